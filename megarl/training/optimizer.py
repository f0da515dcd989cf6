"""Megarl's optimizer settings as Megatron's optimizer, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config.recipe import Optimizer


def learning_rate(settings: Optimizer, step: int, total_steps: int) -> float:
    """The rate of step `step` (from 1) of `total_steps`: linear warm-up, then the schedule.

    It depends on nothing but the step, so a resumed run cannot go on with another one.
    """
    if step <= settings.warmup_steps:
        return settings.learning_rate * step / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    share = 1 - progress if settings.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return settings.learning_rate * (settings.final_fraction + (1 - settings.final_fraction) * share)


def build_optimizer(settings: Optimizer, bf16: bool, model_chunks: list):
    """Megatron's AdamW over the model chunks. Weight decay spares norms and biases, as Megatron's default has it."""
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            min_lr=0.0,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            adam_eps=settings.epsilon,
            clip_grad=settings.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=settings.distributed,
            overlap_param_gather=settings.overlap,
        ),
        model_chunks,
    )


def optimizer_step(optimizer, rate: float) -> float:
    """Clip and update; returns the gradient norm before clipping.

    Raises:
        FloatingPointError: the gradient is not finite. The weights must not be used after it.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_mult", 1.0)
    _, norm, _ = optimizer.step()
    norm = math.nan if norm is None else float(norm)
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradient norm is {norm}: the loss or a log-prob of this mini-batch is not finite")
    return norm
