"""PPO-clip on the reward minus the median of the group: robust to one outlier among the rewards."""

import torch

from megarl.objectives import Composition
from megarl.objectives.advantages import Estimate
from megarl.objectives.parameters import number
from megarl.objectives.presets import COMMON
from megarl.objectives.rewards import Scored


def median_centred(scored: Scored) -> Estimate:
    """`scale` times (R - median of the group), on every token of the response; 0 in a group of equal rewards."""
    group, reward = scored.group, scored.reward
    # Sort by group, then by reward: the median of a group is the mean of the one or two entries in the middle of its segment.
    order = torch.argsort(reward, stable=True)
    order = order[torch.argsort(group[order], stable=True)]
    size = torch.bincount(group, minlength=scored.batch.num_groups)
    first = size.cumsum(0) - size
    low, high = order[first + (size - 1).clamp(min=0) // 2], order[(first + size // 2).clamp(max=len(order) - 1)]
    median = (reward[low] + reward[high]) / 2
    advantage = torch.where(scored.equal_group, 0.0, reward - median[group])
    return Estimate(scored.parameters["scale"] * advantage[scored.batch.sequence])


CLIPPED_MEDIAN = Composition(
    name="clipped_median",
    advantage=median_centred,
    parameters={**COMMON, "equal_tol": 1e-8, "scale": 1.0},
    checks={"scale": number(0, above=True)},
)
