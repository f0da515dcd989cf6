"""A replay buffer for LPO: lists of earlier steps, drawn again while they are fresh enough.

Replay is future work in 2605.06139; the rules here are ours. LPO scores a list by s = mean log(pi / pi_rollout), so a stored group stays
usable as long as its sampler's log-probs are kept and the policy has not drifted far from them. Two filters decide: the age in weight
versions before anything is computed, and the drift |s| once the trainer has the current log-probs. What is left is pulled towards the
current policy by age.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megarl.objectives.batch import TokenBatch, segment_max, segment_sum


@dataclass(frozen=True)
class StoredGroup:
    group_id: str
    version: int
    """Of the weights that sampled it."""
    reward_std: float
    payload: Any
    """Whatever the trainer needs to train on it again: token ids, rollout log-probs, rewards."""


class ReplayBuffer:
    """Groups of the last `capacity` additions, oldest out first.

    `max_age`: in versions; older groups are never drawn and are forgotten. `priority`: a group is drawn in proportion to
    reward_std^priority * age_discount^age (0: uniform over groups with a signal). Groups with equal rewards are not stored: their
    coefficients are 0.
    """

    def __init__(self, capacity: int, max_age: int, priority: float = 1.0, age_discount: float = 1.0, equal_tol: float = 1e-8):
        if capacity < 1 or max_age < 1 or priority < 0 or not 0 < age_discount <= 1:
            raise ValueError(
                f"replay needs capacity >= 1, max_age >= 1, priority >= 0 and 0 < age_discount <= 1; "
                f"got {capacity}, {max_age}, {priority}, {age_discount}"
            )
        self.capacity, self.max_age, self.priority, self.age_discount, self.equal_tol = capacity, max_age, priority, age_discount, equal_tol
        self.groups: list[StoredGroup] = []

    def add(self, group_id: str, version: int, rewards: list[float], payload: Any) -> bool:
        """Store a group unless its `rewards` are equal. Returns whether it was stored."""
        spread = torch.tensor(rewards, dtype=torch.float64)
        if len(rewards) < 2 or float(spread.max() - spread.min()) < self.equal_tol:
            return False
        self.groups.append(StoredGroup(group_id, version, float(spread.std(correction=0)), payload))
        del self.groups[: -self.capacity]
        return True

    def draw(self, count: int, version: int, seed: int) -> list[StoredGroup]:
        """Up to `count` different groups for weights `version`; the draw depends only on the buffer, `version` and `seed`."""
        self.groups = [group for group in self.groups if version - group.version <= self.max_age]
        eligible = [group for group in self.groups if group.version < version]
        if not eligible or count < 1:
            return []
        std = torch.tensor([group.reward_std for group in eligible], dtype=torch.float64)
        age = torch.tensor([version - group.version for group in eligible], dtype=torch.float64)
        weights = self.priority * std.log() + age * math.log(self.age_discount)
        weights = (weights - weights.max()).exp().clamp(min=1e-30)  # none may be 0: a draw may ask for all of them
        generator = torch.Generator().manual_seed((seed * 1_000_003 + version) % 2**63)
        chosen = torch.multinomial(weights, min(count, len(eligible)), replacement=False, generator=generator)
        return [eligible[index] for index in sorted(chosen.tolist())]

    def state(self) -> list[StoredGroup]:
        """For a checkpoint; `restore` takes it back."""
        return list(self.groups)

    def restore(self, state: list[StoredGroup]) -> None:
        self.groups = list(state)[-self.capacity :]


def group_drift(batch: TokenBatch) -> Tensor:
    """Largest |s| of each group [G], s = mean over trained tokens of old_logp - rollout_logp; 0 for an empty response."""
    delta = torch.where(batch.mask, (batch.old_logp - batch.rollout_logp).detach().double(), 0.0)
    length = segment_sum(batch.mask.double(), batch.sequence, batch.num_responses)
    score = segment_sum(delta, batch.sequence, batch.num_responses) / length.clamp(min=1)
    return segment_max(score.abs(), batch.group, batch.num_groups).clamp(min=0)


def fresh_groups(batch: TokenBatch, max_drift: float) -> Tensor:
    """[G] bool: groups whose every response has |s| <= `max_drift`. On-policy groups have |s| of the engine's noise only."""
    return group_drift(batch) <= max_drift


def kl_pull(age: Tensor, strength: float) -> Tensor:
    """`TokenBatch.pull` [N] for responses of `age` [N] versions: strength * age.

    LPO's target maximises <w, R> - tau KL(w || P_t) on the list. A further -tau lambda KL(w || P_t) for stale lists only replaces tau by
    tau (1 + lambda): w = softmax(R / (tau (1 + lambda)) + s_t). The older the list, the nearer its target to the current policy.
    """
    return strength * age.double().clamp(min=0)
