"""A warmed-up quick-start model and its data, made by the commands that the quick start uses."""

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megarl.cli import main

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "yaml" / "quickstart.yaml"


def megarl(*arguments, check=0, **options):
    """Run the command line as a user does; the exit code must be `check`."""
    command = [sys.executable, "-m", "megarl", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT, **options)
    assert done.returncode == check, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


class Done(NamedTuple):
    stdout: str
    stderr: str


def megarl_here(*arguments, check=0):
    """The same command line in this process, which has imported already what takes a new one ten seconds."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    assert code == check, f"exit code {code}\n{out.getvalue()}\n{err.getvalue()}"
    return Done(out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Folder with data/ and model/: 150 steps of supervised warm-up."""
    folder = tmp_path_factory.mktemp("warm")
    megarl_here("create", "model", "tiny-qwen3", "--output", folder / "start")
    megarl_here("create", "data", "countdown-tiny", "--output", folder / "data")
    settings = {
        "output": folder / "sft",
        "model.path": folder / "start",
        "data.train": folder / "data/train.jsonl",
        "training.steps": 150,
        "training.threads_per_rank": 1,
    }
    megarl_here("sft", ROOT / "yaml/quickstart_sft.yaml", *overrides(settings))
    os.rename(folder / "sft/model", folder / "model")
    return folder


def overrides(settings):
    return [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]


@pytest.fixture(scope="session")
def settings(warm):
    """Overrides that make the quick start a run of 5 short steps on the warm model."""
    return {
        "model.path": warm / "model",
        "data.train": warm / "data/train.jsonl",
        "data.evaluation.countdown": warm / "data/heldout.jsonl",
        "rollout.prompts_per_step": 16,
        "training.steps": 5,
        "training.minibatches": 2,
        "training.threads_per_rank": 1,
        "evaluation.every": 5,
        "evaluation.max_prompts": 32,
    }
