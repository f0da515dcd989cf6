"""Promise: tool calls get the reward that ToolRL gives them, and its parts are the reward vector."""

import json
from pathlib import Path

import pytest

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.tool_calls import check_examples, make_tool_calls, overlap, read_reference

REFERENCES = [json.loads(line)["answer"] for line in (Path(__file__).parents[2] / "data/toolrl_references.jsonl").read_text().splitlines()]


def example(answer):
    return Example("a", "p", answer)


def calls(*items):
    lines = "\n".join(json.dumps({"name": name, "parameters": parameters}) for name, parameters in items)
    return f"<think> so </think>\n<tool_call>\n{lines}\n</tool_call>"


def test_a_perfect_response_gets_full_marks_on_each_row_of_toolrls_test_file():
    verify = make_tool_calls()
    assert len(REFERENCES) == 80
    for reference in REFERENCES:
        verdict = verify(reference, example(reference))
        full = 4.0 if read_reference(example(reference)) else 1.0
        assert (verdict.status, verdict.reward, verdict.vector) == ("ok", full, ((1.0,) * 4,))


def test_no_row_gives_full_marks_to_another_rows_response():
    verify = make_tool_calls()
    with_calls = [reference for reference in REFERENCES if read_reference(example(reference))]
    assert len(with_calls) == 71
    for reference, other in zip(with_calls, with_calls[1:] + with_calls[:1], strict=True):
        verdict = verify(other, example(reference))
        assert verdict.status == "wrong" and verdict.reward < 4 and verdict.vector[0][0] == 1.0


@pytest.mark.parametrize(
    ("response", "reward", "vector"),
    [
        # s = (names + keys + values) / (1 + 2 calls + 3 arguments); the reward is 1 + 6 s - 3.
        (calls(("f", {"a": 1, "b": 2}), ("g", {"c": 3})), 4.0, (1, 1, 1, 1)),
        (calls(("g", {"c": 3}), ("f", {"a": 1, "b": 2})), 4.0, (1, 1, 1, 1)),
        (calls(("f", {"a": 1, "b": 9}), ("g", {"c": 3})), 1 + 6 * 5 / 6 - 3, (1, 1, 1, 2 / 3)),
        (calls(("f", {"a": 1}), ("g", {"c": 3})), 1 + 6 * (1 + 1.5 + 2) / 6 - 3, (1, 1, 0.75, 2 / 3)),
        (calls(("f", {"a": 1, "b": 2})), 1 + 6 * (0.5 + 1 + 2) / 6 - 3, (1, 0.5, 0.5, 2 / 3)),
        (calls(("h", {})), 1 + 0 - 3, (1, 0, 0, 0)),
        (calls(("f", {"a": 1, "b": 2}), ("g", {"c": 3}), ("g", {"c": 3})), 1 + 6 * (2 / 3 + 2 + 3) / 6 - 3, (1, 2 / 3, 1, 1)),
        (calls(("f", {"a": 1, "b": 2}), ("g", {"c": 3})).replace("<think> so </think>\n", ""), 3.0, (0, 1, 1, 1)),
    ],
)
def test_parts_of_the_score(response, reward, vector):
    reference = calls(("f", {"a": 1, "b": 2}), ("g", {"c": 3}))
    verdict = make_tool_calls()(response, example(reference))
    assert verdict.reward == pytest.approx(reward)
    assert verdict.vector == (pytest.approx(vector),)
    assert verdict.status == ("ok" if vector == (1, 1, 1, 1) else "wrong")


@pytest.mark.parametrize(
    "inside",
    [
        "not json",
        '["f"]',
        '{"name": "f"}',
        '{"name": ["f"], "parameters": {}}',
        '{"name": "f", "parameters": [1]}',
        "[" * 100_000,
        "1" * 5000,
        "",
    ],
)
def test_calls_that_cannot_be_read(inside):
    reference = calls(("f", {"a": 1}))
    verdict = make_tool_calls()(f"<think> so </think>\n<tool_call>\n{inside}\n</tool_call>", example(reference))
    assert (verdict.status, verdict.reward) == ("unparseable", -2.0)
    assert make_tool_calls()("Sure.", example(reference)).reward == -3.0


def test_a_reference_without_calls_rewards_the_format():
    verify = make_tool_calls()
    reference = example("<think> so </think>\n<response> Which city? </response>")
    assert verify("<think> x </think>\n<response> Where? </response>", reference).reward == 1.0
    wrong = verify("<think> x </think>\n<response> Where? </response>\n<tool_call>\n{}\n</tool_call>", reference)
    assert (wrong.status, wrong.reward, wrong.vector) == ("wrong", 0.0, ((0.0, 0.0, 0.0, 0.0),))
    assert verify("Where?", reference).status == "wrong"


def test_overlap_counts_repeats():
    assert overlap([], []) == 1.0
    assert overlap(["f"], []) == overlap([], ["f"]) == 0.0
    assert overlap(["f", "f", "g"], ["f", "g", "g"]) == 2 / 4


def test_long_hostile_text_takes_no_long_time():
    text = "<think>" + "</think>\n<tool_call>\n" * 20_000
    assert make_tool_calls()(text, example(calls(("f", {})))).status == "unparseable"


def test_references_are_checked():
    check_examples([example(calls(("f", {})))])
    for answer in (None, "", 3, "<tool_call>\nx\n</tool_call>"):
        with pytest.raises(InputError, match=r'^example "a": .*\.$'):
            check_examples([example(answer)])
