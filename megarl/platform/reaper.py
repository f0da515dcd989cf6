"""Ends the processes named on the command line when the parent process is gone.

Run as a script by the process that owns a Ray cluster: when that one is killed, Ray's agents take long to find out by themselves.
Arguments: parent's pid, folder to remove, and a `PID:START_TIME` for each process. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

POLL_S = 0.5


def start_time(pid: int) -> str:
    """When a process started, in ticks since boot; empty if there is none. It tells a process from a later one with its pid."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def main(arguments: list[str]) -> None:
    parent, folder, processes = int(arguments[0]), arguments[1], [argument.split(":") for argument in arguments[2:]]
    while os.getppid() == parent:
        time.sleep(POLL_S)
    for pid, started in processes:
        if start_time(int(pid)) == started:
            os.kill(int(pid), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1:])
