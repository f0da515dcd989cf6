"""Forward and backward through Megatron's schedules, on whatever pipeline there is.

Scaling of the loss, settled here once. An objective's loss is already divided by the denominators of the whole update, so the gradient
wanted is the plain sum over micro-batches and data-parallel ranks. Megatron divides in three places unless told otherwise: the schedule
by the number of micro-batches, DDP by the number of ranks, and `finalize_model_grads` by the number of tokens. With
`calculate_per_token_loss` and a three-tuple from the loss function the first two are off; the third is off because
`_finalize_sum` does not pass the token count on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megarl import platform
from megarl.models.logprobs import collision_statistics, token_logprobs
from megarl.training.batching import Plan, collate
from megarl.training.sequences import Sequences


@dataclass
class TokenOutputs:
    """What the last stage computes for the response tokens of one micro-batch, [t] each."""

    token_index: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor | None
    collision: torch.Tensor | None
    """sum_i p_i^2; with it `plogp_squares`, sum_i p_i^2 ln p_i. None unless asked for."""
    plogp_squares: torch.Tensor | None
    anchor: torch.Tensor
    """Zero, and a function of the model's output: added to the loss it keeps an empty micro-batch in the graph."""


def _finalize_sum(model, num_tokens=None, **groups):
    finalize_model_grads(model, None, **groups)


def wrap_for_training(model: torch.nn.Module, *, distributed_optimizer: bool) -> DistributedDataParallel:
    """Megatron's DDP around a stage: gradients are summed in fp32 over the data-parallel ranks."""
    config = get_model_config(model)
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer)
    wrapped = DistributedDataParallel(config=config, ddp_config=settings, module=model)
    config.finalize_model_grads_func = _finalize_sum
    return wrapped


def _tensor(array) -> torch.Tensor:
    return torch.from_numpy(array).to(platform.device())


def run_micro_batches(
    model: torch.nn.Module,
    sequences: Sequences,
    plan: Plan,
    *,
    temperature: float,
    vocab_size: int,
    loss: Callable[[TokenOutputs], tuple[torch.Tensor, dict]] | None,
    entropy: bool,
    collision: bool = False,
) -> Iterable[dict]:
    """Run this rank's micro-batches of `plan`; with `loss` forward and backward, without it forward only.

    `loss` takes the outputs of a micro-batch and gives (its share of the update's loss, a dict to be returned). Without it the dicts hold
    `token_index`, `logp` and `entropy` (None unless it is asked for). Only the last pipeline stage has dicts; the others return none.
    """
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    mine = plan.rows[parallel_state.get_data_parallel_rank()]

    def forward_step(batches, stage):
        batch = next(batches)
        tokens = _tensor(batch.tokens)
        position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        logits = stage(tokens, position_ids, positions=_tensor(batch.positions))

        def finish(logits):
            logp, entropies = token_logprobs(
                logits, _tensor(batch.labels), temperature=temperature, vocab_size=vocab_size, group=tensor_group, entropy=entropy
            )
            count = len(batch.token_index)
            squares = (
                collision_statistics(logits, temperature=temperature, vocab_size=vocab_size, group=tensor_group) if collision else None
            )
            outputs = TokenOutputs(
                _tensor(batch.token_index),
                logp[:count],
                entropies[:count] if entropy else None,
                *((None, None) if squares is None else (x[:count] for x in squares)),
                0.0 * logp.sum(),
            )
            if loss is None:
                value, result = outputs.anchor, {"token_index": batch.token_index, "logp": outputs.logp, "entropy": outputs.entropy}
            else:
                value, result = loss(outputs)
            return value, torch.ones((), dtype=torch.int, device=logits.device), result

        return logits, finish

    rows, length = plan.fixed_shape or (1, 1)  # used by pipeline stages only
    # Log-prob passes run in eval mode; there is no dropout, but a layer added later must not find itself training.
    model.train(loss is not None)
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([collate(sequences, rows_of_batch, plan) for rows_of_batch in mine]),
        model=model,
        num_microbatches=plan.count,
        seq_length=length,
        micro_batch_size=rows,
        forward_only=loss is None,
    )
