"""Ready-made data: `train.jsonl` and `heldout.jsonl` of a task.

The held-out examples depend on the task and its options only, never on the seed, and none of them is in the training file.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megarl.errors import InputError
from megarl.tasks import maze
from megarl.tasks.countdown import evaluate_expression
from megarl.tasks.dataset import write_jsonl
from megarl.tasks.names import nearest

Row = dict[str, Any]
Split = tuple[list[Row], list[Row]]
FILES = ("train.jsonl", "heldout.jsonl")
REASONING_GYM = "reasoning-gym"

HELDOUT_SEED = 2_000_000_000
"""Of everything in a held-out file; seeds of training data are drawn below it, and reasoning-gym uses seed + index for each entry."""


def create_data(task: str, output: str | Path, seed: int = 0, options: dict[str, str] | None = None) -> dict[str, int]:
    """Write the two files of `task` into the folder `output` and return the number of lines of each.

    Tasks: `countdown-tiny`, `countdown`, `maze`, `reasoning-gym:<data set>`; options are those of the functions below. Existing files are
    never overwritten, and nothing is left behind by a failure. Raises InputError for an unknown task or option, or a bad value.
    """
    options = dict(options or {})
    name, _, dataset = task.partition(":")
    makers: dict[str, Callable[[int, dict[str, str]], Split]] = {
        "countdown-tiny": _countdown_tiny,
        "countdown": _countdown,
        "maze": _maze,
    }
    if name == REASONING_GYM and dataset:
        makers[task] = lambda seed, options: _reasoning_gym(dataset, seed, options)
    if task not in makers:
        raise InputError(f'no task "{task}"{nearest(task, [*makers, REASONING_GYM + ":<data set>"])}')
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed must be an integer >= 0, got {seed!r}.")
    folder = Path(output)
    _check_output(folder)
    train, heldout = makers[task](seed, options)
    return _write(folder, train, heldout)


def _check_output(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder to write {' and '.join(FILES)} into.")
    for name in FILES:
        if (folder / name).exists():
            raise InputError(f"{folder / name} exists already; remove it or choose another folder.")


def _write(folder: Path, train: list[Row], heldout: list[Row]) -> dict[str, int]:
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        counts = {}
        for name, rows in zip(FILES, (train, heldout), strict=True):
            counts[name.removesuffix(".jsonl")] = write_jsonl(folder / name, rows)
            written.append(folder / name)
        return counts
    except BaseException as error:
        for path in written:
            path.unlink()
        for path in missing:
            if path.is_dir():
                path.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"{folder}: cannot be written ({error.strerror}).") from None
        raise


def _whole(options: dict[str, str], key: str, default: int | None, least: int = 1) -> int | None:
    """Take an integer >= `least` out of the options."""
    if key not in options:
        return default
    text = options.pop(key)
    if not re.fullmatch("[0-9]{1,8}", text) or int(text) < least:
        raise InputError(f'option {key}: expected an integer from {least} to 99999999, got "{text}".')
    return int(text)


def _refuse_rest(task: str, options: dict[str, str], known: tuple[str, ...]) -> None:
    for key in options:
        raise InputError(f'task {task} has no option "{key}"{nearest(key, known)}')


# ------------------------------------------------------- the quick-start task
TINY_NUMBERS = range(1, 21)
TINY_TARGETS = range(100)
TINY_HELDOUT = 256
TINY_DEMONSTRATIONS = 8
"""Right ones per line, and as many random ones."""

Instance = tuple[tuple[int, ...], int]


def tiny_instances() -> tuple[dict[Instance, list[str]], dict[tuple[int, ...], list[str]]]:
    """({(numbers ascending, target): all its solutions}, {numbers: all expressions of them}) of the quick-start task.

    Three numbers from 1 to 20, + and - only, no parentheses, targets 0 to 99. Instances that the sum of the three solves are left out:
    always answering a+b+c would solve a quarter of them, and that shortcut is easier to learn than the task.
    """
    solutions: dict[Instance, list[str]] = {}
    expressions: dict[tuple[int, ...], list[str]] = {}
    for numbers in itertools.combinations_with_replacement(TINY_NUMBERS, 3):
        values: dict[str, int] = {}
        for a, b, c in itertools.permutations(numbers):
            for x, y in itertools.product((1, -1), repeat=2):
                values[f"{a}{'+' if x > 0 else '-'}{b}{'+' if y > 0 else '-'}{c}"] = a + x * b + y * c
        expressions[numbers] = sorted(values)
        for expression in expressions[numbers]:
            if values[expression] in TINY_TARGETS and values[expression] != sum(numbers):
                solutions.setdefault((numbers, values[expression]), []).append(expression)
    return solutions, expressions


def _countdown_tiny(seed: int, options: dict[str, str]) -> Split:
    """Option `size`: number of training lines (default: all)."""
    size = _whole(options, "size", None)
    _refuse_rest("countdown-tiny", options, ("size",))
    solutions, expressions = tiny_instances()
    keys = sorted(solutions)
    fixed = random.Random(HELDOUT_SEED)
    fixed.shuffle(keys)
    heldout = [_tiny_row(key, fixed) for key in keys[:TINY_HELDOUT]]
    train_keys = keys[TINY_HELDOUT:]
    if size is not None and size > len(train_keys):
        raise InputError(f"option size: countdown-tiny has {len(train_keys)} training instances, {size} were asked for.")
    rng = random.Random(seed)
    rng.shuffle(train_keys)
    train = []
    for key in train_keys[:size]:
        row = _tiny_row(key, rng)
        # Drawing one uniformly gives a right one half of the time. The other half is random on purpose: after clean demonstrations
        # alone the model has little left to learn.
        row["demonstrations"] = _draw(solutions[key], rng) + _draw(expressions[key[0]], rng)
        train.append(row)
    return train, heldout


def _tiny_row(key: Instance, rng: random.Random) -> Row:
    numbers, target = list(key[0]), key[1]
    rng.shuffle(numbers)
    return {"prompt": " ".join(map(str, numbers)) + f"={target}:", "answer": target, "metadata": {"numbers": numbers}}


def _draw(items: list[str], rng: random.Random) -> list[str]:
    """TINY_DEMONSTRATIONS of the items, each as often as any other up to one."""
    rounds, rest = divmod(TINY_DEMONSTRATIONS, len(items))
    return items * rounds + rng.sample(items, rest)


# ----------------------------------------------------------------- Countdown
COUNTDOWN_NUMBERS = (1, 99)
COUNTDOWN_TARGETS = (10, 99)
COUNTDOWN_PROMPT = (
    "Use the numbers {numbers} to reach {target}. Use each of them exactly once; you may use +, -, *, / and parentheses. "
    "Think step by step, then write the expression alone between <answer> and </answer>, for example <answer>(1 + 2) / 3</answer>."
)


def _countdown(seed: int, options: dict[str, str]) -> Split:
    """Options `size` (training lines, 20000) and `heldout` (512).

    Half of the instances have 3 numbers, half 4; numbers 1 to 99, targets 10 to 99. reasoning-gym's generator has the same parameters, but
    it does not fit: it nests only to the left, so it never needs (a+b)*(c+d), it divides only where integers divide evenly, and at 18 ms
    per instance (it works through sympy) 20000 take six minutes. Its scorer runs a model's answer through sympy's parser, which is eval.
    """
    size, heldout_size = _whole(options, "size", 20_000), _whole(options, "heldout", 512)
    _refuse_rest("countdown", options, ("size", "heldout"))
    heldout = dict(itertools.islice(_countdown_instances(random.Random(HELDOUT_SEED), set()), heldout_size))
    train = itertools.islice(_countdown_instances(random.Random(seed), set(heldout)), size)
    return [row for _, row in train], list(heldout.values())


def _countdown_instances(rng: random.Random, seen: set[Instance]) -> Iterator[tuple[Instance, Row]]:
    """Endless different instances, none of those in `seen`, each with the solution that it was made from as demonstration."""
    while True:
        numbers = [rng.randint(*COUNTDOWN_NUMBERS) for _ in range(rng.choice((3, 4)))]
        expression = _random_expression(numbers, rng)
        value = evaluate_expression(expression)[0]
        if value is None or value.denominator != 1 or not COUNTDOWN_TARGETS[0] <= value <= COUNTDOWN_TARGETS[1]:
            continue
        key = (tuple(sorted(numbers)), int(value))
        if key in seen:
            continue
        seen.add(key)
        yield (
            key,
            {
                "prompt": COUNTDOWN_PROMPT.format(numbers=", ".join(map(str, numbers)), target=int(value)),
                "answer": int(value),
                "metadata": {"numbers": numbers},
                "demonstrations": [f"<answer>{expression}</answer>"],
            },
        )


def _random_expression(numbers: list[int], rng: random.Random) -> str:
    """Join two random parts by a random operator until one is left."""
    parts = [str(number) for number in numbers]
    while len(parts) > 1:
        left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        joined = f"{left} {rng.choice('+-*/')} {right}"
        parts.append(f"({joined})" if parts else joined)
    return parts[0]


# ---------------------------------------------------------------------- maze
def _maze(seed: int, options: dict[str, str]) -> Split:
    """Options `size` (training lines, 20000), `heldout` (256) and `lava` (cells, 2).

    The demonstrations are one way straight to the exit, one over the gold, one over the diamond and one over both, as far as there are
    such ways of no more moves than the verifier allows: they differ in what they pick up, so that there is something left to learn.
    """
    size, heldout_size, lava = _whole(options, "size", 20_000), _whole(options, "heldout", 256), _whole(options, "lava", 2, least=0)
    _refuse_rest("maze", options, ("size", "heldout", "lava"))
    if lava > maze.SIZE:
        raise InputError(f"option lava: a maze of {maze.SIZE} x {maze.SIZE} cells has at most {maze.SIZE} of lava, {lava} were asked for.")
    seen: set[str] = set()
    heldout = list(itertools.islice(_mazes(random.Random(HELDOUT_SEED), lava, seen), heldout_size))
    return list(itertools.islice(_mazes(random.Random(seed), lava, seen), size)), heldout


def _mazes(rng: random.Random, lava: int, seen: set[str]) -> Iterator[Row]:
    """Endless different mazes, none of those in `seen`."""
    while True:
        text = maze.random_maze(rng, lava)
        if text in seen:
            continue
        seen.add(text)
        made = maze.read_maze(text)
        items = [made.gold, made.diamond]
        rng.shuffle(items)
        routes = [maze.route(made, stops, rng) for stops in ((), (made.gold,), (made.diamond,), items)]
        routes = [moves for moves in routes if moves is not None and len(moves) <= maze.MAX_MOVES]
        if routes:
            yield {"prompt": f"{text}:", "answer": routes[0], "metadata": {"maze": text}, "demonstrations": routes}


# ------------------------------------------------------------- reasoning-gym
TEMPLATE = "{question}\nGive the final answer between <answer> and </answer>."
ATTEMPTS_PER_ENTRY = 20
FRUITLESS_ATTEMPTS = 50
"""After so many without a single entry, the data set or its settings are the reason, not chance."""


def _reasoning_gym(dataset: str, seed: int, options: dict[str, str]) -> Split:
    """Options beside the data set's own settings: `size` (training lines, 1000), `heldout` (200), `prompt`, `shots` (0), `reply`.

    `prompt` is the user's message, with {question} or a field of the entry's metadata, such as chain_sum's {expression}, in braces.
    `shots`: so many solved questions come before it as turns of the chat; they are the same in all lines, and in neither file. `reply` is
    how they are answered, with {answer} or any field; by default the answer alone, tagged if the prompt asks for <answer>.
    """
    from megarl.tasks import reasoning_gym

    task = f"{REASONING_GYM}:{dataset}"
    size, heldout_size = _whole(options, "size", 1000), _whole(options, "heldout", 200)
    shots = _whole(options, "shots", 0, least=0)
    template = options.pop("prompt", TEMPLATE)
    reply = options.pop("reply", "<answer>{answer}</answer>" if "<answer>" in template else "{answer}")
    if "seed" in options:
        raise InputError(f"task {task}: the seed is an argument of the command, not an option.")
    config = {key: _parse(text) for key, text in options.items()}
    reasoning_gym.create_dataset(dataset, config, f"task {task}")
    seen: set[str] = set()
    fixed = _entries(task, config, HELDOUT_SEED, heldout_size + shots, seen)
    train = _entries(task, config, random.Random(seed).randrange(HELDOUT_SEED // 2), size, seen)
    before: list[dict[str, str]] = []
    for entry in fixed[heldout_size:]:
        before += [{"role": "user", "content": _fill(template, entry, task)}, {"role": "assistant", "content": _fill(reply, entry, task)}]

    def row(entry: Row) -> Row:
        metadata = {"dataset": dataset, "entry": entry} | ({"config": config} if config else {})
        message = {"role": "user", "content": _fill(template, entry, task)}
        return {"prompt": [*before, message], "answer": entry["answer"], "metadata": metadata}

    return [row(entry) for entry in train], [row(entry) for entry in fixed[:heldout_size]]


def _entries(task: str, config: dict[str, Any], first_seed: int, count: int, seen: set[str]) -> list[Row]:
    """`count` entries with different questions, none of those in `seen`, as JSON can hold them.

    An entry is used only if the scorer, given the stored entry, finds its own reference answer right: some scorers need objects that JSON
    cannot hold, some data sets have no reference answer, and now and then a generator fails.
    """
    from megarl.tasks import reasoning_gym

    attempts = max(ATTEMPTS_PER_ENTRY * count, FRUITLESS_ATTEMPTS)
    source = reasoning_gym.create_dataset(task.partition(":")[2], config | {"seed": first_seed, "size": attempts}, f"task {task}")
    entries: list[Row] = []
    failure = ""
    tried = 0
    while tried < attempts and (entries or not failure or tried < FRUITLESS_ATTEMPTS):
        tried += 1
        try:
            entry = _json_safe(source[tried - 1])
            score = source.score_answer(entry["answer"], entry)
        except Exception as error:  # a generator without an instance for these settings, a scorer that cannot read the stored entry
            failure = f"; the last failure was {type(error).__name__}: {error}"
            continue
        if entry["answer"] is None or score != 1.0:
            failure = f"; the scorer gives {score} to the reference answer {entry['answer']!r:.40} of an entry stored as JSON"
            continue
        if entry["question"] in seen:
            continue
        seen.add(entry["question"])
        entries.append(entry)
        if len(entries) == count:
            return entries
    raise InputError(
        f"task {task}: {count} new questions were asked for, {tried} attempts gave {len(entries)}{failure}; "
        "lower `size` and `heldout` or widen the settings, or use another data set."
    )


def _fill(template: str, entry: Row, task: str) -> str:
    """The template with each {field} replaced; other braces stay."""
    fields = entry["metadata"] | {"question": entry["question"].rstrip(), "answer": entry["answer"]}

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            raise InputError(f'"{template}": {task} has no field {match[0]}{nearest(match[1], fields)}')
        return str(fields[match[1]])

    return re.sub(r"\{(\w+)\}", value, template)


def _parse(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _json_safe(value: Any) -> Any:
    """What comes back when the value is stored as JSON. Whether the scorer still understands it is checked for every entry."""
    if isinstance(value, dict):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_safe(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(_json_safe(item) for item in value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    return _json_safe(value.item()) if hasattr(value, "item") else str(value)
