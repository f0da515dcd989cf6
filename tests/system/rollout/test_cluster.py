"""The local Ray cluster: listens on loopback only, and leaves no process behind, however its driver ends."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.system

DRIVER = """
import os, signal, subprocess, sys, time
import ray
from megarl.platform.rollout_env import ray_cluster

class Stubborn:
    def __init__(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    def pid(self):
        return os.getpid()
    def work(self):
        import torch
        while True:
            torch.ones(500, 500) @ torch.ones(500, 500)

with ray_cluster():
    actor = ray.remote(Stubborn).options(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
    print(ray.get(actor.pid.remote()), flush=True)
    actor.work.remote()
    time.sleep(0.5)
    print("working", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def driver():
    process = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def started(driver):
    """The driver's cluster: all processes under it, the actor's among them."""
    actor = int(driver.stdout.readline())
    assert driver.stdout.readline() == "working\n"
    processes = psutil.Process(driver.pid).children(recursive=True)
    assert actor in {process.pid for process in processes}
    return processes


def listening_addresses(processes):
    return {c.laddr.ip for process in processes for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_driver_that_is_killed_leaves_nothing(driver, number):
    processes = started(driver)
    assert listening_addresses([psutil.Process(driver.pid), *processes]) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    os.kill(driver.pid, number)
    driver.wait(60)
    deadline = time.monotonic() + 30
    alive = processes
    while alive and time.monotonic() < deadline:
        _, alive = psutil.wait_procs(alive, timeout=1)
    assert not [process.name() for process in alive]
