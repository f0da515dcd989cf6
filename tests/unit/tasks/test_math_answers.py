"""Promise: a right answer is right however it is written, a wrong one is not, and no answer is neither."""

import importlib.util
from pathlib import Path

import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.math_answers import check_examples, equal_answers, find_answer, make_math, read_reference

ROOT = Path(__file__).parents[3]


def benchmark():
    spec = importlib.util.spec_from_file_location("math_confusion", ROOT / "benchmarks/verifiers/math_confusion.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_reference_is_rejected_and_no_perturbed_answer_accepted():
    """Real references of GSM8K and MATH-500 in five surface forms each, and 100 answers with a digit, sign or letter changed."""
    verify = make_math()
    cases = benchmark().cases(ROOT / "tests/data/math", perturbed=100)
    assert len(cases) == 5 * 200 + 100
    wrong = [(response, example.answer) for _, _, response, right, example in cases if (verify(response, example).status == "ok") != right]
    assert not wrong


EQUAL = [
    ("0.5", "1/2"), (r"\frac12", "0.5"), (r"\dfrac{1}{2}", r"\frac{1}{2}"), ("50%", r"50\%"), ("50%", "50"), ("0.5", r"50\%"), ("1.0", "1"),
    ("$18", "18"), (r"\$18.50", "18.5"), ("1,000,000", "1000000"), (r"10{,}000", "10000"), (r"10,\!080", "10080"), ("3.0 inches", "3"),
    (r"10\text{ cm}^2", "10"), ("10 cm", r"10\mbox{ cm}"), ("90 degrees", r"90^\circ"), (r"3 \times 10^8", "3e8"), ("x = 5", "5"),
    (r"\sqrt{8}", r"2\sqrt{2}"), ("sqrt(2)/2", r"\frac{\sqrt{2}}{2}"), ("2 pi r", r"2\pi r"), ("x^2+2x+1", "(x+1)^2"), ("p-q", "p - q"),
    ("a+b", "b+a"), ("(1, 2)", r"\left( 1,2 \right)"), (r"\{2,1\}", r"\{1,2\}"), ("-3, 5", "5,-3"), (r"x \in (1,2)", "(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"), ("(A)", "A"), (r"\text{(A)}", "A"),
    ("evelyn", r"\text{Evelyn}"), ("an ellipse", r"\text{ellipse}"), ("No solution", r"\text{no solution}"), ("52", "52_8"),
    ("6 - 5i", "6-5i"),
    ("-1/3", r"-\frac{1}{3}"), (r"1\frac{1}{2}", r"\frac{3}{2}"), ("3<x", "x>3"), ("−5", "-5"), ("18.", "18"),
]  # fmt: skip
DIFFERENT = [
    ("-5", "5"), ("0.33", "1/3"), ("1/0", "0"), ("3.14", r"\pi"), ("1e999", "1"), ("100", r"10\%"), ("5 5", "55"), ("1,2", "12"),
    ("23", "2,3"),
    ("(1,2)", "(2,1)"), ("[1,2]", "(1,2)"), ("1,234", "(1,234)"), (r"\{1,3\}", r"\{1,2\}"), ("5,6", "5"), ("5 or 6", "5"),
    ("10 to 20", "10"),
    ("5 apples and 6 pears", "5"), ("12 more than 5", "12"), ("7 and not 8", "7"), ("52_2", "52_8"), ("x_1", "x_2"), ("x^2", "x^3"),
    ("x", "y"), ("x<3", "x>3"), ("12x", "12"), ("no", "on"), ("cab", "abc"), ("west", "east"), ("B", "A"), ("(A)(B)", "A"), ("x=3", "x=4"),
    ("11:30 PM", r"\text{11:30 AM}"), ("3 cm^2", "32"), ("", "5"), (r"\frac{2}{1}", r"\frac{1}{2}"), (r"\boxed{5", "5"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference"), EQUAL)
def test_equal(answer, reference):
    assert equal_answers(answer, reference)


@pytest.mark.parametrize(("answer", "reference"), DIFFERENT)
def test_different(answer, reference):
    assert not equal_answers(answer, reference)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"\boxed{1}, no: \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{7} and then \boxed{8", "7"),
        (r"\boxed{\text{a \} b}}", r"\text{a \} b}"),
        (r"\fbox {3}", "3"),
        ("The answer is 5. It is even.", "5"),
        ("**Answer:** 5", "5"),
        ("The answer is 7. No, the answer is $x + 1$.", "x + 1"),
        ("so x = 3, and y = 4. The answer is (3, 4).", "(3, 4)"),
        ("He pays $5 and $6, so $11", "$11"),
        ("We find $x=1$, and then $x^2$", "x^2"),
        ("2 + 2 = 4\n#### 4\nDone.", "4"),
        ("5 + 6 gives the total of 11 eggs.", "11"),
        ("-5", "-5"),
        ("I really do not know", None),
        ("", None),
        ("####", None),
    ],
)
def test_where_the_answer_is(response, answer):
    assert find_answer(response) == answer


def test_the_strict_format_takes_no_other_place():
    verify = make_math("boxed")
    example = Example("a", "p", "5")
    assert [verify(text, example).status for text in (r"\boxed{5}", r"\boxed{6}", "The answer is 5", "#### 5")] == [
        "ok", "wrong", "unparseable", "unparseable",
    ]  # fmt: skip
    assert make_math("tagged")("so <answer>5</answer>", example).status == "ok"
    assert make_math("plain")("5.0", example).status == "ok"


def test_verdicts():
    verify = make_math()
    right, wrong, none = (
        verify(text, Example("a", "p", "2 * 9 = 18\n#### 18")) for text in (r"\boxed{18}", "It is 19.", "No idea at all here")
    )
    assert (right.status, right.reward, right.extracted) == ("ok", 1.0, "18")
    assert (wrong.status, wrong.reward, wrong.extracted, wrong.detail) == ("wrong", 0.0, "19", "expected 18")
    assert (none.status, none.reward) == ("unparseable", 0.0)
    assert verify(r"\boxed{" + "1+" * 2000 + "1}", Example("a", "p", 1)).status == "unparseable"


def test_references():
    assert [read_reference(Example("a", "p", x)) for x in (18, 1.5, "so #### 7", r"Thus \boxed{3}", " x ")] == ["18", "1.5", "7", "3", "x"]
    for answer in (None, True, "", "  ", [], "$$"):
        with pytest.raises(InputError, match=r'example "b": math needs the reference, .*\.$'):
            check_examples([Example("a", "p", 1), Example("b", "p", answer)])
    with pytest.raises(InputError, match="`format` is 'xml'; expected one of auto, boxed, tagged, plain"):
        make_math("xml")
