"""Promise: exact arithmetic, the given numbers exactly once; nothing a model writes is run, crashes or hangs the verifier."""

import itertools
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import InputError
from megarl.tasks.countdown import MAX_CHARACTERS, MAX_DEPTH, ExpressionError, check_examples, evaluate_expression, make_countdown
from megarl.tasks.dataset import Example
from megarl.tasks.verdict import Verdict

EXAMPLE = Example("a", "5 18 13=36:", 36, {"numbers": [5, 18, 13]})
PLAIN = make_countdown(format="plain")


@st.composite
def expressions(draw, depth=4):
    """(text, value or None, numbers), built without the parser; every inner expression stands in parentheses."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 120))
        return str(number), Fraction(number), [number]
    left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    operator, space = draw(st.sampled_from("+-*/")), draw(st.sampled_from(["", " ", "\n"]))
    text = space.join(["(", left[0], operator, right[0], ")"])
    if left[1] is None or right[1] is None or (operator == "/" and right[1] == 0):
        return text, None, left[2] + right[2]
    value = {"+": left[1] + right[1], "-": left[1] - right[1], "*": left[1] * right[1], "/": left[1] / (right[1] or 1)}[operator]
    return text, value, left[2] + right[2]


@settings(max_examples=100, deadline=None)
@given(expressions())
def test_value_and_numbers_of_any_expression(expression):
    assert evaluate_expression(expression[0]) == expression[1:]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.data())
def test_precedence_and_associativity_are_pythons(numbers, data):
    operators = data.draw(st.lists(st.sampled_from("+-*/"), min_size=len(numbers) - 1, max_size=len(numbers) - 1))
    pairs = list(itertools.zip_longest(numbers, operators, fillvalue=""))
    python = eval("".join(f"Fraction({number}){operator}" for number, operator in pairs))  # our own text, not a model's
    assert evaluate_expression("".join(f"{number}{operator}" for number, operator in pairs)) == (python, numbers)


@pytest.mark.parametrize(
    ("text", "value"),
    [("6×7", 42), ("8 ÷ 2", 4), ("8 − 9", -1), ("1/3+1/3+1/3", 1), ("7", 7), ("((7))", 7), ("0*3", 0), ("1/0", None), ("0/(1-1)+2", None)],
)
def test_accepted(text, value):
    assert evaluate_expression(text)[0] == value


REFUSED = {
    "": "ends where a number is expected",
    "()": "number expected before \\)",
    "1+": "ends where",
    "+1": "number expected before \\+",
    "-1+2": "number expected before -",
    "3*-1": "number expected before -",
    "2**3": "number expected before \\*",
    "9//2": "number expected before /",
    "1 2": "operator expected before 2",
    "2(3)": "operator expected before \\(",
    "(2)3": "operator expected before 3",
    "(1+2": "not closed",
    "1+2)": "too many",
    "01+2": "leading zero",
    "1.5": "'\\.' is not part",
    "1e3": "'e' is not part",
    "1_0": "'_' is not part",
    "13+18+5=36": "'=' is not part",
    "x": "'x' is not part",
    "٣+1": "is not part",
    "３": "is not part",
    "2²": "is not part",
    "1\x00": "is not part",
    "1\u00a0+2": "is not part",
    "__import__('os')": "is not part",
    "9" * 19: "more than 18 digits",
    "(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1): "nested deeper",
    "1+" * (MAX_CHARACTERS // 2) + "1": "longer than",
}


@pytest.mark.parametrize("text", REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_expression_is_unparseable(text):
    with pytest.raises(ExpressionError, match=REFUSED[text]):
        evaluate_expression(text)
    verdict = PLAIN(text, EXAMPLE)
    assert (verdict.status, verdict.reward) == ("unparseable", 0.0)
    assert verdict.detail


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789+-*/() \n=×÷−.x", max_size=60) | st.text(max_size=60))
def test_any_text_gets_a_verdict(text):
    for verify in (PLAIN, make_countdown()):
        for response in (text, f"<answer>{text}</answer>"):
            verdict = verify(response, EXAMPLE)
            assert (verdict.status, verdict.reward) in {("ok", 1.0), ("wrong", 0.1), ("wrong", 0.0), ("unparseable", 0.0)}


@pytest.mark.parametrize("unit", ["(", "1+", ")", "9", "1*(", " ", "<answer>", "</answer>", "((1)+", "-"])
def test_huge_texts_end_at_once(unit):
    text = unit * (100_000 // len(unit))
    start = time.process_time()
    for verify in (PLAIN, make_countdown()):
        for response in (text, f"<answer>{text}</answer>", f"<answer>{text}", f"{text}</answer>"):
            assert verify(response, EXAMPLE).status == "unparseable"
    assert time.process_time() - start < 2


def test_largest_allowed_expression_is_fast():
    text = "/".join(["9" * 18] * (MAX_CHARACTERS // 19))
    start = time.process_time()
    value, numbers = evaluate_expression(text)
    assert value.denominator == (10**18 - 1) ** (len(numbers) - 2) and len(numbers) == 52
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    ("response", "status", "reward"),
    [
        ("13+18+5", "ok", 1.0),
        (" (13+18) + 5\n", "ok", 1.0),
        ("13+18-5", "wrong", 0.1),
        ("13/(18-18)", "wrong", 0.0),
        ("18+18", "wrong", 0.0),
        ("36", "wrong", 0.0),
        ("13+18+5+5-5", "wrong", 0.0),
        ("13+18", "wrong", 0.0),
        ("", "unparseable", 0.0),
        ("   ", "unparseable", 0.0),
        ("<answer>13+18+5</answer>", "unparseable", 0.0),
    ],
)
def test_verdicts_of_the_plain_format(response, status, reward):
    verdict = PLAIN(response, EXAMPLE)
    assert (verdict.status, verdict.reward, verdict.correct) == (status, reward, status == "ok")


def test_a_division_by_zero_with_the_right_numbers_is_wrong_and_well_formed():
    verdict = PLAIN("5/(18-18)", Example("z", "", 1, {"numbers": [5, 18, 18]}))
    assert verdict == Verdict("wrong", 0.1, "5/(18-18)", "divides by zero")


def test_repeated_numbers_are_used_as_often_as_given():
    example = Example("r", "", 8, {"numbers": [4, 4]})
    assert PLAIN("4+4", example).status == "ok"
    assert PLAIN("4", example) == Verdict("wrong", 0.0, "4", "uses [4], expected each of [4, 4] once")


def test_a_value_close_to_the_target_is_not_the_target():
    assert PLAIN("1000000/999999", Example("c", "", 1, {"numbers": [1000000, 999999]})).status == "wrong"
    # 49*(1/49) is not 1 in floating point
    assert PLAIN("49*(1/49)", Example("c", "", 1, {"numbers": [49, 1, 49]})).status == "ok"


@pytest.mark.parametrize(
    ("response", "status"),
    [
        ("so <answer>13+18+5</answer>", "ok"),
        ("<answer>1+1</answer> no: <answer> 13+18+5 </answer>.", "ok"),
        ("<answer>13+18+5</answer> no: <answer>1+1</answer>", "wrong"),
        ("<answer>13+18+5</answer> and <answer>1+1", "ok"),
        ("<answer><answer>13+18+5</answer>", "ok"),
        ("13+18+5", "unparseable"),
        ("<answer>13+18+5", "unparseable"),
        ("13+18+5</answer>", "unparseable"),
        ("</answer>13+18+5<answer>", "unparseable"),
        ("<answer></answer>", "unparseable"),
        ("<Answer>13+18+5</Answer>", "unparseable"),
    ],
)
def test_the_tagged_answer_is_the_last_one(response, status):
    assert make_countdown()(response, EXAMPLE).status == status


def test_arguments():
    assert make_countdown(format="plain", format_reward=0.25)("13-18-5", EXAMPLE).reward == 0.25
    sums = make_countdown(format="plain", symbols="+-")
    assert sums("13+18+5", EXAMPLE).status == "ok"
    assert sums("(13+18)+5", EXAMPLE).status == sums("13*18/5", EXAMPLE).status == "unparseable"
    refused = {"format": ["xml", "last_number"], "format_reward": [1.0, float("nan"), "0.1", True], "symbols": ["", "()", "+^", 3]}
    for name, value in [(name, value) for name, values in refused.items() for value in values]:
        with pytest.raises(InputError, match=name):
            make_countdown(**{name: value})


@pytest.mark.parametrize(
    ("answer", "metadata", "message"),
    [
        (36, {}, "`metadata.numbers`"),
        (36, {"numbers": []}, "`metadata.numbers`"),
        (36, {"numbers": "5 18 13"}, "`metadata.numbers`"),
        (36, {"numbers": [5, "18"]}, "`metadata.numbers`"),
        (36, {"numbers": [5, True]}, "`metadata.numbers`"),
        (36, {"numbers": [5, 1.0]}, "`metadata.numbers`"),
        (36, {"numbers": [5, -1]}, "`metadata.numbers`"),
        ("36", {"numbers": [5]}, "as `answer`, got '36'"),
        (36.0, {"numbers": [5]}, "as `answer`"),
        (None, {"numbers": [5]}, "as `answer`"),
    ],
)
def test_a_malformed_example_is_named(answer, metadata, message):
    bad = Example("f:7", "", answer, metadata)
    for judge in (lambda: PLAIN("1", bad), lambda: check_examples([EXAMPLE, bad])):
        with pytest.raises(InputError, match=f'example "f:7": countdown needs .*{message}'):
            judge()
    check_examples([EXAMPLE])
