"""Token losses of the policy: value and slope (derivative with respect to the token's own log-prob), both detached.

Every token loss here is a function of one log-prob, given per-response numbers that are computed beforehand. So its derivative is written
down beside it instead of being traced, and the whole policy loss is one node of the autograd graph (`objective.LinearLoss`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMITS = (-20.0, 10.0)


@dataclass
class TokenLoss:
    """[t] each."""

    value: Tensor
    slope: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None
    """True where the clip, not the log-prob, decides the loss."""


def token_ratio(logp: Tensor, old_logp: Tensor) -> tuple[Tensor, Tensor]:
    """pi/pi_old at each token [t] and its derivative; the log-ratio is clamped to [-20, 20]."""
    log_ratio = logp - old_logp
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = clamped.exp()
    return ratio, torch.where(clamped == log_ratio, ratio, 0.0)


def sequence_ratio(mean_log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """GSPO-token (2507.18071, eq. 13): the value of the sequence ratio, a slope in the token's own log-prob only.

    `mean_log_ratio` [t]: of the token's response, clamped to [-20, 10].
    """
    clamped = mean_log_ratio.clamp(*SEQUENCE_LOG_RATIO_LIMITS)
    ratio = clamped.exp()
    return ratio, torch.where(clamped == mean_log_ratio, ratio, 0.0)


def clip_band(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """`ratio` clamped to [1 - low, 1 + high]; None leaves a side open."""
    if low is None and high is None:
        return ratio
    return ratio.clamp(None if low is None else 1 - low, None if high is None else 1 + high)


def clipped_surrogate(
    ratio: Tensor, ratio_slope: Tensor, advantage: Tensor, low: float | None, high: float | None, dual: float | None
) -> TokenLoss:
    """PPO's max(-r A, -clip(r) A) (1707.06347, eq. 7); with `dual`, at most -dual A where A < 0 (1912.09729)."""
    value = -ratio * advantage
    bound = -clip_band(ratio, low, high) * advantage
    clipped = bound > value
    value = torch.maximum(value, bound)
    if dual is not None:
        ceiling = torch.where(advantage < 0, -dual * advantage, torch.inf)
        clipped = clipped | (value > ceiling)
        value = torch.minimum(value, ceiling)
    return TokenLoss(value, torch.where(clipped, 0.0, -ratio_slope * advantage), ratio, clipped)


def weighted_log_prob(logp: Tensor, weight: Tensor | float, advantage: Tensor) -> TokenLoss:
    """-w A log pi with a constant weight w: REINFORCE for w = 1, CISPO (2506.13585, eq. 4) for the clipped ratio."""
    slope = -weight * advantage
    return TokenLoss(slope * logp, slope)


def capped_surrogate(ratio: Tensor, ratio_slope: Tensor, advantage: Tensor, high: float | None) -> TokenLoss:
    """WAPO's -min(r, 1 + high) A; no lower clip. A winner's advantage is positive."""
    cap = math.inf if high is None else 1 + high
    clipped = ratio > cap
    return TokenLoss(-ratio.clamp(max=cap) * advantage, torch.where(clipped, 0.0, -ratio_slope * advantage), ratio, clipped)


def clipped_log_ratio(delta: Tensor, coefficient: Tensor, low: float | None, high: float | None, mode: str) -> TokenLoss:
    """LPO's token term (2605.06139, app. D.3): the coefficient c times the log-ratio `delta` [t] to the sampler.

    `hard`: c clip(delta), `pessimistic`: max(c delta, c clip(delta)), `none`: c delta; clip is to [ln(1 - low), ln(1 + high)].
    """
    ratio = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    value = coefficient * delta
    if mode == "none":
        return TokenLoss(value, coefficient, ratio)
    lower = -math.inf if low is None or low >= 1 else math.log1p(-low)
    upper = math.inf if high is None else math.log1p(high)
    clamped = delta.clamp(lower, upper)
    bound = coefficient * clamped
    if mode == "hard":
        clipped = clamped != delta
        return TokenLoss(bound, torch.where(clipped, 0.0, coefficient), ratio, clipped)
    clipped = bound > value
    return TokenLoss(torch.maximum(value, bound), torch.where(clipped, 0.0, coefficient), ratio, clipped)


def value_surrogate(values: Tensor, old_values: Tensor, targets: Tensor, clip: float | None) -> TokenLoss:
    """1/2 max((V - T)^2, (clip(V, V_old - c, V_old + c) - T)^2) and its derivative with respect to V; None: 1/2 (V - T)^2."""
    error = values - targets
    if clip is None:
        return TokenLoss(error.square() / 2, error)
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    bounded_error = bounded - targets
    clipped = bounded_error.abs() > error.abs()
    value = torch.where(clipped, bounded_error, error).square() / 2
    return TokenLoss(value, torch.where(clipped & (bounded != values), 0.0, error), clipped=clipped)
