"""Off-policy weights: the trainer's log-probs at the start of the step against the sampler's. Detached; they multiply the token loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megarl.objectives.batch import segment_sum

LOG_RATIO_LIMIT = 20.0


def off_policy_weights(
    log_ratio: Tensor, mask: Tensor, term_mask: Tensor, sequence: Tensor, responses: int, correction: dict[str, Any]
) -> Tensor:
    """w [T] from log_ratio = old_logp - rollout_logp [T] for `correction` {kind, low, high, normalize}.

    `mask`: trained tokens; products and means run over them. `term_mask`: those left after dropped responses; `normalize` divides by the
    mean over them. Kinds: token_tis, sequence_tis (truncated), token_mis, icepop, sequence_mis (masked), geometric (rejection).
    """
    kind = correction["kind"]
    low = 0.0 if correction["low"] is None else correction["low"]
    high = torch.inf if correction["high"] is None else correction["high"]
    log_ratio = torch.where(mask, log_ratio, 0.0)
    exponent = log_ratio
    if kind not in ("token_tis", "token_mis", "icepop"):
        exponent = segment_sum(log_ratio, sequence, responses)
        if kind == "geometric":
            exponent = exponent / segment_sum(mask.to(exponent.dtype), sequence, responses).clamp(min=1)
        exponent = exponent[sequence]
    ratio = exponent.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    inside = (ratio >= low) & (ratio <= high)
    if kind in ("token_tis", "sequence_tis"):
        weights = ratio.clamp(low, high)
    elif kind == "geometric":
        weights = inside.to(ratio.dtype)
    else:
        weights = torch.where(inside, ratio, 0.0)
    if correction["normalize"]:
        mean = weights[term_mask].mean() if bool(term_mask.any()) else weights.new_zeros(())
        weights = torch.where(mean > 0, weights / mean, weights)
    return weights


def mismatch_statistics(log_ratio: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """How far trainer and sampler are apart, from log_ratio = old_logp - rollout_logp [n] at the trained tokens, and what the weights do.

    `kl_k1`, `kl_k3` estimate KL(rollout || trainer); `chi2` = E rho^2 - 1; `effective_share` = (sum w)^2 / (n sum w^2).
    """
    if len(log_ratio) == 0:
        return {}
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    result = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "kl_k1": -log_ratio.mean(),
        "kl_k3": (ratio - 1 - log_ratio).mean(),
        "chi2": ratio.square().mean() - 1,
    }
    if weights is not None:
        result["zero_share"] = (weights == 0).to(ratio.dtype).mean()
        result["effective_share"] = weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)
    return result
