"""Metrics over several responses per prompt. All need only numpy.

State the sampler (temperature, top-p, largest length) beside every number: these are properties of policy and sampler together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pass_at_k(n: ArrayLike, c: ArrayLike, k: int) -> NDArray[np.float64]:
    """Unbiased pass@k of each prompt from c right ones among n responses: 1 - C(n-c, k) / C(n, k).

    Computed as 1 - prod_{i=n-c+1..n} (1 - k/i), which is exact to rounding for any n (Chen et al. 2021, arXiv 2107.03374).

    n, c: integers of shapes that broadcast, [prompts] or scalar. Returns float64 of that shape.
    Raises ValueError unless 1 <= k <= n and 0 <= c <= n everywhere: with fewer than k responses pass@k is undefined.
    """
    n, c = np.broadcast_arrays(_integers(n, "n"), _integers(c, "c"))
    k = _whole(k, "k")
    if np.any(n < k):
        raise ValueError(f"pass@{k} needs at least {k} responses per prompt, got {int(n.min())}")
    if np.any((c < 0) | (c > n)):
        raise ValueError("c, the number of right responses, must be between 0 and n")
    steps = np.arange(1, int(c.max(initial=0)) + 1)  # i = n-c+step
    index = (n - c)[..., None] + steps
    factors = np.where(steps <= c[..., None], 1 - k / np.maximum(index, 1), 1.0)
    return 1 - np.prod(np.clip(factors, 0, None), axis=-1)


def best_at_k(scores: ArrayLike, k: int) -> NDArray[np.float64]:
    """Expected best score of k responses drawn without replacement: sum_{i=k..n} s_(i) C(i-1, k-1) / C(n, k), s_(i) ascending.

    scores: [..., n], any finite real scores. Returns [...]. With scores 0 and 1 it is pass@k.
    Raises ValueError unless 1 <= k <= n, or if a score is not finite.
    """
    scores = np.sort(np.asarray(scores, dtype=np.float64), axis=-1)
    k = _whole(k, "k")
    if scores.ndim == 0 or scores.shape[-1] < k:
        raise ValueError(f"best@{k} needs at least {k} responses per prompt, got {scores.shape[-1] if scores.ndim else 0}")
    if not np.isfinite(scores).all():
        raise ValueError("scores must be finite")
    n = scores.shape[-1]
    weights = np.array([float(Fraction(comb(i - 1, k - 1), comb(n, k))) for i in range(1, n + 1)])
    return scores @ weights


def maj_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """Probability that the majority answer of k responses of one prompt is right, over all C(n, k) subsets.

    answers: [n] canonical answers; equal ones vote together, None (no answer was found) does not vote. correct: [n] verdicts, the same for
    equal answers. A tie for the most votes is split evenly; a subset without any vote counts as wrong.

    Exact, by counting: for each right answer and each number of its votes, a polynomial over the other answers counts the subsets in which
    none of them has more votes, by how many have as many. Raises ValueError unless 1 <= k <= n.
    """
    k = _whole(k, "k")
    if len(answers) != len(correct):
        raise ValueError(f"{len(answers)} answers, {len(correct)} verdicts")
    if len(answers) < k:
        raise ValueError(f"maj@{k} needs at least {k} responses per prompt, got {len(answers)}")
    verdicts: dict[Hashable, bool] = {}
    for answer, verdict in zip(answers, correct, strict=True):
        if answer is not None and verdicts.setdefault(answer, bool(verdict)) != bool(verdict):
            raise ValueError(f"answer {answer!r} is both right and wrong: answers must be canonical")
    votes = Counter(answer for answer in answers if answer is not None)
    silent = len(answers) - sum(votes.values())
    right = [answer for answer in votes if verdicts[answer]]
    won = sum(_subsets_won(votes[a], [size for b, size in votes.items() if b != a], silent, k) for a in right)
    return float(won / comb(len(answers), k))


def _subsets_won(own: int, others: list[int], silent: int, k: int) -> Fraction:
    """Number of k-subsets in which an answer with `own` responses has the most votes, a tie among m of them counting 1/m."""
    total = Fraction(0)
    for lead in range(1, min(own, k) + 1):
        # ways[used][tied]: choices from the other answers with `used` votes in all, at most `lead` each, `tied` of them with `lead`
        ways: dict[tuple[int, int], int] = {(0, 0): 1}
        for size in others:
            following: dict[tuple[int, int], int] = {}
            for (used, tied), count in ways.items():
                for votes in range(min(size, lead, k - lead - used) + 1):
                    key = (used + votes, tied + (votes == lead))
                    following[key] = following.get(key, 0) + count * comb(size, votes)
            ways = following
        for (used, tied), count in ways.items():
            total += Fraction(comb(own, lead) * count * comb(silent, k - lead - used), tied + 1)
    return total


def avg_at_k(correct: ArrayLike) -> tuple[float, float]:
    """(mean accuracy, its standard error) of [prompts, k] right/wrong or scores; every prompt weighs the same.

    The error is the one over prompts, std(prompt means, ddof=1) / sqrt(prompts): the k responses of a prompt are not independent draws
    of the data set. It is NaN for a single prompt, where it is unknown.
    """
    values = np.asarray(correct, dtype=np.float64)
    if values.ndim != 2 or 0 in values.shape:
        raise ValueError(f"expected [prompts, k], got shape {values.shape}")
    means = values.mean(axis=1)
    error = means.std(ddof=1) / np.sqrt(len(means)) if len(means) > 1 else float("nan")
    return float(means.mean()), float(error)


def _whole(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
    return int(value)


def _integers(values: ArrayLike, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {array.dtype}")
    return array.astype(np.int64)
