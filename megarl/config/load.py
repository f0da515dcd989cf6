"""From a recipe file to a validated recipe that knows where each of its values came from.

Layers, later ones win: defaults, the file's `base` (and the base's own), the file, `--set`. Mappings merge key by key; everything else is
replaced as a whole, and so is a mapping when the later layer says `{}`, or when it names another objective or verifier: parameters of
one must never leak into the other.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from megarl.config import fields
from megarl.config.read import Entry, Origin, Problem, parse
from megarl.config.recipe import Recipe, Section, SftRecipe
from megarl.errors import InputError, sentence

R = TypeVar("R", bound=Section)

REPLACED_UNDER_ANOTHER_NAME = (("objective",), ("verifier",))


@dataclass(frozen=True)
class Loaded(Generic[R]):
    """A recipe, the source of each of its leaves (`yaml/x.yaml:12`, `--set` or `default`) by dotted key, and the file it was read from."""

    recipe: R
    sources: dict[str, str]
    path: Path

    @contextmanager
    def naming(self, section: str) -> Iterator[None]:
        """Put the source of the key at fault before an InputError of the block, which checks what only the `section`'s own room knows.

        The key is the first one of the section that the message quotes, or its `name`.
        """
        try:
            yield
        except InputError as error:
            text = str(error)
            key = "" if text.startswith(section) else f"{section}: "
            raise InputError(sentence(f"{self._source_of_quoted(section, text)}: {key}{text}")) from None

    def _source_of_quoted(self, section: str, text: str) -> str:
        own = {key.removeprefix(section): source for key, source in self.sources.items() if key.startswith(f"{section}.")}
        for word in re.findall(r"""[`"']([\w.-]+)[`"']""", text):
            for key, source in own.items():
                if f".{word}." in f"{key}.":
                    return source
        return own.get(".name", str(self.path))


def load_recipe(
    path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    kind: type[R] = Recipe,  # type: ignore[assignment]
) -> Loaded[R]:
    """Read the recipe at `path` with the given `key=value` overrides. Raises InputError that lists all mistakes."""
    tree, files, problems = _read_layers(os.fspath(path), overrides)
    return _validate(tree, files, problems, kind)


def load_any_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Loaded[Any]:
    """`load_recipe` for a recipe of whatever kind: one without objective, verifier and rollout is for the supervised warm-up."""
    tree, files, problems = _read_layers(os.fspath(path), overrides)
    kind: type[Section] = Recipe if {"objective", "verifier", "rollout"} & tree.value.keys() else SftRecipe
    return _validate(tree, files, problems, kind)


def merge(base: Entry, over: Entry, path: tuple[str, ...] = ()) -> Entry:
    """`over` on top of `base`, by the rules in this module's docstring."""
    if not isinstance(base.value, dict) or not isinstance(over.value, dict) or (path and not over.value):
        return over
    names = [layer.value["name"].value for layer in (base, over) if "name" in layer.value]
    if path in REPLACED_UNDER_ANOTHER_NAME and len(names) == 2 and names[0] != names[1]:
        return over
    merged = dict(base.value)
    for key, entry in over.value.items():
        merged[key] = merge(merged[key], entry, (*path, key)) if key in merged else entry
    return Entry(merged, over.origin)


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The leaves of a plain value with their paths: scalars, lists, and empty mappings."""
    if isinstance(value, dict) and (value or not path):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    return [(path, value)]


def plain(value: Any) -> Any:
    """A recipe, or a part of one, as mappings, lists and scalars."""
    if isinstance(value, Section):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def _read_layers(path: str, overrides: Sequence[str]) -> tuple[Entry, list[str], list[Problem]]:
    """The merged tree, the files it was read from (the recipe first), and the mistakes seen so far."""
    layers: list[Entry] = []
    files: list[str] = []
    problems: list[Problem] = []
    wanted: str | None = path
    why = ""
    while wanted is not None:
        if os.path.realpath(wanted) in map(os.path.realpath, files):
            raise InputError(f"{why}`base` goes in a circle: {' -> '.join([*files, wanted])}.")
        tree = _read_file(wanted, why, problems)
        layers.append(tree)
        files.append(wanted)
        wanted, why = _base(tree, wanted)
    result = layers.pop()
    for layer in reversed(layers):
        result = merge(result, layer)
    return merge(result, _overrides(overrides, problems)), files, problems


def _read_file(path: str, why: str, problems: list[Problem]) -> Entry:
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{why}{path}: no such file; give the path of a recipe (YAML).") from None
    except IsADirectoryError:
        raise InputError(f"{why}{path}: is a folder; give the path of a recipe (YAML).") from None
    except OSError as error:
        raise InputError(f"{why}{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(f"{path}:{line}: is not UTF-8 text (byte 0x{error.object[error.start]:02x}); save it as UTF-8.") from None
    tree, found = parse(text, path)
    problems.extend(found)
    if tree is None:
        raise InputError(f"{path}: is empty; a recipe is a mapping of keys to values.")
    if not isinstance(tree.value, dict):
        raise InputError(f"{tree.origin}: a recipe is a mapping of keys to values, this is {_given(tree.plain())}.")
    return tree


def _base(tree: Entry, file: str) -> tuple[str | None, str]:
    """Take `base` out of a file's tree; the path that it names and the words that say who asked for it."""
    entry = tree.value.pop("base", None)
    if entry is None:
        return None, ""
    if not isinstance(entry.value, str) or not entry.value:
        raise InputError(f"{entry.origin}: base: expected the path of one recipe, relative to this file, given {_given(entry.plain())}.")
    return os.path.normpath(os.path.join(os.path.dirname(file), entry.value)), f"{entry.origin}: base: "


