"""Advantage estimators: shaped rewards in, per-token numbers out. Each is a named part that a preset is composed of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megarl.objectives.gae import discounted_sums, generalized_advantages, last_token, length_adaptive_lambda, whiten
from megarl.objectives.listwise import lpo_targets, tpo_targets
from megarl.objectives.rewards import Scored


@dataclass
class Estimate:
    advantage: Tensor
    """[T] float64; what lies outside the kept responses' trained tokens is not looked at."""
    keep: Tensor | None = None
    """[N] bool: the responses that the method selects; None: all."""
    targets: Tensor | None = None
    """[T] value targets."""
    per_response: dict[str, Tensor] = field(default_factory=dict)
    """[N] numbers that the surrogate needs at the update."""


Estimator = Callable[[Scored], Estimate]


def _spread(scored: Scored, advantage: Tensor, **rest) -> Estimate:
    return Estimate(advantage[scored.batch.sequence], **rest)


def _scaled(scored: Scored, centred: Tensor) -> Tensor:
    """`centred` [N] over the group's std + `std_eps`, or as it is with `std: none`."""
    kind = scored.parameters["std"]
    if kind == "none":
        return centred
    std = scored.group_std(kind) + scored.parameters["std_eps"]
    return torch.where((centred == 0) | (std == 0), 0.0, centred / std)


def group_centred(scored: Scored) -> Estimate:
    """(R - mean) / (std + eps): GRPO (2402.03300, sec. 4.1.2); without the std Dr.GRPO (2503.20783, eq. 3)."""
    return _spread(scored, _scaled(scored, scored.centred))


def set_centred(scored: Scored) -> Estimate:
    """VPO: as `group_centred`, and 0 where the std is below 1e-6."""
    advantage = _scaled(scored, scored.centred)
    if (kind := scored.parameters["std"]) != "none":
        advantage = torch.where(scored.group_std(kind) < 1e-6, 0.0, advantage)
    return _spread(scored, advantage)


def leave_one_out(scored: Scored) -> Estimate:
    """R_i - mean of the others = K/(K-1) (R_i - mean) (2402.14740, eq. 8); 0 if K = 1."""
    size = scored.group_size
    return _spread(scored, _scaled(scored, scored.centred * size / (size - 1).clamp(min=1)))


def mean_normalized(scored: Scored) -> Estimate:
    """MaxRL's (R - mean) / mean; 0 where the mean is not above `equal_tol` (2602.02710, thm. 5)."""
    mean = scored.group_mean(scored.reward)
    usable = mean > scored.parameters["equal_tol"]
    return _spread(scored, torch.where(usable, scored.centred / torch.where(usable, mean, 1.0), 0.0))


def batch_scaled(scored: Scored) -> Estimate:
    """REINFORCE++-baseline: R - mean of the group, over the std of these numbers in the whole batch (2501.03262)."""
    centred, kind = scored.centred, scored.parameters["std"]
    if kind == "none":
        return _spread(scored, centred)
    std = batch_std(scored, centred, kind)
    return _spread(scored, torch.where(std > 0, centred / (std + scored.parameters["std_eps"]), 0.0))


def batch_std(scored: Scored, numbers: Tensor, kind: str = "population") -> Tensor:
    """Std of `numbers` [N] over the responses in the batch; 0 if they are equal up to `equal_tol`."""
    inside = numbers[scored.in_batch]
    if len(inside) < 2:
        return numbers.new_zeros(())
    variance = (inside - inside.mean()).square().sum() / (len(inside) - (kind == "unbiased"))
    return torch.where(inside.max() - inside.min() < scored.parameters["equal_tol"], 0.0, variance.sqrt())


def plain_reward(scored: Scored) -> Estimate:
    """R, without a baseline (Reinforce-Rej, 2504.11343)."""
    return _spread(scored, scored.reward)


def correct_only(scored: Scored) -> Estimate:
    """1 on correct responses, the others dropped: RAFT (2504.11343), PSR (2506.01347)."""
    return _spread(scored, torch.ones_like(scored.reward), keep=scored.correct)


def incorrect_only(scored: Scored) -> Estimate:
    """-1 on incorrect responses, the others dropped: NSR (2506.01347)."""
    return _spread(scored, -torch.ones_like(scored.reward), keep=~scored.correct)


