"""The command line. Each command imports what it needs when it runs, so that help and `show` start at once and need no torch."""

from __future__ import annotations

import argparse
import math
import os
import select
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megarl import __version__
from megarl.errors import CheckFailed, InputError, Interrupted, RunFailed

if TYPE_CHECKING:
    from megarl.config.load import Loaded

R = TypeVar("R")
CLOSED_PIPE = 141  # what a shell reports for a program that SIGPIPE ended
INTERRUPTED = 130


def _train(args: argparse.Namespace) -> int:
    from megarl.config.recipe import Recipe

    loaded = _begin(args, Recipe)
    from megarl.loop import train

    return train.run(loaded, args.resume)


def _sft(args: argparse.Namespace) -> int:
    from megarl.config.recipe import SftRecipe

    loaded = _begin(args, SftRecipe)
    from megarl.loop import sft

    return sft.run(loaded)


def _eval(args: argparse.Namespace) -> int:
    from megarl.config.recipe import Recipe

    loaded = _begin(args, Recipe)
    from megarl.loop import evaluate

    return evaluate.run(loaded, args.model, args.output)


def _grade(args: argparse.Namespace) -> int:
    values = _verifier_arguments(args.set)
    from megarl.tasks.grade import grade

    def report(done: int, total: int, seconds: float) -> None:
        print(f"{done:,} of {total:,} graded, {seconds * (total - done) / done:.0f} s left", file=sys.stderr)

    limits = {key: value for key in ("workers", "timeout_s", "memory_mib") if (value := getattr(args, key)) is not None}
    counts = grade(args.file, args.output, args.verifier, values, limits, report)
    for status, count in counts.counts.most_common():
        print(f"{status:12}{count:10,}{count / counts.total:8.1%}")
    return 0


def _check(args: argparse.Namespace) -> int:
    from megarl.config.load import load_recipe
    from megarl.config.recipe import Recipe

    loaded = load_recipe(args.recipe, args.set, Recipe)
    from megarl.loop import check

    return check.run(loaded, int(args.sample), int(args.show))


def _begin(args: argparse.Namespace, kind: type[R]) -> Loaded[R]:
    """The recipe, and a sign of life: importing the roles takes seconds."""
    from megarl.config.load import load_recipe
    from megarl.observe import progress

    loaded = load_recipe(args.recipe, args.set, kind)
    progress.begin(f"reading what {args.recipe} names")
    return loaded


def _show(args: argparse.Namespace) -> int:
    from megarl.config import show

    if args.fields:
        sys.stdout.write(show.field_reference())
        return 0
    if args.recipe is None:
        raise InputError("show: expected the path of a recipe, or --fields.")
    from megarl.config.load import load_any_recipe

    loaded = load_any_recipe(args.recipe, args.set)
    _check_named_verifier(loaded)
    sys.stdout.write(show.to_json(loaded) if args.json else show.render(loaded))
    return 0


def _check_named_verifier(loaded: Loaded[Any]) -> None:
    """What `train` checks and needs no torch. Not a verifier of the user's, whose import runs their code, nor the objective."""
    verifier = getattr(loaded.recipe, "verifier", None)
    if verifier is None or ":" in verifier.name:
        return
    from megarl.tasks.verifiers import make_verifier

    with loaded.naming("verifier"):
        make_verifier(verifier.name, verifier.args)


def _preflight(args: argparse.Namespace) -> int:
    from megarl.config.load import load_recipe
    from megarl.config.recipe import Recipe

    loaded = load_recipe(args.recipe, args.set, Recipe)
    from megarl.planning.preflight import preflight, table

    rows = preflight(loaded, args.ranks)
    if not rows:
        return 0
    print(table(rows))
    if not all(row.agrees for row in rows):
        raise CheckFailed("the layout changes the result of an update")
    print("the layout does not change the result")
    return 0


