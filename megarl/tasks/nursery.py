"""The processes that run a verifier. One, the nursery, loads it and then forks workers, so that a new worker costs milliseconds.

`pool.py` starts the nursery as a program of its own: no thread, open file or signal handler of the driver gets into a worker. It obeys
three messages of 5 bytes: fork a worker (its end of a socket pair comes with the message), kill one and say how it ended, and the end of
the connection, upon which everything below it is killed. As a subreaper it also inherits whatever a verifier leaves behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
from multiprocessing.connection import Connection

from megarl.errors import InputError
from megarl.tasks.verdict import Verdict
from megarl.tasks.verifiers import Verifier, judge_one, make_verifier

FORK, KILL = b"F", b"K"
MESSAGE = struct.Struct("<ci")
"""(FORK or KILL, pid)"""
ANSWER = struct.Struct("<i")
"""The pid of the new worker, or the wait status of the one that is gone."""
PARENT_CHECK_S = 0.5
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(descriptor: int) -> None:
    """Serve the socket `descriptor` until its other end is closed or the parent is gone."""
    parent = os.getppid()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a verifier prints must not get between the driver's results
    control = socket.socket(fileno=descriptor)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    name, args, memory_bytes = pickle.loads(control.recv(1 << 20))
    try:
        verifier = make_verifier(name, args)
    except InputError as error:
        control.send(str(error).encode()[:1000])
        return
    control.send(b"ready")
    gc.freeze()  # the collector would touch, and so copy, every page that the workers share
    workers: set[int] = set()
    try:
        while os.getppid() == parent:
            _reap_orphans(workers)
            if not select.select([control], [], [], PARENT_CHECK_S)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE.size, 1)
            if not message:
                return
            kind, pid = MESSAGE.unpack(message)
            if kind == FORK:
                answer = _fork(Connection(descriptors[0]), control, verifier, memory_bytes)
                workers.add(answer)
            else:
                answer = _kill(pid)
                workers.discard(pid)
                _kill_orphans(workers)
            control.send(ANSWER.pack(answer))
    finally:
        _kill_orphans(set())


def _fork(connection: Connection, control: socket.socket, verifier: Verifier, memory_bytes: int) -> int:
    pid = os.fork()
    if pid:
        connection.close()
        return pid
    code = 1
    try:
        control.close()
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        limit = _address_space() + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        _work(connection, verifier)
        code = 0
    finally:
        os._exit(code)


def _work(connection: Connection, verifier: Verifier) -> None:
    """Judge one list of (response, example) after the other; each verdict is sent as soon as it is there."""
    pid = os.getpid()
    while True:
        try:
            items = connection.recv()
        except EOFError:
            return
        for response, example in items:
            try:
                result = judge_one(verifier, response, example)
            except InputError as error:
                result = error
            if os.getpid() != pid:  # a verifier that forked came back twice
                os._exit(0)
            try:
                message = pickle.dumps(result)
            except Exception as error:  # what the verifier extracted may be anything
                message = pickle.dumps(Verdict("crash", 0.0, detail=f"the verdict cannot be sent ({type(error).__name__}: {error})"))
            connection.send_bytes(message)


def _kill(pid: int) -> int:
    """Kill a worker with its session's processes; its wait status, which is its own where it had ended before."""
    for kill in (os.killpg, os.kill):  # a process that was forked just now has no group yet
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _reap_orphans(workers: set[int]) -> None:
    """Processes that a verifier started in vain wait for their parent, which they have lost, to ask how they ended: that is us now."""
    for pid in set(_children()) - workers:
        os.waitpid(pid, os.WNOHANG)


def _kill_orphans(workers: set[int]) -> None:
    """Kill all children that are not workers: what verifiers have started and left. Theirs become ours then, so look again."""
    while orphans := set(_children()) - workers:
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
