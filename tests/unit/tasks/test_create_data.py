"""Promise: ready-made data is right, reproducible, without overlap between training and evaluation, and complete or not there."""

import collections
import hashlib
import json

import pytest

from megarl.errors import InputError
from megarl.tasks.countdown import evaluate_expression, make_countdown
from megarl.tasks.create import TINY_DEMONSTRATIONS, create_data, tiny_instances
from megarl.tasks.dataset import read_examples
from megarl.tasks.verifiers import check_examples, judge, make_verifier


def create(folder, task, seed=0, **options):
    counts = create_data(task, folder, seed, {key: str(value) for key, value in options.items()})
    splits = [read_examples(folder / name) for name in ("train.jsonl", "heldout.jsonl")]
    assert counts == {"train": len(splits[0]), "heldout": len(splits[1])}
    assert sorted(path.name for path in folder.iterdir()) == ["heldout.jsonl", "train.jsonl"]
    return splits


def keys(examples):
    return {(tuple(sorted(example.metadata["numbers"])), example.answer) for example in examples}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "data"
    return folder, *create(folder, "countdown-tiny")


def test_tiny_instances_are_all_there_without_the_shortcut(tiny):
    _, train, heldout = tiny
    assert (len(train), len(heldout)) == (3944, 256)
    assert keys(train) | keys(heldout) == set(tiny_instances()[0])
    assert not keys(train) & keys(heldout)
    sums = make_countdown(format="plain")
    for example in train + heldout:
        numbers = example.metadata["numbers"]
        assert len(numbers) == 3 and all(1 <= number <= 20 for number in numbers) and 0 <= example.answer <= 99
        assert example.prompt == " ".join(map(str, numbers)) + f"={example.answer}:"
        assert sums("+".join(map(str, numbers)), example).status == "wrong"
    assert max(len(example.prompt) for example in train + heldout) <= 12


def test_tiny_lists_numbers_in_any_order(tiny):
    ascending = sum(example.metadata["numbers"] == sorted(example.metadata["numbers"]) for example in tiny[1])
    assert 0.1 < ascending / len(tiny[1]) < 0.35


def test_half_of_the_demonstrations_are_right_and_half_are_drawn_from_all_expressions(tiny):
    verify = make_countdown(format="plain", symbols="+-")
    solutions, expressions = tiny_instances()
    right_among_random = []
    for example in tiny[1][::4]:
        right, drawn = example.demonstrations[:TINY_DEMONSTRATIONS], example.demonstrations[TINY_DEMONSTRATIONS:]
        assert len(right) == len(drawn) == TINY_DEMONSTRATIONS
        assert {verdict.status for verdict in judge(verify, right, [example] * TINY_DEMONSTRATIONS)} == {"ok"}
        assert all(verdict.reward >= 0.1 for verdict in judge(verify, drawn, [example] * TINY_DEMONSTRATIONS))
        numbers = tuple(sorted(example.metadata["numbers"]))
        # every solution as often as any other up to one, so that none is preferred
        uses = collections.Counter(right)
        assert set(uses) == set(solutions[numbers, example.answer]) and max(uses.values()) - min(uses.values()) <= 1
        right_among_random.append(sum(evaluate_expression(text)[0] == example.answer for text in drawn) / TINY_DEMONSTRATIONS)
    expected = [len(solution) / len(expressions[key[0]]) for key, solution in solutions.items()]
    assert sum(right_among_random) / len(right_among_random) == pytest.approx(sum(expected) / len(expected), abs=0.02)


def test_tiny_heldout_is_the_same_for_every_seed_and_for_ever(tiny, tmp_path):
    train, _ = create(tmp_path / "other", "countdown-tiny", seed=1)
    for name, same in (("heldout.jsonl", True), ("train.jsonl", False)):
        assert ((tmp_path / "other" / name).read_bytes() == (tiny[0] / name).read_bytes()) is same
    assert keys(train) == keys(tiny[1])
    # published numbers were measured on this very file
    assert hashlib.sha256((tiny[0] / "heldout.jsonl").read_bytes()).hexdigest()[:16] == "2593484160ca3bf5"


def test_the_same_seed_gives_the_same_files(tiny, tmp_path):
    create(tmp_path / "again", "countdown-tiny")
    for name in ("heldout.jsonl", "train.jsonl"):
        assert (tmp_path / "again" / name).read_bytes() == (tiny[0] / name).read_bytes()


