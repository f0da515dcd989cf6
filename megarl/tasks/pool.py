"""Verdicts from worker processes with hard limits: an item that hangs or kills its worker costs that item and nothing else."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.errors import InputError, RunFailed, sentence
from megarl.tasks.dataset import Example
from megarl.tasks.nursery import ANSWER, FORK, KILL, MESSAGE
from megarl.tasks.verdict import Verdict

MAX_CHUNK = 32
STUCK_SHARE = 0.1
"""Of the time limit: a worker that has been on one item for so long is stuck. Another takes over the rest of its items and its place."""
STUCK_PER_WORKER = 3
"""Stuck workers beside each working one. More would slow each other down where they are slow and not stuck; with all places taken, items
wait for a time limit to run out."""
CLOSE_S = 5.0

START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from megarl.tasks.nursery import main; main(int(sys.argv[2]))"


@dataclass
class _Worker:
    pid: int
    connection: Connection
    items: deque[int] = field(default_factory=deque)
    """What it has not answered yet; it is at the first."""
    since: float = 0.0
    """When it came to the first."""
    stuck: bool = False
    retired: bool = False
    """Its other items went to somebody else: it must not come to them."""


class VerifierPool:
    """Worker processes of the verifier `name`, started now; `judge` may be called any number of times, `close` ends them.

    workers: how many judge at the same time. timeout_s: wall-clock seconds for one item. memory_mib: what a worker may allocate beside what
    the loaded verifier takes. The processes end with this one, however it ends. Not for use by several threads at once.
    """

    def __init__(self, name: str, args: dict[str, Any], *, workers: int, timeout_s: float, memory_mib: int):
        self._name, self._workers, self._timeout = name, workers, timeout_s
        self._all: list[_Worker] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._nursery = subprocess.Popen(
                [sys.executable, "-c", START, json.dumps(sys.path), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C is for the driver, which wants to end its step with these still alive
            )
        self.close = weakref.finalize(self, _close, self._control, self._nursery)
        self._control.send(pickle.dumps((name, args, memory_mib << 20)))
        self._ready = False

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def judge(self, responses: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict per response, in order. InputError for an example that the verifier cannot judge, RunFailed if the pool is lost."""
        if len(responses) != len(examples):
            raise ValueError(f"{len(responses)} responses for {len(examples)} examples")
        self._wait_ready()
        verdicts: list[Verdict | None] = [None] * len(responses)
        todo = deque(range(len(responses)))
        items = list(zip(responses, examples, strict=True))
        try:
            while todo or self._busy():
                self._hand_out(todo, items)
                for connection in wait([worker.connection for worker in self._busy()], self._patience()):
                    self._receive(next(worker for worker in self._all if worker.connection is connection), verdicts, todo)
                self._look_at_clock(verdicts, todo)
        except InputError:
            for worker in self._busy():
                self._end(worker)
            raise
        except BaseException:  # anywhere, even between a question to the nursery and its answer
            self.close()
            raise
        for worker in self._all[self._workers :]:
            self._end(worker)
        return verdicts

    def _busy(self) -> list[_Worker]:
        return [worker for worker in self._all if worker.items]

    def _hand_out(self, todo: deque[int], items: list[tuple[str, Example]]) -> None:
        while todo:
            idle = next((worker for worker in self._all if not worker.items), None)
            if idle is None:
                stuck = sum(worker.stuck for worker in self._all)
                if len(self._all) - stuck >= self._workers or stuck > STUCK_PER_WORKER * self._workers:
                    return
                idle = self._fork()
            # Small chunks towards the end, so that the workers end together.
            size = max(1, min(MAX_CHUNK, len(todo) // (2 * self._workers)))
            idle.items = deque(todo.popleft() for _ in range(size))
            idle.since, idle.stuck = time.monotonic(), False
            try:
                idle.connection.send([items[index] for index in idle.items])
            except OSError:  # it died idle: whatever it is, it is not these items' doing
                todo.extendleft(reversed(idle.items))
                self._end(idle)

    def _receive(self, worker: _Worker, verdicts: list[Verdict | None], todo: deque[int]) -> None:
        while worker.items and worker.connection.poll():
            try:
                result = worker.connection.recv()
            except (EOFError, OSError, pickle.UnpicklingError):
                status = self._end(worker, todo_after_first=todo)
                verdicts[worker.items[0]] = Verdict("crash", 0.0, detail=_how_it_ended(status))
                return
            if isinstance(result, InputError):
                raise result
            verdicts[worker.items.popleft()] = result
            worker.since, worker.stuck = time.monotonic(), False
            if worker.retired:
                self._end(worker)

    def _look_at_clock(self, verdicts: list[Verdict | None], todo: deque[int]) -> None:
        now = time.monotonic()
        for worker in self._busy():
            if now - worker.since >= self._timeout and not worker.connection.poll():
                self._end(worker, todo_after_first=todo)
                verdicts[worker.items[0]] = Verdict("timeout", 0.0, detail=f"no verdict within {self._timeout:g} s")
            elif now - worker.since >= self._timeout * STUCK_SHARE and not worker.stuck:
                worker.stuck = True
                worker.retired = len(worker.items) > 1
                while len(worker.items) > 1:
                    todo.appendleft(worker.items.pop())

    def _patience(self) -> float:
        """Seconds until the clock must be looked at."""
        now = time.monotonic()
        limits = [worker.since + self._timeout * (1.0 if worker.stuck else STUCK_SHARE) for worker in self._busy()]
        return max(0.0, min(limits, default=now) - now)

    # ------------------------------------------------------------ the nursery

    def _wait_ready(self) -> None:
        if self._ready:
            return
        answer = self._control.recv(1 << 16)
        if not answer:
            raise RunFailed(f'The processes of verifier "{self._name}" cannot be started (exit code {self._nursery.wait()})')
        if answer != b"ready":
            raise InputError(sentence(answer.decode()))
        self._ready = True

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self._ask(FORK, 0, theirs.fileno())
        worker = _Worker(pid, Connection(ours.detach()))
        self._all.append(worker)
        return worker

    def _end(self, worker: _Worker, todo_after_first: deque[int] | None = None) -> int:
        """Kill a worker; what it had after its first item goes back in front. Returns its wait status."""
        if todo_after_first is not None:
            while len(worker.items) > 1:
                todo_after_first.appendleft(worker.items.pop())
        self._all.remove(worker)
        worker.connection.close()
        return self._ask(KILL, worker.pid)

    def _ask(self, kind: bytes, pid: int, *descriptors: int) -> int:
        try:
            socket.send_fds(self._control, [MESSAGE.pack(kind, pid)], descriptors)
            answer = self._control.recv(ANSWER.size)
        except OSError as error:
            raise RunFailed(f'The processes of verifier "{self._name}" are gone ({error})') from None
        if not answer:
            raise RunFailed(f'The processes of verifier "{self._name}" are gone (exit code {self._nursery.wait()})')
        return ANSWER.unpack(answer)[0]


def _close(control: socket.socket, nursery: subprocess.Popen) -> None:
    control.close()
    try:
        nursery.wait(CLOSE_S)
    except subprocess.TimeoutExpired:  # still loading the verifier
        nursery.kill()
        nursery.wait()


def _how_it_ended(status: int) -> str:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return "the verifier closed its connection, or its process was killed"
        return f"the verifier's process was ended by {signal.Signals(number).name}"
    return f"the verifier's process ended with exit code {os.WEXITSTATUS(status)}"
