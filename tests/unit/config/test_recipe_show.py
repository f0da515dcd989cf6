"""Promise: what `show` prints is the whole recipe, can be run again, and says where each value came from; the reference is up to date."""

from __future__ import annotations

import json
import string
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import fields, show
from megarl.config.load import load_any_recipe, load_recipe

ROOT = Path(__file__).parents[3]

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12) | st.sampled_from(
    [
        "",
        " a",
        "a\n",
        "a\nb",
        "# c",
        "a: b",
        "a #b",
        "\xa0",
        "\x85",
        *["1e-6", "on", "True", "null", "~", "'", '"', "*a", "&a", "!x", "{}", "[1", "2020-01-01", "1_0", "0x1", ".inf", "<<", "-", "é"],
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)


def test_each_leaf_has_its_source_in_an_aligned_column(write, minimal):
    name = write("x.yaml", "base: minimal.yaml\nevaluation:\n  k: [1, 2]\n  every: 5\n")
    lines = show.render(load_recipe(name, ["training.steps=7", f"objective.note={'n' * 80}"])).splitlines()
    found = {line.split("#")[0].strip(): line.split("# ")[1] for line in lines if "#" in line}
    assert found["k: [1, 2]"] == "x.yaml:3"
    assert found["steps: 7"] == "--set"
    assert found["path: model"] == "minimal.yaml:2"
    assert found["learning_rate: 1.0e-06"] == "default"
    assert len({line.index("#") for line in lines if "#" in line and "nnn" not in line}) == 1
    assert all("#" in line or line.endswith(":") for line in lines)


def test_the_output_is_a_recipe_with_and_without_comments(write, minimal):
    loaded = load_recipe(minimal, ["objective.x={a: [1e-6, on], b: {}}", "output='a # b'"])
    for printed in (show.render(loaded), show.to_yaml(loaded.recipe)):
        again = load_recipe(write("again.yaml", printed))
        assert again.recipe == loaded.recipe
        assert set(again.sources.values()) <= {f"again.yaml:{n}" for n in range(1, 200)}
    assert "#" not in show.to_yaml(loaded.recipe).replace("'a # b'", "")


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(text, values, max_size=4))
def test_any_value_survives_being_printed(tmp_path_factory, arguments):
    folder = tmp_path_factory.getbasetemp()
    lines = ["output: run", "model: {path: m}", "data: {train: t}", "objective: {name: grpo}", "training: {steps: 1}"]
    (folder / "first.yaml").write_text(
        "\n".join([*lines, f"verifier: {show.inline({'name': 'v', 'args': arguments})}\n"]), encoding="utf-8"
    )
    first = load_recipe(folder / "first.yaml")
    assert first.recipe.verifier.args == arguments
    (folder / "second.yaml").write_text(show.render(first), encoding="utf-8")
    assert load_recipe(folder / "second.yaml").recipe == first.recipe


def test_json(write, minimal):
    printed = json.loads(show.to_json(load_any_recipe(minimal)))
    assert printed["command"] == "train"
    assert printed["recipe"]["training"]["steps"] == 5
    assert printed["sources"]["training.steps"] == "minimal.yaml:6"


def test_every_field_is_in_the_reference():
    reference = show.field_reference()
    for kind in fields.COMMANDS:
        for key in fields.keys(kind):
            as_for = any(f"`{'.'.join(key.path[:n])}`: as for" in reference for n in range(1, len(key.path)))
            assert f"`{key.dotted}`" in reference or as_for
    assert "* `training.optimizer.learning_rate`: number > 0; default `1.0e-06`\n" in reference
    assert "* `training.steps`: integer >= 1; required\n" in reference


def test_the_documentation_holds_the_present_reference():
    marker = "<!-- megarl show --fields -->\n"
    _, found, reference = (ROOT / "docs/recipe.md").read_text(encoding="utf-8").partition(f"\n{marker}")
    assert found, "docs/recipe.md has lost the marker of its generated part"
    assert reference == show.field_reference(), "docs/recipe.md is out of date: run the command that it gives"


def test_the_set_of_recipe_keys_changes_only_on_purpose():
    frozen = (ROOT / "tests/data/recipe_keys.txt").read_text().splitlines()
    present = [f"{command} {key.dotted}" for kind, command in fields.COMMANDS.items() for key in fields.keys(kind) if key.section is None]
    gone, new = sorted(set(frozen) - set(present)), sorted(set(present) - set(frozen))
    assert not gone and not new, f"recipes depend on these keys; if it is meant, edit tests/data/recipe_keys.txt: gone {gone}, new {new}"
    assert frozen == sorted(frozen)


def test_every_key_is_plain():
    allowed = set(string.ascii_lowercase + string.digits + "_")
    assert all(set(key.path[-1]) <= allowed for kind in fields.COMMANDS for key in fields.keys(kind))
