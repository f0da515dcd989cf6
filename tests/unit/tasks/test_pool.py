"""Promise: an item that hangs or kills its worker costs that item and nothing else, and no process is left behind."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from megarl.errors import InputError, RunFailed
from megarl.tasks.dataset import Example
from megarl.tasks.pool import VerifierPool

EXAMPLE = Example("a", "p", 1)
HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def own_package(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def start(workers=2, timeout_s=1.0, memory_mib=256, **args):
    return VerifierPool("my_hostile_verifiers:verify", args, workers=workers, timeout_s=timeout_s, memory_mib=memory_mib)


def judge(pool, responses):
    return pool.judge(responses, [EXAMPLE] * len(responses))


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(marker):
    """Pids of live processes with `marker` in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if marker in (folder / "cmdline").read_text():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


def test_each_failure_is_typed_and_costs_only_its_own_item():
    expected = {
        "hang": ("timeout", "no verdict within 1 s"),
        "spin": ("timeout", "no verdict within 1 s"),
        "exits": ("crash", "the verifier's process ended with exit code 0"),
        "segfault": ("crash", "the verifier's process was ended by SIGSEGV"),
        "memory": ("crash", "MemoryError"),
        "deep": ("crash", "RecursionError"),
        "raises": ("crash", "KeyError: 'no such thing'"),
        "closes": ("crash", "the verifier"),
        "daemon": ("crash", "exit code 3"),
        "unpicklable": ("crash", "the verdict cannot be sent"),
        "forks": ("ok", ""),
        "prints": ("ok", ""),
    }
    responses = [text for name in expected for text in (name, "1", "0.5")]
    with start() as pool:
        verdicts = judge(pool, responses)
    for (status, detail), verdict in zip(expected.values(), verdicts[::3], strict=True):
        assert verdict.status == status and detail in verdict.detail, verdict
        assert verdict.reward == (status == "ok")
    assert [v.status for v in verdicts[1::3]] == ["ok"] * len(expected)
    assert [v.reward for v in verdicts[2::3]] == [0.5] * len(expected)
    assert not running("left-by-verifier")


def test_results_are_in_order_over_many_chunks_and_calls():
    with start(workers=3) as pool:
        for _ in range(3):
            rewards = [i / 1000 for i in range(1000)]
            assert [v.reward for v in judge(pool, [str(x) for x in rewards])] == rewards
        assert judge(pool, []) == []


def test_what_a_verifier_prints_is_not_taken_for_a_result(capfd):
    with start() as pool:
        assert [v.status for v in judge(pool, ["prints"] * 5)] == ["ok"] * 5
    assert capfd.readouterr().out == ""


def test_items_behind_a_hanging_one_do_not_wait_for_it():
    """With one worker and a long limit, everything but the hanging item is judged long before it is given up."""
    began = time.monotonic()
    with start(workers=1, timeout_s=4.0) as pool:
        verdicts = judge(pool, ["hang", *["1"] * 100, "hang", *["1"] * 100])
    assert Counter(v.status for v in verdicts) == {"timeout": 2, "ok": 200}
    # One after the other they would take twice the limit.
    assert time.monotonic() - began < 7.5


def test_a_batch_of_nothing_but_trouble_ends():
    with start(timeout_s=0.3) as pool:
        verdicts = judge(pool, ["hang", "exits"] * 30)
    assert [v.status for v in verdicts] == ["timeout", "crash"] * 30


def test_wrong_data_stops_the_batch_and_not_the_pool():
    with start() as pool:
        with pytest.raises(InputError, match=r'^example "a": is wrong\.$'):
            judge(pool, ["1"] * 50 + ["bad_data", "bad_data", *["hang"] * 3])
        assert [v.reward for v in judge(pool, ["0.25"] * 3)] == [0.25] * 3


def test_a_verifier_that_cannot_be_made_is_refused():
    pool = VerifierPool("my_verifiers:no_such", {}, workers=1, timeout_s=1, memory_mib=64)
    with pool, pytest.raises(InputError, match='has no "no_such"'):
        pool.judge(["x"], [EXAMPLE])


def test_the_loss_of_the_nursery_is_one_clear_failure():
    with start() as pool:
        judge(pool, ["1"])
        pool._nursery.kill()
        with pytest.raises(RunFailed, match=r'processes of verifier "my_hostile_verifiers:verify" are gone'):
            judge(pool, ["exits"] * 5)


def test_close_ends_everything():
    pool = start(timeout_s=60)
    judge(pool, ["1"] * 10)
    nursery = pool._nursery.pid
    workers = children(nursery)
    assert workers
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in (nursery, *workers))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_a_driver_that_is_killed_while_items_hang(number):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from megarl.tasks.pool import VerifierPool\n"
        "from megarl.tasks.dataset import Example\n"
        "pool = VerifierPool('my_hostile_verifiers:verify', {}, workers=2, timeout_s=500, memory_mib=256)\n"
        "pool.judge(['1'], [Example('a', 'p', 1)])\n"
        "print(pool._nursery.pid, flush=True)\n"
        "pool.judge(['hang', 'spin', '1', 'spin'], [Example('a', 'p', 1)] * 4)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, str(HERE)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    nursery = int(driver.stdout.readline())
    while len(children(nursery)) < 2:
        time.sleep(0.05)
    workers = children(nursery)
    driver.send_signal(number)
    driver.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in (nursery, *workers)):  # the test's own limit ends a wait in vain
        time.sleep(0.05)


@pytest.mark.slow
def test_ten_thousand_grades_with_one_in_a_hundred_broken():
    """In under three times the time of the same without them, with exact counts and nothing left behind."""
    broken = ["hang", "exits", "spin", "segfault"]
    responses = [broken[i // 100 % 4] if i % 100 == 50 else "1" for i in range(10_000)]
    with start(workers=len(os.sched_getaffinity(0)), timeout_s=0.5, work_s=0.001) as pool:
        judge(pool, ["1"] * 10)
        began = time.monotonic()
        assert Counter(v.status for v in judge(pool, ["1"] * 10_000)) == {"ok": 10_000}
        without = time.monotonic() - began
        verdicts = judge(pool, responses)
        elapsed = time.monotonic() - began - without
        left = children(pool._nursery.pid)
        nursery = pool._nursery.pid
    kinds = {"1": "ok", "hang": "timeout", "spin": "timeout", "exits": "crash", "segfault": "crash"}
    assert [v.status for v in verdicts] == [kinds[text] for text in responses]
    assert Counter(v.status for v in verdicts) == {"ok": 9_900, "timeout": 50, "crash": 50}
    print(f"{without:.1f} s without, {elapsed:.1f} s with broken ones")
    assert elapsed < 3 * without
    assert not any(Path(f"/proc/{pid}").exists() for pid in (nursery, *left))
