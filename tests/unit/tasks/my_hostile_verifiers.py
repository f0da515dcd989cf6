"""A verifier that misbehaves when the response asks for it, for test_pool.py."""

import ctypes
import os
import subprocess
import sys
import time

from megarl.errors import InputError
from megarl.tasks.verdict import Verdict


def verify(response, answer, metadata, work_s=0.0):
    """The response is a number, the reward, or the name of a function below."""
    until = time.perf_counter() + work_s
    while time.perf_counter() < until:
        pass
    return globals()[response]() if response.isidentifier() else float(response)


def hang():
    time.sleep(1000)


def spin():
    while True:
        pass


def exits():
    os._exit(0)


def segfault():
    ctypes.string_at(0)


def memory():
    return len(bytearray(8 << 30))


def deep():
    return deep()


def raises():
    raise KeyError("no such thing")


def forks():
    os.fork()
    return 1.0


def closes():
    os.closerange(3, 100)
    return 1.0


def prints():
    print("noise")
    sys.stdout.flush()
    return 1.0


def daemon():
    """Leaves a process in a session of its own behind, then takes the worker down."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "left-by-verifier"], start_new_session=True)
    os._exit(3)


def unpicklable():
    return Verdict("ok", 1.0, extracted=lambda: 0)


def bad_data():
    raise InputError('example "a": is wrong.')
