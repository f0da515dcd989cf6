"""Promise: the metrics are the published estimators, exactly."""

import itertools
import json
from fractions import Fraction
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.evaluation.metrics import avg_at_k, best_at_k, maj_at_k, pass_at_k

GOLDEN = {case["id"]: case for case in json.loads((Path(__file__).parents[2] / "data" / "evaluation_golden.json").read_text())["cases"]}


def test_pass_at_k_golden():
    case = GOLDEN["pass_at_k"]
    for (n, c, k), value, mean in zip(case["inputs"]["n_c_k"], case["expected"]["value"], case["expected"]["avg_at_k"], strict=True):
        assert pass_at_k(n, c, k) == pytest.approx(value, abs=1e-12)
        assert avg_at_k([[1] * c + [0] * (n - c)])[0] == pytest.approx(mean, abs=1e-12)
    assert pass_at_k(8, 2, 4) == pytest.approx(11 / 14, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.data())
def test_pass_at_k_is_its_definition(n, data):
    cs = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=5))
    k = data.draw(st.integers(1, n))
    exact = [float(1 - Fraction(comb(n - c, k), comb(n, k))) for c in cs]
    assert pass_at_k(n, cs, k) == pytest.approx(exact, abs=1e-12)
    assert pass_at_k([n] * len(cs), np.array(cs), k).shape == (len(cs),)


def test_pass_at_k_of_all_but_one_is_not_rounded_away():
    assert pass_at_k(10_000, 1, 10) == pytest.approx(1e-3, rel=1e-9)
    assert pass_at_k(1000, 500, 300) == pytest.approx(float(1 - Fraction(comb(500, 300), comb(1000, 300))), rel=1e-12)
    assert pass_at_k(10_000, 10_000, 1) == 1.0
    assert pass_at_k(10_000, 0, 10_000) == 0.0


@pytest.mark.parametrize(
    "arguments", [(4, 1, 5), ([8, 4], [1, 1], 5), (4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 1.5), (4.0, 1, 1), (4, 0.5, 1), (4, 1, True)]
)
def test_pass_at_k_undefined(arguments):
    with pytest.raises(ValueError):
        pass_at_k(*arguments)


def test_best_at_k_golden():
    case = GOLDEN["best_at_k"]
    scores = case["inputs"]["scores"]
    for k, value in zip(case["inputs"]["k"], case["expected"]["without_replacement"], strict=True):
        assert best_at_k(scores, k) == pytest.approx(value, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.data())
def test_best_at_k_is_the_mean_over_all_subsets(scores, data):
    k = data.draw(st.integers(1, len(scores)))
    subsets = [max(subset) for subset in itertools.combinations(scores, k)]
    assert best_at_k([scores, scores[::-1]], k) == pytest.approx([np.mean(subsets)] * 2, abs=1e-9)


def test_best_at_k_of_right_and_wrong_is_pass_at_k():
    for c, k in itertools.product(range(9), range(1, 9)):
        assert best_at_k([1] * c + [0] * (8 - c), k) == pytest.approx(pass_at_k(8, c, k), abs=1e-12)


@pytest.mark.parametrize("arguments", [([1.0], 2), ([], 1), (1.0, 1), ([1.0, float("nan")], 1), ([1.0, float("inf")], 1), ([1.0], 0)])
def test_best_at_k_undefined(arguments):
    with pytest.raises(ValueError):
        best_at_k(*arguments)


def majority_by_enumeration(answers, correct, k):
    right = dict(zip(answers, correct, strict=True))
    total = Fraction(0)
    for subset in itertools.combinations(answers, k):
        votes = {answer: subset.count(answer) for answer in subset if answer is not None}
        winners = [answer for answer, count in votes.items() if count == max(votes.values())]
        total += Fraction(sum(right[answer] for answer in winners), max(len(winners), 1))
    return float(total / comb(len(answers), k))


def test_maj_at_k_golden():
    case = GOLDEN["maj_at_k"]
    answers = case["inputs"]["answers"]
    correct = [case["inputs"]["correct"][answer] == 1.0 for answer in answers]
    for k, value in zip(case["inputs"]["k"], case["expected"]["value"], strict=True):
        assert maj_at_k(answers, correct, k) == pytest.approx(value, abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), st.data())
def test_maj_at_k_is_the_mean_over_all_subsets(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    right = {answer: data.draw(st.booleans()) for answer in "abcd"} | {None: False}
    correct = [right[answer] for answer in answers]
    assert maj_at_k(answers, correct, k) == pytest.approx(majority_by_enumeration(answers, correct, k), abs=1e-12)


def test_unparsed_answers_do_not_vote():
    assert maj_at_k([None, None, None, "a"], [False, False, False, True], 4) == 1.0
    assert maj_at_k([None, None], [False, False], 2) == 0.0
    assert maj_at_k([None, "a"], [False, True], 1) == 0.5


def test_maj_at_k_of_many_responses_needs_no_enumeration():
    answers = ["a"] * 30 + ["b"] * 20 + [f"x{i}" for i in range(14)]
    assert maj_at_k(answers, [answer == "a" for answer in answers], 32) > 0.9
    assert maj_at_k(answers, [answer == "b" for answer in answers], 64) == 0.0


@pytest.mark.parametrize(
    "arguments", [(["a"], [True], 2), (["a"], [True, False], 1), (["a", "a"], [True, False], 1), (["a"], [True], 0), ([], [], 1)]
)
def test_maj_at_k_undefined(arguments):
    with pytest.raises(ValueError):
        maj_at_k(*arguments)


def test_avg_at_k_weighs_prompts_equally_and_clusters_by_prompt():
    mean, error = avg_at_k([[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]])
    assert mean == 0.5
    assert error == pytest.approx(0.5 / np.sqrt(3))
    # the same prompt means with more responses: no smaller error
    assert avg_at_k(np.repeat([[1.0], [0.0]], 1000, axis=1))[1] == pytest.approx(0.5)
    assert np.isnan(avg_at_k([[1, 0]])[1])
    for bad in ([], [[]], [1, 0], 1.0):
        with pytest.raises(ValueError):
            avg_at_k(bad)
