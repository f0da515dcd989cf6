"""Promise: the first signal lets the step end, the second ends the run at once, and the exit code says which signal it was."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megarl import cli
from megarl.errors import Interrupted
from megarl.loop.stopping import StopRequest

ROOT = Path(__file__).parents[3]


def test_the_first_signal_is_noted_and_announced():
    said = []
    with StopRequest(said.append, "stopping after this step") as stop:
        assert stop.signal is None and stop.exit_code == 0
        signal.raise_signal(signal.SIGTERM)
        assert (stop.signal, stop.exit_code) == (signal.SIGTERM, 143)
    assert said == ["SIGTERM: stopping after this step (once more: at once)"]


@pytest.mark.parametrize("first, second, code", [("SIGINT", "SIGINT", 130), ("SIGTERM", "SIGTERM", 143), ("SIGINT", "SIGTERM", 143)])
def test_the_second_ends_the_block_at_once(first, second, code):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    ended = []
    with pytest.raises(Interrupted) as caught, StopRequest(lambda text: None, "stopping"):
        signal.raise_signal(getattr(signal, first))
        try:
            signal.raise_signal(getattr(signal, second))
        finally:
            ended.append("what was started")
    assert (caught.value.exit_code, ended) == (code, ["what was started"])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_at_once_takes_one_signal():
    said = []
    with pytest.raises(Interrupted) as caught, StopRequest(said.append, "stopping", at_once=True):
        signal.raise_signal(signal.SIGTERM)
    assert (caught.value.exit_code, said) == (143, ["SIGTERM: stopping"])


def test_what_fails_while_it_is_cut_off_is_no_news():
    with pytest.raises(Interrupted), StopRequest(lambda text: None, "stopping", at_once=True):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("an engine died") from None


def test_an_error_before_any_signal_is_itself():
    with pytest.raises(RuntimeError, match="an engine died"), StopRequest(lambda text: None, "stopping"):
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("an engine died")


def test_a_handler_that_was_replaced_is_put_back():
    with StopRequest(lambda text: None, "stopping") as stop:
        signal.signal(signal.SIGTERM, lambda *_: None)
        stop.listen()
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM


def test_a_third_ends_the_process_itself():
    code = """
import signal
from megarl.loop.stopping import StopRequest
with StopRequest(print, "stopping"):
    signal.raise_signal(signal.SIGTERM)
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGTERM and "still here" not in done.stdout


def test_the_command_line_ends_with_the_signals_code(monkeypatch, capsys):
    def stopped(args):
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(cli, "_report", stopped)
    assert cli.main(["report", "folder"]) == 143
    assert capsys.readouterr().err == "megarl: interrupted\n"