def test_tiny_size(tiny, tmp_path):
    train, heldout = create(tmp_path / "small", "countdown-tiny", size=10)
    assert train == tiny[1][:10] and heldout == tiny[2]
    with pytest.raises(InputError, match=r"has 3944 training instances, 3945 were asked for"):
        create(tmp_path / "large", "countdown-tiny", size=3945)


def test_countdown_is_solvable_and_in_range(tmp_path):
    train, heldout = create(tmp_path / "a", "countdown", size=300, heldout=100)
    other, again = create(tmp_path / "b", "countdown", seed=1, size=300, heldout=100)
    assert (len(train), len(heldout)) == (300, 100)
    assert heldout == again and keys(train) != keys(other)
    assert len(keys(train)) == 300 and not (keys(train) | keys(other)) & keys(heldout)
    verify = make_verifier("countdown")
    everything = train + heldout
    assert {verdict.status for verdict in judge(verify, [e.demonstrations[0] for e in everything], everything)} == {"ok"}
    sizes = collections.Counter(len(example.metadata["numbers"]) for example in everything)
    assert set(sizes) == {3, 4} and min(sizes.values()) > 100
    for example in everything:
        assert all(1 <= number <= 99 for number in example.metadata["numbers"]) and 10 <= example.answer <= 99
        assert ", ".join(map(str, example.metadata["numbers"])) in example.prompt and f"reach {example.answer}." in example.prompt
    used = set("".join(example.demonstrations[0].replace("</answer>", "") for example in everything))
    assert set("+-*/()") <= used


def test_reasoning_gym_lines_are_judged_by_their_own_verifier(tmp_path):
    train, heldout = create(tmp_path / "a", "reasoning-gym:chain_sum", size=40, heldout=20, max_terms=3, allow_negation="true")
    other, again = create(tmp_path / "b", "reasoning-gym:chain_sum", seed=1, size=40, heldout=20, max_terms=3, allow_negation="true")
    assert (len(train), len(heldout)) == (40, 20)
    prompts = [{example.prompt[0]["content"] for example in split} for split in (train, other, heldout)]
    assert [len(split) for split in prompts] == [40, 40, 20]
    assert not prompts[0] & prompts[2] and not prompts[1] & prompts[2] and len(prompts[0] & prompts[1]) < 10
    assert heldout == again
    check_examples("reasoning_gym", train + heldout)
    verdicts = judge(make_verifier("reasoning_gym"), [f"<answer>{example.answer}</answer>" for example in train], train)
    assert {verdict.status for verdict in verdicts} == {"ok"}
    assert train[0].metadata["config"] == {"max_terms": 3, "allow_negation": True}
    assert train[0].prompt[0]["content"].endswith("\nGive the final answer between <answer> and </answer>.")


