"""Promise: before a run one sees what the model will see, what the limits do, and which references their own verifier rejects."""

import json
from pathlib import Path

import numpy as np
import pytest

from megarl.cli import main
from megarl.loop.check import histogram
from megarl.models.create import character_tokenizer

RECIPE = """
output: run
model: {path: model}
data: {train: train.jsonl, evaluation: {held: held.jsonl}, max_prompt_length: 8}
verifier: {name: countdown, args: {format: plain}}
objective: {name: grpo}
training: {steps: 1}
"""


def row(prompt, answer, numbers, *demonstrations):
    return {"prompt": prompt, "answer": answer, "metadata": {"numbers": numbers}, "demonstrations": list(demonstrations)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    character_tokenizer().save_pretrained("model")
    Path("recipe.yaml").write_text(RECIPE)
    write("train.jsonl", row("1 2=3:", 3, [1, 2], "2-1", "1+2"), row("1 2 3=6:", 6, [1, 2, 3], "1+2+3"))
    write("held.jsonl", row("4 1=3:", 3, [4, 1]))
    return tmp_path


def write(path, *rows):
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_good_recipe(folder, capsys):
    assert main(["check", "recipe.yaml", "--set", "data.max_prompt_length=7"]) == 0
    out = capsys.readouterr().out
    assert "== train.jsonl: 2 examples" in out and "== held.jsonl: 1 examples" in out
    assert '-- example "train:1", 6 tokens\n1 2=3:\n-- answer\n3' in out
    assert "1 above data.max_prompt_length (7): the run is refused" in out
    assert "-- references: 2 of 2 accepted" in out
    assert "512 responses of a step" in out
    assert "the examples hold no responses that could be judged" in out
    assert sorted(path.name for path in folder.iterdir()) == ["held.jsonl", "model", "recipe.yaml", "train.jsonl"]


def test_a_rejected_reference_is_a_failure(folder, capsys):
    write("held.jsonl", row("4 1=3:", 3, [4, 1], "4-1"), row("4 1=5:", 5, [4, 1], "4-1", "4"))
    assert main(["check", "recipe.yaml", "--show", "1"]) == 1
    error = capsys.readouterr().err
    assert "1 references are rejected by their own verifier" in error
    assert "held.jsonl: example \"held:2\", answer '5' (wrong: is 3, expected 5; wrong: uses [4], expected each of [1, 4] once)" in error


def test_the_answer_is_a_reference_where_it_is_a_response(folder, capsys):
    write("train.jsonl", {"prompt": "1+1=", "answer": "#### 2"}, {"prompt": "1+2=", "answer": 3})
    write("held.jsonl", {"prompt": "1+1=", "answer": "2"})
    assert main(["check", "recipe.yaml", "--set", "verifier={name: math, args: {format: boxed}}"]) == 0
    assert "2 of 2 accepted" in capsys.readouterr().out


def test_what_a_run_would_refuse(folder, capsys):
    write("train.jsonl", {"prompt": "1", "answer": "x"})
    assert main(["check", "recipe.yaml"]) == 2
    assert 'example "train:1": countdown needs' in capsys.readouterr().err


def test_histogram():
    assert histogram(np.array([3])).split() == ["3-3", "1", "#" * 40]
    lines = histogram(np.array([1] * 10 + [25] * 5 + [30])).splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["1-3", "10"], ["4-6", "0"], ["7-9", "0"], ["10-12", "0"], ["13-15", "0"], ["16-18", "0"], ["19-21", "0"], ["22-24", "0"],
        ["25-27", "5"], ["28-30", "1"],
    ]  # fmt: skip
    assert [line.count("#") for line in lines if "#" in line] == [40, 20, 4]
