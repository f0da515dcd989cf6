"""Promise: exit codes are 0 done, 1 check failed, 2 bad input, 130 interrupted; bad input never ends in a traceback; help is instant."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from megarl import __version__, cli
from megarl.errors import CheckFailed, InputError

ROOT = Path(__file__).parents[3]


def megarl(*arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megarl", *arguments]
    if shell:
        command = ["bash", "-c", shell, sys.executable]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})


@pytest.fixture
def stub(monkeypatch):
    """Puts a function in the place of a command's implementation, to see what the command line hands over."""

    def put(module: str, name: str, function) -> None:
        parent, _, child = module.rpartition(".")
        package, made = types.ModuleType(parent), types.ModuleType(module)
        setattr(made, name, function)
        setattr(package, child, made)
        # The package too: importing the real one would import torch.
        monkeypatch.setitem(sys.modules, parent, package)
        monkeypatch.setitem(sys.modules, module, made)

    return put


def test_help_and_show_import_no_torch(minimal):
    for command, absent in (("show minimal.yaml", {"torch", "ray", "vllm", "megatron"}), ("--help", {"torch", "pydantic", "yaml"})):
        code = f"import sys; from megarl.cli import main\ntry: main({command.split()})\nfinally: assert not {absent} & set(sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
        assert (done.returncode, done.stderr) == (0, "")


def test_bad_input_ends_with_code_2_and_one_message(minimal):
    done = megarl("train", minimal, "--set", "training.stpes=3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "megarl: error: --set: unknown key `training.stpes`: did you mean `training.steps`?\n"


def test_a_closed_pipe_is_no_error(minimal):
    # The reader is gone before anything is written: the shell's own end of the pipe is closed at once.
    done = megarl(shell="{ sleep 0.5; $0 -m megarl show minimal.yaml; echo $? >&2; } | true")
    assert done.stderr == f"{cli.CLOSED_PIPE}\n"
    done = megarl(shell="{ sleep 0.5; $0 -m megarl --help; echo $? >&2; } | true")
    assert done.stderr == f"{cli.CLOSED_PIPE}\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"megarl {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["train"],
        ["train", "minimal.yaml", "--sett", "a=1"],
        ["train", "minimal.yaml", "stray"],
        ["--stray", "show", "minimal.yaml"],
        ["eval", "minimal.yaml"],
        ["create"],
        ["create", "data", "countdown"],
        ["create", "data", "countdown", "--output", "d", "--seed", "-1"],
        ["create", "data", "countdown", "--output", "d", "--stray", "a=1"],
        ["create", "model", "tiny", "--output", "d", "a=1"],
        ["conformance"],
    ],
)
def test_a_wrong_command_line_ends_with_code_2(minimal, arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["show"], ["show", "no.yaml"], ["sft", "minimal.yaml"], ["eval", "no.yaml", "--model", "m"]])
def test_bad_input_in_each_command(minimal, arguments, capsys):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("megarl: error: ")


@pytest.mark.parametrize("command", [["train"], ["eval", "--model", "m"]])
def test_the_first_line_comes_before_the_imports(stub, minimal, capsys, command):
    seen = []
    stub(
        {"train": "megarl.loop.train", "eval": "megarl.loop.evaluate"}[command[0]],
        "run",
        lambda *_: seen.append(capsys.readouterr().out) or 0,
    )
    assert cli.main([command[0], minimal, *command[1:]]) == 0
    assert seen[0].endswith("s  reading what minimal.yaml names\n")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("verifier.name=countdwn", '--set: verifier.name: "countdwn" is not known; did you mean "countdown"?'),
        ("verifier.args={fromat: 1}", '--set: verifier.args: "countdown" has no argument "fromat"; did you mean "format"?'),
    ],
)
def test_show_checks_a_verifier_by_name(minimal, capsys, setting, said):
    assert cli.main(["show", minimal, "--set", setting]) == 2
    assert said in capsys.readouterr().err
    assert cli.main(["show", minimal, "--set", "verifier.name=my.own:function"]) == 0  # importing it would run its code


def test_show(minimal, capsys):
    assert cli.main(["show", minimal, "--set", "seed=4"]) == 0
    assert capsys.readouterr().out.startswith("seed: 4 ")
    assert cli.main(["show", minimal, "--json"]) == 0
    assert capsys.readouterr().out.startswith("{\n")
    assert cli.main(["show", "--fields"]) == 0
    assert "`training.steps`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (CheckFailed("3 of 4"), 1, "megarl: 3 of 4\n"),
        (InputError("bad"), 2, "megarl: error: bad\n"),
        (KeyboardInterrupt(), 130, "megarl: interrupted\n"),
    ],
)
def test_how_a_command_ends(stub, minimal, capsys, error, code, message):
    def fail(*_):
        raise error

    stub("megarl.loop.train", "run", fail)
    assert cli.main(["train", minimal]) == code
    assert capsys.readouterr().err == message


def test_a_broken_pipe_inside_a_run_is_not_hidden(stub, minimal):
    def fail(*_):
        raise BrokenPipeError("a worker's pipe")

    stub("megarl.loop.train", "run", fail)
    with pytest.raises(BrokenPipeError):
        # Standard output has a file number here, as it has outside of tests.
        cli.main(["train", minimal])


def test_what_the_commands_are_given(stub, minimal, capsys):
    seen = []

    def record(code):
        return lambda *arguments: seen.append(arguments) or code

    stub("megarl.loop.train", "run", record(0))
    assert cli.main(["train", minimal, "--set", "seed=1", "--set", "training.steps=2", "--resume"]) == 0
    loaded, resume = seen.pop()
    assert (loaded.recipe.seed, loaded.recipe.training.steps, resume) == (1, 2, True)
    stub("megarl.loop.evaluate", "run", record(1))
    assert cli.main(["eval", minimal, "--model", "folder"]) == 1
    assert seen.pop()[1] == Path("folder")
    stub("megarl.objectives.conformance", "main", record(1))
    assert cli.main(["conformance", "a.json", "b.json", "--json"]) == 1
    assert seen.pop() == (["a.json", "b.json"], True)
    stub("megarl.models.create", "create_model", record(5000))
    assert cli.main(["create", "model", "tiny", "--output", "m"]) == 0
    assert seen.pop() == ("tiny", Path("m"), 0)
    capsys.readouterr()
    stub("megarl.tasks.create", "create_data", record({"train": 1000, "heldout": 2}))
    assert cli.main(["create", "data", "countdown", "--output", "d", "--seed", "7", "high=20", "ops=a=b"]) == 0
    assert seen.pop() == ("countdown", Path("d"), 7, {"high": "20", "ops": "a=b"})
    assert capsys.readouterr().out == "d: 1,000 lines of train, 2 lines of heldout\n"


@pytest.mark.parametrize("options", [["high"], ["=3"], ["high=2", "high=3"]])
def test_bad_task_options(capsys, options):
    assert cli.main(["create", "data", "countdown", "--output", "d", *options]) == 2
    assert capsys.readouterr().err.startswith(f"megarl: error: {options[-1]}: ")
