"""What a Ray cluster and a rollout engine need to know about the machine."""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from megarl.platform import reaper
from megarl.platform.device import gpus, has_gpu

LOOPBACK = "127.0.0.1"


def engine_environment(threads: int = 1) -> dict[str, str]:
    """Environment variables of an engine actor. `threads`: OpenMP threads of its kernels, on a CPU."""
    common = {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # The engine core runs in the actor: one process less, and nothing that outlives the actor.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if has_gpu():
        return common
    return common | {
        "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than any run on a CPU gains from it
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while another process has their core make generation ten times slower
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" puts every engine on the first core
        "VLLM_HOST_IP": LOOPBACK,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def engine_resources(tensor_parallel: int) -> dict[str, Any]:
    """What an engine actor asks of Ray: its GPUs, or nothing (a CPU is shared by all)."""
    return {"num_cpus": 0, "num_gpus": tensor_parallel if has_gpu() else 0}


def available_gpus() -> int | None:
    """GPUs of the Ray cluster, inside `ray_cluster`; before it those of this machine, or None where another cluster is to be joined."""
    import ray

    if ray.is_initialized():
        return int(ray.cluster_resources().get("GPU", 0))
    return None if os.environ.get("RAY_ADDRESS") else gpus()


@contextmanager
def ray_cluster(object_store_mib: int = 128) -> Iterator[None]:
    """Join the Ray cluster at RAY_ADDRESS if that is set; else run one on this machine, bound to loopback, for the time of the block.

    Ray's processes end with this one, however it ends: most ask the kernel to be told, a watching process takes care of the others.
    """
    import ray
    from ray._private import ray_constants

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        try:
            yield
        finally:
            ray.shutdown()
        return
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # loopback only; else a token is written into the home folder
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # its default of 15 starves the actors beside anything else; they are the work
        # Despite its name: without it Ray replaces the loopback address by the machine's own and listens on every interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    cluster_was_enabled, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False  # read when ray was imported
    folder = tempfile.mkdtemp(prefix="megarl-ray-")
    watching = None
    try:
        with _own_session():
            ray.init(
                address="local",
                num_cpus=1,  # actors share the machine and ask for none; Ray starts one idle worker per CPU that it is told of
                include_dashboard=False,
                object_store_memory=object_store_mib << 20,
                _node_ip_address=LOOPBACK,
                _temp_dir=folder,
                **quiet,
            )
        watching = _start_reaper(folder)
        yield
    finally:
        ray.shutdown()
        if watching is not None:
            watching.kill()
            watching.wait()
        ray_constants.ENABLE_RAY_CLUSTER = cluster_was_enabled
        shutil.rmtree(folder, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _own_session() -> Iterator[None]:
    """Ray's processes get sessions of their own: a signal to this process's group (Ctrl-C, `timeout`) must reach this process alone, which
    then ends its step and stops them in order."""
    from ray._private import services

    plain = services.ConsolePopen
    services.ConsolePopen = functools.partial(plain, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = plain


def _start_reaper(folder: str) -> subprocess.Popen[bytes]:
    processes = [f"{child.pid}:{reaper.start_time(child.pid)}" for child in psutil.Process().children(recursive=True)]
    return subprocess.Popen([sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), folder, *processes], start_new_session=True)
