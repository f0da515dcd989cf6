"""Tool calls: format, tool names, argument keys and argument values, scored as ToolRL does (Qian et al. 2025, arXiv 2504.13958, sec. 3).

An example has as `answer` the reference response: `<think>...</think>`, then `<tool_call>` with one JSON object
{"name": ..., "parameters": {...}} per line, or `<response>`, or both.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.several import judge_each
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier

FORMATS = {
    (True, False): re.compile(r"^<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>$", re.DOTALL),
    (False, True): re.compile(r"^<think>.*?</think>\n<response>.*?</response>$", re.DOTALL),
    (True, True): re.compile(r"^<think>.*?</think>\n<tool_call>\n.*?\n</tool_call>\n<response>.*?</response>$", re.DOTALL),
    (False, False): re.compile(r"^<think>.*?</think>$", re.DOTALL),
}
"""(has calls, has a response) of the reference -> what the response must look like."""
LARGEST = 3.0
"""Of the reward for the calls, which goes from minus this to this; the format gives 0 or 1 on top."""

Call = dict[str, Any]


def make_tool_calls(answers: int | None = None) -> Verifier:
    """The verifier `tool_calls`.

    answers: so many numbered answers in a response (see `judge_each`); null: the response is the answer.

    Reward: 1 for the format, plus 6 s - 3, where s is the share of what can be had: the overlap of the tool names, and for each call of the
    reference the overlap of the argument names and the number of right values (arXiv 2504.13958, eq. 1-5). Without calls in the reference
    only the format counts. Reward vector: format, names, argument names, argument values, each from 0 to 1.
    Verdicts: `ok` with full marks; `unparseable` (-3, or 0 without calls in the reference) if there are no readable calls where
    there should be; else `wrong`.
    """
    return judge_each(_verify, answers)


def _verify(response: str, example: Example) -> Verdict:
    response = response.strip()
    wanted = read_reference(example)
    in_format = float(_has_format(response, example.answer))
    calls = parse_calls(response)
    if wanted is None:
        # ToolRL gives no reward for the calls here, and none for making none: only the verdict and the vector tell.
        none_made = float("<tool_call>" not in response)
        right = in_format and none_made
        return Verdict("ok" if right else "wrong", in_format, vector=((in_format, none_made, none_made, none_made),))
    if calls is None:
        return Verdict("unparseable", in_format - LARGEST, detail="no readable calls", vector=((in_format, 0.0, 0.0, 0.0),))
    share, parts = score_calls(wanted, calls)
    status = "ok" if in_format and share == 1 else "wrong"
    return Verdict(status, in_format + 2 * LARGEST * share - LARGEST, calls, vector=((in_format, *parts),))


def score_calls(wanted: list[Call], calls: list[Call]) -> tuple[float, tuple[float, float, float]]:
    """(share of the score that can be had, (names, argument names, argument values)), all from 0 to 1; the order of calls is free.

    Each wanted call takes the best one left of its name. The first number is ToolRL's; the other three are its parts, each over its own
    maximum.
    """
    names = overlap([call["name"] for call in wanted], [call["name"] for call in calls])
    left = list(calls)
    keys = values = 0.0
    for call in wanted:
        arguments = call["parameters"]
        scored = [(_score_arguments(arguments, other["parameters"]), other) for other in left if other["name"] == call["name"]]
        best, other = max(scored, key=lambda item: sum(item[0]), default=((0.0, 0), None))
        if sum(best) > 0:
            left.remove(other)
            keys, values = keys + best[0], values + best[1]
    most = sum(len(call["parameters"]) for call in wanted)
    share = (names + keys + values) / (1 + len(wanted) + most)
    return share, (names, keys / len(wanted), values / most if most else float(names > 0))


def _score_arguments(wanted: dict[str, Any], given: dict[str, Any]) -> tuple[float, int]:
    return overlap(list(wanted), list(given)), sum(key in given and given[key] == value for key, value in wanted.items())


def overlap(wanted: list[str], given: list[str]) -> float:
    """Intersection over union of two multisets; 1 for two empty ones."""
    if not wanted and not given:
        return 1.0
    common = (Counter(wanted) & Counter(given)).total()
    return common / (len(wanted) + len(given) - common)


def parse_calls(text: str) -> list[Call] | None:
    """The calls in the first <tool_call>...</tool_call>, one JSON object per line; None if there is none or one cannot be read."""
    _, opened, rest = text.partition("<tool_call>")
    inside, closed, _ = rest.partition("</tool_call>")
    if not opened or not closed:
        return None
    try:
        calls = [json.loads(line) for line in inside.strip().split("\n")]
    except (ValueError, RecursionError):
        return None
    readable = all(
        isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("parameters"), dict) for call in calls
    )
    return calls if readable else None


def read_reference(example: Example) -> list[Call] | None:
    """The calls of the reference, None if it makes none; InputError naming the example if it cannot be read."""
    if not isinstance(example.answer, str) or not example.answer.strip():
        raise InputError(f'example "{example.id}": tool_calls needs the reference response, text, as `answer`, got {example.answer!r}.')
    if "<tool_call>" not in example.answer:
        return None
    calls = parse_calls(example.answer)
    if calls is None:
        raise InputError(
            f'example "{example.id}": the calls in `answer` cannot be read; expected one {{"name": ..., "parameters": {{...}}}} per line '
            "between <tool_call> and </tool_call>."
        )
    return calls


def check_examples(examples: Iterable[Example]) -> None:
    """InputError for the first example that `tool_calls` cannot judge."""
    for example in examples:
        read_reference(example)


def _has_format(response: str, reference: str) -> bool:
    has = ("<tool_call>" in reference, "<response>" in reference)
    # Counted first: with each tag once, the pattern cannot be tried from many places.
    tags = [tag for tag, wanted in zip(("tool_call", "response"), has, strict=True) if wanted]
    once = all(response.count(f"<{tag}>") == response.count(f"</{tag}>") == 1 for tag in tags)
    return once and FORMATS[has].search(response) is not None
