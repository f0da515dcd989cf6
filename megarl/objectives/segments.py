"""Step-level lists for LPO: segments that continue the same prefix are compared with each other.

Step-level lists are future work in 2605.06139; the construction here is ours. The responses of a group are cut into segments (reasoning
steps). All of them form a tree: a node is a distinct segment after a distinct prefix. The children of a node are one list, each child with
the mean reward of the responses that pass through it (or with step rewards of one's own), and LPO runs on these lists as on any others.
Responses branch where the sampler was made to branch; without shared prefixes only the first segments form a list of more than one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.objectives.batch import TOKEN_FIELDS, TokenBatch


@dataclass
class StepLists:
    batch: TokenBatch
    """Its responses are the tree's nodes, its groups their lists. `truncated` and `bootstrap_value` are not carried over."""
    token_index: Tensor
    """[t] where each of its tokens lies in the batch of whole responses."""
    source: Tensor
    """[lists] the group of that batch whose responses each list compares; in order."""


@dataclass
class _Node:
    tokens: tuple[int, int]
    """First and past-the-last token in the flat batch; of the first response that passes through."""
    response: int
    rewards: list[float]
    correct: list[bool]


def step_lists(batch: TokenBatch, token_ids: Tensor, segment: Tensor, step_reward: Tensor | None = None, *, least: int = 2) -> StepLists:
    """Cut a batch into lists of segments that share a prefix.

    `token_ids` [T]; `segment` [T]: number of the token's segment within its response, not decreasing. `step_reward` [T]: a segment's reward
    is that of its last token, averaged over the responses through the node; default: the response's reward. Lists of fewer than `least`
    segments have no signal and are left out. The tokens of a node that several responses share appear once.
    """
    if not isinstance(batch.reward, Tensor):
        raise ValueError("step lists need a number as reward of each response")
    bounds = _segment_bounds(batch, segment)
    ids = token_ids.tolist()
    correct = batch.correct if batch.correct is not None else batch.reward > 0
    lists: dict[tuple, dict[tuple[int, ...], _Node]] = {}
    for response, cuts in enumerate(bounds):
        prefix: tuple = (int(batch.group[response]),)
        for start, end in cuts:
            text = tuple(ids[start:end])
            node = lists.setdefault(prefix, {}).setdefault(text, _Node((start, end), response, [], []))
            node.rewards.append(float(batch.reward[response] if step_reward is None else step_reward[end - 1]))
            node.correct.append(bool(correct[response]))
            prefix = (*prefix, text)
    kept = {prefix: children for prefix, children in lists.items() if len(children) >= least}
    nodes = [(number, node) for number, children in enumerate(kept.values()) for node in children.values()]
    spans = [torch.arange(*node.tokens) for _, node in nodes]
    index = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.long)
    result = TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(len(nodes)), torch.tensor([len(span) for span in spans], dtype=torch.long)),
        mask=batch.mask[index],
        group=torch.tensor([number for number, _ in nodes], dtype=torch.long),
        reward=torch.tensor([sum(node.rewards) / len(node.rewards) for _, node in nodes], dtype=torch.float64),
        correct=torch.tensor([any(node.correct) for _, node in nodes], dtype=torch.bool),
        group_ids=[f"{batch.group_ids[prefix[0]]}/{len(prefix) - 1}.{number}" for number, prefix in enumerate(kept)],
        step=batch.step,
        seed=batch.seed,
    )
    given = {name: value[index] for name in TOKEN_FIELDS if (value := getattr(batch, name)) is not None}
    if batch.pull is not None:
        given["pull"] = batch.pull[torch.tensor([node.response for _, node in nodes], dtype=torch.long)]
    return StepLists(replace(result, **given), index, torch.tensor([prefix[0] for prefix in kept], dtype=torch.long))


def _segment_bounds(batch: TokenBatch, segment: Tensor) -> list[list[tuple[int, int]]]:
    """(start, end) of every segment, by response."""
    bounds: list[list[tuple[int, int]]] = [[] for _ in range(batch.num_responses)]
    if batch.num_tokens == 0:
        return bounds
    same_response = batch.sequence[1:] == batch.sequence[:-1]
    if bool((same_response & (segment[1:] < segment[:-1])).any()):
        raise ValueError("`segment` decreases within a response")
    new = torch.cat([torch.ones(1, dtype=torch.bool), ~same_response | (segment[1:] != segment[:-1])])
    starts = new.nonzero().squeeze(1).tolist()
    for start, end in zip(starts, [*starts[1:], batch.num_tokens], strict=True):
        bounds[int(batch.sequence[start])].append((start, end))
    return bounds
