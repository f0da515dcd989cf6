"""This process's place among the ranks."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megarl import platform

if TYPE_CHECKING:
    from megarl.config.recipe import Layout


def join(rank: int, world_size: int, address: str, port: int, timeout_s: int = 1800) -> None:
    """Join the process group of all ranks; rank 0 listens at `address`:`port`. `timeout_s` limits this and every later collective."""
    dist.init_process_group(
        platform.communication_backend(),
        init_method=f"tcp://{address}:{port}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def initialize(layout: Layout, seed: int) -> None:
    """Set up Megatron's parallel state on the ranks that have joined, of which there must be `layout.world_size`."""
    platform.prepare_megatron()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if dist.get_world_size() != layout.world_size:
        raise ValueError(f"the layout takes {layout.world_size} ranks; {dist.get_world_size()} have joined")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
