"""Promise: each metric is the mean over prompts of its exact value, with an interval that covers as it says."""

import itertools

import numpy as np
import pytest

from megarl.evaluation.summary import Estimate, estimate, summarize


def test_values_against_enumeration():
    rng = np.random.default_rng(0)
    correct = rng.random((6, 5)) < 0.4
    rewards = np.where(correct, 1.0, rng.choice([0.0, 0.25], (6, 5)))
    answers = [[None if rng.random() < 0.2 else str(rng.integers(2)) for _ in range(5)] for _ in range(6)]
    found = summarize(correct, rewards, answers, [1, 3])
    assert list(found) == ["avg@5", "pass@1", "best@1", "maj@1", "pass@3", "best@3", "maj@3"]
    for k in (1, 3):
        passes, bests, majorities = [], [], []
        for i, subset in itertools.product(range(6), itertools.combinations(range(5), k)):
            passes.append(correct[i, list(subset)].any())
            bests.append(rewards[i, list(subset)].max())
            votes: dict = {}
            for j in subset:
                key = "right" if correct[i, j] else answers[i][j]
                if key is not None:
                    votes[key] = votes.get(key, 0) + 1
            lead = max(votes.values(), default=0)
            winners = [key for key, count in votes.items() if count == lead]
            majorities.append(("right" in winners) / max(len(winners), 1))
        for name, values in (("pass", passes), ("best", bests), ("maj", majorities)):
            assert found[f"{name}@{k}"].value == pytest.approx(np.mean(values))
    assert found["avg@5"].value == pytest.approx(correct.mean()) == found["pass@1"].value


def test_the_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(100):
        found = estimate((rng.random(60) < 0.3).astype(float), seed=trial)
        assert found.low <= found.value <= found.high
        hits += found.low <= 0.3 <= found.high
    assert 87 <= hits <= 100


def test_edges():
    assert estimate(np.array([0.5, 0.5])) == Estimate(0.5, 0.5, 0.5)
    single = estimate(np.array([1.0]))
    assert single.value == 1.0 and np.isnan([single.low, single.high]).all()
    assert estimate(np.array([0.0, 1.0, 1.0])) == estimate(np.array([0.0, 1.0, 1.0]))
    for bad in (np.zeros(0), np.zeros((2, 2))):
        with pytest.raises(ValueError, match="expected"):
            estimate(bad)
