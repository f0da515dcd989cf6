"""Generalised advantage estimation of a whole batch at once (1506.02438, eq. 16)."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.objectives.batch import segment_max


def discounted_sums(terms: Tensor, decay: Tensor, sequence: Tensor) -> Tensor:
    """x_t = terms_t + decay x_{t+1} within each response, x = 0 after its last token.

    `terms` [n], `decay` [n] (constant within a response), `sequence` [n]: non-decreasing. Returns [n].
    Instead of stepping through positions, the reach doubles: after j rounds x_t holds the 2^j terms from t on, so the longest response
    of length L takes ceil(log2 L) vector operations. No powers are divided by, so nothing underflows.
    """
    result = terms.clone()
    if len(terms) == 0:
        return result
    reach, power = 1, decay.clone()
    longest = int(torch.unique_consecutive(sequence, return_counts=True)[1].max())
    while reach < longest:
        same = sequence[reach:] == sequence[:-reach]
        # The right side is complete before the addition: overlapping slices are not updated one after the other.
        addition = torch.where(same, power[:-reach] * result[reach:], 0.0)
        result[:-reach] += addition
        power = power * power
        reach *= 2
    return result


def next_in_response(values: Tensor, sequence: Tensor, after_last: Tensor) -> Tensor:
    """values_{t+1} [n]; `after_last` [N] by response where t is the last token."""
    result = after_last[sequence]
    same = sequence[1:] == sequence[:-1]
    result[:-1] = torch.where(same, values[1:], result[:-1])
    return result


def generalized_advantages(rewards: Tensor, values: Tensor, sequence: Tensor, after_last: Tensor, gamma: float, decay: Tensor) -> Tensor:
    """A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t.

    `rewards`, `values`, `sequence` [n]: the trained tokens only (gaps in the mask are closed before). `after_last` [N]: the value after
    the last token; `decay` [N]: lambda of each response.
    """
    deltas = rewards + gamma * next_in_response(values, sequence, after_last) - values
    return discounted_sums(deltas, (gamma * decay)[sequence], sequence)


def last_token(sequence: Tensor, size: int) -> Tensor:
    """Index [N] of each response's last entry in `sequence` [n]; -1 for a response without one."""
    positions = torch.arange(len(sequence), device=sequence.device, dtype=torch.float64)
    return segment_max(positions, sequence, size).clamp(min=-1).long()


def length_adaptive_lambda(length: Tensor, alpha: float) -> Tensor:
    """VAPO's lambda = 1 - 1/(alpha l), clamped to [0, 1] (2504.05118, eq. 9). `length` [N] in trained tokens."""
    return (1 - 1 / (alpha * length.clamp(min=1))).clamp(0, 1)


def whiten(numbers: Tensor, equal_tol: float) -> Tensor:
    """(x - mean) / sqrt(population variance + 1e-8) over `numbers` [n]; 0 if they are all equal up to `equal_tol`."""
    if len(numbers) == 0:
        return numbers
    centred = numbers - numbers.mean()
    scaled = centred / (centred.square().mean() + 1e-8).sqrt()
    return torch.where(numbers.max() - numbers.min() < equal_tol, 0.0, scaled)
