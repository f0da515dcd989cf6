"""pass@k of the engines' present weights on the held-out prompts."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from megarl.config.load import Loaded
from megarl.config.recipe import Recipe
from megarl.errors import InputError
from megarl.evaluation.metrics import avg_at_k, pass_at_k
from megarl.loop.inputs import Inputs, engine_threads
from megarl.loop.machine import check_roles
from megarl.loop.stopping import StopRequest
from megarl.observe.progress import Progress
from megarl.platform.rollout_env import ray_cluster
from megarl.rollout.fleet import Fleet

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
    for name, prompts in inputs.evaluation.items():
        n = settings.responses_per_prompt
        responses = fleet.generate(prompts, n, inputs.sampling(settings.temperature), step=_EVALUATION_STEP, seed=inputs.recipe.seed)
        judged = inputs.judge(prompts, responses)
        right = judged.correct.sum(axis=1)
        prefix = f"eval/{name}/" if len(inputs.evaluation) > 1 else "eval/"
        for k in settings.k:
            metrics[f"{prefix}pass@{k}"] = float(np.mean(pass_at_k(n, right, k)))
        _, metrics[f"{prefix}pass@1_standard_error"] = avg_at_k(judged.correct)
        metrics[f"{prefix}reward_mean"] = float(judged.rewards.mean())
        metrics[f"{prefix}length_mean"] = judged.tokens / len(judged.responses)
    return metrics


def run(loaded: Loaded[Recipe], model: str | os.PathLike[str]) -> int:
    """`megarl eval`: evaluate the Hugging Face folder `model` on the recipe's held-out data and print the metrics.

    A signal ends it at once (Interrupted).
    """
    recipe = loaded.recipe.model_copy(update={"model": loaded.recipe.model.model_copy(update={"path": os.fspath(model)})})
    if not recipe.data.evaluation:
        raise InputError(f"{loaded.path}: `data.evaluation` names no held-out file.")
    roles = {"engines": recipe.rollout.engines, "tensor_parallel": recipe.rollout.tensor_parallel}
    check_roles(**roles)
    inputs = Inputs(replace(loaded, recipe=recipe))
    progress = Progress(0)
    progress.stage(f"starting {recipe.rollout.engines} engine(s) on {model}")
    with StopRequest(progress.stage, "stopping", at_once=True) as stop, ray_cluster():
        stop.listen()  # Ray has its own idea of SIGTERM
        check_roles(**roles)
        fleet = Fleet.start(inputs.engine_config(), recipe.rollout.engines, threads=engine_threads(recipe))
        try:
            prompts = sum(len(prompts) for prompts in inputs.evaluation.values())
            progress.stage(f"{prompts} prompts, {recipe.evaluation.responses_per_prompt} responses each")
            metrics = evaluate_fleet(inputs, fleet)
        finally:
            fleet.shutdown()
    for name, value in metrics.items():
        print(f"{name:36} {value:.4f}")
    return 0
