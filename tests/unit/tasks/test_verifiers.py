"""Promise: ok, wrong, unparseable and crash are different things; a failing verifier never trains on zeros unseen."""

import numpy as np
import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.verdict import STATUSES, Verdict, VerdictCounts
from megarl.tasks.verifiers import check_examples, judge, make_verifier

EXAMPLE = Example("a", "p", 4, {})


@pytest.fixture(autouse=True)
def own_package(monkeypatch):
    """The module is found the way a user's is: by its folder on the path."""
    from pathlib import Path

    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def mine(function, **args):
    return make_verifier(f"my_verifiers:{function}", args)


def test_a_number_is_a_reward_and_one_or_more_is_right():
    verdicts = judge(mine("by_length"), ["xx", "xxxx", "xxxxxxxx", ""], [EXAMPLE] * 4)
    assert [(v.status, v.reward) for v in verdicts] == [("wrong", 0.5), ("ok", 1.0), ("ok", 2.0), ("wrong", 0.0)]
    assert mine("by_length", scale=2.0)("xx", EXAMPLE).status == "ok"
    assert mine("by_length")("xx", Example("b", "p", 4, {"bonus": 0.25})).reward == 0.75
    assert [mine("equal")(text, Example("c", "p", "x")).status for text in "xy"] == ["ok", "wrong"]


def test_a_verdict_is_passed_on():
    assert judge(mine("with_verdict"), ["x"], [EXAMPLE]) == [Verdict("timeout", 0.0)]


def test_numpy_rewards_are_numbers():
    for value in (np.float32(1), np.int64(1), np.bool_(True)):
        assert judge(lambda response, example, value=value: Verdict("ok", value), ["x"], [EXAMPLE])[0].status == "ok"
    verdict = mine("numpy_reward")("x", EXAMPLE)
    assert (verdict.status, verdict.reward, type(verdict.reward)) == ("wrong", 0.5, float)


def test_a_verifier_that_fails_crashes_only_its_own_response():
    calls = iter([Verdict("ok", 1.0), RuntimeError("out of coffee"), Verdict("wrong", 0.0)])

    def verify(response, example):
        result = next(calls)
        if isinstance(result, Exception):
            raise result
        return result

    verdicts = judge(verify, ["1", "2", "3"], [EXAMPLE] * 3)
    assert [v.status for v in verdicts] == ["ok", "crash", "wrong"]
    assert (verdicts[1].detail, verdicts[1].reward) == ("RuntimeError: out of coffee", 0.0)
    assert judge(mine("raises"), ["x"], [EXAMPLE])[0].detail == "KeyError: 'no such thing'"


@pytest.mark.parametrize(
    ("what", "detail"),
    [
        ("none", "returned NoneType"),
        ("text", "returned str"),
        ("list", "returned list"),
        ("nan", "reward nan is not"),
        ("inf", "reward inf is not"),
    ],
)
def test_what_is_no_reward_is_a_crash(what, detail):
    verdict = judge(mine("returns", what=what), ["x"], [EXAMPLE])[0]
    assert (verdict.status, verdict.reward) == ("crash", 0.0)
    assert detail in verdict.detail


def test_no_verdict_and_no_finite_reward_in_it_is_a_crash():
    for result in (0.5, None, Verdict("ok", float("inf")), Verdict("ok", None), Verdict("ok", "1")):
        assert judge(lambda response, example, result=result: result, ["x"], [EXAMPLE])[0].status == "crash"


def test_wrong_data_is_not_the_verifiers_crash():
    with pytest.raises(InputError, match=r'example "a": countdown needs'):
        judge(make_verifier("countdown"), ["1"], [EXAMPLE])


def test_a_stop_of_the_run_is_not_a_crash():
    def stop(response, example):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judge(stop, ["x"], [EXAMPLE])


def test_a_verifier_that_exits_does_not_end_the_run():
    def leave(response, example):
        raise SystemExit(0)

    assert judge(leave, ["x"], [EXAMPLE])[0].status == "crash"


def test_responses_and_examples_belong_together():
    with pytest.raises(ValueError, match=r"2 responses for 1 examples"):
        judge(mine("equal"), ["x", "y"], [EXAMPLE])


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("countdwn", {}, 'verifier.name: "countdwn" is not known; did you mean "countdown"'),
        ("xyz", {}, "known: countdown, .*tool_calls. Your own is named by its import path, package.module:function.$"),
        ("countdown", {"formt": "plain"}, 'has no argument "formt"; did you mean "format"'),
        ("reasoning_gym", {"format": "xml"}, "`format` is 'xml'; expected one of"),
        ("my_verifiers:", {}, "is no import path"),
        (":equal", {}, "is no import path"),
        ("no_such_module:f", {}, 'no module "no_such_module"; install it or add its folder to PYTHONPATH'),
        ("my_verifiers:equl", {}, 'has no "equl"; did you mean "equal"'),
        ("my_verifiers:not_a_function", {}, "is a int, expected a function"),
        ("my_broken_verifiers:f", {}, "importing it fails .*broken while it is imported"),
        ("my_verifiers:two_arguments", {}, r"cannot be called as function\(response, answer, metadata"),
        ("my_verifiers:by_length", {"scal": 1}, "unexpected keyword argument 'scal'"),
    ],
)
def test_what_is_no_verifier_is_refused(name, args, message):
    with pytest.raises(InputError, match=message):
        make_verifier(name, args)


def test_check_examples_finds_bad_data_before_the_run():
    good = Example("g", "p", 3, {"numbers": [1, 2]})
    check_examples("countdown", [good])
    with pytest.raises(InputError, match=r'example "a": countdown needs'):
        check_examples("countdown", [good, EXAMPLE])
    check_examples("my_verifiers:equal", [EXAMPLE])


def test_shares():
    assert VerdictCounts.of([]).shares() == {f"verdict/{status}": 0.0 for status in STATUSES}
    counts = VerdictCounts.of([Verdict("ok", 1.0), Verdict("ok", 1.0), Verdict("wrong", 0.0)]) + VerdictCounts.of([Verdict("crash", 0.0)])
    shares = counts.shares()
    assert counts.total == 4
    assert shares == {f"verdict/{status}": {"ok": 0.5, "wrong": 0.25, "crash": 0.25}.get(status, 0.0) for status in STATUSES}


def test_a_verdict_has_a_known_status():
    with pytest.raises(ValueError, match=r"status 'right'"):
        Verdict("right", 1.0)
    assert [Verdict(status, 0.0).correct for status in STATUSES] == [True] + [False] * 5
