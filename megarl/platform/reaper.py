"""Ends the processes named on the command line when the parent process is gone.

Run as a script by the process that owns a Ray cluster, with `PID:START_TIME` arguments: when that process is killed, Ray's agents find out by
themselves only after minutes. Arguments: parent, folder to remove, processes. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

POLL_S = 0.5


def start_time(pid: int) -> str:
    """When a process started, in ticks since boot; empty if there is none. With the pid it names a process for good: pids are used again."""
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
