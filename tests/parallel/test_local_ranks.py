"""Local ranks: they meet, report what went wrong first, and never outlive their caller."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from megarl.errors import InputError, RunFailed
from megarl.training.local_ranks import run_ranks
from tests.parallel.rank_functions import change_a_global, fail_on_one_rank, sleep_with_a_child, sum_of_ranks

pytestmark = pytest.mark.system


def test_results_come_in_rank_order():
    results = run_ranks(3, sum_of_ranks, 1)
    assert [rank for rank, _, _ in results] == [0, 1, 2]
    assert [total for _, total, _ in results] == [6.0] * 3
    assert not any(psutil.pid_exists(pid) for _, _, pid in results)


def test_each_call_has_processes_of_its_own():
    assert run_ranks(1, change_a_global) == [False]
    assert run_ranks(1, change_a_global) == [False]


@pytest.mark.parametrize(
    "how, error, message",
    [
        ("input error", InputError, "the second rank does not like it."),
        ("killed", RunFailed, "rank 1 of 2 died"),
        ("no pickle", RunFailed, "rank 1: .* cannot be sent to another process"),
    ],
)
def test_the_first_failure_is_raised_and_nobody_is_left_waiting(how, error, message):
    with pytest.raises(error, match=message) as caught:
        run_ranks(2, fail_on_one_rank, how)
    if how == "input error":
        assert "on rank 1 of 2" in caught.value.__notes__[0] and "fail_on_one_rank" in caught.value.__notes__[0]


def test_ranks_end_with_a_caller_that_is_killed(tmp_path):
    code = (
        f"from megarl.training.local_ranks import run_ranks; from tests.parallel.rank_functions import {sleep_with_a_child.__name__} as f"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", f"{code}; run_ranks(2, f, {str(tmp_path)!r})"], env=os.environ | {"PYTHONPATH": os.getcwd()}
    )
    try:
        while len(list(tmp_path.glob("rank?"))) < 2:
            assert caller.poll() is None
            time.sleep(0.1)
    finally:
        caller.kill()
        caller.wait()
    pids = [int(pid) for path in tmp_path.glob("rank?") for pid in path.read_text().split()]
    assert len(pids) == 4
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        time.sleep(0.1)  # ends at once, or the test's own time limit says that it does not
