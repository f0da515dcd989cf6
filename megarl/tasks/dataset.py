"""Data files: one example per JSON line or Parquet row.

An example is {"prompt": str | [{"role": str, "content": str}, ...], "answer": any JSON, "metadata": {...}, "id": str,
"demonstrations": [str]}; `prompt` and `answer` are required, null stands for "not given" in the other three. The id is
"<file stem>:<line>" unless given.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl.errors import InputError
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


def read_examples(path: str | Path) -> list[Example]:
    """All examples of a .jsonl or .parquet file, in order. Blank lines are skipped.

    Raises InputError with the file and the line (Parquet: the row), both counted from 1, for whatever is wrong with it.
    """
    path = Path(path)
    readers = {".jsonl": _jsonl_objects, ".parquet": _parquet_objects}
    if path.suffix not in readers:
        raise InputError(f"{path}: expected a file that ends in .jsonl or .parquet.")
    _check_readable(path)
    unit = "row" if path.suffix == ".parquet" else "line"
    examples: list[Example] = []
    seen: dict[str, int] = {}
    for number, row in readers[path.suffix](path):
        place = f"{path}: {unit} {number}"
        try:
            example = _example(row, f"{path.stem}:{number}", place)
        except RecursionError:
            raise InputError(f"{place}: nested too deeply.") from None
        if example.id in seen:
            raise InputError(
                f'{path}: {unit}s {seen[example.id]} and {number} have the same id "{example.id}"; ids must be unique in a file.'
            )
        seen[example.id] = number
        examples.append(example)
    if not examples:
        raise InputError(f"{path}: holds no examples; expected one per {unit}.")
    return examples


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
    _check_readable(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_readable(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path}: is a folder, expected a data file.")
    if not path.exists():
        raise InputError(f"{path}: no such file.")
    if not path.is_file():  # a pipe can be read once only, and waits for a writer
        raise InputError(f"{path}: is a pipe or device, expected a data file; write its content to one.")
    try:
        path.open("rb").close()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None


# ---------------------------------------------------------------- JSON lines
def _jsonl_objects(path: Path) -> Iterator[tuple[int, Any]]:
    """(line number, parsed line). Lines end at \\n only: U+2028 and the like are allowed inside a JSON string."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}: line {number}"
            try:
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise InputError(f"{place}: not UTF-8 (byte {error.start + 1} of the line: {error.reason}).") from None
            if text:
                yield number, _parse(text, place)


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite_float)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON ({error.msg} at column {error.colno}).") from None
    except RecursionError:
        raise InputError(f"{place}: nested too deeply.") from None
    except ValueError as error:
        raise InputError(f"{place}: {error}.") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f'key "{next(key for key in keys if keys.count(key) > 1)}" is given twice')
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number; expected a finite number or null")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text} is too large for a float")
    return value


# ------------------------------------------------------------------- Parquet
def _parquet_objects(path: Path) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs the package pyarrow; install it or convert the file to .jsonl.") from None
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a Parquet file ({_first_line(error)}).") from None
    with file:
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise InputError(f"{path}: two columns have the same name; columns: {', '.join(names)}.")
        number = 0
        batches = file.iter_batches(batch_size=1024)
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except (pyarrow.ArrowException, OSError, ValueError) as error:
                raise InputError(f"{path}: cannot be read after row {number} ({_first_line(error)}).") from None
            for row in rows:
                number += 1
                yield number, row


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
