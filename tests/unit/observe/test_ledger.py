"""Promises of the ledger: every moment is booked once, and the phases sum to the step exactly."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.ledger import Ledger


class Clock:
    """A clock that moves when it is told."""

    def __init__(self):
        self.nanoseconds = 12_345

    def __call__(self) -> int:
        return self.nanoseconds

    def pass_seconds(self, seconds: float) -> None:
        self.nanoseconds += round(seconds * 1e9)


@pytest.fixture
def clock():
    return Clock()


def approximately(values):
    return pytest.approx(values, abs=1e-8)


def test_phases_and_what_lies_between_them(clock):
    ledger = Ledger(clock)
    clock.pass_seconds(0.5)
    with ledger.phase("generate"):
        clock.pass_seconds(2)
    clock.pass_seconds(0.25)
    with ledger.phase("train"):
        clock.pass_seconds(3)
    with ledger.phase("generate"):
        clock.pass_seconds(1)
    assert ledger.close_step() == approximately({"time/generate": 3, "time/train": 3, "time/other": 0.75, "time/step": 6.75})


def test_each_step_starts_from_nothing(clock):
    ledger = Ledger(clock)
    with ledger.phase("generate"):
        clock.pass_seconds(2)
    ledger.close_step()
    clock.pass_seconds(1)
    assert ledger.close_step() == approximately({"time/other": 1, "time/step": 1})


def test_a_nested_phase_is_not_booked_twice(clock):
    ledger = Ledger(clock)
    with ledger.phase("train"):
        clock.pass_seconds(1)
        with ledger.phase("logprobs"):
            clock.pass_seconds(2)
        clock.pass_seconds(4)
        with ledger.phase("train"):
            clock.pass_seconds(8)
    assert ledger.close_step() == approximately({"time/train": 13, "time/logprobs": 2, "time/other": 0, "time/step": 15})


def test_overlapping_phases_of_two_threads_are_not_booked_twice(clock):
    ledger = Ledger(clock)
    generate, train = ledger.phase("generate"), ledger.phase("train")
    generate.__enter__()
    clock.pass_seconds(1)
    train.__enter__()
    clock.pass_seconds(2)
    generate.__exit__(None, None, None)
    clock.pass_seconds(4)
    train.__exit__(None, None, None)
    clock.pass_seconds(8)
    assert ledger.close_step() == approximately({"time/generate": 1, "time/train": 6, "time/other": 8, "time/step": 15})


def test_a_phase_that_outlives_the_step_is_booked_to_both(clock):
    ledger = Ledger(clock)
    with ledger.phase("generate"):
        clock.pass_seconds(1)
        assert ledger.close_step() == approximately({"time/generate": 1, "time/other": 0, "time/step": 1})
        clock.pass_seconds(2)
    assert ledger.close_step() == approximately({"time/generate": 2, "time/other": 0, "time/step": 2})


def test_a_phase_that_fails_is_booked_and_ended(clock):
    ledger = Ledger(clock)
    with pytest.raises(RuntimeError), ledger.phase("train"):
        clock.pass_seconds(1)
        raise RuntimeError
    clock.pass_seconds(2)
    assert ledger.close_step() == approximately({"time/train": 1, "time/other": 2, "time/step": 3})


@pytest.mark.parametrize("name", ["other", "step"])
def test_what_the_ledger_computes_is_no_phase(name):
    with pytest.raises(ValueError, match=name), Ledger().phase(name):
        pass


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 10**13)), max_size=30), st.randoms())
def test_the_sum_is_exact_in_any_order(events, order):
    clock = Clock()
    ledger = Ledger(clock)
    running = []
    for name, nanoseconds in events:
        phase = ledger.phase(name)
        phase.__enter__()
        running.append(phase)
        clock.nanoseconds += nanoseconds
        if nanoseconds % 3:
            running.pop(nanoseconds % len(running)).__exit__(None, None, None)
    booked = ledger.close_step()
    total = booked.pop("time/step")
    parts = list(booked.values())
    order.shuffle(parts)
    assert sum(parts) == total and all(part >= 0 for part in parts)
    for phase in running:
        phase.__exit__(None, None, None)


def test_real_time_and_real_threads():
    ledger = Ledger()
    began = time.perf_counter()

    def work(name):
        for _ in range(20):
            with ledger.phase(name):
                time.sleep(random.random() / 1000)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("generate", "train", "verify")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    booked = ledger.close_step()
    assert booked["time/step"] == pytest.approx(time.perf_counter() - began, abs=0.05)
    assert all(sum(order) == booked["time/step"] for order in itertools.permutations(list(booked.values())[:-1]))
