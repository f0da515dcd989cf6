"""What a run says on the terminal: stages with the time, one line per step, and a summary at the end."""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from megarl.observe.metrics import read_metrics
from megarl.observe.names import clock, headline_metrics, pass_metrics, percent, points, series, short
from megarl.observe.run_folder import RunFolder, step_of

_RECENT = 10  # steps that the time left is estimated from: covers the usual evaluation interval
_FIELDS = (("loss", "sft/loss", 3), ("len", "response/length_mean", 1), ("entropy", "policy/entropy", 2), ("grad", "policy/grad_norm", 2))
_BOLD, _DIM, _GREEN, _RED, _RESET = "\033[1m", "\033[2m", "\033[32m", "\033[31m", "\033[0m"
_began = time.monotonic()


def begin(text: str) -> None:
    """A command's first line, before what takes long to import. The seconds of all later lines count from here."""
    global _began
    _began = time.monotonic()
    Progress(0).stage(text)


class Progress:
    """Writes to the terminal, a line at a time. Colours only where the stream is a terminal (and NO_COLOR is not set)."""

    def __init__(self, steps: int, stream: TextIO | None = None):
        self._steps = steps
        self._stream = stream or sys.stdout
        self._colour = self._stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._first_reward: float | None = None
        self._evaluation_width = 0

    def recall(self, rows: list[dict[str, Any]]) -> None:
        """Take over the rows of a run that is resumed, so that differences and estimates go on from there."""
        for row in rows:
            self._remember(row)

    def stage(self, text: str) -> None:
        """A line for what begins now, after the seconds since the start: `   3.2s  starting 1 engine ...`."""
        self._say(f"{self._paint(_DIM, f'{time.monotonic() - _began:6.1f}s')}  {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of a step: what is missing in `metrics` is left out. In parentheses the reward's change since the first step."""
        self._remember(metrics)
        width = len(str(self._steps))
        parts = [self._paint(_BOLD, f"step {step:{max(3, width)}}/{self._steps}")]
        if "reward/mean" in metrics:
            parts.append(f"reward {metrics['reward/mean']:.3f} {self._change(metrics['reward/mean'] - (self._first_reward or 0.0))}")
        evaluation = "  ".join(f"{label} {percent(metrics[name])}" for label, name in headline_metrics(metrics))
        self._evaluation_width = max(self._evaluation_width, len(evaluation))
        if evaluation:
            parts.append(evaluation.ljust(self._evaluation_width))
        elif self._evaluation_width:
            parts.append(" " * self._evaluation_width)
        parts += [f"{label} {metrics[name]:.{digits}f}" for label, name, digits in _FIELDS if name in metrics]
        times = [f"{label} {metrics[name]:.1f}s" for label, name in (("gen", "time/generate"), ("train", "time/train")) if name in metrics]
        if times:
            parts.append(self._paint(_DIM, " ".join(times)))
        left = self.seconds_left(step)
        if left is not None:
            parts.append(f"left {clock(left)}")
        self._say("  ".join(parts).rstrip())

    def seconds_left(self, step: int) -> float | None:
        """Estimate after `step`, from the mean `time/step` of the last ten steps; None before the first of them."""
        if not self._durations:
            return None
        return (self._steps - step) * sum(self._durations) / len(self._durations)

    def summary(self, folder: RunFolder) -> None:
        """The end: the first and last evaluation of the whole run (resumed or not), and where things lie."""
        rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
        last = rows[-1]["step"] if rows else 0
        spent = clock(sum(row.get("time/step", 0.0) for row in rows))
        self._say("")
        if last < self._steps:
            self._say(self._paint(_BOLD, f"stopped after step {last} of {self._steps}") + f" ({spent} in steps); go on with --resume")
        else:
            self._say(self._paint(_BOLD, f"done: {last} steps") + f" ({spent} in steps)")
        for label, before, after, change in outcomes(rows):
            self._say(f"  {label:<18}  {before} -> {after}  {self._paint(_RED if change.startswith('-') else _GREEN, f'({change})')}")
        for label, place in _places(folder):
            self._say(f"  {label:<18}  {place}")

    def _remember(self, metrics: Mapping[str, float]) -> None:
        if self._first_reward is None and math.isfinite(metrics.get("reward/mean", math.nan)):
            self._first_reward = metrics["reward/mean"]
        if "reward/mean" in metrics and "time/step" in metrics:  # an evaluation alone is no measure for a step
            self._durations.append(metrics["time/step"])

    def _change(self, change: float) -> str:
        return self._paint(_RED if change < 0 else _GREEN, f"({change:+.3f})")

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_RESET}" if self._colour else text

    def _say(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


def outcomes(rows: list[dict[str, Any]]) -> list[tuple[str, str, str, str]]:
    """(label, first, last, change) of each pass@k evaluated twice or more, then of the training reward."""
    names = {name for row in rows for name in row}
    found = []
    for dataset, k, name in pass_metrics(names):
        values = series(rows, name)
        if len(values) > 1:
            first, last = values[0][1], values[-1][1]
            found.append((f"{dataset} pass@{k}".strip(), percent(first), percent(last), points(first, last)))
    rewards = series(rows, "reward/mean")
    if len(rewards) > 1:
        first, last = rewards[0][1], rewards[-1][1]
        found.append(("training reward", short(first), short(last), f"{last - first:+.3f}"))
    return found


def _places(folder: RunFolder) -> list[tuple[str, str]]:
    checkpoints = [path for path in folder.checkpoints.glob("step-*") if step_of(path) is not None and path.is_dir()]
    places = [("run folder", str(folder.path))]
    if folder.report.exists():
        places.append(("report", str(folder.report)))
    if checkpoints:
        places.append(("checkpoint", str(max(checkpoints, key=lambda path: step_of(path) or 0))))
    return [*places, ("curves", f"tensorboard --logdir {shlex.quote(str(folder.tensorboard))}")]
