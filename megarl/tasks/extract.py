"""Where the answer is in a response."""

from __future__ import annotations

from typing import Literal, get_args

from megarl.errors import InputError

AnswerFormat = Literal["tagged", "plain"]
OPEN, CLOSE = "<answer>", "</answer>"


def extract_answer(response: str, format: AnswerFormat) -> str | None:
    """The answer without surrounding white space, None if there is none.

    `tagged`: what stands in the last <answer>...</answer>. `plain`: the whole response.
    """
    if format == "plain":
        return response.strip() or None
    end = response.rfind(CLOSE)
    start = response.rfind(OPEN, 0, max(end, 0))
    if start < 0:
        return None
    return response[start + len(OPEN) : end].strip() or None


def check_format(format: str) -> None:
    if format not in get_args(AnswerFormat):
        raise InputError(f'verifier.args: format "{format}" is not known; expected `tagged` (the last <answer>...</answer>) or `plain`')
