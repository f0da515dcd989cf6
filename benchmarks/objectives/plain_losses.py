"""The same losses as plain autograd formulations over padded [N, L] tensors, the usual way of writing them.

Advantages are taken as given, so that only the loss and its backward pass are compared. Each returns the policy loss (or both losses).
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(numbers: Tensor, mask: Tensor) -> Tensor:
    return (numbers * mask).sum() / mask.sum().clamp(min=1)


def sequence_mean(numbers: Tensor, mask: Tensor) -> Tensor:
    present = mask.any(1)
    per_response = (numbers * mask).sum(1) / mask.sum(1).clamp(min=1)
    return (per_response * present).sum() / present.sum().clamp(min=1)


def ppo_clip(ratio: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.2) -> Tensor:
    return torch.maximum(-ratio * advantage, -ratio.clamp(1 - low, 1 + high) * advantage)


def log_ratio(logp: Tensor, old: Tensor) -> Tensor:
    return (logp - old).clamp(-20, 20)


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    x = (logp - ref).clamp(-20, 20)
    return (torch.exp(-x) - 1 + x).clamp(max=10)


def grpo(logp, old, mask, advantage, **_):
    return sequence_mean(ppo_clip(log_ratio(logp, old).exp(), advantage), mask)


def dapo_kl(logp, old, mask, advantage, ref, **_):
    return masked_mean(ppo_clip(log_ratio(logp, old).exp(), advantage, high=0.28) + 0.04 * k3(logp, ref), mask)


def gspo(logp, old, mask, advantage, **_):
    mean = ((logp - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    token = (mean.detach() + logp - logp.detach()).clamp(-20, 10)
    return sequence_mean(ppo_clip(token.exp(), advantage, 3e-4, 4e-4), mask)


def cispo(logp, old, mask, advantage, **_):
    return masked_mean(-log_ratio(logp, old).exp().clamp(max=1.28).detach() * advantage * logp, mask)


def rloo(logp, old, mask, advantage, **_):
    return (-(advantage * logp) * mask).sum() / mask.any(1).sum()


def ppo(logp, old, mask, advantage, values, old_values, targets, **_):
    policy = masked_mean(ppo_clip(log_ratio(logp, old).exp(), advantage), mask)
    clipped = torch.minimum(torch.maximum(values, old_values - 0.2), old_values + 0.2)
    return policy, masked_mean(0.5 * torch.maximum((values - targets).square(), (clipped - targets).square()), mask)


def wapo(logp, old, mask, advantage, group, **_):
    winners = advantage.amax(1) > 0
    size = torch.bincount(group)
    winning = torch.zeros(len(size)).index_add_(0, group, winners.float()).gt(0).sum().clamp(min=1)
    token = -log_ratio(logp, old).exp().clamp(max=10) * advantage
    return ((token * mask * winners[:, None]).sum(1) / (size[group] * 1024)).sum() / winning


def listwise_scores(delta: Tensor, mask: Tensor, group: Tensor) -> tuple[Tensor, int]:
    """[groups, K] length-normalised scores; groups are contiguous and of equal size."""
    score = (delta * mask).sum(1) / mask.sum(1).clamp(min=1)
    groups = int(group.max()) + 1
    return score.view(groups, -1), groups


def lpo(logp, old, mask, group, reward, **_):
    delta = logp - old
    score, groups = listwise_scores(delta, mask, group)
    reward = reward.view(groups, -1)
    std = reward.std(1, correction=0, keepdim=True)
    equal = std.squeeze(1) < 1e-8
    target = (reward / torch.where(std < 1e-8, 1.0, std)).softmax(1)
    coefficient = torch.where(equal[:, None], 0.0, score.softmax(1) - target).detach().reshape(-1, 1)
    clipped = delta.clamp(torch.log(torch.tensor(0.8)), torch.log(torch.tensor(1.2)))
    return ((coefficient * clipped * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / groups


def tpo(logp, old, mask, group, reward, **_):
    groups = int(group.max()) + 1
    new, before = ((x * mask).sum(1).view(groups, -1) for x in (logp, old))
    reward = reward.view(groups, -1)
    std = reward.std(1, correction=0, keepdim=True)
    u = torch.where(std < 1e-6, 0.0, (reward - reward.mean(1, keepdim=True)) / torch.where(std < 1e-6, 1.0, std))
    target = (before.log_softmax(1) + u).softmax(1)
    return -(target * new.log_softmax(1)).sum(1).mean()


def gae(rewards: Tensor, values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """The backward loop over positions of [N, L], gaps carried over."""
    count, length = rewards.shape
    result = torch.zeros_like(rewards)
    following, next_value = rewards.new_zeros(count), rewards.new_zeros(count)
    for t in reversed(range(length)):
        here = mask[:, t]
        step = rewards[:, t] + next_value - values[:, t] + decay * following
        following = torch.where(here, step, following)
        next_value = torch.where(here, values[:, t], next_value)
        result[:, t] = torch.where(here, step, 0.0)
    return result
