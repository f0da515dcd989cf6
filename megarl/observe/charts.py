"""Curves and stacked bars as inline SVG: no script, no font, no outside reference. Text sits in HTML around them, except for the axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from megarl.observe.names import percent, short

WIDTH, HEIGHT = 480, 210
LEFT, RIGHT, TOP, BOTTOM = 54, 12, 8, 26
MOST_POINTS = 400  # a curve is averaged down to this many
MOST_BARS = 120
SMOOTH_FROM = 48  # points from which on a rolling mean is drawn over the raw curve
_TINY, _HUGE = 1e-290, 1e290  # beyond, arithmetic on the axes underflows or overflows
MARK_UP_TO = 40  # points up to which each one gets a dot

Point = tuple[float, float | None]  # step, value; None: a gap


@dataclass(frozen=True)
class Series:
    label: str
    colour: str
    points: list[Point]
    band: list[float | None] | None = None
    """Half width of a band around each point."""


def line_chart(
    series: Sequence[Series], steps: tuple[float, float], *, log: bool = False, share: bool = False, zero: bool = False, smooth: bool = True
) -> str:
    """Curves over the steps. Gaps at None (and at values <= 0 where `log`), single points as dots; `zero` starts the axis there.

    A long curve is drawn thin, with a rolling mean over it, unless `smooth` is off.
    """
    drawn = [_prepared(one, log) for one in series]
    values = [value for one in drawn for value in _extent(one, log)]
    if not values:
        return _empty()
    low, high = _range(values, log, zero, share)
    x, y = _x_axis(steps), _y_axis(low, high, log)
    ticks = log_ticks(low, high) if log else nice_ticks(low, high)
    parts = [_grid(x, y, steps, ticks, [power_label(tick) for tick in ticks] if log else tick_labels(ticks, share))]
    for one in drawn:
        parts += _band(one, x, y, low, log)
        means = _smoothed(one.points) if smooth else None
        if means:
            parts += _curve(one.points, one.colour, x, y, "thin")
            parts += _curve(means, one.colour, x, y, "thick")
        else:
            parts += _curve(one.points, one.colour, x, y, "thick")
    parts += _hover(drawn, x, percent if share else short)
    return _svg(parts, ", ".join(one.label for one in series))


def stacked_chart(layers: Sequence[Series], steps: tuple[float, float], *, share: bool = False) -> str:
    """Bars of non-negative values on top of each other, one bar per step or per few steps; a missing value counts as nothing."""
    totals: dict[float, list[float]] = {}
    for index, layer in enumerate(layers):
        for step, value in layer.points:
            if _drawable(value, False) and value >= 0:
                totals.setdefault(step, [0.0] * len(layers))[index] = value
    if not totals:
        return _empty()
    columns = sorted(totals.items())
    bars = [
        (chunk[0][0], chunk[-1][0], [_mean(parts) or 0.0 for parts in zip(*(heights for _, heights in chunk))])
        for chunk in _chunks(columns, MOST_BARS)
    ]
    high = 1.0 if share else nice_ceiling(max(sum(heights) for _, _, heights in bars))
    x, y = _x_axis(steps), _y_axis(0.0, high, False)
    ticks = nice_ticks(0.0, high)
    widest = (x(1) - x(0)) * (0.84 if len(bars) <= 30 else 1.0)
    outlines: list[list[str]] = [[] for _ in layers]
    hovers = []
    for first, last, heights in bars:
        width = min(x(last) - x(first) + widest, 40.0) if first == last else x(last) - x(first) + widest
        left = max(LEFT, (x(first) + x(last) - width) / 2)
        right = min(WIDTH - RIGHT, (x(first) + x(last) + width) / 2)
        total = 0.0
        for outline, height in zip(outlines, heights):
            total += height
            outline.append(f"M{left:.2f},{HEIGHT - BOTTOM}V{y(total):.2f}H{right:.2f}V{HEIGHT - BOTTOM}")
        told = [f"{layer.label} {percent(height) if share else short(height)}" for layer, height in zip(layers, heights)]
        hovers.append(_hover_column(left, right, f"{_steps_name(first, last)}: {', '.join(told)}"))
    # each layer reaches down to the axis, the lower ones in front: no seams
    shapes = [f'<path fill="{layer.colour}" d="{"".join(outline)}"/>' for layer, outline in zip(layers, outlines)]
    return _svg(
        [_grid(x, y, steps, ticks, tick_labels(ticks, share)), *reversed(shapes), *hovers], ", ".join(layer.label for layer in layers)
    )


def share_bar(shares: Sequence[tuple[str, str, float]]) -> str:
    """One horizontal bar of (label, colour, share) parts."""
    parts, left = [], 0.0
    for label, colour, share in shares:
        title = f"<title>{escape(label)} {percent(share)}</title>"
        parts.append(f'<rect x="{left:.2f}" y="0" width="{1000 * share:.2f}" height="14" fill="{colour}">{title}</rect>')
        left += 1000 * share
    return f'<svg class="bar" viewBox="0 0 1000 14" preserveAspectRatio="none" role="img" aria-label="shares">{"".join(parts)}</svg>'


def nice_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2, 2.5, 5 times a power of ten) from low to high."""
    step = _nice_step((high - low) / count)
    if step == 0:
        return [low]
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, first + 3 * count) if index * step <= high + 1e-9 * step]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten in the range, at most six; the ends themselves if there are fewer than two."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last <= first:
        return [low, high]
    return [10.0**power for power in range(first, last + 1, math.ceil((last - first + 1) / 6))]


