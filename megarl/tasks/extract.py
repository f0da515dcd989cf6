"""Where the answer is in a response."""

from __future__ import annotations

import re
from typing import Literal

from megarl.errors import InputError

AnswerFormat = Literal["tagged", "plain", "last_number"]
OPEN, CLOSE = "<answer>", "</answer>"
NUMBER = re.compile(r"(?<![0-9.])-?[0-9]+(?:\.[0-9]+)?")


def extract_answer(response: str, format: AnswerFormat) -> str | None:
    """The answer without surrounding white space, None if there is none.

    `tagged`: what stands in the last <answer>...</answer>. `plain`: the whole response. `last_number`: the last decimal number, with its
    minus sign unless that follows a digit (then it is an operator).
    """
    if format == "last_number":
        return next(reversed(NUMBER.findall(response)), None)
    if format == "plain":
        return response.strip() or None
    end = response.rfind(CLOSE)
    start = response.rfind(OPEN, 0, max(end, 0))
    if start < 0:
        return None
    return response[start + len(OPEN) : end].strip() or None


def check_format(format: str, allowed: tuple[str, ...]) -> None:
    if format not in allowed:
        raise InputError(f"verifier.args: `format` is {format!r}; expected one of {', '.join(allowed)}.")
