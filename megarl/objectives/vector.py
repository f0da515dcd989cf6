"""VPO: rewards of sets of solutions under random weightings of a reward vector (2605.22817)."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from megarl.errors import InputError
from megarl.objectives.batch import TokenBatch


def set_rewards(batch: TokenBatch, parameters: dict[str, Any]) -> Tensor:
    """Mean over the group's weights w of the best row's w.r, [N] float64; 0 for a response without rows.

    The weights are those of the batch, or `num_weights` drawn per (seed, step, group id) and shared by the group's responses.
    """
    if isinstance(batch.reward, Tensor):
        raise InputError("`reward` is a number; objective `vpo` expects a list of rows of rewards per response")
    device = batch.group.device
    rows_of = torch.tensor([len(rows) for rows in batch.reward], device=device)
    dimensions = _dimensions(batch)
    weights, is_weight = _group_weights(batch, dimensions, parameters)
    if int(rows_of.sum()) == 0:
        return torch.zeros(batch.num_responses, dtype=torch.float64, device=device)
    width = weights.shape[-1]
    rows = torch.cat([_padded(matrix.double(), width) for matrix in batch.reward if len(matrix)]).to(device)
    response = torch.repeat_interleave(torch.arange(batch.num_responses, device=device), rows_of)
    scores = torch.einsum("mk,mwk->mw", rows, weights[batch.group[response]])
    best = scores.new_full((batch.num_responses, scores.shape[1]), -torch.inf)
    best = best.scatter_reduce_(0, response[:, None].expand_as(scores), scores, "amax")
    counted = is_weight[batch.group]
    mean = torch.where(counted, best, 0.0).sum(1) / counted.sum(1).clamp(min=1)
    return torch.where(rows_of > 0, mean, 0.0)


def _padded(matrix: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(matrix, (0, width - matrix.shape[1]))


def _dimensions(batch: TokenBatch) -> list[int]:
    """k of each group; 0 where no response has rows."""
    dimensions = [0] * batch.num_groups
    for response, (group, matrix) in enumerate(zip(batch.group.tolist(), batch.reward, strict=True)):
        if len(matrix):
            if dimensions[group] not in (0, matrix.shape[1]):
                raise InputError(
                    f"`reward` of {batch.place(response)} has rows of {matrix.shape[1]} numbers; "
                    f"others of the group have {dimensions[group]}"
                )
            dimensions[group] = matrix.shape[1]
    return dimensions


def _group_weights(batch: TokenBatch, dimensions: list[int], parameters: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights [G, W, k] padded with zeros, and which of the W are weights [G, W]."""
    given = batch.weights or [None] * batch.num_groups
    drawn = []
    for group, (k, weights) in enumerate(zip(dimensions, given, strict=True)):
        if weights is None:
            seed = weight_seed(batch.seed, batch.step, batch.group_ids[group])
            weights = draw_weights(parameters["num_weights"], max(k, 1), parameters["alpha"], seed, parameters["sampler"])
        elif k and weights.shape[1] != k:
            raise InputError(f"`weights` of group {batch.group_ids[group]!r} have {weights.shape[1]} numbers; its reward rows have {k}")
        drawn.append(weights.double())
    count, width = max(len(w) for w in drawn), max(w.shape[1] for w in drawn)
    result = torch.stack([torch.nn.functional.pad(w, (0, width - w.shape[1], 0, count - len(w))) for w in drawn])
    lengths = torch.tensor([len(w) for w in drawn])
    is_weight = torch.arange(count)[None] < lengths[:, None]
    return result.to(batch.group.device), is_weight.to(batch.group.device)


def weight_seed(seed: int, step: int, group_id: str) -> int:
    """A seed of its own for each (seed, step, group id), so that the weights depend neither on the order of the groups nor on a resume."""
    digest = hashlib.blake2b(f"{seed}/{step}/{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def draw_weights(count: int, dimensions: int, alpha: float, seed: int, sampler: str = "iid") -> Tensor:
    """`count` weights [count, dimensions] from the symmetric Dirichlet(`alpha`), on the CPU in float64.

    `sampler` iid, or sobol: scrambled Sobol points through the spacings of sorted uniforms (alpha = 1) or inverse Gamma functions.
    """
    if dimensions == 1:
        return torch.ones(count, 1, dtype=torch.float64)
    if sampler == "iid":
        generator = torch.Generator().manual_seed(seed)
        gammas = torch._standard_gamma(torch.full((count, dimensions), alpha, dtype=torch.float64), generator)
        return _normalised(gammas)
    axes = dimensions - 1 if alpha == 1 else dimensions
    uniforms = torch.quasirandom.SobolEngine(axes, scramble=True, seed=seed % 2**31).draw(count, dtype=torch.float64)
    if alpha == 1:
        edges = torch.nn.functional.pad(uniforms.sort(1).values, (1, 0))
        return torch.diff(torch.nn.functional.pad(edges, (0, 1), value=1.0), dim=1)
    return _normalised(inverse_gamma_cdf(uniforms, alpha))


def _normalised(gammas: Tensor) -> Tensor:
    # A tiny alpha underflows all of a row's draws; its limit is a vertex of the simplex.
    total = gammas.sum(1, keepdim=True)
    vertex = torch.nn.functional.one_hot(gammas.argmax(1), gammas.shape[1]).double()
    return torch.where(total > 0, gammas / total.clamp(min=math.ulp(0.0)), vertex)


def inverse_gamma_cdf(uniforms: Tensor, alpha: float) -> Tensor:
    """x with P(alpha, x) = u, by bisection of ln x to full float64 precision."""
    low, high = torch.full_like(uniforms, -700.0), torch.full_like(uniforms, math.log(alpha + 50 * (1 + math.sqrt(alpha))))
    shape = torch.tensor(alpha, dtype=uniforms.dtype)
    for _ in range(64):
        middle = (low + high) / 2
        below = torch.special.gammainc(shape, middle.exp()) < uniforms
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return ((low + high) / 2).exp()


def exact_set_reward(rows: Tensor) -> float | None:
    """E over w ~ Dirichlet(1, ..., 1) of max_j w.r_j for `rows` [m, k], where it is cheap: m <= 1 or k <= 2. None otherwise.

    For k = 2, w = (x, 1 - x) with x uniform: the maximum of m lines, integrated piece by piece between their crossings.
    """
    rows = rows.double()
    if len(rows) == 0:
        return 0.0
    if len(rows) == 1:
        return float(rows.mean())
    if rows.shape[1] == 1:
        return float(rows.max())
    if rows.shape[1] > 2:
        return None
    intercept, slope = rows[:, 1], rows[:, 0] - rows[:, 1]
    crossings = (intercept[None] - intercept[:, None]) / (slope[:, None] - slope[None])
    crossings = crossings[crossings.isfinite() & (crossings > 0) & (crossings < 1)]
    edges = torch.cat([crossings.new_tensor([0.0]), crossings.unique(), crossings.new_tensor([1.0])])
    middle = (edges[1:] + edges[:-1]) / 2
    return float(((intercept[:, None] + slope[:, None] * middle).amax(0) * edges.diff()).sum())
