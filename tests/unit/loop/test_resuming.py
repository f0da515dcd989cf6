"""Promise: a resumed run keeps what its earlier steps depended on, and says what else has changed."""

import pytest

from megarl.config.load import load_recipe
from megarl.loop.resuming import FIXED, changes

RECIPE = """
output: run
model: {path: model}
data: {train: data/train.jsonl, evaluation: {a: data/a.jsonl}}
verifier: {name: countdown}
objective: {name: grpo, clip_high: 0.2}
training: {steps: 60}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(RECIPE)
    return lambda *overrides: load_recipe("x.yaml", overrides).recipe


def test_the_same_recipe_has_no_changes(recipe):
    assert changes(recipe(), recipe()) == ([], [])


def test_what_may_change_is_told(recipe):
    now = recipe("training.steps=100", "objective={clip_low: 0.1}", "evaluation.k=[1]", "data.evaluation.b=b.jsonl")
    refused, allowed = changes(recipe(), now)
    assert (refused, sorted(allowed)) == (
        [],
        ["data.evaluation.b unset -> b.jsonl", "evaluation.k [1, 8] -> [1]", "objective.clip_low unset -> 0.1", "training.steps 60 -> 100"],
    )


@pytest.mark.parametrize("setting", ["seed=1", "model.path=other", "data.train=data/a.jsonl", "rollout.prompts_per_step=3"])
def test_what_must_not_change_is_refused(recipe, setting):
    key, value = setting.split("=")
    refused, allowed = changes(recipe(), recipe(setting))
    assert allowed == [] and len(refused) == 1
    assert refused[0].startswith(f"{key} ") and refused[0].endswith(f" -> {value}")


def test_paths_to_the_same_place_are_the_same(recipe, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "model")
    now = recipe("model.path=link", f"data.train={tmp_path}/data/train.jsonl", "data.evaluation.a=./data//a.jsonl", "output=./run/")
    assert changes(recipe(), now) == ([], [])
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    assert changes(recipe(), now) == (["model.path model -> link"], [])


def test_the_fixed_keys_exist(recipe):
    tree = recipe().model_dump()
    for key in FIXED:
        at = tree
        for part in key.split("."):
            at = at[part]
