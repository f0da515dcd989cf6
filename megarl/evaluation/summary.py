"""A held-out set's metrics with confidence intervals over its prompts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.evaluation.metrics import best_at_k, maj_at_k, pass_at_k

RESAMPLES = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts, and the interval that holds it with probability `LEVEL` when other prompts had been drawn."""

    value: float
    low: float
    high: float


def estimate(per_prompt: NDArray[np.float64], seed: int = 0) -> Estimate:
    """Mean of [prompts] numbers with its percentile bootstrap interval over prompts (Efron 1979); NaN bounds for a single prompt.

    The responses of a prompt are no independent draws of the data set, so prompts are resampled, not responses. The same seed gives the
    same interval.
    """
    values = np.asarray(per_prompt, dtype=np.float64)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"expected [prompts], got shape {values.shape}")
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(mean, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    # One at a time: a large data set needs no [RESAMPLES, prompts] array.
    means = np.array([values[rng.integers(len(values), size=len(values))].mean() for _ in range(RESAMPLES)])
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(mean, float(low), float(high))


def summarize(
    correct: NDArray[np.bool_],
    rewards: NDArray[np.float64],
    answers: Sequence[Sequence[Hashable | None]],
    ks: Sequence[int],
) -> dict[str, Estimate]:
    """`avg@n`, and `pass@k`, `best@k` and `maj@k` for each k, of [prompts, n] verdicts, rewards and extracted answers.

    avg@n: share of right responses. pass@k: a right one among k, unbiased. best@k: expected best reward of k. maj@k: the answer with most
    votes among k is right, ties split evenly; right answers vote together, wrong ones with those that read the same, None does not vote.
    """
    prompts, n = correct.shape
    right = correct.sum(axis=1)
    found = {f"avg@{n}": estimate(correct.mean(axis=1))}
    for k in ks:
        found[f"pass@{k}"] = estimate(pass_at_k(n, right, k))
        found[f"best@{k}"] = estimate(best_at_k(rewards, k))
        votes = [[True if ok else answer for ok, answer in zip(correct[i], answers[i], strict=True)] for i in range(prompts)]
        found[f"maj@{k}"] = estimate(np.array([maj_at_k(votes[i], correct[i].tolist(), k) for i in range(prompts)]))
    return found
