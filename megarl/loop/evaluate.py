"""pass@k of the engines' present weights on the held-out prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from megarl.evaluation.metrics import avg_at_k, pass_at_k
from megarl.rollout.fleet import Fleet

if TYPE_CHECKING:
    from megarl.loop.run import Inputs, Run

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
        responses = fleet.generate(
            prompts, n, inputs.sampling(settings.temperature), step=_EVALUATION_STEP, seed=inputs.recipe.seed
        )
        judged = inputs.judge(prompts, responses)
        right = judged.correct.sum(axis=1)
        prefix = f"eval/{name}/" if len(inputs.evaluation) > 1 else "eval/"
        for k in settings.k:
            metrics[f"{prefix}pass@{k}"] = float(np.mean(pass_at_k(n, right, k)))
        _, metrics[f"{prefix}pass@1_standard_error"] = avg_at_k(judged.correct)
        metrics[f"{prefix}reward_mean"] = float(judged.rewards.mean())
        metrics[f"{prefix}length_mean"] = judged.tokens / len(judged.responses)
    return metrics
