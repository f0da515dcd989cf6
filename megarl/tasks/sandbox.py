"""Running generated programs without letting them reach anything: bubblewrap's namespaces, resource limits, a deadline.

Inside there is a Python without site-packages, /usr read-only, and an empty /tmp of a few MiB: no network, no home, no data, no
environment. A program can make no other process or thread, and is killed with everything it has at its deadline.
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megarl.errors import InputError
from megarl.tasks import sandbox_runner

Mode = Literal["bubblewrap", "rlimits"]
RUNNER = Path(sandbox_runner.__file__).read_text(encoding="utf-8")
NOBODY = 65534
SCRATCH_BYTES = 16 << 20
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONIOENCODING": "utf-8"}


@dataclass(frozen=True)
class Limits:
    """time_s: wall clock for everything that one response needs. memory_mib, file_mib, output_kib: of one process."""

    time_s: float = 6.0
    memory_mib: int = 512
    file_mib: int = 1
    output_kib: int = 1024

    def settings(self) -> dict[str, int]:
        return {
            "RLIMIT_AS": self.memory_mib << 20,
            "RLIMIT_CPU": math.ceil(self.time_s) + 1,
            "RLIMIT_FSIZE": self.file_mib << 20,
            "RLIMIT_NOFILE": 32,
            "RLIMIT_CORE": 0,
            "RLIMIT_NPROC": 0,
        }


class SandboxError(Exception):
    """The sandbox itself failed: nothing is known about the program."""


@dataclass(frozen=True)
class Ran:
    """What a process left: its standard output, its exit code (None: killed at the deadline or for too much output), and why."""

    output: bytes
    code: int | None
    detail: str


class Sandbox:
    """Starts processes of `sandbox_runner`. InputError where this machine cannot."""

    def __init__(self, mode: Mode, limits: Limits):
        self.mode, self.limits = mode, limits
        self._prefix = _bubblewrap() if mode == "bubblewrap" else []
        # Root must become somebody else, or the limit on processes does not hold. Inside a user namespace one is nobody already.
        self._uid = NOBODY if mode == "bubblewrap" and os.geteuid() == 0 else None
        try:
            ran = self.run_script("print(6 * 7)", "", time.monotonic() + 10 + limits.time_s)
        except SandboxError as error:
            raise InputError(_refusal(str(error))) from None
        if ran.output != b"42\n":
            raise InputError(_refusal(ran.detail or f"a first program printed {ran.output!r}"))

    def run_script(self, source: str, stdin: str, deadline: float) -> Ran:
        """Run a program on a standard input until `deadline`, on the monotonic clock."""
        with ExitStack() as stack:
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            files = [_file(stack, source), _file(stack, stdin)]
            process = self._start(stack, {"role": "script", "source": files[0], "channel": theirs.fileno()}, files[1], subprocess.PIPE)
            theirs.close()
            ran = _wait(process, deadline, self.limits.output_kib << 10)
            ours.setblocking(False)
            if not _started(ours):
                raise SandboxError(f"the sandbox did not start ({ran.detail})")
            return ran

    def run_tests(self, source: str, setup: str, tests: list[Any], deadline: float) -> list[bool | str]:
        """True, or why not, for each test that was done by the deadline; see `sandbox_runner.check`."""
        with ExitStack() as stack:
            program_end, tests_end = (stack.enter_context(end) for end in socket.socketpair())
            files = [_file(stack, source), _file(stack, json.dumps({"setup": setup, "tests": tests}))]
            self._start(
                stack, {"role": "serve", "source": files[0], "channel": program_end.fileno()}, subprocess.DEVNULL, subprocess.DEVNULL
            )
            checker = self._start(
                stack, {"role": "check", "source": files[1], "channel": tests_end.fileno()}, subprocess.DEVNULL, subprocess.PIPE
            )
            program_end.close()
            tests_end.close()
            ran = _wait(checker, deadline, self.limits.output_kib << 10)
        if ran.code not in (0, None):
            started = ran.code != sandbox_runner.NOT_STARTED
            raise SandboxError(f"the checker failed: {ran.detail}" if started else "the program's sandbox did not start")
        return [json.loads(line) for line in ran.output.splitlines()[: len(tests)]]

    def _start(self, stack: ExitStack, settings: dict[str, Any], stdin: int, stdout: int) -> subprocess.Popen:
        settings = settings | {"limits": self.limits.settings(), "uid": self._uid}
        interpreter = os.path.realpath(sys.executable)
        process = subprocess.Popen(
            [*self._prefix, interpreter, "-I", "-S", "-c", RUNNER, json.dumps(settings)],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.PIPE if stdout == subprocess.PIPE else subprocess.DEVNULL,
            pass_fds=[settings["source"], settings["channel"]],
            env=ENVIRONMENT,
            cwd="/",
            start_new_session=True,
        )
        stack.callback(_kill, process)
        return process


def _bubblewrap() -> list[str]:
    """The command that puts what follows it into namespaces of its own."""
    program = shutil.which("bwrap")
    if program is None:
        raise InputError(_refusal("bwrap is not installed (Debian's package bubblewrap)"))
    # As root there is no user namespace to be nobody in: the runner changes its user itself, and may do only that.
    root = os.geteuid() == 0
    command = [program, "--die-with-parent", "--new-session", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    command += ["--unshare-cgroup-try", "--cap-drop", "ALL"]
    command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if root else ["--unshare-user"]
    command += ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for name in ("/bin", "/lib", "/lib32", "/lib64"):
        if os.path.islink(name):
            command += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            command += ["--ro-bind", name, name]
    prefix = os.path.realpath(sys.base_prefix)
    if not Path(prefix).is_relative_to("/usr"):
        for parent in reversed(Path(prefix).parents[:-1]):  # it may be below a home that is closed to others; the mount alone is open
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", prefix, prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    return [*command, "--"]


def _refusal(reason: str) -> str:
    return (
        f"verifier.args: sandbox: programs cannot be run in a sandbox here: {reason}. Install bubblewrap and allow user namespaces, or ask "
        "for `sandbox: rlimits` by name: it limits time, memory and files only, so that a program can read what this user can read and use "
        "the network."
    )


def _file(stack: ExitStack, text: str) -> int:
    """A file in memory with a text, open at its beginning."""
    descriptor = os.memfd_create("text")
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _wait(process: subprocess.Popen, deadline: float, most: int) -> Ran:
    """Read the process's output until it ends, the deadline comes, or there are more than `most` bytes; then it is dead."""
    streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    output, errors = streams.values()
    open_streams = set(streams)
    detail = ""
    while open_streams and not detail:
        ready, _, _ = select.select(list(open_streams), [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            detail = "not done in time"
        for descriptor in ready:
            data = os.read(descriptor, 1 << 16)
            if not data:
                open_streams.discard(descriptor)
            streams[descriptor] += data
            if len(streams[descriptor]) > most:
                detail = "too much output"
    if not detail:
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its streams and goes on
            detail = "not done in time"
    if detail:
        _kill(process)
        return Ran(bytes(output[:most]), None, detail)
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    return Ran(bytes(output), code, (lines[-1] if lines else f"exit code {code}") if code else "")


def _kill(process: subprocess.Popen) -> None:
    """The process with all that it started; bubblewrap's namespace ends with it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _started(channel: socket.socket) -> bool:
    try:
        return channel.recv(len(sandbox_runner.HELLO)) == sandbox_runner.HELLO
    except OSError:
        return False
