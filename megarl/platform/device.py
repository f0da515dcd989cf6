"""Questions about the machine, answered in one place."""

from __future__ import annotations

import importlib.util
import os

import torch


def has_gpu() -> bool:
    """Whether this process sees a GPU."""
    return torch.cuda.is_available()


def gpus() -> int:
    """Number of GPUs that this process sees."""
    return torch.cuda.device_count()


def device() -> torch.device:
    """Where this process keeps its tensors: its GPU, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if has_gpu() else torch.device("cpu")


def communication_backend() -> str:
    """The torch.distributed backend for model tensors."""
    return "nccl" if has_gpu() else "gloo"


def fused_kernels() -> bool:
    """Whether Transformer Engine's layers are to be used. Never on a CPU: importing it there raises an error of its own."""
    return has_gpu() and importlib.util.find_spec("transformer_engine") is not None


def use_threads(threads: int) -> None:
    """Number of CPU threads of this process's kernels."""
    torch.set_num_threads(threads)


def use_gpu(index: int) -> None:
    """Make the `index`-th GPU this process's own; nothing where there is none."""
    if has_gpu():
        torch.cuda.set_device(index)


def synchronize() -> None:
    """Wait until the work given to the GPU is done, so that a clock can be read."""
    if has_gpu():
        torch.cuda.synchronize()


def rank_environment(threads: int) -> dict[str, str]:
    """Environment variables that a training rank needs before it imports torch. `threads`: of its CPU kernels."""
    common = {
        "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        # Waiting threads that spin take the cores from the engine and from each other: several times slower wherever cores are shared.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Expected on a CPU, and said once per process otherwise: what Megatron falls back to without its fused kernels.
        "PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "ignore"),
    }
    if has_gpu():
        # One connection keeps the order of kernels that Megatron's communication overlap relies on. Asking NVML whether there is a GPU
        # leaves CUDA untouched, so that a process that has asked can still be forked.
        return common | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    # Compiling the small helper functions that Megatron decorates costs minutes of C++ compilation and gains nothing here.
    return common | {"TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}


def rank_resources() -> dict[str, float]:
    """What a training rank asks of Ray: one GPU, or nothing (a CPU is shared by all)."""
    return {"num_cpus": 0, "num_gpus": 1 if has_gpu() else 0}


def prepare_megatron() -> None:
    """Make `megatron.core` usable on this machine. Call before its first import; does nothing on a GPU; safe to repeat."""
    if has_gpu():
        return
    from megarl.platform import megatron_cpu

    megatron_cpu.install()
