"""Promise: reasoning-gym's own scores, from data that went through a file, and no data set whose scorer runs text as code."""

import inspect
import json
from decimal import Decimal

import pytest
import reasoning_gym as package
from reasoning_gym.factory import DATASETS

from megarl.errors import InputError
from megarl.tasks.dataset import Example
from megarl.tasks.reasoning_gym import RUNS_CODE, check_examples, make_reasoning_gym
from megarl.tasks.verifiers import judge


def example(name="chain_sum", config=None, index=0):
    entry = package.create_dataset(name, seed=1, size=5, **(config or {}))[index]
    metadata = {"dataset": name, "entry": entry} | ({"config": config} if config else {})
    return Example("e", "p", entry["answer"], json.loads(json.dumps(metadata)))


def test_the_reward_is_the_scorers_score():
    sample = example()
    right = sample.answer
    verify = make_reasoning_gym()
    assert verify(f"so <answer>{right}</answer>", sample) == verify(f"<answer>1</answer><answer> {right} </answer>", sample)
    verdict = verify(f"so <answer>{right}</answer>", sample)
    assert (verdict.status, verdict.reward, verdict.extracted) == ("ok", 1.0, right)
    verbose = f"it is {right}"
    score = package.get_score_answer_fn("chain_sum")(verbose, sample.metadata["entry"])
    assert 0 < score < 1
    verdict = verify(f"<answer>{verbose}</answer>", sample)
    assert (verdict.status, verdict.reward) == ("wrong", score)
    assert verify("<answer>none</answer>", sample).reward == 0.0
    assert verify(right, sample).status == "unparseable"
    assert make_reasoning_gym(format="plain")(right, sample).status == "ok"
    assert make_reasoning_gym(format="last_number")(f"1 + 1 = {right}", sample).status == "ok"


def test_the_scorer_knows_the_settings_of_the_data():
    """decimal_arithmetic allows an error of one unit of the last decimal place of its settings (default: 3 places)."""
    sample = example("decimal_arithmetic", {"min_num_decimal_places": 8, "max_num_decimal_places": 8, "precision": 16})
    verify = make_reasoning_gym()
    assert verify(f"<answer>{sample.answer}</answer>", sample).status == "ok"
    close = str(Decimal(sample.answer) + Decimal("0.0001"))
    assert verify(f"<answer>{close}</answer>", sample).status == "wrong"
    without = Example("e", "p", sample.answer, {key: sample.metadata[key] for key in ("dataset", "entry")})
    assert verify(f"<answer>{close}</answer>", without).status == "ok"


def test_a_scorer_that_raises_is_a_crash():
    broken = example("prime_factorization")
    verdict = judge(make_reasoning_gym(), ["<answer>not numbers</answer>"], [broken])[0]
    assert (verdict.status, verdict.reward) == ("crash", 0.0)
    assert "ValueError" in verdict.detail


def sources():
    """(data set, source of the module that holds its scorer)"""
    return [(name, inspect.getsource(inspect.getmodule(kind))) for name, (kind, _) in DATASETS.items()]


def test_all_data_sets_that_run_text_as_code_are_refused():
    """A new version of the package may add one: then this fails until it is looked at."""
    looked_at = {
        "propositional_logic",  # a parser of its own
        "basic_arithmetic",  # evaluates what it generated, not answers
    }
    found = {name for name, source in sources() if any(call in source for call in ("eval(", "exec(", "parse_expr(", "sympify("))}
    assert found - looked_at <= RUNS_CODE
    assert RUNS_CODE - found == {"composite"}  # it hands the answer on to the data set that the line names


def test_code_in_an_answer_is_not_run(tmp_path):
    mark = tmp_path / "ran"
    attack = f"<answer>open({str(mark)!r}, 'w')</answer>"
    for name in sorted(RUNS_CODE):
        sample = Example("e", "p", "", {"dataset": name, "entry": {"question": "", "answer": "", "metadata": {"source_dataset": name}}})
        with pytest.raises(InputError, match=f'"{name}" runs text of answers or data as code and is refused'):
            make_reasoning_gym()(attack, sample)
    assert not mark.exists()


ENTRY = {"question": "q", "answer": "a", "metadata": {}}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "needs `metadata.dataset`"),
        ({"dataset": 3}, "needs `metadata.dataset`"),
        ({"dataset": "chain_sums", "entry": ENTRY}, 'has no data set "chain_sums"; did you mean "chain_sum"'),
        ({"dataset": "countdown", "entry": ENTRY}, "use the task and verifier `countdown` instead"),
        ({"dataset": "chain_sum"}, "needs `metadata.entry`"),
        ({"dataset": "chain_sum", "entry": {"question": "q"}}, "needs `metadata.entry` with `question`, `answer` and `metadata`"),
        ({"dataset": "chain_sum", "entry": ENTRY, "config": [1]}, "`metadata.config` must be an object"),
        ({"dataset": "chain_sum", "entry": ENTRY, "config": {"max_term": 3}}, 'no setting "max_term"; did you mean "max_terms"'),
        ({"dataset": "chain_sum", "entry": ENTRY, "config": {"max_terms": 1}}, "refuses its settings"),
    ],
)
def test_a_malformed_example_is_named(metadata, message):
    with pytest.raises(InputError, match=f'example "f:3".*{message}'):
        check_examples([example(), Example("f:3", "p", "a", metadata)])
