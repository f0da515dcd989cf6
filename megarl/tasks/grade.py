"""Grading a file of responses: `megarl grade`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megarl.errors import InputError, sentence
from megarl.tasks.data_files import read_jsonl
from megarl.tasks.dataset import Example, write_jsonl
from megarl.tasks.judging import Judge
from megarl.tasks.verdict import Verdict, VerdictCounts
from megarl.tasks.verifiers import check_examples

BATCH = 4096
SECONDS_BETWEEN_REPORTS = 5.0

Report = Callable[[int, int, float], None]
"""Called now and then with (graded, all, seconds since the start)."""


def grade(
    file: str | Path,
    output: str | Path,
    name: str,
    args: Mapping[str, Any],
    limits: Mapping[str, Any] | None = None,
    report: Report = lambda done, total, seconds: None,
) -> VerdictCounts:
    """Judge each line {"response": text, "answer": any, "metadata": {...}, ...} of a .jsonl file and write one line per line, in order.

    Written are `verdict`, `reward`, `extracted` and `detail`, `vector` where the verifier gives one, and the line's `id` where it has one;
    other keys of a line are not looked at. `limits`: keyword arguments of `Judge`. The output appears when it is complete.

    Raises InputError, naming file and line, for a line that is not of this form or that the verifier cannot judge, for an unknown verifier
    or argument, and for an output that exists already or cannot be written.
    """
    file, output = Path(file), Path(output)
    if output.exists():
        raise InputError(f"{output} exists already; remove it or choose another file.")
    if not output.parent.is_dir():
        raise InputError(f"{output}: there is no folder {output.parent}; make it first.")
    with Judge(name, args, **(limits or {})) as judge:
        rows = [_read(row, f"{file}: line {number}", f"{file.name}:{number}", name) for number, row in read_jsonl(file)]
        counts = VerdictCounts()

        def graded() -> Iterator[dict[str, Any]]:
            nonlocal counts
            began = reported = time.monotonic()
            for first in range(0, len(rows), BATCH):
                part = rows[first : first + BATCH]
                verdicts = judge([response for response, _, _ in part], [example for _, example, _ in part])
                counts += VerdictCounts.of(verdicts)
                for (_, _, identity), verdict in zip(part, verdicts, strict=True):
                    yield ({} if identity is None else {"id": identity}) | _row(verdict)
                if time.monotonic() - reported > SECONDS_BETWEEN_REPORTS:
                    reported = time.monotonic()
                    report(first + len(part), len(rows), reported - began)

        try:
            write_jsonl(output, graded())
        except OSError as error:
            raise InputError(f"{output}: cannot be written ({error.strerror}).") from None
    return counts


def _read(row: Any, place: str, name: str, verifier: str) -> tuple[str, Example, Any]:
    """(response, example, the line's id) of a line."""
    if not isinstance(row, dict):
        raise InputError(f"{place}: expected an object with `response` and `answer`.")
    for key in ("response", "answer"):
        if key not in row:
            raise InputError(f"{place}: `{key}` is missing.")
    if not isinstance(row["response"], str):
        raise InputError(f"{place}: `response` must be a string.")
    metadata = {} if row.get("metadata") is None else row["metadata"]
    if not isinstance(metadata, dict):
        raise InputError(f"{place}: `metadata` must be an object.")
    example = Example(name, "", row["answer"], metadata)
    try:
        check_examples(verifier, [example])
    except InputError as error:
        own = f'example "{name}": '
        raise InputError(f"{place}: {sentence(str(error).removeprefix(own))}") from None
    return row["response"], example, row.get("id")


def _row(verdict: Verdict) -> dict[str, Any]:
    row = {"verdict": verdict.status, "reward": float(verdict.reward), "extracted": _as_json(verdict.extracted), "detail": verdict.detail}
    return row if verdict.vector is None else row | {"vector": [list(map(float, row)) for row in verdict.vector]}


def _as_json(value: Any) -> Any:
    """What a verifier extracted may be anything; what JSON cannot hold is written as text."""
    try:
        json.dumps(value, allow_nan=False)
        return value
    except (TypeError, ValueError):
        return str(value)
