"""Promises of the terminal output: one plain line per step, an honest estimate, and a summary that says where things lie."""

from __future__ import annotations

import io
import os
import pty
import re

import pytest

from megarl.observe import progress
from megarl.observe.metrics import MetricsWriter, read_metrics
from megarl.observe.progress import Progress

STEP = {
    "reward/mean": 0.362,
    "response/length_mean": 8.31,
    "policy/entropy": 0.312,
    "policy/grad_norm": 0.517,
    "time/generate": 0.5,
    "time/train": 0.6,
    "time/step": 1.0,
}


class Stream(io.StringIO):
    """Remembers how much was flushed."""

    flushed = 0

    def flush(self):
        self.flushed = len(self.getvalue())


def lines_of(stream):
    return stream.getvalue().splitlines()


def test_one_line_per_step():
    stream = Stream()
    progress = Progress(60, stream)
    progress.step(11, STEP)
    progress.step(12, STEP | {"reward/mean": 0.412, "eval/pass@1": 0.412, "eval/pass@8": 0.7})
    assert lines_of(stream) == [
        "step  11/60  reward 0.362 (+0.000)  len 8.3  entropy 0.31  grad 0.52  gen 0.5s train 0.6s  left 0:49",
        "step  12/60  reward 0.412 (+0.050)  pass@1 41.2%  len 8.3  entropy 0.31  grad 0.52  gen 0.5s train 0.6s  left 0:48",
    ]


def test_columns_stay_in_place_between_evaluations():
    stream = Stream()
    progress = Progress(60, stream)
    progress.step(10, STEP | {"eval/pass@1": 0.4})
    progress.step(11, STEP)
    first, second = lines_of(stream)
    assert first.index("len") == second.index("len")


def test_what_is_missing_is_left_out():
    stream = Stream()
    progress = Progress(60, stream)
    progress.step(0, {"eval/math/pass@1": 0.295, "eval/code/pass@1": 0.1})
    progress.step(1, {})
    assert lines_of(stream) == ["step   0/60  code pass@1 10.0%  math pass@1 29.5%", "step   1/60"]


def test_values_that_are_not_finite_are_shown():
    stream = Stream()
    Progress(60, stream).step(1, {"reward/mean": float("nan"), "policy/grad_norm": float("inf")})
    assert "reward nan" in stream.getvalue() and "grad inf" in stream.getvalue()


def test_every_line_is_flushed():
    stream = Stream()
    progress = Progress(60, stream)
    progress.stage("starting 1 engine ...")
    assert stream.flushed == len(stream.getvalue()) > 0
    progress.step(1, STEP)
    assert stream.flushed == len(stream.getvalue())


def test_a_stage_tells_the_seconds_since_the_start():
    stream = Stream()
    Progress(60, stream).stage("starting 1 engine ...")
    assert re.fullmatch(r" +\d+\.\ds  starting 1 engine \.\.\.\n", stream.getvalue())


def test_seconds_count_from_the_commands_first_line(capsys, monkeypatch):
    progress.begin("reading")
    monkeypatch.setattr(progress, "_began", progress._began - 100)
    Progress(60).stage("starting")
    first, second = capsys.readouterr().out.splitlines()
    assert first == "   0.0s  reading" and re.fullmatch(r" 100\.\ds  starting", second)


def test_time_left_follows_the_recent_steps():
    progress = Progress(100, Stream())
    assert progress.seconds_left(0) is None
    progress.step(0, {"time/step": 500.0, "eval/pass@1": 0.3})
    assert progress.seconds_left(0) is None, "an evaluation alone says nothing about a step"
    for step in range(1, 21):
        progress.step(step, STEP | {"time/step": 60.0})
    for step in range(21, 41):
        progress.step(step, STEP | {"time/step": 2.0})
    assert progress.seconds_left(40) == pytest.approx(120.0)
    assert progress.seconds_left(100) == 0


def test_a_resumed_run_goes_on_with_differences_and_estimate():
    stream = Stream()
    progress = Progress(60, stream)
    progress.recall([{"step": 1} | STEP | {"reward/mean": 0.3, "time/step": 3.0}])
    assert progress.seconds_left(50) == 30.0
    progress.step(2, STEP | {"reward/mean": 0.35})
    assert "reward 0.350 (+0.050)" in stream.getvalue()


LINES = "from megarl.observe.progress import Progress; p = Progress(60); p.stage('s'); p.step(1, {'reward/mean': 0.5})"


def on_a_terminal(python, **variables) -> str:
    ours, theirs = pty.openpty()
    code = f"import os; os.environ.pop('NO_COLOR', None); os.environ.update({{'TERM': 'xterm'}} | {variables!r}); {LINES}"
    python(code, stdout=theirs, check=True)
    os.close(theirs)
    seen = os.read(ours, 10_000).decode()
    os.close(ours)
    return seen.replace("\r\n", "\n")


def test_no_control_codes_off_a_terminal_and_colours_on_one(python):
    plain = python(LINES, capture_output=True, check=True).stdout
    assert plain.isprintable() or set(plain) - set(filter(str.isprintable, plain)) == {"\n"}
    assert plain.endswith("  s\nstep   1/60  reward 0.500 (+0.000)\n")
    coloured = on_a_terminal(python)
    assert "\033[1m" in coloured and re.sub(r"\033\[\d*m", "", coloured).endswith("  s\nstep   1/60  reward 0.500 (+0.000)\n")
    assert "\033" not in on_a_terminal(python, NO_COLOR="1") and "\033" not in on_a_terminal(python, TERM="dumb")


def test_the_summary_says_what_improved_and_where_things_lie(finished):
    finished.checkpoint(20).mkdir()
    finished.checkpoint(60).mkdir()
    (finished.checkpoints / ".step-000070.tmp").mkdir()
    finished.report.write_text("x")
    stream = Stream()
    Progress(60, stream).summary(finished)
    text = stream.getvalue()
    assert "done: 60 steps (1:15 in steps)" in text
    assert re.search(r"pass@1 +29\.5% -> 59\.5% +\(\+30\.0 points\)", text)
    assert re.search(r"training reward +0\.305 -> 0\.600 +\(\+0\.295\)", text)
    for place in (finished.path, finished.report, finished.checkpoint(60), f"tensorboard --logdir {finished.tensorboard}"):
        assert f" {place}\n" in text
    assert "step-000020" not in text and "step-000070" not in text


def test_the_summary_of_a_stopped_run_and_of_one_without_metrics(folder):
    stream = Stream()
    Progress(60, stream).summary(folder)
    assert (
        "stopped after step 0 of 60" in stream.getvalue() and "report" not in stream.getvalue() and "checkpoint " not in stream.getvalue()
    )
    with MetricsWriter(folder) as writer:
        writer.write(37, STEP)
    stream = Stream()
    Progress(60, stream).summary(folder)
    assert "stopped after step 37 of 60" in stream.getvalue() and "--resume" in stream.getvalue()
    assert read_metrics(folder.metrics)[0]["step"] == 37
