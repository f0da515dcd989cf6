"""The flat token batch that every objective sees, and sums over its segments.

T tokens of N responses in G groups lie in one dimension, whatever the model's layout was. A response is a segment of tokens: `sequence` is
in order. A group is a set of responses: `group` may be in any order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from megarl.errors import InputError

TOKEN_FIELDS = ("logp", "old_logp", "rollout_logp", "ref_logp", "values", "old_values", "entropy")
"""Per-token numbers, [T] each."""


def segment_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sums of `values` [n, ...] by `index` [n] into [size, ...]."""
    return values.new_zeros((size, *values.shape[1:])).index_add_(0, index, values)


def segment_max(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Maxima of `values` [n] by `index` [n] into [size]; -inf for a segment without entries."""
    return values.new_full((size,), -torch.inf).scatter_reduce_(0, index, values, "amax")


def segment_log_softmax(scores: Tensor, index: Tensor, size: int) -> Tensor:
    """log-softmax of `scores` [n] within each segment, the segment's maximum subtracted first. Returns [n]."""
    centred = scores - segment_max(scores, index, size)[index]
    return centred - segment_sum(centred.exp(), index, size).log()[index]


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float64 stays, everything narrower than float32 is widened."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class TokenBatch:
    """One rollout batch. Fields that are None are absent; an objective's `needs` names those it cannot do without."""

    sequence: Tensor
    """[T] long, the response of each token."""
    mask: Tensor
    """[T] bool, True for tokens that are trained on; False for tool or observation tokens."""
    group: Tensor
    """[N] long, the group of each response."""
    reward: Tensor | list[Tensor]
    """[N], or for vpo N matrices [m, k] (m solutions, k rewards each; m = 0 where nothing could be parsed)."""
    logp: Tensor | None = None
    """[T] log-probs of the current policy."""
    old_logp: Tensor | None = None
    """[T] of the policy at the start of the step. Default: `logp`. If both are absent the update is taken to be on-policy: the log-probs
    that `loss` is given are the old ones."""
    rollout_logp: Tensor | None = None
    """[T] as the sampler saw them. Default: `old_logp`."""
    ref_logp: Tensor | None = None
    """[T] of the reference policy."""
    values: Tensor | None = None
    """[T] of the current value model."""
    old_values: Tensor | None = None
    """[T] of the value model at the start of the step. Default: `values`."""
    entropy: Tensor | None = None
    """[T] of the policy's next-token distribution, in nats."""
    correct: Tensor | None = None
    """[N] bool. Default: reward > 0 (vpo: set reward > 0)."""
    correct_given: Tensor | None = None
    """[N] bool: the responses that `correct` speaks of; the default holds for the others. None: all, if `correct` is there."""
    truncated: Tensor | None = None
    """[N] bool, cut at the length limit. Default: False."""
    bootstrap_value: Tensor | None = None
    """[N] value after the cut of a truncated response; NaN where there is none."""
    group_ids: list[str] = field(default_factory=list)
    """G names. Default: "0", "1", ..."""
    step: int = 0
    seed: int = 0
    weights: list[Tensor | None] | None = None
    """vpo: G matrices [W, k] to use in place of drawn weights."""
    pull: Tensor | None = None
    """lpo: [N] >= 0, extra weight of the KL to the current policy in the target of a replayed list (`replay.kl_pull`)."""
    absent: dict[str, str] = field(default_factory=dict)
    """For a field that some responses lack: the first place where it is missing."""

    def __post_init__(self) -> None:
        if not self.group_ids:
            groups = int(self.group.max()) + 1 if len(self.group) else 0
            self.group_ids = [str(index) for index in range(groups)]
        if self.old_logp is None and self.logp is not None and "old_logp" not in self.absent:
            self.old_logp = self.logp.detach()
        if self.rollout_logp is None:
            self.rollout_logp = self.old_logp
        if self.truncated is None:
            self.truncated = torch.zeros_like(self.group, dtype=torch.bool)
        if self.old_values is None and self.values is not None:
            self.old_values = self.values.detach()

    @property
    def num_tokens(self) -> int:
        return len(self.sequence)

    @property
    def num_responses(self) -> int:
        return len(self.group)

    @property
    def num_groups(self) -> int:
        return len(self.group_ids)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers: the widest of the token fields that are given."""
        dtypes = [value.dtype for name in TOKEN_FIELDS if (value := getattr(self, name)) is not None]
        if isinstance(self.reward, Tensor) and not dtypes:
            dtypes = [self.reward.dtype]
        result = torch.float32
        for dtype in dtypes:
            result = torch.promote_types(result, dtype)
        return result

    def place(self, response: int) -> str:
        """Where a response is, in words for an error."""
        group = int(self.group[response])
        within = int((self.group[:response] == group).sum())
        return f"group {self.group_ids[group]!r}, response {within}"

    def to(self, device: torch.device | str) -> TokenBatch:
        """The same batch on another device."""
        return replace(self, **{f.name: _moved(getattr(self, f.name), device) for f in fields(self)})

    def check(self) -> None:
        """Raise InputError for a field of the wrong length or with a number that is not finite at a trained token."""
        tokens, responses = self.num_tokens, self.num_responses
        for name in ("mask", *TOKEN_FIELDS):
            value = getattr(self, name)
            if value is not None and value.shape != (tokens,):
                raise InputError(f"`{name}` has shape {tuple(value.shape)}; expected one number per token, ({tokens},)")
        for name in ("correct", "truncated", "bootstrap_value", "pull"):
            value = getattr(self, name)
            if value is not None and value.shape != (responses,):
                raise InputError(f"`{name}` has shape {tuple(value.shape)}; expected one entry per response, ({responses},)")
        if len(self.reward) != responses:
            raise InputError(f"`reward` has {len(self.reward)} entries; expected one per response, {responses}")
        for name in TOKEN_FIELDS:
            value = getattr(self, name)
            if value is not None and not bool((finite := value.detach().isfinite() | ~self.mask).all()):
                response = int(self.sequence[int((~finite).nonzero()[0])])
                raise InputError(f"`{name}` of {self.place(response)} holds NaN or an infinite number; expected finite numbers")
        if isinstance(self.reward, Tensor):
            finite = self.reward.isfinite()
        else:
            finite = torch.tensor([bool(rows.isfinite().all()) for rows in self.reward], dtype=torch.bool)
        if not bool(finite.all()):
            raise InputError(f"`reward` of {self.place(int((~finite).nonzero()[0]))} is NaN or infinite; expected finite numbers")

    @classmethod
    def from_lists(
        cls, groups: Sequence[Mapping[str, Any]], *, dtype: torch.dtype = torch.float32, step: int = 0, seed: int = 0
    ) -> TokenBatch:
        """Build a batch from `[{"id", "responses": [{"reward", "logp", ...}], "weights"}]`, the layout of the conformance cases.

        Per response: `reward` (a number or a list of rows) and at least one list of tokens; the other fields are those of this class. A
        field that only some responses have becomes None; `old_logp`, `rollout_logp` and `old_values` fall back response by response.
        """
        flat = [(g, response) for g, group in enumerate(groups) for response in group["responses"]]
        columns: dict[str, list[Any]] = {name: [response.get(name) for _, response in flat] for name in TOKEN_FIELDS}
        for name, source in (("old_logp", "logp"), ("rollout_logp", "old_logp"), ("old_values", "values")):
            columns[name] = [other if own is None else own for own, other in zip(columns[name], columns[source], strict=True)]
        lengths = [_length(response) for _, response in flat]
        ids = [str(group.get("id", index)) for index, group in enumerate(groups)]
        tensors, absent = {}, {}
        for name, column in columns.items():
            missing = [i for i, tokens in enumerate(column) if tokens is None and lengths[i] > 0]
            if not missing:
                tensors[name] = torch.tensor([x for tokens in column for x in tokens or ()], dtype=dtype)
            elif len(missing) < len(column):
                group = flat[missing[0]][0]
                within = missing[0] - next(i for i, (g, _) in enumerate(flat) if g == group)
                absent[name] = f"group {ids[group]!r}, response {within}"
        masks = [m if (m := response.get("mask")) is not None else [1] * n for (_, response), n in zip(flat, lengths, strict=True)]
        rewards = [response["reward"] for _, response in flat]
        matrices = any(isinstance(reward, (list, tuple, Tensor)) for reward in rewards)
        given = [response.get("correct") is not None for _, response in flat]
        correct = [bool(response.get("correct")) for _, response in flat]
        bootstrap = [response.get("bootstrap_value") for _, response in flat]
        weights = [group.get("weights") for group in groups]
        return cls(
            sequence=torch.repeat_interleave(torch.arange(len(flat)), torch.tensor(lengths, dtype=torch.long)),
            mask=torch.tensor([bool(x) for tokens in masks for x in tokens], dtype=torch.bool),
            group=torch.tensor([g for g, _ in flat], dtype=torch.long),
            reward=[_matrix(reward) for reward in rewards] if matrices else torch.tensor(rewards, dtype=torch.float64),
            correct=torch.tensor(correct, dtype=torch.bool) if any(given) else None,
            correct_given=torch.tensor(given, dtype=torch.bool) if any(given) and not all(given) else None,
            truncated=torch.tensor([bool(response.get("truncated", False)) for _, response in flat], dtype=torch.bool),
            bootstrap_value=torch.tensor([torch.nan if b is None else b for b in bootstrap], dtype=dtype),
            group_ids=ids,
            step=step,
            seed=seed,
            weights=[None if w is None else _matrix(w) for w in weights] if any(w is not None for w in weights) else None,
            absent=absent,
            **tensors,
        )


def _matrix(rows: Any) -> Tensor:
    matrix = torch.as_tensor(rows, dtype=torch.float64)
    return matrix if matrix.dim() == 2 else matrix.reshape(0, 0)


def _length(response: Mapping[str, Any]) -> int:
    return next((len(response[name]) for name in TOKEN_FIELDS if response.get(name) is not None), 0)


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list) and any(isinstance(item, Tensor) for item in value):
        return [_moved(item, device) for item in value]
    return value
