"""YAML text to a tree that remembers where each value came from.

Scalars are read by the rules of YAML 1.2's core schema, less its spellings nobody needs: only `true` and `false` are booleans (so `on`,
`no` and `True` stay text), `1e-6` is a number, `010` is ten, and a date is text. Aliases and tags are refused: a recipe says what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import yaml
from megarl.errors import InputError, sentence

MAX_DEPTH = 32
_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, order=True)
class Origin:
    """A line of a file, or the command line (`file` is None)."""

    file: str | None
    line: int = 0

    def __str__(self) -> str:
        return "--set" if self.file is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Entry:
    """A value with its origin: a scalar, a list of entries, or a mapping of text to entries."""

    value: Any
    origin: Origin

    def plain(self) -> Any:
        """The value without origins."""
        if isinstance(self.value, dict):
            return {key: entry.plain() for key, entry in self.value.items()}
        if isinstance(self.value, list):
            return [entry.plain() for entry in self.value]
        return self.value

    def find(self, path: tuple[str | int, ...]) -> Entry | None:
        """The entry at `path` (keys of mappings, indices of lists), or None."""
        entry = self
        for part in path:
            value = entry.value
            known = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            if part not in known:
                return None
            entry = value[part]
        return entry


@dataclass(frozen=True)
class Problem:
    """One mistake in a recipe."""

    origin: Origin | str
    text: str

    def __str__(self) -> str:
        return sentence(f"{self.origin}: {self.text}")


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's composer with the scalar rules of this module."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # not PyYAML's

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(None, None, "an alias: write the value out, or share it through `base`", mark)
        return super().compose_node(parent, index)


def add_scalar_rules(target: Any) -> None:
    """Add this module's rules for plain scalars to a PyYAML loader or dumper class."""
    number = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)"
    rules = {
        "null": r"~|null|",
        "bool": r"true|false",
        "int": r"[-+]?[0-9]+",
        "float": rf"{number}(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
    }
    for name, pattern in rules.items():
        target.add_implicit_resolver(_TAG + name, re.compile(rf"^(?:{pattern})$"), None)


add_scalar_rules(RecipeLoader)


def parse(text: str, file: str | None) -> tuple[Entry | None, list[Problem]]:
    """Read one YAML document; `file` is None for the value of a `--set`.

    Returns the tree (None if there is no document) and the mistakes that do not hide the rest: duplicate keys, tags, unusable scalars.
    Raises InputError if the text is not YAML.
    """
    place = "--set" if file is None else file
    try:
        node = RecipeLoader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        line = "" if file is None or error.problem_mark is None else f":{error.problem_mark.line + 1}"
        context = f" {error.context}" if error.context else ""
        raise InputError(f"{place}{line}: not valid YAML: {error.problem}{context}.") from None
    except yaml.reader.ReaderError as error:
        line = "" if file is None else f":{text.count(chr(10), 0, error.position) + 1}"
        raise InputError(f"{place}{line}: not valid YAML: the character {error.character!r} is not allowed.") from None
    except RecursionError:
        raise InputError(f"{place}: the values are nested too deeply.") from None
    except (ValueError, OverflowError):  # PyYAML passes \U escapes to chr() unchecked
        raise InputError(f"{place}: not valid YAML: an escape sequence names no character.") from None
    if node is None:
        return None, []
    problems: list[Problem] = []
    return _entry(node, file, problems, 0), problems


def _entry(node: yaml.Node, file: str | None, problems: list[Problem], depth: int, origin: Origin | None = None) -> Entry:
    here = _origin(node, file)
    origin = origin or here
    kinds = {yaml.MappingNode: ("map",), yaml.SequenceNode: ("seq",), yaml.ScalarNode: ("str", "null", "bool", "int", "float")}
    if depth > MAX_DEPTH:
        raise InputError(f"{here}: the values are nested too deeply (more than {MAX_DEPTH} levels).")
    if node.tag not in {_TAG + name for name in kinds[type(node)]}:
        problems.append(Problem(here, f"the tag `{node.tag}` is not accepted here: write the plain value"))
        return Entry(None, origin)
    if isinstance(node, yaml.MappingNode):
        return Entry(dict(_items(node, file, problems, depth)), origin)
    if isinstance(node, yaml.SequenceNode):
        return Entry([_entry(item, file, problems, depth + 1) for item in node.value], origin)
    try:
        return Entry(_scalar(node), origin)
    except ValueError as error:
        problems.append(Problem(here, str(error)))
        return Entry(None, origin)


def _items(node: yaml.MappingNode, file: str | None, problems: list[Problem], depth: int) -> Iterator[tuple[str, Entry]]:
    first: dict[str, Origin] = {}
    for key_node, value_node in node.value:
        here = _origin(key_node, file)
        if not isinstance(key_node, yaml.ScalarNode):
            problems.append(Problem(here, "a key must be one word, not a list or mapping"))
            continue
        key = key_node.value
        try:
            _check_text(key)
        except ValueError as error:
            problems.append(Problem(here, f"key {key!r}: {error}"))
            continue
        if key in first:
            place = "twice in it" if file is None else f"the first is on line {first[key].line}"
            problems.append(Problem(here, f"duplicate key `{key}`: {place}"))
        first.setdefault(key, here)
        yield key, _entry(value_node, file, problems, depth + 1, here)


def _scalar(node: yaml.ScalarNode) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind == "null":
        return None
    if kind == "str":
        _check_text(text)
        return text
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text]
        return int(text) if kind == "int" else float(re.sub(r"\.(?=inf$|nan$)", "", text))
    except (ValueError, KeyError):
        raise ValueError(f"{text[:40]!r} cannot be read as {kind}") from None


def _check_text(text: str) -> None:
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("text with a NUL or half a surrogate pair is not accepted")


def _origin(node: yaml.Node, file: str | None) -> Origin:
    return Origin(file, 0 if file is None else node.start_mark.line + 1)
