"""Reading metric names, and showing numbers to people: shared by the terminal and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

_PASS = re.compile(r"eval/(?:(?P<set>.+)/)?pass@(?P<k>\d+)")


def pass_metrics(names: Iterable[str]) -> list[tuple[str, int, str]]:
    """(evaluation set or "", k, name) of the `eval/pass@1` or `eval/<set>/pass@1` metrics, by set and k."""
    matches = ((_PASS.fullmatch(name), name) for name in set(names))
    return sorted((match["set"] or "", int(match["k"]), name) for match, name in matches if match)


def headline_metrics(names: Iterable[str]) -> list[tuple[str, str]]:
    """(label, name) of the pass@k with the smallest k of each evaluation set, such as ("math pass@1", "eval/math/pass@1")."""
    first: dict[str, tuple[str, str]] = {}
    for dataset, k, name in pass_metrics(names):
        first.setdefault(dataset, (f"{dataset} pass@{k}".strip(), name))
    return list(first.values())


def series(rows: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, float]]:
    """(step, value) of the rows that have a finite value of this metric."""
    return [(row["step"], float(row[name])) for row in rows if name in row and math.isfinite(row[name])]


def clock(seconds: float) -> str:
    """Seconds as 0:48, 1:02:03 or 2d 03:04:05."""
    total = max(0, round(seconds))
    days, rest = divmod(total, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{rest:02}"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def points(first: float, last: float) -> str:
    """Difference of two shares in percentage points, of the rounded percentages that stand beside it."""
    return f"{round(100 * last, 1) - round(100 * first, 1):+.1f} points"


def short(value: float) -> str:
    """A number in at most about seven characters."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.2g}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{2 - min(2, math.floor(math.log10(size)))}f}" if size >= 1 else f"{value:.3f}"