def _convert(args: argparse.Namespace) -> int:
    from megarl.config.recipe import Layout

    layout = Layout(tensor=args.tensor, pipeline=args.pipeline, data=args.expert, expert=args.expert, sequence_parallel=args.tensor > 1)
    from megarl.training.convert import convert

    print(f"{args.output}: {convert(args.source, args.output, layout)} folder")
    return 0


def _conformance(args: argparse.Namespace) -> int:
    from megarl.objectives import conformance

    return conformance.main(args.files, args.json)


def _report(args: argparse.Namespace) -> int:
    from megarl.observe import report

    print(report.render(args.folder))
    return 0


def _create_model(args: argparse.Namespace) -> int:
    from megarl.models.create import create_model

    parameters = create_model(args.preset, args.output, args.seed)
    print(f"{args.output}: a model of {parameters:,} parameters")
    return 0


def _create_data(args: argparse.Namespace) -> int:
    options = _options(args.options)
    from megarl.tasks.create import create_data

    lines = create_data(args.task, args.output, args.seed, options)
    print(f"{args.output}: " + ", ".join(f"{count:,} lines of {name}" for name, count in lines.items()))
    return 0


def _options(texts: Sequence[str]) -> dict[str, str]:
    """`key=value` arguments; what the values mean is the task's business."""
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{text}: expected key=value.")
        if key in options:
            raise InputError(f"{text}: `{key}` is given twice.")
        options[key] = value
    return options


