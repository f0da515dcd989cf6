"""Promises of the charts: gaps stay gaps, single points are seen, ticks can be told apart, size is bounded, no number breaks them."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.charts import HEIGHT, LEFT, WIDTH, Series, line_chart, nice_ceiling, nice_ticks, power_label, stacked_chart, tick_labels
from megarl.observe.names import clock, headline_metrics, pass_metrics, points, short


def parts(svg: str, kind: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(kind))


def one(values, **options):
    return line_chart([Series("reward", "#123456", [(step, value) for step, value in enumerate(values)])], (0, len(values) - 1), **options)


def test_a_gap_splits_the_curve():
    lines = parts(one([1.0, 2.0, None, 3.0, 4.0, math.nan, 1.0]), "polyline")
    assert [len(line.get("points").split()) for line in lines] == [2, 2]


def test_single_points_are_seen():
    assert len(parts(one([None, 2.0, None]), "circle")) == 1
    assert len(parts(one([0.5]), "circle")) == 1
    assert len(parts(one([1.0] * 50 + [None, 2.0, None] + [1.0] * 50, smooth=False), "circle")) == 1, "also in a curve without dots"


def test_values_at_or_below_zero_are_gaps_on_a_log_axis():
    svg = one([1e-3, 0.0, 1e-5, -1.0, 1e-4], log=True)
    assert len(parts(svg, "circle")) == 3 and not parts(svg, "polyline")
    assert "10⁻⁵" in svg and "10⁻²" in svg


def test_the_band_follows_the_curve_and_its_gaps():
    svg = line_chart([Series("reward", "#123456", [(0, 1.0), (1, 1.0), (2, None), (3, 1.0)], [0.5, 0.5, 0.5, None])], (0, 3))
    (band,) = parts(svg, "polygon")
    assert len(band.get("points").split()) == 4


def test_nothing_to_draw_is_said():
    for values in ([], [None], [math.nan, math.inf]):
        assert "not recorded yet" in one(values)
    assert "not recorded yet" in stacked_chart([Series("a", "#123456", [])], (0, 1))


def test_a_long_curve_is_smoothed_over_and_bounded():
    svg = one([math.sin(step) for step in range(20_000)])
    assert [line.get("class") for line in parts(svg, "polyline")] == ["thin", "thick"] and len(svg) < 150_000
    assert [line.get("class") for line in parts(one([1.0] * 100, smooth=False), "polyline")] == ["thick"]
    bars = stacked_chart([Series("a", "#123456", [(step, 1.0) for step in range(20_000)])], (0, 19_999))
    assert len(bars) < 30_000


def test_stacked_layers_sum_and_count_what_is_missing_as_nothing():
    svg = stacked_chart([Series("a", "#111111", [(0, 1.0), (1, 2.0)]), Series("b", "#222222", [(1, 2.0), (2, None)])], (0, 2))
    tops = {part.get("fill"): [float(top) for top in re.findall(r"V([\d.]+)H", part.get("d"))] for part in parts(svg, "path")}
    axis = HEIGHT - 26
    assert (axis - tops["#222222"][1]) == pytest.approx(2 * (axis - tops["#111111"][1]), abs=0.1)
    assert tops["#222222"][0] == tops["#111111"][0]
    assert "step 1: a 2.00, b 2.00" in svg


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.none(), st.floats()), max_size=60), st.booleans(), st.booleans(), st.booleans())
def test_any_numbers_give_valid_svg_inside_its_frame(values, log, share, zero):
    svg = one(values, log=log, share=share, zero=zero) if values else one([])
    if svg.startswith("<svg"):
        for part in ElementTree.fromstring(svg).iter():
            for x, y in (pair.split(",") for pair in part.get("points", "").split() if part.tag == "polyline"):
                assert LEFT - 1 <= float(x) <= WIDTH and -1 <= float(y) <= HEIGHT


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_inside_and_told_apart(low, span):
    high = low + span
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 9
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)
    if span > 1e-4 and abs(low) < 1e3:
        assert len(set(tick_labels(ticks, share=False))) == len(ticks)


def test_labels():
    assert tick_labels([0.0, 0.25, 0.5], share=True) == ["0%", "25%", "50%"]
    assert tick_labels([10.01, 10.02, 10.03], share=False) == ["10.01", "10.02", "10.03"]
    assert tick_labels([0.0, 2500.0, 5000.0], share=False) == ["0", "2,500", "5,000"]
    assert [power_label(10.0**power) for power in (-12, -1, 0, 3)] == ["10⁻¹²", "10⁻¹", "1", "10³"]
    assert nice_ceiling(0.0) == 1.0 and nice_ceiling(0.97) == 1.0 and nice_ceiling(13.0) == 15.0


def test_numbers_for_people():
    assert [short(value) for value in (0, 0.4123, 8.31, 83.1, 831.4, 8314, 1.5e7, 2e-5, -0.25, math.nan, math.inf)] == [
        "0", "0.412", "8.31", "83.1", "831", "8,314", "1.5e+07", "2e-05", "-0.250", "nan", "inf",
    ]  # fmt: skip
    assert [clock(seconds) for seconds in (0, 48, 61, 3723, 90061, -1)] == ["0:00", "0:48", "1:01", "1:02:03", "1d 01:01:01", "0:00"]
    assert points(0.295, 0.578) == "+28.3 points" and points(0.5, 0.4) == "-10.0 points"


def test_evaluations_are_found_by_name():
    names = ["eval/pass@8", "eval/pass@1", "eval/math/pass@16", "eval/math/pass@4", "eval/pass@k", "reward/mean"]
    assert pass_metrics(names) == [
        ("", 1, "eval/pass@1"),
        ("", 8, "eval/pass@8"),
        ("math", 4, "eval/math/pass@4"),
        ("math", 16, "eval/math/pass@16"),
    ]
    assert headline_metrics(names) == [("pass@1", "eval/pass@1"), ("math pass@4", "eval/math/pass@4")]
