"""Estimators of KL(policy || reference) at the sampled token (Schulman, "Approximating KL divergence")."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def kl_estimate(log_ratio: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """The estimate and its derivative with respect to the policy's log-prob, from x = logp - ref_logp [t], detached.

    k1 = x, k2 = x^2/2, k3 = min(e^-x - 1 + x, 10), with x clamped to [-20, 20]; the derivative is 0 where a clamp is active.
    """
    x = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        value, slope = x, torch.ones_like(x)
    elif estimator == "k2":
        value, slope = x.square() / 2, x
    else:
        value, slope = torch.expm1(-x) + x, -torch.expm1(-x)
        slope = torch.where(value > K3_LIMIT, 0.0, slope)
        value = value.clamp(max=K3_LIMIT)
    return value, torch.where(x == log_ratio, slope, 0.0)