def _overrides(overrides: Sequence[str], problems: list[Problem]) -> Entry:
    """All `--set key=value` as one layer, so that their order matters for the same key only."""
    origin = Origin(None)
    result = Entry({}, origin)
    for text in overrides:
        key, equals, value = text.partition("=")
        parts = key.split(".")
        if not equals or not all(part.strip() == part != "" for part in parts):
            raise InputError(f"--set {text}: expected key=value, for instance --set training.steps=100.")
        if parts == ["base"]:
            raise InputError(f"--set {text}: `base` can only be set in a file.")
        try:
            entry, found = parse(value, None)
        except InputError as error:
            raise InputError(f"{error} The value of `{text}` is read as YAML: quote text with special characters.") from None
        problems.extend(Problem(origin, f"{key}: {problem.text}") for problem in found)
        entry = entry or Entry(None, origin)
        for part in reversed(parts):
            entry = Entry({part: entry}, origin)
        result = merge(result, entry)
    return result


def _validate(tree: Entry, files: list[str], problems: list[Problem], kind: type[R]) -> Loaded[R]:
    recipe: R | None = None
    data = tree.plain()
    try:
        # Through JSON, because strict JSON keeps `"3"` from being an integer and still lets a list fill any kind of sequence.
        recipe = kind.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        problems = problems + _problems(error, tree, files, kind)
    problems = problems + _objective_problems(tree, files, kind)
    if problems or recipe is None:
        raise InputError(_message(problems, files))
    sources = {}
    for path, _ in leaves(plain(recipe)):
        entry = tree.find(path)
        sources[fields.dotted(path)] = str(entry.origin) if entry is not None else "default"
    return Loaded(recipe, sources, Path(files[0]))


def _message(problems: list[Problem], files: list[str]) -> str:
    def place(problem: Problem) -> tuple[int, int]:
        origin = problem.origin
        if isinstance(origin, str) or origin.file is None:
            return (len(files), 0)
        return (files.index(origin.file), origin.line)

    lines = list(dict.fromkeys(str(problem) for problem in sorted(problems, key=place)))
    if len(lines) == 1:
        return lines[0]
    return "\n  ".join([f"{files[0]}: {len(lines)} mistakes", *lines])


def _objective_problems(tree: Entry, files: list[str], kind: type[Section]) -> list[Problem]:
    objective = tree.value.get("objective")
    if "objective" not in kind.model_fields or objective is None or not isinstance(objective.value, dict):
        return []
    name = objective.value.get("name")
    if name is None:
        return [_missing("objective.name", objective.origin, files, "the name of an objective")]
    if not isinstance(name.value, str):
        return [Problem(name.origin, f"objective.name: expected the name of an objective, given {_given(name.plain())}")]
    return []


def _missing(key: str, origin: Origin | str, files: list[str], expected: str | None, why: str = "") -> Problem:
    looked = ", in its base ".join(files)
    return Problem(origin, f"{key}: missing, expected {expected or 'a value'}; looked for in {looked} and in --set{why}")


def _problems(error: ValidationError, tree: Entry, files: list[str], kind: type[Section]) -> list[Problem]:
    problems = []
    for detail in error.errors(include_url=False):
        path, nearest = _locate(tree, detail["loc"])
        # A file's own mapping has no key, hence no line worth naming.
        origin: Origin | str = nearest.origin if nearest is not tree else files[0]
        if detail["type"] == "missing":
            cleared = " (an empty mapping replaces that of the base)" if path and not nearest.value and len(files) > 1 else ""
            for key in fields.required_leaves(kind, (*path, detail["loc"][-1])):
                problems.append(_missing(key, origin, files, fields.describe_at(kind, tuple(key.split("."))), cleared))
        elif detail["type"] == "extra_forbidden":
            problems.append(Problem(origin, f"unknown key `{fields.dotted(path)}`: {fields.suggest(kind, path)}"))
        elif detail["type"] in ("value_error", "assertion_error"):
            text = str(detail["ctx"]["error"])
            key = f"{fields.dotted(path)}: " if path else ""
            problems.append(Problem(origin, f"{key}{text}{_named_sources(text, path, tree)}"))
        else:
            expected = fields.describe_at(kind, path) or detail["msg"]
            problems.append(Problem(origin, f"{fields.dotted(path)}: expected {expected}, given {_given(nearest.plain())}"))
    return problems


def _locate(tree: Entry, loc: tuple[int | str, ...]) -> tuple[fields.Path, Entry]:
    """The part of a validation error's location that exists in the tree (it also names union branches), and the entry there."""
    path: fields.Path = ()
    entry = tree
    for part in loc:
        below = entry.find((part,))
        if below is not None:
            path, entry = (*path, part), below
    return path, entry


def _named_sources(text: str, section: fields.Path, tree: Entry) -> str:
    """Where the keys that a message quotes in backticks were set; those of the section may be quoted without it."""
    found = []
    for word in text.split("`")[1::2]:
        path = tuple(word.split("."))
        entry = tree.find((*section, *path)) or tree.find(path)
        found.append(f"`{word}`: {entry.origin if entry is not None else 'default'}")
    return f" ({', '.join(found)})" if found else ""


def _given(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    return str(value)
