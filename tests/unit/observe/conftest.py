"""Run folders to observe: written with the real writers, none of them faked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import megarl
from megarl.observe.metrics import MetricsWriter
from megarl.observe.run_folder import RunFolder

RECIPE = """seed: 7
output: runs/countdown
model: {path: models/tiny}
data: {train: data/train.jsonl}
verifier: {name: countdown}
objective: {name: dapo, clip_high: 0.28}
rollout: {prompts_per_step: 64, responses_per_prompt: 8, max_response_length: 32}
training: {steps: 60, minibatches: 2}
"""


def _step_metrics(step: int) -> dict[str, float]:
    metrics = {
        "reward/mean": 0.3 + 0.005 * step,
        "reward/std": 0.45,
        "response/length_mean": 8.3,
        "policy/entropy": 0.9 / (1 + step),
        "policy/kl_rollout_train": 1e-6 * step,
        "policy/logprob_diff_max": 3e-4,
        "policy/grad_norm": 0.52,
        "policy/clip_fraction": 0.02,
        "time/generate": 0.5,
        "time/train": 0.625,
        "time/other": 0.125,
        "time/step": 1.25,
        "throughput/generated_tokens_per_second": 8000.0,
        "verdict/ok": 0.3,
        "verdict/wrong": 0.7,
    }
    return metrics | ({"eval/pass@1": 0.295 + 0.005 * step, "eval/pass@8": 0.6} if step % 10 == 0 else {})


def _record(step: int, index: int, **changes) -> dict:
    plain = {"step": step, "prompt_id": f"test:{index // 2}", "prompt": f"Make 24 from {index}.", "response": f"answer {index}"}
    return plain | {"answer": {"target": 24}, "verdict": "ok", "reward": 1.0, "length": 3, "sample": index % 2} | changes


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess]:
    """Runs code in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(megarl.__file__).parent.parent)}
    return lambda code, **options: subprocess.run(
        [sys.executable, "-c", code], **{"text": True, "timeout": 60, "env": environment} | options
    )


@pytest.fixture
def step_metrics():
    """step -> the metrics of a plain step."""
    return _step_metrics


@pytest.fixture
def record():
    """(step, index, **changes) -> a rollout record; two responses per prompt."""
    return _record


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path / "run") as made:
        made.write_recipe(RECIPE)
        yield made


@pytest.fixture
def finished(folder):
    """Sixty steps, evaluated every ten, with rollouts of two of them."""
    folder.write_environment(7, "recipe.yaml")
    with MetricsWriter(folder) as writer:
        writer.write(0, {"eval/pass@1": 0.295, "eval/pass@8": 0.5})
        for step in range(1, 61):
            writer.write(step, _step_metrics(step))
    folder.append_rollouts(1, [_record(1, index, verdict="wrong", reward=0.0) for index in range(24)])
    folder.append_rollouts(60, [_record(60, index) for index in range(24)])
    return folder