def weighted_signs(scored: Scored) -> Estimate:
    """`positive_weight` on correct responses, -1 on incorrect ones: W-REINFORCE (2506.01347, eq. 9)."""
    negative = -torch.ones_like(scored.reward)
    return _spread(scored, torch.where(scored.correct, scored.parameters["positive_weight"], negative))


def winners(scored: Scored) -> Estimate:
    """WAPO (2606.16154): R - mean of the responses that are above it by more than `equal_tol`, the others dropped."""
    winner = scored.centred > scored.parameters["equal_tol"]
    advantage = torch.where(winner, _scaled(scored, scored.centred), 0.0)
    return _spread(scored, advantage, keep=winner, per_response={"winner": winner, "group_size": scored.group_size})


def _token_rewards(scored: Scored) -> tuple[Tensor, Tensor, Tensor]:
    """The trained tokens' positions [n], their responses [n], and their rewards [n]: R on the last one, less the KL penalty."""
    positions = scored.mask.nonzero().squeeze(1)
    sequence = scored.batch.sequence[positions]
    rewards = torch.zeros(len(positions), dtype=torch.float64, device=positions.device)
    if scored.token_penalty is not None:
        rewards -= scored.token_penalty[positions]
    last = last_token(sequence, scored.batch.num_responses)
    present = last >= 0
    rewards.index_add_(0, last[present], scored.reward[present])
    return positions, sequence, rewards


def whitened_returns(scored: Scored) -> Estimate:
    """REINFORCE++ (2501.03262): discounted reward-to-go of each token, whitened over the tokens of the batch. No groups."""
    positions, sequence, rewards = _token_rewards(scored)
    returns = discounted_sums(rewards, torch.full_like(rewards, scored.parameters["gamma"]), sequence)
    advantage = torch.zeros(scored.batch.num_tokens, dtype=torch.float64, device=positions.device)
    advantage[positions] = whiten(returns, scored.parameters["equal_tol"])
    return Estimate(advantage)


def value_based(scored: Scored) -> Estimate:
    """PPO's GAE (1506.02438); VAPO's length-adaptive lambda and its own lambda for the critic (2504.05118, sec. 4)."""
    batch, parameters = scored.batch, scored.parameters
    positions, sequence, rewards = _token_rewards(scored)
    values = batch.old_values.detach().double()[positions]
    after_last = torch.zeros_like(scored.reward)
    if parameters["bootstrap_truncated"]:
        after_last = torch.where(batch.truncated, batch.bootstrap_value.double(), after_last)
    gamma, alpha = parameters["gamma"], parameters.get("alpha")
    policy = torch.full_like(scored.length, parameters["lambda"]) if alpha is None else length_adaptive_lambda(scored.length, alpha)
    critic = policy if parameters["lambda_critic"] is None else torch.full_like(policy, parameters["lambda_critic"])
    advantages = generalized_advantages(rewards, values, sequence, after_last, gamma, policy)
    returns = advantages if critic is policy else generalized_advantages(rewards, values, sequence, after_last, gamma, critic)
    if parameters["whiten"]:
        advantages = whiten(advantages, parameters["equal_tol"])
    result = torch.zeros(2, batch.num_tokens, dtype=torch.float64, device=positions.device)
    result[0, positions] = advantages
    result[1, positions] = returns + values
    return Estimate(result[0], targets=result[1])


def listwise_policy(scored: Scored) -> Estimate:
    """LPO: the coefficients depend on the current log-probs; what is fixed for the step is the target (`listwise.lpo_targets`)."""
    batch = scored.batch
    targets = lpo_targets(scored, batch_std(scored, scored.centred) if scored.parameters["tau"] == "batch_std" else None)
    return Estimate(torch.zeros(batch.num_tokens, dtype=torch.float64, device=batch.group.device), per_response=targets)


def target_policy(scored: Scored) -> Estimate:
    """TPO: as `listwise_policy`, with `listwise.tpo_targets`."""
    batch = scored.batch
    return Estimate(torch.zeros(batch.num_tokens, dtype=torch.float64, device=batch.group.device), per_response=tpo_targets(scored))
