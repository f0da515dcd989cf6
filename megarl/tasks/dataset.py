"""Data files: one example per line or row.

An example is {"prompt": str | [{"role": str, "content": str}, ...], "answer": any JSON, "metadata": {...}, "id": str,
"demonstrations": [str]}; `prompt` and `answer` are required, null stands for "not given" in the other three. The id is
"<file stem>:<line>" unless given.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import InputError
from megarl.tasks.data_files import check_readable, read_rows
from megarl.tasks.names import nearest

KEYS = ("prompt", "answer", "metadata", "id", "demonstrations")
MESSAGE_KEYS = ("role", "content")


@dataclass(frozen=True)
class Example:
    id: str
    prompt: str | list[dict[str, str]]
    answer: Any
    metadata: dict[str, Any] = field(default_factory=dict)
    demonstrations: tuple[str, ...] = ()


def read_examples(path: str | Path, columns: Mapping[str, str] | None = None) -> list[Example]:
    """All examples of what `path` names (`data_files.find_files` says what it may be), in order. Blank lines are skipped.

    `columns`: which column is `prompt`, `answer`, `id`, `demonstrations` or `metadata`, with dots for what lies deeper
    ({"prompt": "question", "answer": "reward_model.ground_truth"}); the columns that are not named go into the metadata. Without it the
    columns have the names above, and any other is refused.

    Raises InputError with the file and the line (else: the row), both counted from 1, for whatever is wrong with it.
    """
    for key in columns or {}:
        if key not in KEYS:
            raise InputError(f'data.columns: "{key}" is nothing that an example has{nearest(key, KEYS)}')
    examples: list[Example] = []
    seen: dict[str, str] = {}
    for file, unit, number, row in read_rows(path):
        place = f"{file}: {unit} {number}"
        try:
            example = _example(_renamed(row, columns, place) if columns else row, f"{file.stem}:{number}", place)
        except RecursionError:
            raise InputError(f"{place}: nested too deeply.") from None
        if example.id in seen:
            raise InputError(f'{seen[example.id]} and {place} have the same id "{example.id}"; ids must be unique.')
        seen[example.id] = place
        examples.append(example)
    if not examples:
        raise InputError(f"{path}: holds no examples.")
    return examples


def _renamed(row: Any, columns: Mapping[str, str], place: str) -> Any:
    """The row with the loader's own keys; what is left over is metadata."""
    if not isinstance(row, dict):
        return row
    used = {column.partition(".")[0] for column in columns.values()}
    rest = {key: value for key, value in row.items() if key not in used}
    renamed: dict[str, Any] = {}
    for key, column in columns.items():
        value: Any = row
        for part in column.split("."):
            if not isinstance(value, dict) or part not in value:
                raise InputError(f'{place}: there is no column "{column}" for `{key}`{nearest(column, row)}')
            value = value[part]
        renamed[key] = value
    metadata = renamed.get("metadata")
    return renamed | {"metadata": rest | metadata if isinstance(metadata, dict) else rest if metadata is None else metadata}


def write_jsonl(path: str | Path, rows: Iterable[dict[str, Any]]) -> int:
    """Write one JSON object per line; the file appears under its name only when it is complete. Returns the number of lines."""
    path = Path(path)
    count = 0
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
                count += 1
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def fingerprint(path: str | Path) -> str:
    """SHA-256 of a file's content, in hex."""
    path = Path(path)
    check_readable(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# -------------------------------------------------------------------- schema
def _example(row: Any, default_id: str, place: str) -> Example:
    if not isinstance(row, dict):
        raise InputError(f"{place}: expected an object with `prompt` and `answer`, got {_kind(row)}.")
    for key in row:
        if key not in KEYS:
            raise InputError(f'{place}: unknown key "{key}"{nearest(key, KEYS)}')
    for key in ("prompt", "answer"):
        if key not in row:
            raise InputError(f"{place}: `{key}` is missing.")
    for key, value in row.items():
        _check_json(value, key, place)
    metadata, identity, demonstrations = row.get("metadata"), row.get("id"), row.get("demonstrations")
    if metadata is not None and not isinstance(metadata, dict):
        raise InputError(f"{place}: `metadata` must be an object, got {_kind(metadata)}.")
    if identity is not None and (not isinstance(identity, str) or not identity):
        raise InputError(f"{place}: `id` must be a non-empty string, got {_kind(identity)}.")
    return Example(
        id=default_id if identity is None else identity,
        prompt=_prompt(row["prompt"], place),
        answer=row["answer"],
        metadata={} if metadata is None else metadata,
        demonstrations=() if demonstrations is None else _demonstrations(demonstrations, place),
    )


def _prompt(prompt: Any, place: str) -> str | list[dict[str, str]]:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise InputError(f"{place}: `prompt` is empty.")
        return prompt
    if not isinstance(prompt, list):
        raise InputError(f"{place}: `prompt` must be a string or a list of messages, got {_kind(prompt)}.")
    if not prompt:
        raise InputError(f"{place}: `prompt` is empty.")
    for index, message in enumerate(prompt, start=1):
        where = f"{place}: message {index} of `prompt`"
        if not isinstance(message, dict):
            raise InputError(f"{where} must be an object with `role` and `content`, got {_kind(message)}.")
        for key in message:
            if key not in MESSAGE_KEYS:
                raise InputError(f'{where}: unknown key "{key}"{nearest(key, MESSAGE_KEYS)}')
        for key in MESSAGE_KEYS:
            if key not in message:
                raise InputError(f"{where}: `{key}` is missing.")
            if not isinstance(message[key], str):
                raise InputError(f"{where}: `{key}` must be a string, got {_kind(message[key])}.")
        if not message["role"]:
            raise InputError(f"{where}: `role` is empty.")
    if not any(message["content"].strip() for message in prompt):
        raise InputError(f"{place}: `prompt` is empty: no message has content.")
    return prompt


def _demonstrations(demonstrations: Any, place: str) -> tuple[str, ...]:
    if not isinstance(demonstrations, list):
        raise InputError(f"{place}: `demonstrations` must be a list of strings, got {_kind(demonstrations)}.")
    for index, text in enumerate(demonstrations, start=1):
        if not isinstance(text, str) or not text:
            raise InputError(f"{place}: demonstration {index} must be a non-empty string, got {_kind(text)}.")
    return tuple(demonstrations)


def _check_json(value: Any, where: str, place: str) -> None:
    """Only what JSON can say is allowed in an example: Parquet also knows bytes, dates, decimals, NaN and maps."""
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError(f"{place}: `{where}` holds half of a surrogate pair, which is not text.") from None
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{place}: `{where}` is {value}; expected a finite number or null.")
    elif isinstance(value, list):
        for item in value:
            _check_json(item, where, place)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_json(key, where, place)
            _check_json(item, f"{where}.{key}", place)
    elif value is not None and not isinstance(value, (bool, int)):
        raise InputError(f"{place}: `{where}` holds {_kind(value)}; expected what JSON can hold.")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if value == "":
        return "an empty string"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
