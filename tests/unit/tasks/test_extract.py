"""Promise: the answer is found where the format says it is, and nowhere else."""

import pytest

from megarl.errors import InputError
from megarl.tasks.extract import check_format, extract_answer


@pytest.mark.parametrize(
    ("response", "number"),
    [
        ("3 + 4 = 7", "7"),
        ("3 - 4 = -1", "-1"),
        ("it is -1.5, surely.", "-1.5"),
        ("so 7.", "7"),
        ("3-4", "4"),
        ("a-4", "-4"),
        ("12", "12"),
        ("٣", None),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(response, number):
    assert extract_answer(response, "last_number") == number


def test_plain_is_all_of_it():
    assert extract_answer(" a b\n", "plain") == "a b"
    assert extract_answer(" \n", "plain") is None


def test_formats_are_checked():
    check_format("plain", ("tagged", "plain"))
    with pytest.raises(InputError, match=r"`format` is 'last_number'; expected one of tagged, plain\."):
        check_format("last_number", ("tagged", "plain"))
