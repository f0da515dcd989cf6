"""This process's place among the ranks."""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist

from megarl import platform


def initialize(
    rank: int, world_size: int, address: str, port: int, *, tensor: int, pipeline: int, seed: int, timeout_s: int = 1800
) -> None:
    """Join the process group and set up Megatron's parallel state. Data-parallel size is what is left of `world_size`."""
    platform.prepare_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group(
        platform.communication_backend(),
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
