"""Weights and optimizer state by Megatron's distributed checkpoints, which load under another layout than they were saved with."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megarl.errors import InputError
from megarl.models.policy import unwrap

# The distributed optimizer's shards are put together by parameter, so that any other layout can read them.
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


def _weights(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    return {f"model{i}": unwrap(chunk).sharded_state_dict(metadata=dict(_METADATA)) for i, chunk in enumerate(chunks)}


def _state(chunks: Sequence[torch.nn.Module], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    """What is saved: tensors, and the number of updates that Adam has seen.

    The optimizer's plain values (groups of parameters, rates) stay this run's own: they come from the recipe, and there are two sets of
    them where experts have an optimizer to themselves, which depends on the layout.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

    state = _weights(chunks)
    tensors = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=dict(_METADATA))
    keep = (ShardedBase, LocalNonpersistentObject)
    state["optimizer"] = dict_list_map_inplace(lambda value: value if isinstance(value, keep) else LocalNonpersistentObject(value), tensors)
    return state | {"updates": max((group.get("step", 0) for group in optimizer.param_groups), default=0)}


def save(chunks: Sequence[torch.nn.Module], optimizer: Any, folder: str) -> None:
    """Save into an existing, empty folder. A collective of all ranks; complete when it has returned on all of them."""
    from megatron.core import dist_checkpointing

    # Results of a synchronous save are passed within this process. Megatron would start a manager process for them, which imports
    # everything anew and outlives a rank that is killed.
    _pass_results_by(queue.Queue())
    dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), folder)


def begin_save(chunks: Sequence[torch.nn.Module], optimizer: Any, folder: str) -> Any:
    """Start to save the present state into an existing, empty folder while training goes on. A collective of all ranks.

    What it returns is for `finish_save`. Until that has returned on all ranks the folder is no checkpoint, and `load` refuses it.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    # The writer is a fork of this process: it sees the weights of this moment, and its end of the queue.
    _pass_results_by(multiprocessing.get_context("fork").Queue())
    pending = AsyncCallsQueue()
    pending.schedule_async_request(dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), folder, async_sharded_save=True))
    return pending


def finish_save(pending: Any) -> None:
    """Wait until what `begin_save` started is a whole checkpoint. A collective of all ranks; raises where the writing failed."""
    pending.maybe_finalize_async_calls(blocking=True)


def _pass_results_by(results: Any) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = results


def load(chunks: Sequence[torch.nn.Module], optimizer: Any, folder: str) -> None:
    """Load what `save` wrote, whatever the layout was then. A collective of all ranks.

    Raises InputError if the checkpoint is damaged or of another model; missing or unexpected entries count as such: an optimizer moment
    that is left at zero would go unnoticed.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with _refusing(folder):
        state = dist_checkpointing.load(_state(chunks, optimizer, is_loading=True), folder, strict=StrictHandling.RAISE_ALL)
        for i, chunk in enumerate(chunks):
            unwrap(chunk).load_state_dict(state[f"model{i}"])
        with torch.no_grad():
            optimizer.load_state_dict(state["optimizer"])
        for group in optimizer.param_groups:
            group["step"] = state["updates"]


def save_weights(chunks: Sequence[torch.nn.Module], folder: str) -> None:
    """Save the weights alone into an existing, empty folder. A collective of all ranks."""
    from megatron.core import dist_checkpointing

    _pass_results_by(queue.Queue())
    dist_checkpointing.save(_weights(chunks), folder)


def load_weights(chunks: Sequence[torch.nn.Module], folder: str) -> None:
    """Load the weights alone, of a checkpoint that may hold more. A collective of all ranks. Raises InputError if some are missing."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    with _refusing(folder):
        state = dist_checkpointing.load(_weights(chunks), folder, strict=StrictHandling.RAISE_UNEXPECTED)
        for i, chunk in enumerate(chunks):
            unwrap(chunk).load_state_dict(state[f"model{i}"])


@contextlib.contextmanager
def _refusing(folder: str) -> Iterator[None]:
    """Whatever Megatron, torch and the file system raise for files that are not what they should be, as an InputError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        reason = str(error).strip().splitlines()
        raise InputError(f"{folder}: the checkpoint cannot be loaded ({type(error).__name__}: {reason[-1] if reason else ''}).") from None