def _verifier_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` arguments with values as in a recipe."""
    from megarl.config.read import parse

    values: dict[str, Any] = {}
    for key, text in _options(texts).items():
        entry, problems = parse(text, None)
        if problems:
            raise InputError(f"--set {key}={text}: {problems[0].text}.")
        values[key] = None if entry is None else entry.plain()
    return values


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected a number > 0, given {text!r}")
        return value

    return read


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number >= 0, given {text!r}")
    return int(text)


def _ranks(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1, given {text!r}")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    root = argparse.ArgumentParser(prog="megarl", description="Reinforcement learning from verifiable rewards.", allow_abbrev=False)
    root.add_argument("--version", action="version", version=f"megarl {__version__}")
    commands = root.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(group: Any, name: str, run: Any, words: str, **extra: Any) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = group.add_parser(
            name, help=words, description=words[0].upper() + words[1:] + ".", allow_abbrev=False, **extra
        )
        sub.set_defaults(run=run, parser=sub)
        return sub

    train = command(commands, "train", _train, "train a model as a recipe says")
    sft = command(commands, "sft", _sft, "supervised warm-up on worked examples")
    evaluate = command(commands, "eval", _eval, "evaluate a model on the held-out data of a recipe")
    show = command(commands, "show", _show, "print a recipe with all its values and where each came from")
    check = command(commands, "check", _check, "look at the data of a recipe, and try its verifier on the references")
    preflight = command(commands, "preflight", _preflight, "check that a recipe's layout does not change its result")
    for sub in (train, sft, evaluate, check, preflight):
        sub.add_argument("recipe", metavar="RECIPE")
    show.add_argument("recipe", metavar="RECIPE", nargs="?")
    preflight.add_argument("--ranks", metavar="N", type=_ranks, default=8, help="most processes to start (default 8)")
    for sub in (train, sft, evaluate, check, show, preflight):
        sub.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="override a key, for instance training.steps=3")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the output folder")
    evaluate.add_argument(
        "--model", metavar="FOLDER", type=Path, required=True, help="Hugging Face folder, or a step of a run's checkpoints"
    )
    evaluate.add_argument("--output", metavar="OUT", type=Path, help="also write the results there, as JSON")
    check.add_argument("--sample", metavar="N", type=_positive(int), default=512, help="examples to verify of each file; default: 512")
    check.add_argument("--show", metavar="N", type=_positive(int), default=2, help="prompts to print of each file; default: 2")
    show.add_argument("--json", action="store_true", help="print JSON: the recipe, and the source of each value")
    show.add_argument("--fields", action="store_true", help="print the documentation of all fields instead")

    grade = command(commands, "grade", _grade, "grade a file of responses with a verifier")
    grade.add_argument("file", metavar="FILE", type=Path, help='JSON lines {"response": ..., "answer": ..., "metadata": {...}}')
    grade.add_argument("--verifier", metavar="NAME", required=True, help="as in a recipe: a built-in one, or package.module:function")
    grade.add_argument("--output", metavar="OUT", type=Path, required=True, help="one JSON line for each line of FILE")
    grade.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="an argument of the verifier")
    grade.add_argument("--workers", metavar="N", type=_positive(int), help="processes; default: one per core")
    grade.add_argument("--timeout-s", metavar="S", type=_positive(float), help="longest time for one response; default: 10")
    grade.add_argument("--memory-mib", metavar="MIB", type=_positive(int), help="memory of a worker; default: 2048")

    convert = command(commands, "convert", _convert, "turn a Hugging Face folder into Megatron's distributed format, or back")
    convert.add_argument("source", metavar="SOURCE", type=Path, help="Hugging Face folder, Megatron folder, or a run's checkpoint")
    convert.add_argument("--output", metavar="FOLDER", type=Path, required=True)
    for name, what in (("tensor", "share every matrix"), ("pipeline", "hold some layers each"), ("expert", "hold some experts each")):
        convert.add_argument(f"--{name}", metavar="N", type=_ranks, default=1, help=f"ranks that {what} while converting (default 1)")

    conformance = command(commands, "conformance", _conformance, "check the objectives against case files")
    conformance.add_argument("files", metavar="FILE", nargs="+")
    conformance.add_argument("--json", action="store_true", help="print the results as JSON")

    report = command(commands, "report", _report, "write the HTML report of a run")
    report.add_argument("folder", metavar="FOLDER", type=Path)

    create = commands.add_parser("create", help="create a small model or a data set", allow_abbrev=False)
    kinds = create.add_subparsers(title="what to create", metavar="KIND", required=True)
    model = command(kinds, "model", _create_model, "create a randomly initialised model")
    model.add_argument("preset", metavar="PRESET")
    usage = "%(prog)s TASK --output DIR [--seed N] [KEY=VALUE ...]"
    data = command(kinds, "data", _create_data, "create the data files of a task", usage=usage)
    data.add_argument("task", metavar="TASK")
    data.set_defaults(options=[])
    for sub in (model, data):
        sub.add_argument("--output", metavar="DIR", type=Path, required=True)
        sub.add_argument("--seed", metavar="N", type=_seed, default=0)
    return root


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    args, rest = parser().parse_known_args(argv)
    # argparse cannot collect positional arguments on both sides of an option, so the options of `create data` arrive as a rest.
    if rest and hasattr(args, "options") and not any(text.startswith("-") for text in rest):
        args.options = rest
    elif rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args


def _run(argv: Sequence[str] | None) -> int:
    args = _parse(argv)
    try:
        return args.run(args)
    except SystemExit as error:  # not argparse's: code of the user's, which must not end a run as if it were done
        print(f"megarl: something in the run called sys.exit({error.code})", file=sys.stderr)
        return 1
    except InputError as error:
        print(f"megarl: error: {error}", file=sys.stderr)
        return 2
    except (CheckFailed, RunFailed) as error:
        print(f"megarl: {error}", file=sys.stderr)
        return 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 a check failed, 2 bad input, 128 + n ended by signal n."""
    try:
        try:
            code = _run(argv)
        except SystemExit:  # argparse has printed help
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _output_is_closed():
            raise  # a pipe or socket inside the run, not our own output
        # The interpreter flushes standard output once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except KeyboardInterrupt as error:
        print("megarl: interrupted", file=sys.stderr)
        return error.exit_code if isinstance(error, Interrupted) else INTERRUPTED


def _output_is_closed() -> bool:
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))