def nice_ceiling(value: float) -> float:
    """The round number at or above a value > 0; 1 for 0 and what is next to it."""
    if value < _TINY:
        return 1.0
    step = _nice_step(value / 4)
    return step * math.ceil(value / step - 1e-9)


def _nice_step(rough: float) -> float:
    if rough <= 0 or not math.isfinite(rough):
        return 0.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next((factor * power for factor in (1, 2, 2.5, 5) if rough <= factor * power * (1 + 1e-9)), 10 * power)


def _prepared(one: Series, log: bool) -> Series:
    """Gaps where a value cannot be drawn, and not more points than the chart can show."""
    band = one.band or [None] * len(one.points)
    triples = [
        (step, value if _drawable(value, log) else None, half if _drawable(half, False) else None)
        for (step, value), half in zip(one.points, band)
    ]
    chunks = _chunks(triples, MOST_POINTS)
    points = [(chunk[len(chunk) // 2][0], _mean([value for _, value, _ in chunk])) for chunk in chunks]
    return Series(one.label, one.colour, points, [_mean([half for _, _, half in chunk]) for chunk in chunks])


def _chunks(items: list, most: int) -> list[list]:
    """Neighbours put together, evenly, so that there are at most so many groups."""
    count = min(len(items), most)
    return [items[index * len(items) // count : (index + 1) * len(items) // count] for index in range(count)]


def _drawable(value: float | None, log: bool) -> bool:
    return value is not None and math.isfinite(value) and abs(value) < _HUGE and (value > _TINY or not log)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


def _extent(one: Series, log: bool) -> list[float]:
    found = []
    for (_, value), half in zip(one.points, one.band or []):
        if value is not None:
            found += [value] if half is None or log else [value, value - half, value + half]
    return found


def _range(values: list[float], log: bool, zero: bool, share: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return 10.0 ** math.floor(math.log10(low)), 10.0 ** (math.floor(math.log10(high)) + 1)
    if zero and low >= 0:
        low = 0.0
        return low, min(nice_ceiling(high), 1.0) if share and high <= 1 else nice_ceiling(high)
    size = max(abs(low), abs(high))
    if size < _TINY:
        return low - 0.5, high + 0.5
    pad = 0.06 * (high - low) if high - low > 1e-6 * size else 0.1 * size  # float noise is drawn flat
    return low - pad, high + pad


def _x_axis(steps: tuple[float, float]) -> Callable[[float], float]:
    first, last = steps
    margin = 0.5 if last - first < 60 else 0.0
    span = last - first + 2 * margin
    return lambda step: LEFT + (step - first + margin) / span * (WIDTH - LEFT - RIGHT)


def _y_axis(low: float, high: float, log: bool) -> Callable[[float], float]:
    scale: Callable[[float], float] = math.log10 if log else float
    bottom, span = scale(low), scale(high) - scale(low)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (scale(value) - bottom) / span * (HEIGHT - TOP - BOTTOM)

    return y


def tick_labels(ticks: Sequence[float], share: bool) -> list[str]:
    """As many digits as tell the ticks apart."""
    scaled = [100 * tick if share else tick for tick in ticks]
    gaps = [after - before for before, after in pairwise(scaled)]
    digits = 0
    while digits < 6 and any(abs(gap - round(gap, digits)) > 0.01 * gap for gap in gaps):
        digits += 1
    large = max(map(abs, scaled)) >= 1e6 or digits == 6
    return [(f"{value:.3g}" if large else f"{value:,.{digits}f}") + ("%" if share else "") for value in scaled]


def power_label(value: float) -> str:
    """10⁻³ for a power of ten, else the number."""
    power = round(math.log10(value))
    if abs(math.log10(value) - power) > 1e-9:
        return short(value)
    return "1" if power == 0 else "10" + str(power).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _grid(x: Callable, y: Callable, steps: tuple[float, float], ticks: list[float], labels: list[str]) -> str:
    parts = []
    for tick, label in zip(ticks, labels):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in sorted({round(tick) for tick in nice_ticks(*steps, count=6)} if steps[1] > steps[0] else {round(steps[0])}):
        if steps[0] <= tick <= steps[1]:
            label = f"{tick:,}"
            centre = min(x(tick), WIDTH - 4 * len(label))
            parts.append(f'<text x="{centre:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    return "".join(parts)


def _segments(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The runs of points between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for step, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append((step, value))
    return [run for run in runs if run]


def _curve(points: Sequence[Point], colour: str, x: Callable, y: Callable, kind: str) -> list[str]:
    parts = []
    few = len(points) <= MARK_UP_TO
    for run in _segments(points):
        if len(run) > 1:
            path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in run)
            parts.append(f'<polyline class="{kind}" stroke="{colour}" points="{path}"/>')
        if few or len(run) == 1:
            parts += [f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="{2.6 if few else 1.6}" fill="{colour}"/>' for step, value in run]
    return parts


def _band(one: Series, x: Callable, y: Callable, low: float, log: bool) -> list[str]:
    edges = [(step, None if value is None or half is None else (value, half)) for (step, value), half in zip(one.points, one.band or [])]
    parts, run = [], []
    for step, edge in [*edges, (0.0, None)]:
        if edge is not None:
            run.append((step, *edge))
            continue
        if run:
            upper = [f"{x(step):.1f},{y(value + half):.1f}" for step, value, half in run]
            lower = [f"{x(step):.1f},{y(max(value - half, low) if log else value - half):.1f}" for step, value, half in reversed(run)]
            # the outline shows a lone point's band, which has no width
            parts.append(f'<polygon class="band" fill="{one.colour}" stroke="{one.colour}" points="{" ".join(upper + lower)}"/>')
        run = []
    return parts


def _smoothed(points: Sequence[Point]) -> list[Point] | None:
    """Centred rolling mean over a twentieth of the curve; a gap stays a gap. None for curves that are short enough to read."""
    if len(points) < SMOOTH_FROM:
        return None
    reach = max(2, len(points) // 40)
    values = [value for _, value in points]
    means = [_mean(values[max(0, index - reach) : index + reach + 1]) for index in range(len(values))]
    return [(step, None if value is None else mean) for (step, value), mean in zip(points, means)]


def _hover(drawn: Sequence[Series], x: Callable, name: Callable[[float], str]) -> list[str]:
    """An invisible column for each step that tells its values."""
    told: dict[float, list[str]] = {}
    for one in drawn:
        for (step, value), half in zip(one.points, one.band or []):
            text = "not finite" if value is None else name(value) + (f" ± {name(half)}" if half is not None else "")
            told.setdefault(step, []).append(f"{one.label} {text}")
    columns = sorted(told)
    parts = []
    for index, step in enumerate(columns):
        left = (x(columns[index - 1]) + x(step)) / 2 if index else x(step) - 6
        right = (x(columns[index + 1]) + x(step)) / 2 if index + 1 < len(columns) else x(step) + 6
        parts.append(_hover_column(left, right, f"step {step:g}: {', '.join(told[step])}"))
    return parts


def _hover_column(left: float, right: float, title: str) -> str:
    box = f'x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}"'
    return f'<rect class="hover" {box}><title>{escape(title)}</title></rect>'


def _steps_name(first: float, last: float) -> str:
    return f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"


def _svg(parts: Sequence[str], label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def _empty() -> str:
    return '<p class="empty">not recorded yet</p>'
