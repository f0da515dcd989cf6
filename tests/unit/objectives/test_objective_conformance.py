"""Promise: every objective gives the numbers of the conformance cases, and refuses what must be refused, through the training code."""

import copy
import json
import math

import pytest
from objective_batches import DATA, cases

from megarl.errors import InputError
from megarl.objectives.conformance import main, run_case

CASES = cases("cases.json") + cases("bad_cases.json")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_case(case):
    result = run_case(case)
    assert result.ok, result.message


def base() -> dict:
    return copy.deepcopy(next(case for case in CASES if case["id"] == "grpo_off_policy"))


def response(**fields) -> dict:
    return {"objective": {"name": "grpo"}, "batch": {"groups": [{"responses": [{"reward": 1.0, "logp": [-0.5, -0.6], **fields}]}]}}


REFUSED = [
    (response(mask=[True, 1]), "mask"),
    (response(truncated=1), "truncated"),
    (response(correct="yes"), "correct"),
    (response(reward=True), "reward"),
    (response(reward=None), "reward"),
    (response(reward=math.inf), "reward"),
    (response(reward=10**400), "reward"),
    (response(logp="x"), "logp"),
    (response(ref_logp=[0.0]), "ref_logp"),
    (response(ref_logp=[0.0, math.nan]), "ref_logp"),
    (response(bootstrap_value=math.nan), "bootstrap_value"),
    (response(entropy=[None, 1.0]), "entropy"),
    ({**response(), "tolerance": -1}, "tolerance"),
    ({**response(), "expected": {"losss": 0.0}}, "losss"),
    ({**response(), "objective": {"name": "lpo", "schedule": {}}}, "schedule"),
    ({**response(), "objective": {}}, "name"),
    ({**response(), "objective": "grpo"}, "objective"),
    ({"objective": {"name": "grpo"}}, "batch"),
    ({"objective": {"name": "grpo"}, "batch": {"groups": [3]}}, "group 0"),
    ({"objective": {"name": "grpo"}, "batch": {"groups": [{"respones": []}]}}, "respones"),
    ({"objective": {"name": "grpo"}, "batch": {"groups": [], "seed": 1}}, "seed"),
    (
        {"objective": {"name": "vpo"}, "batch": {"groups": [{"weights": [[1.0]], "responses": [{"reward": [[1, 0]], "logp": []}]}]}},
        "weights",
    ),
    ({"objective": {"name": "vpo"}, "batch": {"groups": [{"weights": [], "responses": [{"reward": [[1]], "logp": []}]}]}}, "weights"),
]


@pytest.mark.parametrize(("case", "text"), REFUSED, ids=[f"{i}-{text}" for i, (_, text) in enumerate(REFUSED)])
def test_malformed_case_fails_with_the_name_of_the_fault(case, text):
    result = run_case(case)
    assert not result.ok
    assert text in result.message
    assert "internal" not in result.message
    assert run_case({**{k: v for k, v in case.items() if k != "expected"}, "error": text}).ok or "expected" in case


def test_the_place_of_a_missing_field_is_named():
    case = response(ref_logp=[0.0, 0.0])
    case["batch"]["groups"].append({"id": "b", "responses": [{"reward": 0.0, "logp": [], "ref_logp": []}, {"reward": 0.0, "logp": [-1.0]}]})
    case["objective"]["kl"] = {"coef": 0.1}
    message = run_case(case).message
    assert "ref_logp" in message and "'b'" in message and "response 1" in message


def test_a_wrong_expectation_fails_and_names_the_field():
    case = base()
    case["expected"]["loss"] += 0.1
    result = run_case(case)
    assert not result.ok and "`loss`" in result.message and result.largest_error > 1e-3


@pytest.mark.parametrize("wrong", [math.nan, [0.0], "0", None, True])
def test_nan_and_other_nesting_never_pass(wrong):
    case = base()
    case["expected"]["loss"] = wrong
    case["tolerance"] = 1e9
    assert not run_case(case).ok


def test_a_case_that_should_be_refused_and_is_not_fails():
    case = base()
    del case["expected"]
    case["error"] = "grpo"
    assert not run_case(case).ok


def test_command(tmp_path, capsys):
    """Exit codes and output of `megarl conformance`."""
    good = str(DATA / "bad_cases.json")
    assert main([good], False) == 0
    case = base()
    case["expected"]["loss"] += 1
    bad = tmp_path / "wrong.json"
    bad.write_text(json.dumps({"cases": [case, {"objective": {"name": "grpoo"}, "batch": {}}]}))
    capsys.readouterr()
    assert main([good, str(bad)], True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["failed"] == 2 and report["passed"] == len(cases("bad_cases.json"))
    assert main([str(bad)], False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAIL grpo_off_policy") and "`loss`" in lines[0]
    assert lines[1].startswith("FAIL #1") and "grpoo" in lines[1]


@pytest.mark.parametrize("content", ["{", "[]", '{"cases": {}}', '{"cases": []}', None, b"\xff\xfe"])
def test_a_file_that_holds_no_cases_is_refused(tmp_path, content):
    file = tmp_path / "cases.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=str(file)):
        main([str(file)], False)


def test_the_documented_example_is_right():
    text = (DATA.parents[2] / "docs" / "methods.md").read_text()
    example = text.split("```json\n")[1].split("```")[0]
    result = run_case(json.loads(example))
    assert result.ok, result.message
