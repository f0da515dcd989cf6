"""Promises of the metrics: full precision, always valid JSON, TensorBoard the same, a killed run readable."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megarl.errors import InputError
from megarl.observe.metrics import MetricsWriter, encode_row, read_metrics


def tensorboard_scalars(folder, name):
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_one_object_per_step_with_the_step_first(folder):
    with MetricsWriter(folder) as writer:
        writer.write(1, {"reward/mean": 1 / 3, "count": 12, "numpy": np.float32(0.5)})
        writer.write(2, {"reward/mean": 0.1 + 0.2})
        lines = folder.metrics.read_text().splitlines()  # before close: a step is on disk at once
    assert lines[0] == '{"step": 1, "reward/mean": 0.3333333333333333, "count": 12, "numpy": 0.5}'
    assert json.loads(lines[1]) == {"step": 2, "reward/mean": 0.1 + 0.2}


def test_values_that_are_not_finite_stay_valid_json_and_are_told_apart(folder):
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}
    with MetricsWriter(folder) as writer:
        writer.write(4, values)
    line = json.loads(folder.metrics.read_text(), parse_constant=pytest.fail)
    assert line["a"] is None and line["a/nonfinite"] == "nan" and line["b/nonfinite"] == "inf" and line["c/nonfinite"] == "-inf"
    assert "d/nonfinite" not in line
    (row,) = read_metrics(folder.metrics)
    assert math.isnan(row.pop("a")) and row == {"step": 4, "b": math.inf, "c": -math.inf, "d": 1.0}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "step" and not name.endswith("/nonfinite")), st.floats()))
def test_what_is_written_is_what_is_read(tmp_path, metrics):
    path = tmp_path / "metrics.jsonl"
    path.write_text(encode_row({"step": 3} | metrics), encoding="utf-8")
    (row,) = read_metrics(path)
    assert row.keys() == {"step", *metrics}
    assert all(row[name] == value or (math.isnan(row[name]) and math.isnan(value)) for name, value in metrics.items())


def test_a_half_last_line_is_left_out_and_a_whole_one_without_newline_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for cut in range(len('{"step": 2, "a": 1.5}')):
        path.write_text('{"step": 1}\n' + '{"step": 2, "a": 1.5}'[:cut])
        assert [row["step"] for row in read_metrics(path)] == [1]
    path.write_text('{"step": 1}\n{"step": 2, "a": 1.5}')
    assert read_metrics(path)[-1] == {"step": 2, "a": 1.5}
    path.write_text("")
    assert read_metrics(path) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("oops", "not valid JSON"),
        ("[1]", "a JSON object"),
        ('{"a": 1}', "an integer `step`"),
        ('{"step": 1, "a": "x"}', "a number for `a`"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 0}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(InputError, match=f"metrics.jsonl:2: .*{message}"):
        read_metrics(path)


def test_the_step_is_no_metric(folder):
    with MetricsWriter(folder) as writer, pytest.raises(ValueError, match="'step'"):
        writer.write(1, {"step": 2})


def test_tensorboard_has_the_same_numbers(folder):
    with MetricsWriter(folder) as writer:
        for step in (1, 2):
            writer.write(step, {"reward/mean": 0.25 * step})
        assert tensorboard_scalars(folder, "reward/mean") == [(1, 0.25), (2, 0.5)]  # before close: nothing waits in a queue


def test_a_resumed_run_hides_the_redone_steps_in_tensorboard(folder, monkeypatch):
    with MetricsWriter(folder) as writer:
        for step in range(1, 6):
            writer.write(step, {"reward/mean": float(step)})
    folder.truncate_metrics(3)
    later = time.time() + 10  # event files are read in the order of their names, which begin with the second
    monkeypatch.setattr("time.time", lambda: later)
    with MetricsWriter(folder) as writer:
        writer.write(4, {"reward/mean": 40.0})
    assert len(list(folder.tensorboard.iterdir())) == 2
    assert tensorboard_scalars(folder, "reward/mean") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert [row["reward/mean"] for row in read_metrics(folder.metrics)] == [1.0, 2.0, 3.0, 40.0]


def test_writing_metrics_imports_no_torch_and_no_tensorflow(folder, python):
    folder.close()
    code = f"""
import sys
from megarl.observe.metrics import MetricsWriter
from megarl.observe.run_folder import RunFolder
with RunFolder.open({str(folder.path)!r}) as folder, MetricsWriter(folder) as writer:
    writer.write(1, {{"a": 1.0}})
print([name for name in ("torch", "tensorflow", "ray", "vllm") if name in sys.modules])
"""
    assert python(code, capture_output=True, check=True).stdout == "[]\n"
    assert read_metrics(folder.metrics) == [{"step": 1, "a": 1.0}]
