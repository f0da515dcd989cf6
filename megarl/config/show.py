"""A recipe as text: the resolved values with their sources, and the reference of all fields."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import yaml
from megarl.config import fields
from megarl.config.load import Loaded, plain
from megarl.config.read import add_scalar_rules
from megarl.config.recipe import Section

COMMENT_COLUMN = 60
"""Longer lines do not push the column of comments further to the right."""


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or this package's reader would not read back as text, and never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    # Single quotes fold line breaks; double quotes keep a value on its line.
    style = '"' if len(text.splitlines()) > 1 or text.splitlines() != [text] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


add_scalar_rules(_Dumper)
_Dumper.add_representer(str, _represent_text)


def inline(value: Any) -> str:
    """A value as YAML on one line."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=math.inf, sort_keys=False)
    return text.removesuffix("...\n").removesuffix("\n")


def to_yaml(recipe: Section) -> str:
    """The whole recipe, defaults included, as YAML that `load_recipe` reads back to the same recipe."""
    return "".join(f"{line}\n" for line, _ in _lines(plain(recipe)))


def render(loaded: Loaded[Any]) -> str:
    """`to_yaml` with the source of each value in a column of comments."""
    lines = list(_lines(plain(loaded.recipe)))
    column = max((len(line) for line, path in lines if path and len(line) <= COMMENT_COLUMN), default=0)
    text = ""
    for line, path in lines:
        text += f"{line:{column}}  # {loaded.sources[fields.dotted(path)]}\n" if path else f"{line}\n"
    return text


def to_json(loaded: Loaded[Any]) -> str:
    """The recipe and its sources as JSON."""
    kind = fields.COMMANDS[type(loaded.recipe)]
    return json.dumps({"command": kind, "recipe": plain(loaded.recipe), "sources": loaded.sources}, indent=2, ensure_ascii=False) + "\n"


def _lines(mapping: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """The lines of a mapping; with those that hold a leaf, the path of the leaf."""
    indent = "  " * len(path)
    for key, value in mapping.items():
        here = (*path, key)
        if isinstance(value, dict) and value:
            yield f"{indent}{inline(key)}:", None
            yield from _lines(value, here)
        else:
            yield f"{indent}{inline(key)}: {inline(value)}", here


def field_reference() -> str:
    """All fields of all kinds of recipe with type, default and documentation, as Markdown."""
    text = ""
    shown: dict[tuple[str, ...], tuple[type[Section], str]] = {}
    for kind, command in fields.COMMANDS.items():
        text += f"## Fields of a `megarl {command}` recipe\n\n{_words(kind.__doc__)}\n\n"
        same: tuple[str, ...] | None = None
        for key in fields.keys(kind):
            if same is not None and key.path[: len(same)] == same:
                continue
            same = None
            if key.section is not None and shown.get(key.path, (None, ""))[0] is key.section:
                same = key.path
                text += f"* `{key.dotted}`: as for `megarl {shown[key.path][1]}`\n"
            elif key.section is not None:
                shown[key.path] = (key.section, command)
                text += f"* `{key.dotted}`: section\n"
            else:
                text += f"* `{key.dotted}`: {fields.describe(key.info.annotation, key.info.metadata)}; {_default(key)}\n"
            documentation = key.info.description or (key.section.__doc__ if key.section and not same else None)
            if documentation:
                text += f"  {_words(documentation)}\n"
        text += "\n"
    return text.rstrip("\n") + "\n"


def _default(key: fields.Key) -> str:
    return "required" if key.info.is_required() else f"default `{inline(plain(key.info.get_default(call_default_factory=True)))}`"


def _words(text: str | None) -> str:
    return " ".join((text or "").split())
