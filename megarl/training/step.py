"""Forward and backward through Megatron's schedules, on whatever pipeline there is.

Scaling of the loss, settled here once. An objective's loss is already divided by the denominators of the whole update, so the gradient
wanted is the plain sum over micro-batches and data-parallel ranks. Megatron divides in three places unless told otherwise: the schedule
by the number of micro-batches, DDP by the number of ranks, and `finalize_model_grads` by the number of tokens. With
`calculate_per_token_loss` and a three-tuple from the loss function the first two are off; the third is off because
`_finalize_sum` does not pass the token count on. Context-parallel ranks hold different tokens of the same sequences, so they count among
the data-parallel ranks here: Megatron's DDP sums over both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from megarl import platform
from megarl.models.logprobs import TokenStatistics
from megarl.training.batching import Collated, Plan, collate
from megarl.training.sequences import Sequences

if TYPE_CHECKING:
    from megarl.config.recipe import Optimizer
    from megarl.objectives import SequenceSums


@dataclass
class TokenOutputs:
    """What the last stage computes for the response tokens of one micro-batch, [t] each."""

    token_index: torch.Tensor
    logp: torch.Tensor
    entropy: torch.Tensor | None
    collision: torch.Tensor | None
    """sum_i p_i^2; with it `collision_log`, sum_i p_i^2 ln p_i. None unless asked for."""
    collision_log: torch.Tensor | None
    anchor: torch.Tensor
    """Zero, and a function of the model's output: added to the loss it keeps an empty micro-batch in the graph."""


def _finalize_sum(model, num_tokens=None, **groups):
    finalize_model_grads(model, None, **groups)


def wrap_for_training(chunks: Sequence[torch.nn.Module], settings: Optimizer) -> list[DistributedDataParallel]:
    """Megatron's DDP around the chunks of a stage: gradients are summed in fp32 over the data-parallel and context-parallel ranks."""
    config = get_model_config(chunks[0])
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=settings.distributed,
        overlap_grad_reduce=settings.overlap,
        overlap_param_gather=settings.overlap,
    )
    # Buckets of the first chunk only: there is nothing left to overlap with when the gradients of the others are ready.
    wrapped = [DistributedDataParallel(config=config, ddp_config=ddp, module=m, disable_bucketing=i > 0) for i, m in enumerate(chunks)]
    config.finalize_model_grads_func = _finalize_sum
    if settings.overlap:
        no_sync = [chunk.no_sync for chunk in wrapped]  # reduce in the last micro-batch only
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def complete_weights(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the weights now that an overlapped optimizer leaves for the next forward pass. A collective of all ranks."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def complete_gradients(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the gradients of which a distributed optimizer leaves every rank its own part. A collective of all ranks."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if not chunk.ddp_config.use_distributed_optimizer:
                continue
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets:
                mine = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)


def sum_over_context(sums: SequenceSums | None) -> SequenceSums | None:
    """The numbers that couple the tokens of a micro-batch, from the parts that its context-parallel ranks hold."""
    group = parallel_state.get_context_parallel_group()
    if sums is None or group.size() == 1:
        return sums
    packed = sums.packed()
    dist.all_reduce(packed, group=group)
    return type(sums)(*packed)


def _tensor(array) -> torch.Tensor:
    return torch.from_numpy(array).to(platform.device())


def _packed_params(batch: Collated) -> PackedSeqParams | None:
    """Bounds of the sequences in a packed micro-batch. A sequence's padding counts as part of it: it comes last, where causal attention
    keeps it out of the others, and leaves no token whose attention is undefined."""
    if batch.cu_seqlens_padded is None:
        return None
    bounds, longest = _tensor(batch.cu_seqlens_padded), batch.max_seqlen
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    sequences: Sequences,
    plan: Plan,
    *,
    temperature: float,
    vocab_size: int,
    loss: Callable[[TokenOutputs], tuple[torch.Tensor, dict]] | None,
    entropy: bool,
    collision: bool = False,
    chunk_tokens: int | None = None,
) -> Iterable[dict]:
    """Run this rank's micro-batches of `plan` through its chunks of the model; with `loss` forward and backward, without it forward only.

    `loss` takes the outputs of a micro-batch (of a context-parallel rank: of its tokens) and gives (its share of the update's loss, a dict
    to be returned). Without it the dicts hold `token_index`, `logp` and `entropy` (None unless it is asked for). Only the last pipeline
    stage has dicts; the others return none. `chunk_tokens`: tokens whose logits exist at a time (models/logprobs.py).
    """
    options = {
        "temperature": temperature,
        "vocab_size": vocab_size,
        "entropy": entropy,
        "collision": collision,
        "chunk_tokens": chunk_tokens,
    }
    mine = plan.rows[parallel_state.get_data_parallel_rank()]
    batches = [collate(sequences, rows, plan, parallel_state.get_context_parallel_rank()) for rows in mine]

    def forward_step(iterator, chunk):
        batch = next(iterator)
        out = chunk(
            _tensor(batch.tokens),
            _tensor(batch.position_ids),
            positions=_tensor(batch.positions),
            labels=_tensor(batch.labels),
            packed_seq_params=_packed_params(batch),
            **options,
        )

        def finish(tokens: TokenStatistics):
            count = len(batch.token_index)
            cut = lambda numbers: None if numbers is None else numbers[:count]
            statistics = (cut(x) for x in (tokens.logp, tokens.entropy, tokens.collision, tokens.collision_log))
            outputs = TokenOutputs(_tensor(batch.token_index), *statistics, 0.0 * tokens.logp.sum())
            if loss is None:
                value, result = outputs.anchor, {"token_index": batch.token_index, "logp": outputs.logp, "entropy": outputs.entropy}
            else:
                value, result = loss(outputs)
            return value, torch.ones((), dtype=torch.int, device=platform.device()), result

        return out, finish

    rows, length = plan.fixed_shape or (1, 1)  # used by pipeline stages only
    for chunk in chunks:
        # Log-prob passes run in eval mode; there is no dropout, but a layer added later must not find itself training.
        chunk.train(loss is not None)
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if several else iter(batches),
        model=list(chunks) if several else chunks[0],
        num_microbatches=plan.count,
        seq_length=length,
        micro_batch_size=rows,
        forward_only=loss is None,
    )
