"""Promise: no misspelt key is ever accepted, and the message names it."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config import fields
from megarl.config.load import load_recipe, plain
from megarl.config.recipe import Recipe, Section, SftRecipe
from megarl.errors import InputError

FULL: dict[type[Section], dict] = {
    Recipe: plain(
        Recipe.model_validate(
            {
                "output": "run",
                "model": {"path": "m"},
                "data": {"train": "t"},
                "verifier": {"name": "countdown"},
                "objective": {"name": "grpo"},
                "replay": {},
                "training": {"steps": 1, "step_lists": {"separators": ["."]}},
            }
        )
    ),
    SftRecipe: plain(SftRecipe.model_validate({"output": "run", "model": {"path": "m"}, "data": {"train": "t"}, "training": {"steps": 1}})),
}
ALPHABET = string.ascii_letters + string.digits + "_-. :#é"


@st.composite
def typo(draw, word: str) -> str:
    """`word` with one character replaced, removed, added, or swapped with the next."""
    at = draw(st.integers(0, len(word) - 1))
    letter = draw(st.sampled_from(ALPHABET))
    edits = [word[:at] + letter + word[at + 1 :], word[:at] + word[at + 1 :], word[:at] + letter + word[at:], word + letter]
    edits.append(word[:at] + word[at : at + 2][::-1] + word[at + 2 :])
    return draw(st.sampled_from([edit for edit in edits if edit != word]))


def renamed(mapping: dict, path: tuple[str, ...], name: str) -> str:
    """The mapping as JSON (which is YAML) with the key at `path` renamed; also where `name` is a key beside it already."""
    items = []
    for key, value in mapping.items():
        inner = renamed(value, path[1:], name) if path[:1] == (key,) and len(path) > 1 else json.dumps(value)
        items.append(f"{json.dumps(name if path == (key,) else key, ensure_ascii=False)}: {inner}")
    return "{" + ", ".join(items) + "}"


@pytest.mark.parametrize("kind", FULL)
def test_a_full_recipe_is_accepted(kind, tmp_path):
    (tmp_path / "x.yaml").write_text(renamed(FULL[kind], (), ""))
    assert plain(load_recipe(tmp_path / "x.yaml", kind=kind).recipe) == FULL[kind]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_single_character_typo_of_any_key_is_refused_by_name(tmp_path_factory, data):
    kind = data.draw(st.sampled_from(list(FULL)))
    path = data.draw(st.sampled_from([key.path for key in fields.keys(kind)]))
    name = data.draw(typo(path[-1]))
    file = tmp_path_factory.getbasetemp() / "typo.yaml"
    file.write_text(renamed(FULL[kind], path, name))
    with pytest.raises(InputError) as caught:
        load_recipe(file, kind=kind)
    message = str(caught.value)
    assert f"`{fields.dotted((*path[:-1], name))}`" in message or f"duplicate key `{name}`" in message
    assert f"{file}:1: " in message