def test_prompt_shots_and_reply(tmp_path):
    options = {
        "size": 10,
        "heldout": 5,
        "prompt": "What is {expression}? {x",
        "shots": 2,
        "reply": "{expression} = {answer}",
        "max_terms": 2,
    }
    train, heldout = create(tmp_path / "a", "reasoning-gym:chain_sum", **options)
    shots = train[0].prompt[:-1]
    assert [message["role"] for message in train[0].prompt] == ["user", "assistant", "user", "assistant", "user"]
    for question, reply in (shots[:2], shots[2:]):
        expression = question["content"].removeprefix("What is ").removesuffix("? {x")
        assert reply["content"] == f"{expression} = {evaluate_expression(expression)[0]}"
    questions = [example.prompt[-1]["content"] for example in train + heldout]
    assert len(set(questions) | {shots[0]["content"], shots[2]["content"]}) == 17
    assert all(example.prompt[:-1] == shots for example in train + heldout)
    entry = train[0].metadata["entry"]
    assert questions[0] == f"What is {entry['metadata']['expression']}? {{x"
    tagged = create(tmp_path / "b", "reasoning-gym:chain_sum", size=5, heldout=5, shots=1)[0][0].prompt
    assert tagged[1]["content"].startswith("<answer>") and tagged[1]["content"].endswith("</answer>")
    plain = create(tmp_path / "c", "reasoning-gym:chain_sum", size=5, heldout=5, shots=1, prompt="{question}")[0][0].prompt
    assert int(plain[1]["content"]) is not None


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("countdown-tny", {}, 'no task "countdown-tny"; did you mean "countdown-tiny"'),
        ("reasoning-gym", {}, 'no task "reasoning-gym"; did you mean "reasoning-gym:<data set>"'),
        ("zzz", {}, "known: countdown, countdown-tiny, maze, reasoning-gym:<data set>"),
        ("countdown-tiny", {"heldout": "9"}, 'task countdown-tiny has no option "heldout"; known: size'),
        ("countdown", {"sise": "9"}, 'has no option "sise"; did you mean "size"'),
        ("countdown", {"size": "0"}, "option size: expected an integer from 1"),
        ("countdown", {"size": "-1"}, "option size: expected"),
        ("countdown", {"size": "1e3"}, "option size: expected"),
        ("countdown", {"size": "٣"}, "option size: expected"),
        ("countdown", {"heldout": ""}, "option heldout: expected"),
        ("reasoning-gym:chain_sm", {}, 'no data set "chain_sm"; did you mean "chain_sum"'),
        ("reasoning-gym:n_queens", {}, "runs text of answers or data as code and is refused"),
        ("reasoning-gym:chain_sum", {"max_term": "3"}, 'no setting "max_term"; did you mean "max_terms"'),
        ("reasoning-gym:chain_sum", {"max_terms": "1"}, "refuses its settings"),
        ("reasoning-gym:chain_sum", {"max_terms": "many"}, "refuses its settings"),
        ("reasoning-gym:chain_sum", {"seed": "1"}, "the seed is an argument of the command"),
        ("reasoning-gym:chain_sum", {"shots": "-1"}, "option shots: expected an integer from 0"),
        ("reasoning-gym:chain_sum", {"prompt": "{expresion}", "size": "2"}, 'no field {expresion}; did you mean "expression"'),
        ("reasoning-gym:chain_sum", {"max_terms": "2", "max_digits": "1"}, "1000 new questions were asked for, 20000 attempts gave 0"),
        ("reasoning-gym:graph_color", {"size": "2"}, "50 attempts gave 0; the scorer gives 0.0 to the reference answer None"),
    ],
)
def test_what_cannot_be_created_is_refused_and_leaves_nothing(tmp_path, task, options, message):
    with pytest.raises(InputError, match=message):
        create_data(task, tmp_path / "new" / "deep", 0, options)
    assert not list(tmp_path.iterdir())


def test_bad_seeds_are_refused(tmp_path):
    for seed in (-1, 1.5, True, "1"):
        with pytest.raises(InputError, match=r"seed must be an integer >= 0"):
            create_data("countdown-tiny", tmp_path / "new", seed, {})


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "heldout.jsonl").write_text("mine")
    with pytest.raises(InputError, match=r"heldout.jsonl exists already"):
        create_data("countdown", tmp_path, 0, {"size": "5"})
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("heldout.jsonl", "mine")]
    with pytest.raises(InputError, match=r"heldout.jsonl: is a file"):
        create_data("countdown", tmp_path / "heldout.jsonl", 0, {"size": "5"})


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    """The disk is full while the second file is written."""
    from megarl.tasks import create as module

    real = module.write_jsonl

    def write(path, rows):
        if path.name == "heldout.jsonl":
            raise OSError(28, "No space left on device")
        return real(path, rows)

    monkeypatch.setattr(module, "write_jsonl", write)
    with pytest.raises(InputError, match=r"cannot be written .No space left on device"):
        create_data("countdown", tmp_path / "new" / "deep", 0, {"size": "5", "heldout": "5"})
    assert not list(tmp_path.iterdir())


def test_lines_are_plain_json(tiny):
    for line in (tiny[0] / "train.jsonl").read_text().splitlines()[:20]:
        assert set(json.loads(line)) == {"prompt", "answer", "metadata", "demonstrations"}


def test_mazes_have_ways_out_that_differ_in_what_they_pick_up(tmp_path):
    train, heldout = create(tmp_path / "a", "maze", size=300, heldout=50)
    other, again = create(tmp_path / "b", "maze", seed=1, size=300, heldout=50)
    assert heldout == again and train != other
    assert not {example.prompt for example in train} & {example.prompt for example in heldout}
    assert len({example.prompt for example in train}) == 300
    check_examples("maze", train + heldout)
    pairs = [(text, example) for example in train for text in (*example.demonstrations, example.answer)]
    verdicts = judge(make_verifier("maze"), *map(list, zip(*pairs, strict=True)))
    assert {verdict.status for verdict in verdicts} == {"ok"}
    assert all(verdict.vector[0][3] == 1.0 for verdict in verdicts)
    assert {verdict.vector[0][1:3] for verdict in verdicts} == {(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)}
    with pytest.raises(InputError, match="at most 5 of lava, 9 were asked for"):
        create(tmp_path / "c", "maze", lava=9)
