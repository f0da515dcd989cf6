"""Held-out prompts answered and judged: within a run, and of any model by itself."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config.load import Loaded
from megarl.config.recipe import Layout, Recipe
from megarl.errors import InputError
from megarl.evaluation.metrics import avg_at_k, pass_at_k
from megarl.evaluation.summary import LEVEL, estimate, summarize
from megarl.loop.inputs import Inputs, engine_threads
from megarl.loop.machine import check_roles
from megarl.loop.rollouts import JudgedRollouts
from megarl.loop.stopping import StopRequest
from megarl.observe.progress import Progress
from megarl.platform.rollout_env import ray_cluster
from megarl.rollout.fleet import Fleet
from megarl.tasks.verdict import VerdictCounts
from megarl.training.convert import WEIGHTS, convert

if TYPE_CHECKING:
    from megarl.loop.run import Run

# Training steps count from 1: no evaluation shares its seeds with one, and all evaluations of a run share theirs.
_EVALUATION_STEP = 0


def evaluate(run: Run) -> dict[str, float]:
    """`eval/...` metrics of all held-out sets; with more than one, their name stands before the metric's."""
    return evaluate_fleet(run.inputs, run.fleet)


def evaluate_fleet(inputs: Inputs, fleet: Fleet) -> dict[str, float]:
    """As `evaluate`, with whatever weights the engines hold."""
    settings = inputs.recipe.evaluation
    metrics: dict[str, float] = {}
    for name, judged in judge_all(inputs, fleet):
        n = judged.n
        right = judged.correct.sum(axis=1)
        prefix = f"eval/{name}/" if len(inputs.evaluation) > 1 else "eval/"
        for k in settings.k:
            metrics[f"{prefix}pass@{k}"] = float(np.mean(pass_at_k(n, right, k)))
        _, metrics[f"{prefix}pass@1_standard_error"] = avg_at_k(judged.correct)
        metrics[f"{prefix}reward_mean"] = float(judged.rewards.mean())
        metrics[f"{prefix}length_mean"] = judged.tokens / len(judged.responses)
    return metrics


def judge_all(inputs: Inputs, fleet: Fleet) -> Iterator[tuple[str, JudgedRollouts]]:
    """(name, judged responses) of each held-out set."""
    settings = inputs.recipe.evaluation
    for name, prompts in inputs.evaluation.items():
        sampling = inputs.sampling(settings.temperature)
        responses = fleet.generate(prompts, settings.responses_per_prompt, sampling, step=_EVALUATION_STEP, seed=inputs.recipe.seed)
        yield name, inputs.judge(prompts, responses)


def results(inputs: Inputs, model: str, judged: Iterable[tuple[str, JudgedRollouts]]) -> dict[str, Any]:
    """What `megarl eval --output` writes: the sampler, of which all numbers are properties too, and each set's metrics with intervals."""
    recipe = inputs.recipe
    sets = {}
    for name, rollouts in judged:
        shape = (len(rollouts.prompts), rollouts.n)
        texts = [None if v.status not in ("ok", "wrong") or v.extracted is None else str(v.extracted) for v in rollouts.verdicts]
        answers = [texts[i * rollouts.n : (i + 1) * rollouts.n] for i in range(shape[0])]
        metrics = summarize(rollouts.correct, rollouts.rewards.reshape(shape), answers, recipe.evaluation.k)
        metrics["reward"] = estimate(rollouts.rewards.reshape(shape).mean(axis=1))
        sets[name] = {
            "prompts": shape[0],
            "metrics": {
                key: {part: None if isnan(number) else number for part, number in asdict(value).items()} for key, value in metrics.items()
            },
            "length_mean": rollouts.tokens / len(rollouts.responses),
            "verdicts": dict(VerdictCounts.of(rollouts.verdicts).counts),
        }
    sampler = {
        "temperature": recipe.evaluation.temperature,
        "max_response_length": recipe.rollout.max_response_length,
        "responses_per_prompt": recipe.evaluation.responses_per_prompt,
        "seed": recipe.seed,
    }
    return {"model": model, "sampler": sampler, "interval": LEVEL, "sets": sets}


def run(loaded: Loaded[Recipe], model: str | os.PathLike[str], output: Path | None = None) -> int:
    """`megarl eval`: evaluate a model on the recipe's held-out data, print the metrics and write them as JSON to `output`.

    `model`: a Hugging Face folder, or what `megarl convert` turns into one, such as a step's folder in a run's `checkpoints`. A signal
    ends it at once (Interrupted).
    """
    if not loaded.recipe.data.evaluation:
        raise InputError(f"{loaded.path}: `data.evaluation` names no held-out file.")
    if output is not None and output.exists():
        raise InputError(f"{output} exists already; choose another file.")
    if output is not None and not output.parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.parent}; make it first.")
    with TemporaryDirectory(prefix="megarl-eval-") as scratch:
        folder = os.fspath(model)
        if (Path(model) / WEIGHTS).is_dir():
            folder = f"{scratch}/model"
            convert(Path(model), Path(folder), Layout())
        found = _evaluate_folder(loaded, folder, os.fspath(model))
    for name, part in found["sets"].items():
        for key, value in part["metrics"].items():
            interval = "" if value["low"] is None else f"  [{value['low']:.4f}, {value['high']:.4f}]"
            print(f"{f'{name}/{key}':36} {value['value']:.4f}{interval}")
    if output is not None:
        temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(found, indent=2))
        temporary.replace(output)
    return 0


def _evaluate_folder(loaded: Loaded[Recipe], folder: str, name: str) -> dict[str, Any]:
    """The results of a Hugging Face folder, which they call `name`."""
    recipe = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"path": folder})})
    roles = {"engines": recipe.rollout.engines, "tensor_parallel": recipe.rollout.tensor_parallel}
    check_roles(**roles)
    inputs = Inputs(replace(loaded, recipe=recipe))
    progress = Progress(0)
    progress.stage(f"starting {recipe.rollout.engines} engine(s) on {name}")
    with StopRequest(progress.stage, "stopping", at_once=True) as stop, ray_cluster():
        stop.listen()  # Ray has its own idea of SIGTERM
        check_roles(**roles)
        fleet = Fleet.start(inputs.engine_config(), recipe.rollout.engines, threads=engine_threads(recipe))
        try:
            prompts = sum(len(prompts) for prompts in inputs.evaluation.values())
            progress.stage(f"{prompts} prompts, {recipe.evaluation.responses_per_prompt} responses each")
            return results(inputs, name, judge_all(inputs, fleet))
        finally:
            fleet.shutdown()
