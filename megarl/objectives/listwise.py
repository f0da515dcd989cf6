"""LPO (2605.06139) and TPO (2604.06159): the group's responses as a list, moved towards a target distribution on that list.

Scores s [N] of the responses give the listwise policy P = softmax(s) within each group. A divergence D(P, w) to the target w has the
gradient sum_k c_k grad s_k with c_k = P_k (h_k - sum_j P_j h_j), h = dD/dP; so all that a loss needs are the numbers c.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.objectives.batch import segment_log_softmax, segment_sum

if TYPE_CHECKING:
    from megarl.objectives.rewards import Scored

LOG_RATIO_LIMIT = 20.0


def lpo_coefficients(
    log_policy: Tensor, log_target: Tensor, group: Tensor, groups: int, divergence: str, alpha: float | None = None
) -> Tensor:
    """c [N] from ln P and ln w [N] by response (2605.06139, eq. 9); sums to 0 over each group.

    r = w/P has its exponent clamped to [-20, 20]; the reverse KL's ln P - ln w is not clamped.
    """
    policy = log_policy.exp()
    if divergence == "forward_kl":
        return policy - log_target.exp()
    log_ratio = log_target - log_policy
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match divergence:
        case "reverse_kl":
            h = -log_ratio
        case "js":
            h = -torch.log((1 + ratio) / 2) / 2
        case "hellinger":
            h = (1 - ratio.sqrt()) / 2
        case "alpha":
            h = -ratio.pow(alpha) / alpha
        case "tv":
            h = torch.sign(policy - log_target.exp()) / 2
        case "chi2_reverse":
            h = 2 * (1 / ratio - 1)
        case "chi2_forward":
            h = 1 - ratio.square()
        case _:
            raise ValueError(f"unknown divergence {divergence!r}")
    return policy * (h - segment_sum(policy * h, group, groups)[group])


def lpo_targets(scored: Scored, batch_std: Tensor | None) -> dict[str, Tensor]:
    """What LPO fixes for the step, [N] each: `logit` = R/tau, `start` = s_t (absent if the update is on-policy), `silent`: c = 0."""
    batch, parameters = scored.batch, scored.parameters
    mean = scored.group_mean(scored.reward)
    silent = scored.equal_group
    match parameters["tau"]:
        case "group_std":
            tau = scored.group_std("population")
        case "one":
            tau = torch.ones_like(mean)
        case "group_mean":
            tau, silent = mean, silent | (mean <= parameters["equal_tol"])
        case "rloo":
            tau = (scored.group_size - 1) / scored.group_size
        case "batch_std":
            tau = batch_std.expand_as(mean)
        case value:
            tau = torch.full_like(mean, value)
    silent = silent | (tau <= 0)
    if batch.pull is not None:
        tau = tau * (1 + batch.pull.double())
    # A constant shift within a group cancels in the softmax; centring keeps R/tau small.
    result = {"logit": scored.centred / torch.where(silent, 1.0, tau), "silent": silent}
    if batch.old_logp is not None:
        result["start"] = mean_log_ratio(batch.old_logp, batch.rollout_logp, scored)
    return result


def mean_log_ratio(logp: Tensor, reference: Tensor, scored: Scored) -> Tensor:
    """Length-normalised log-ratio [N] over the trained tokens; 0 for a response without any."""
    delta = torch.where(scored.mask, (logp - reference).detach().double(), 0.0)
    return segment_sum(delta, scored.batch.sequence, scored.batch.num_responses) / scored.length.clamp(min=1)


def tpo_targets(scored: Scored) -> dict[str, Tensor]:
    """What TPO fixes for the step, [N] each: `logit` = u/eta with the z-score u, `start` = summed old log-prob (absent if on-policy)."""
    batch = scored.batch
    std = scored.group_std("population")
    flat = scored.equal_group | (std < 1e-6)
    u = torch.where(flat, 0.0, scored.centred / torch.where(flat, 1.0, std))
    result = {"logit": u / scored.parameters["eta"]}
    if batch.old_logp is not None:
        old = torch.where(scored.mask, batch.old_logp.detach().double(), 0.0)
        result["start"] = segment_sum(old, batch.sequence, batch.num_responses)
    return result


def lpo_scalars(
    score: Tensor, targets: dict[str, Tensor], group: Tensor, groups: int, divergence: str, alpha: float | None, pointwise: bool
) -> Tensor:
    """c [N] from the current scores s [N]: P = softmax(s), w = softmax(R/tau + s_t); `pointwise`: -w."""
    log_target = segment_log_softmax(targets["logit"] + targets.get("start", score), group, groups)
    if pointwise:
        coefficient = -log_target.exp()
    else:
        coefficient = lpo_coefficients(segment_log_softmax(score, group, groups), log_target, group, groups, divergence, alpha)
    return torch.where(targets["silent"], 0.0, coefficient)


def tpo_scalars(score: Tensor, targets: dict[str, Tensor], group: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """p - q, q and the log-normaliser of p, [N] each, from the current summed log-probs (2604.06159, eq. 4)."""
    log_old = segment_log_softmax(targets.get("start", score), group, groups)
    log_target = segment_log_softmax(log_old + targets["logit"], group, groups)
    log_policy = segment_log_softmax(score, group, groups)
    return log_policy.exp() - log_target.exp(), log_target.exp(), score - log_policy
