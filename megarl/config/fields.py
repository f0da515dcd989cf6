"""What the recipe models say about themselves: keys, types in words, documentation, and the key that a misspelt one was meant to be."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from megarl.config.recipe import Recipe, Section, SftRecipe

COMMANDS: dict[type[Section], str] = {Recipe: "train", SftRecipe: "sft"}
"""The command that takes each kind of recipe."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Key:
    """A key of a recipe. `section` is the model of its value if that is a section, else None."""

    path: tuple[str, ...]
    info: FieldInfo
    section: type[Section] | None

    @property
    def dotted(self) -> str:
        return dotted(self.path)


def dotted(path: Path) -> str:
    """`("evaluation", "k", 1)` -> `evaluation.k[1]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def keys(kind: type[Section], prefix: tuple[str, ...] = ()) -> Iterator[Key]:
    """All keys of a kind of recipe, sections before their own keys, in the order of declaration."""
    for name, info in kind.model_fields.items():
        section = _section(info.annotation)
        yield Key((*prefix, name), info, section)
        if section is not None:
            yield from keys(section, (*prefix, name))


def required_leaves(kind: type[Section], path: Path) -> list[str]:
    """What must be written for the missing key `path` to be there: itself, or the required keys of its section."""
    below = [key for key in keys(kind) if key.path[: len(path)] == path]
    if not below or below[0].section is None:
        return [dotted(path)]
    required = [key.path for key in below if len(key.path) == len(path) + 1 and key.info.is_required()]
    return [leaf for child in required for leaf in required_leaves(kind, child)] or [dotted(path)]


def suggest(kind: type[Section], path: Path) -> str:
    """Words that help with the unknown key `path`: the keys it may have been meant to be, or those that exist beside it."""
    known = [key.path for key in keys(kind)]
    for other, command in COMMANDS.items():
        if other is not kind and kind in COMMANDS and any(key.path == path for key in keys(other)):
            return f"it belongs to recipes of `megarl {command}`, this one is read as a recipe of `megarl {COMMANDS[kind]}`"
    leaf = str(path[-1])
    siblings = [key for key in known if key[:-1] == path[:-1]]
    found = [key for key in known if key[-1] == leaf] or _close(leaf, siblings, known)
    if not found:
        place = f"`{dotted(path[:-1])}`" if len(path) > 1 else "a recipe"
        return f"the keys of {place} are " + ", ".join(f"`{key[-1]}`" for key in siblings)
    found.sort(key=lambda key: -_shared(key, path))
    return "did you mean " + " or ".join(f"`{dotted(key)}`" for key in found[:3]) + "?"


def _close(leaf: str, siblings: list[tuple[str, ...]], known: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The keys most like `leaf`: a sibling, unless a key elsewhere is much more like it."""

    def score(key: tuple[str, ...]) -> float:
        likeness = difflib.SequenceMatcher(None, leaf.lower().replace("-", "_"), key[-1]).ratio()
        beside = key in siblings
        return likeness + 0.15 * beside if likeness >= (0.6 if beside else 0.75) else 0.0

    scores = {key: score(key) for key in known}
    best = max(scores.values())
    return [key for key in known if scores[key] == best > 0]


def _shared(a: Path, b: Path) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def describe_at(kind: type[Section], path: Path) -> str | None:
    """The type of the value at `path` in words; None where anything goes."""
    annotation: Any = kind
    metadata: list[Any] = []
    for part in path:
        annotation, metadata = _step(annotation, part)
        if annotation is Any:
            return None
    return describe(annotation, metadata)


def _step(annotation: Any, part: str | int) -> tuple[Any, list[Any]]:
    """Annotation and constraints of one key, or list element, of a value of type `annotation`."""
    section = _section(annotation)
    if section is not None and part in section.model_fields:
        info = section.model_fields[str(part)]
        return info.annotation, info.metadata
    for option in _options(annotation):
        inner = get_args(option)
        if get_origin(option) is dict:
            return inner[1], []
        if get_origin(option) in (list, tuple, set, frozenset) and inner:
            return inner[0], []
    return Any, []


def describe(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """A type in words: `integer >= 1`, `list of text`, `error` or `drop`, ..."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        extra = [part for item in inner[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return describe(inner[0], [*metadata, *extra])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if option is type(None) else describe(option, metadata) for option in inner)
    limits = _limits(metadata)
    if origin is dict:
        return ("mapping" if inner[1] is Any else f"mapping of names to {describe(inner[1])}") + limits
    if origin in (list, tuple, set, frozenset):
        return f"list of {describe(inner[0])}{limits}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section" + limits
    names = {int: "integer", float: "number", str: "text", bool: "true or false", Any: "anything"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation))) + limits


def _limits(metadata: list[Any] | tuple[Any, ...]) -> str:
    words = []
    for item in metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if isinstance(item, annotated_types.BaseMetadata) and hasattr(item, name):
                words.append(f"{sign} {getattr(item, name)}")
        if isinstance(item, annotated_types.MultipleOf):
            words.append(f"multiple of {item.multiple_of}")
        if isinstance(item, annotated_types.MinLen):
            words.append("(not empty)" if item.min_length == 1 else f"(at least {item.min_length} long)")
    return " " + ", ".join(words) if words else ""


def _options(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union, the type itself if it is none; `Annotated` is taken off."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(option for part in get_args(annotation) for option in _options(part))
    return (annotation,)


def _section(annotation: Any) -> type[Section] | None:
    return next((option for option in _options(annotation) if isinstance(option, type) and issubclass(option, Section)), None)
