import itertools

import pytest

from megarl.config.recipe import Optimizer
from megarl.training.optimizer import learning_rate


def rates(total=10, **settings):
    return [learning_rate(Optimizer(learning_rate=1.0, **settings), step, total) for step in range(1, total + 1)]


def test_warm_up_is_linear_and_ends_at_the_full_rate():
    assert rates(warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_without_warm_up():
    assert rates() == [1.0] * 10


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decay_ends_at_the_final_fraction(schedule):
    found = rates(warmup_steps=2, schedule=schedule, final_fraction=0.1)
    assert found[1] == 1.0 and found[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(found[1:]))


def test_half_way_of_a_cosine_is_the_middle():
    assert learning_rate(Optimizer(learning_rate=2.0, schedule="cosine"), 5, 10) == pytest.approx(1.0)
