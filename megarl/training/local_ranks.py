"""Training ranks as processes of this machine that run one function and are gone: for tests, and for checks before a run.

A server process imports torch and Megatron once; every rank is a fork of it. So the first call takes some seconds, later ones a fraction
of one, and what a function patches or leaves behind dies with its process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver
from typing import Any

from megarl.errors import RunFailed
from megarl.platform.device import rank_environment

HOST = "127.0.0.1"


def run_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on `world_size` processes that are joined in a process group; its results in rank order.

    Function, arguments and results travel by pickle. Whatever happens, no process is left when this returns; if this process is killed,
    its ranks end too.

    Raises:
        The first exception of any rank, with that rank's traceback as a note; RunFailed for a rank that died without one.
    """
    from megarl.sync.transport import free_port

    work = pickle.dumps((function, arguments))
    context, port = _context(), free_port(HOST)
    processes, pipes = [], []
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(theirs, work, rank, world_size, port), name=f"rank {rank}")
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(pipes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # one that has not made its own group yet
        for process in processes:
            process.join()
        for pipe in pipes:
            pipe.close()


def _context() -> multiprocessing.context.ForkServerContext:
    """The server process must import torch with the environment of a rank; it inherits this process's."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megarl.training.preload"])
    with _environment(rank_environment(threads=1)):
        forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _collect(pipes: list[connection.Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        failures: list[tuple[float, BaseException]] = []
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        for pipe in connection.wait(waiting):
            rank = pipes.index(pipe)
            try:
                moment, data, error = pickle.loads(pipe.recv_bytes())
                results[rank] = None if data is None else pickle.loads(data)
            except EOFError:
                moment, error = float("inf"), RunFailed(f"rank {rank} of {len(pipes)} died")
            if error is not None:
                failures.append((moment, error))
        if failures:  # the others fail in its wake
            raise min(failures, key=lambda failure: failure[0])[1]
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(pipe: connection.Connection, work: bytes, rank: int, world_size: int, port: int) -> None:
    os.setpgid(0, 0)  # so that what this process starts ends with it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer: tuple[float, bytes | None, BaseException | None]
    try:
        answer = (0.0, _run(work, rank, world_size, port), None)
    except BaseException as error:
        error.add_note(f"on rank {rank} of {world_size}:\n{traceback.format_exc()}")
        answer = (time.monotonic(), None, error)
    try:
        data = pickle.dumps(answer)
    except Exception as error:
        data = pickle.dumps((answer[0], None, RunFailed(f"rank {rank}: {answer[2]!r} cannot be sent to another process ({error})")))
    pipe.send_bytes(data)


def _run(work: bytes, rank: int, world_size: int, port: int) -> bytes:
    import torch
    import torch.distributed as dist

    from megarl import platform
    from megarl.training import parallel

    torch.set_num_threads(1)
    platform.use_gpu(rank)
    parallel.join(rank, world_size, HOST, port)
    function, arguments = pickle.loads(work)
    result = function(*arguments)
    try:
        data = pickle.dumps(result)  # before the others are let go: what fails here must fail first
    except Exception as error:
        raise RunFailed(f"rank {rank}: {result!r} cannot be sent to another process ({error})") from None
    dist.barrier()  # a rank that leaves early would break connections that others still send over
    dist.destroy_process_group()
    return data


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)
