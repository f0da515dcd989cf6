"""Several answers in one response: `<answer_1>...</answer_1>`, `<answer_2>...</answer_2>` and so on, each judged for itself."""

from __future__ import annotations

import re

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier


def judge_each(verify: Verifier, answers: int | None) -> Verifier:
    """`verify` for each of up to `answers` numbered answers of a response; with None it stays as it is.

    The reward is the best one's, `ok` needs one right answer, and the reward vectors are one row per different answer that was found, in
    the order of their numbers (none: `unparseable` with an empty matrix). A number that comes twice counts the first time.
    """
    if answers is None:
        return verify
    if isinstance(answers, bool) or not isinstance(answers, int) or answers < 1:
        raise InputError(f"verifier.args: answers must be null or an integer >= 1, got {answers!r}.")

    def verify_each(response: str, example: Example) -> Verdict:
        texts = find_answers(response, answers)
        verdicts = [verify(text, example) for text in texts]
        rows = tuple(row for verdict in verdicts for row in verdict.vector or ())
        if not rows:
            return Verdict("unparseable", 0.0, detail=f"none of the answers <answer_1> to <answer_{answers}>", vector=())
        best = max(verdicts, key=lambda verdict: (verdict.status == "ok", verdict.reward))
        return Verdict(best.status, best.reward, [verdict.extracted for verdict in verdicts], best.detail, rows)

    return verify_each


def find_answers(response: str, answers: int) -> list[str]:
    """The different texts in <answer_i>...</answer_i>, i = 1 to `answers`."""
    found: list[str] = []
    for number in range(1, answers + 1):
        match = re.search(rf"<answer_{number}>(.*?)</answer_{number}>", response, re.DOTALL)
        if match and match[1].strip() and match[1].strip() not in found:
            found.append(match[1].strip())
    return found
