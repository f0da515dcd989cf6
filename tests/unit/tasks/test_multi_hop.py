"""Promise: hops and final answer are scored apart, as MuSiQue's rewards ask."""

import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.multi_hop import check_examples, make_multi_hop, normalize, word_f1

HOPS = [{"question": "Who wrote Emma?", "answer": "Jane Austen"}, {"question": "Where was #1 born?", "answer": "Steventon"}]


def example(answer="the village of Steventon", hops=HOPS, aliases=("Steventon",)):
    return Example("a", "p", answer, {"question_decomposition": hops, "answer_aliases": list(aliases)})


def test_hops_and_f1():
    verify = make_multi_hop()
    verdict = verify("Emma is by Jane Austen, who was born in Steventon. <answer>Steventon.</answer>", example())
    assert (verdict.status, verdict.reward, verdict.vector) == ("ok", 1.0, ((1, 1, 1, 1, 1),))
    verdict = verify("<answer>village Steventon, Hampshire</answer>", example(aliases=()))
    f1 = 2 * 2 / (3 + 3)
    assert verdict.vector == ((0, 1, 1, 1, pytest.approx(f1)),)
    assert (verdict.status, verdict.reward) == ("wrong", pytest.approx((3 + 3 * f1) / 7))
    none = verify("It is Steventon, by Jane Austen", example())
    assert (none.status, none.reward, none.vector) == ("unparseable", 0.0, ((0, 0, 0, 0, 0),))


def test_four_hops_have_no_free_marks():
    hops = [{"answer": name} for name in ("Anna", "Bob", "Cleo", "Dan")]
    verdict = make_multi_hop()("Cleo <answer>Bobby</answer>", example("Eve", hops, ()))
    assert verdict.vector == ((0, 0, 1, 0, 0),)
    assert verdict.reward == pytest.approx(1 / 7)


def test_a_hop_is_found_as_whole_words_only():
    verify = make_multi_hop("plain")
    assert verify("Janet Austen", example()).vector[0][0] == 0
    assert verify("JANE  Austen's", example(hops=[{"answer": "Jane Austens"}])).vector[0][0] == 1


def test_normalisation():
    assert normalize("The U.S.  of an-A!") == "us of ana"
    assert word_f1("a the", "The") == 1.0 and word_f1("", "x") == 0.0
    assert word_f1("cat cat dog", "cat") == pytest.approx(2 / 4)


def test_several_answers_are_rows():
    verify = make_multi_hop("plain", answers=3)
    verdict = verify("<answer_1>Rome</answer_1><answer_2>Jane Austen from Steventon</answer_2><answer_3>Rome</answer_3>", example())
    assert len(verdict.vector) == 2
    assert verdict.reward == max((sum(row[:4]) + 3 * row[4]) / 7 for row in verdict.vector)
    assert verify("Rome", example()).vector == ()


@pytest.mark.parametrize(
    "bad",
    [
        example(answer=3),
        example(answer=" "),
        example(hops=[]),
        example(hops=[{"question": "x"}]),
        example(hops=[{"answer": "x"}] * 5),
        Example("a", "p", "x"),
        Example("a", "p", "x", {"question_decomposition": HOPS, "answer_aliases": "x"}),
    ],
)
def test_data_is_checked(bad):
    check_examples([example()])
    with pytest.raises(InputError, match=r'^example "a": multi_hop needs .*\.$'):
        check_examples([bad])
