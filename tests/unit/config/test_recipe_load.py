"""Promise: a recipe means exactly one thing, and every value knows where it came from."""

from __future__ import annotations

import math

import pytest

from megarl.config.load import load_any_recipe, load_recipe
from megarl.config.recipe import Recipe, SftRecipe


def test_sources_name_line_override_and_default(write, minimal):
    name = write(
        "x.yaml", "base: minimal.yaml\ntraining:\n  optimizer:\n    learning_rate: 1e-4\ndata:\n  evaluation:\n    test: t.jsonl\n"
    )
    loaded = load_recipe(name, ["training.minibatches=4"])
    assert isinstance(loaded.recipe, Recipe)
    assert loaded.recipe.training.optimizer.learning_rate == 1e-4
    assert loaded.recipe.training.minibatches == 4
    expected = {
        "training.steps": "minimal.yaml:6",
        "training.optimizer.learning_rate": "x.yaml:4",
        "data.evaluation.test": "x.yaml:7",
        "data.train": "minimal.yaml:3",
        "training.minibatches": "--set",
        "training.optimizer.beta1": "default",
        "objective.name": "minimal.yaml:5",
        "verifier.args": "default",
        "evaluation.k": "default",
    }
    assert {key: loaded.sources[key] for key in expected} == expected
    assert str(loaded.path) == "x.yaml"


def test_base_is_relative_to_the_file_and_chains(write, minimal):
    write("a/top.yaml", "base: ../b/middle.yaml\nseed: 3\n")
    write("b/middle.yaml", "base: ../minimal.yaml\nseed: 2\ntraining: {epochs: 2}\n")
    loaded = load_recipe("a/top.yaml")
    assert (loaded.recipe.seed, loaded.recipe.training.epochs, loaded.recipe.training.steps) == (3, 2, 5)
    assert loaded.sources["training.epochs"] == "b/middle.yaml:3"
    assert loaded.sources["training.steps"] == "minimal.yaml:6"


def test_a_recipe_may_be_a_base_and_nothing_else(write, minimal):
    assert load_recipe(write("x.yaml", "base: minimal.yaml\n")).recipe == load_recipe(minimal).recipe


def test_lists_are_replaced_and_mappings_merged(write, minimal):
    write("b.yaml", "base: minimal.yaml\nevaluation: {k: [1, 4, 8]}\nverifier: {name: countdown, args: {a: 1, deep: {b: 2}}}\n")
    recipe = load_recipe(write("x.yaml", "base: b.yaml\nevaluation: {k: [2]}\nverifier: {args: {deep: {c: 3}}}\n")).recipe
    assert recipe.evaluation.k == [2]
    assert recipe.verifier.args == {"a": 1, "deep": {"b": 2, "c": 3}}


def test_an_empty_mapping_replaces(write, minimal):
    write("b.yaml", "base: minimal.yaml\nverifier: {name: countdown, args: {a: 1}}\n")
    loaded = load_recipe(write("x.yaml", "base: b.yaml\nverifier: {args: {}}\n"))
    assert loaded.recipe.verifier.args == {}
    assert loaded.sources["verifier.args"] == "x.yaml:2"


@pytest.mark.parametrize(
    "overrides",
    [["objective={name: lpo, beta: 2}"], ["objective.name=lpo", "objective.beta=2"], ["objective.beta=2", "objective.name=lpo"]],
)
def test_another_objective_inherits_nothing_whatever_the_order(write, minimal, overrides):
    name = write("x.yaml", "base: minimal.yaml\nobjective: {name: grpo, clip: 0.2}\n")
    loaded = load_recipe(name, overrides)
    assert loaded.recipe.objective == {"name": "lpo", "beta": 2}
    assert loaded.sources["objective.beta"] == "--set"


def test_another_verifier_inherits_no_arguments(write, minimal):
    write("b.yaml", "base: minimal.yaml\nverifier: {name: countdown, args: {a: 1}}\n")
    recipe = load_recipe(write("x.yaml", "base: b.yaml\nverifier: {name: reasoning_gym}\n")).recipe
    assert recipe.verifier.args == {}


def test_the_same_objective_keeps_its_parameters(write, minimal):
    write("b.yaml", "base: minimal.yaml\nobjective: {name: grpo, clip: 0.2, beta: 1}\n")
    for text in ("objective: {clip: 0.3}", "objective: {name: grpo, clip: 0.3}"):
        assert load_recipe(write("x.yaml", f"base: b.yaml\n{text}\n")).recipe.objective == {"name": "grpo", "clip": 0.3, "beta": 1}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        ("-1.5e+2", -150.0),
        (".5", 0.5),
        ("3", 3),
        ("010", 10),
        ("-7", -7),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        *(
            (word, word)
            for word in ("on", "off", "yes", "no", "True", "FALSE", "y", "Null", "1_000", "0x10", "1:30", "2020-01-01", "inf", "<<", "=")
        ),
        ("'3'", "3"),
        ('"true"', "true"),
        ("!!str 3", "3"),
        ("[1, [a, {b: 1e2}]]", [1, ["a", {"b": 100.0}]]),
        ("{on: no, 1: x}", {"on": "no", "1": "x"}),
    ],
)
def test_scalars_mean_what_they_look_like(minimal, text, value):
    found = load_recipe(minimal, [f"objective.x={text}"]).recipe.objective["x"]
    assert found == value and type(found) is type(value)


def test_an_integer_may_stand_for_a_number(minimal):
    rate = load_recipe(minimal, ["training.optimizer.learning_rate=1"]).recipe.training.optimizer.learning_rate
    assert rate == 1.0 and isinstance(rate, float)


def test_the_last_set_of_a_key_wins(minimal):
    assert load_recipe(minimal, ["seed=1", "seed=2"]).recipe.seed == 2


def test_set_may_hold_equals_signs(minimal):
    assert load_recipe(minimal, ["output=runs/lr=3"]).recipe.output == "runs/lr=3"


def test_utf8_with_and_without_byte_order_mark(write, minimal):
    for mark in (b"", b"\xef\xbb\xbf"):
        assert load_recipe(write("x.yaml", mark + "base: minimal.yaml\noutput: läufe/一\n".encode())).recipe.output == "läufe/一"


def test_warm_up_recipes(write):
    name = write("sft.yaml", "output: run\nmodel: {path: m}\ndata: {train: t.jsonl}\ntraining: {steps: 3, batch_size: 2}\n")
    assert load_recipe(name, kind=SftRecipe).recipe.training.batch_size == 2
    assert isinstance(load_any_recipe(name).recipe, SftRecipe)


def test_load_any_recognises_a_training_recipe(minimal):
    assert isinstance(load_any_recipe(minimal).recipe, Recipe)
