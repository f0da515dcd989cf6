"""From what a recipe names as data to rows: JSON lines, Parquet, Arrow, and folders of them."""

from __future__ import annotations

import glob
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megarl.errors import InputError

SHARD = re.compile(r"(.+?)-[0-9]+-of-[0-9]+(?:-[0-9a-f]+)?$")
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""What `save_to_disk` of Hugging Face datasets leaves in the folder of a data set, and of one with several splits."""


def read_rows(path: str | Path) -> Iterator[tuple[Path, str, int, Any]]:
    """(file, "line" or "row", its number from 1, what it holds) of all files that `path` names, in order."""
    for file in find_files(path):
        unit = "line" if file.suffix == ".jsonl" else "row"
        for number, row in READERS[file.suffix](file):
            yield file, unit, number, row


def read_jsonl(path: str | Path) -> Iterator[tuple[int, Any]]:
    """(line number from 1, parsed line) of each line that is not blank. InputError with file and line for what is not JSON, or UTF-8."""
    path = Path(path)
    check_readable(path)
    yield from _jsonl_objects(path)


def find_files(path: str | Path) -> list[Path]:
    """The data files that `path` names: a .jsonl, .parquet or .arrow file, a pattern with *, or a folder.

    A folder is one that Hugging Face datasets' `save_to_disk` wrote, or holds data files itself or in its folder `data`: those of one
    split, in the order of their names. Raises InputError if there is none, or which one is meant is not clear.
    """
    path = Path(path)
    if "*" in path.name and not path.exists():
        files = sorted(Path(name) for name in glob.glob(str(path)))
        if not files:
            raise InputError(f"{path}: no file has such a name.")
    else:
        files = _files_of_folder(path) if path.is_dir() else [path]
    for file in files:
        if file.suffix not in READERS:
            raise InputError(f"{file}: expected a file that ends in {', '.join(READERS)}.")
        check_readable(file)
    return files


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / SAVED).is_file():
        try:
            names = [entry["filename"] for entry in json.loads((folder / SAVED).read_text(encoding="utf-8"))["_data_files"]]
            return [folder / Path(name).name for name in names]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder / SAVED}: is not what save_to_disk writes ({error!r}).") from None
    if (folder / SAVED_SPLITS).is_file():
        splits = sorted(str(entry) for entry in folder.iterdir() if entry.is_dir())
        raise InputError(f"{folder}: holds several splits; name one of them: {', '.join(splits)}.")
    for place in (folder, folder / "data"):
        files = sorted(file for file in place.glob("*") if file.suffix in READERS)
        if files:
            splits = sorted({match[1] if (match := SHARD.match(file.stem)) else file.stem for file in files})
            if len(splits) > 1:
                choices = ", ".join(str(place / f"{split}*") for split in splits)
                raise InputError(f"{folder}: holds files of several splits; name one of them: {choices}.")
            return files
    raise InputError(f"{folder}: is a folder without data files; expected some that end in {', '.join(READERS)}.")


def check_readable(path: Path) -> None:
    """InputError unless `path` is a file that can be opened."""
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


# -------------------------------------------------- Parquet and Arrow streams
def _parquet_objects(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a Parquet file ({_first_line(error)}).") from None
    with file:
        yield from _table_objects(path, file.schema_arrow.names, file.iter_batches(batch_size=1024))


def _arrow_objects(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow

    with path.open("rb") as source:
        try:
            stream = pyarrow.ipc.open_stream(source)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: not an Arrow stream ({_first_line(error)}).") from None
        yield from _table_objects(path, stream.schema.names, iter(stream))


def _table_objects(path: Path, names: list[str], batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
    """(row number, row) of record batches."""
    import pyarrow

    if len(set(names)) < len(names):
        raise InputError(f"{path}: two columns have the same name; columns: {', '.join(names)}.")
    number = 0
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


READERS = {".jsonl": _jsonl_objects, ".parquet": _parquet_objects, ".arrow": _arrow_objects}
