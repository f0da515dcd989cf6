"""Metrics of a run: metrics.jsonl, one object per step, and the same numbers as TensorBoard events."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

from megarl.errors import InputError

if TYPE_CHECKING:
    from megarl.observe.run_folder import RunFolder

NONFINITE = "/nonfinite"
_NONFINITE_VALUES = {"inf": math.inf, "-inf": -math.inf}
_LARGEST = sys.float_info.max  # JSON's integers have no end


class MetricsWriter:
    """Appends to metrics.jsonl and tensorboard/ of a run folder; every step is on disk when `write` returns.

    If the folder has events already, TensorBoard drops those of the steps that metrics.jsonl no longer has (`RunFolder.truncate_metrics`).
    """

    def __init__(self, folder: RunFolder):
        # tensorboard takes half a second to import; reading metrics does without.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        resumed = any(folder.tensorboard.glob("events.*"))
        rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
        self._jsonl = open(folder.metrics, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._events = EventFileWriter(str(folder.tensorboard))
        if resumed:
            self._purge(from_step=rows[-1]["step"] + 1 if rows else 0)

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Record the metrics of a step: numbers at full precision.

        JSON has no NaN or infinity: in metrics.jsonl such a value is null, and `<name>/nonfinite` says "nan", "inf" or "-inf".
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        if "step" in metrics:
            raise ValueError("'step' is the name of the step itself, no metric")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        self._jsonl.write(encode_row({"step": step} | numbers))
        self._jsonl.flush()
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._events.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._events.flush()

    def close(self) -> None:
        self._jsonl.close()
        self._events.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _purge(self, from_step: int) -> None:
        """TensorBoard's mark of a restart: it hides all earlier events from this step on."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._events.add_event(Event(wall_time=time.time(), step=from_step, session_log=SessionLog(status=SessionLog.START)))
        self._events.flush()


def encode_row(row: Mapping[str, Any]) -> str:
    """One line of metrics.jsonl. `read_metrics` gives the row back, NaN and infinities included."""
    encoded: dict[str, Any] = {}
    for name, value in row.items():
        finite = math.isfinite(value)
        encoded[name] = value if finite else None
        if not finite:
            encoded[name + NONFINITE] = str(value)
    return json.dumps(encoded, allow_nan=False) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl in the order of the file, `step` among the keys. A half-written last line is left out."""
    rows = []
    for number, line in enumerate(read_jsonl(path), start=1):
        row = {name: value for name, value in line.items() if not name.endswith(NONFINITE)}
        for name, value in row.items():
            if value is None:
                row[name] = _NONFINITE_VALUES.get(str(line.get(name + NONFINITE)), math.nan)
            elif isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > _LARGEST:
                raise InputError(f"{path}:{number}: expected a number for `{name}`, got {value!r}: mend or remove the line.")
        if not isinstance(row.get("step"), int):
            raise InputError(f"{path}:{number}: expected an integer `step`: mend or remove the line.")
        rows.append(row)
    return rows


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSONL file. A half-written last line, left by a process that was killed, is left out; other faults are InputErrors."""
    rows = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):  # no newline after it; empty when the file is whole
                break
            raise InputError(f"{path}:{number}: not valid JSON: mend or remove the line.") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:{number}: expected a JSON object: mend or remove the line.")
        rows.append(row)
    return rows
