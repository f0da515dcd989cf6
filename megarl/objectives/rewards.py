"""What the estimators see of a batch: shaped rewards, trained tokens, and statistics over groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megarl.errors import InputError
from megarl.objectives.batch import TokenBatch, segment_max, segment_sum
from megarl.objectives.kl import kl_estimate
from megarl.objectives.vector import set_rewards


@dataclass
class Scored:
    """A batch with its rewards as the estimators use them, in float64.

    Responses of groups that left the batch (`drop_degenerate_groups`) have `in_batch` False and no token in `mask`; they leave whole groups
    at a time, so statistics over a group need not look at `in_batch`, statistics over the batch must.
    """

    batch: TokenBatch
    parameters: dict[str, Any]
    reward: Tensor
    """[N] with penalties; KL in the reward is included unless it is in `token_penalty`."""
    token_penalty: Tensor | None
    """[T] coef * k_t at the trained tokens, for estimators that place rewards on tokens."""
    correct: Tensor
    in_batch: Tensor
    mask: Tensor
    """[T] bool, mask=1 tokens of the responses in the batch."""

    @property
    def group(self) -> Tensor:
        return self.batch.group

    @cached_property
    def length(self) -> Tensor:
        """[N] float64, trained tokens of each response, l."""
        return segment_sum(self.mask.double(), self.batch.sequence, self.batch.num_responses)

    @cached_property
    def group_size(self) -> Tensor:
        """[N] float64, number of responses in the group of each, K."""
        return segment_sum(torch.ones_like(self.reward), self.group, self.batch.num_groups)[self.group]

    def group_mean(self, numbers: Tensor) -> Tensor:
        """[N] -> [N], the mean over each one's group."""
        return segment_sum(numbers, self.group, self.batch.num_groups)[self.group] / self.group_size

    @cached_property
    def equal_group(self) -> Tensor:
        """[N] bool: the rewards of the group are equal up to `equal_tol`, or there is only one. Float noise must not be scaled up."""
        groups = self.batch.num_groups
        spread = segment_max(self.reward, self.group, groups) + segment_max(-self.reward, self.group, groups)
        return (spread[self.group] < self.parameters["equal_tol"]) | (self.group_size == 1)

    @cached_property
    def centred(self) -> Tensor:
        """[N] R - mean of the group; exactly 0 in an equal group."""
        return torch.where(self.equal_group, 0.0, self.reward - self.group_mean(self.reward))

    def group_std(self, kind: str) -> Tensor:
        """[N] standard deviation of the group's rewards, two-pass; `kind` population or unbiased."""
        deviation = self.reward - self.group_mean(self.reward)
        factor = self.group_size / (self.group_size - 1).clamp(min=1) if kind == "unbiased" else 1.0
        return (self.group_mean(deviation.square()) * factor).sqrt()


def score(batch: TokenBatch, parameters: dict[str, Any], *, vector: bool, token_rewards: bool) -> Scored:
    """Steps 1 and 2 of the order of computation: shape the rewards, then let degenerate groups leave.

    `vector`: the rewards are matrices (vpo). `token_rewards`: KL in the reward stays on its tokens (ppo, vapo, reinforce_pp).
    """
    if vector:
        reward = set_rewards(batch, parameters)
    elif isinstance(batch.reward, Tensor):
        reward = batch.reward.detach().double()
    else:
        raise InputError("`reward` is a matrix; only objective `vpo` takes reward matrices, expected a number per response")
    correct = reward > 0
    if batch.correct is not None:
        correct = batch.correct if batch.correct_given is None else torch.where(batch.correct_given, batch.correct, correct)
    if isinstance(parameters["overlong"], dict):
        reward = reward - overlong_penalty(batch, parameters["overlong"])
    in_batch = ~degenerate(batch, correct) if parameters["drop_degenerate_groups"] else torch.ones_like(correct)
    mask = batch.mask & in_batch[batch.sequence]
    penalty = None
    kl = parameters["kl"]
    if kl is not None and kl["where"] == "reward":
        estimate, _ = kl_estimate((batch.old_logp - batch.ref_logp).detach().double(), kl["estimator"])
        penalty = torch.where(mask, kl["coef"] * estimate, 0.0)
        if not token_rewards:
            reward = reward - segment_sum(penalty, batch.sequence, batch.num_responses)
            penalty = None
    return Scored(batch, parameters, reward, penalty, correct, in_batch, mask)


def overlong_penalty(batch: TokenBatch, overlong: dict[str, float]) -> Tensor:
    """DAPO's soft penalty [N] >= 0 (2503.14476, eq. 13); all tokens of the response count, trained or not."""
    tokens = torch.bincount(batch.sequence, minlength=batch.num_responses).double()
    free, cache = overlong["max_length"] - overlong["cache"], overlong["cache"]
    inside = (tokens - free) / cache if cache > 0 else torch.zeros_like(tokens)
    penalty = torch.where(tokens <= free, 0.0, torch.where(tokens <= overlong["max_length"], inside, 1.0))
    return overlong["factor"] * penalty


def degenerate(batch: TokenBatch, correct: Tensor) -> Tensor:
    """[N] bool: all responses of the group are correct, or none is."""
    right = segment_sum(correct.double(), batch.group, batch.num_groups)
    size = segment_sum(torch.ones_like(correct, dtype=torch.float64), batch.group, batch.num_groups)
    return ((right == 0) | (right == size))[batch.group]
