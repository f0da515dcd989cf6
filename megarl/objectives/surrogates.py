"""Surrogates: how an advantage, or a listwise target, becomes a token loss.

Each factors in two. `score` gives a number per token whose sums over the responses are all that tokens need to know of each other
(GSPO's mean log-ratio, LPO's and TPO's scores); `finish` turns the summed scores into detached numbers per response; `token_loss` is then
local to each token. Sums can be added over context-parallel ranks and micro-batches before they are finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megarl.objectives import ratios
from megarl.objectives.aggregate import group_scale, response_scale, winner_scale
from megarl.objectives.batch import segment_sum
from megarl.objectives.listwise import lpo_scalars, tpo_scalars
from megarl.objectives.ratios import TokenLoss

if TYPE_CHECKING:
    from megarl.objectives.objective import Prepared, Update

Coupling = Literal["token", "response", "group"]


class TokenInputs:
    """What a token loss may look at: the tokens at hand, [t] each, detached. Gathered when they are first looked at."""

    def __init__(self, prepared: Prepared, token_index: Tensor, logp: Tensor, by_response: dict[str, Tensor]):
        self._prepared, self._token_index, self.logp, self._by_response = prepared, token_index, logp, by_response

    @cached_property
    def sequence(self) -> Tensor:
        return self._prepared.sequence.index_select(0, self._token_index)

    @cached_property
    def old_logp(self) -> Tensor:
        old = self._prepared.old_logp
        return self.logp if old is None else old.index_select(0, self._token_index)

    @cached_property
    def rollout_logp(self) -> Tensor:
        rollout = self._prepared.rollout_logp
        return self.old_logp if rollout is None else rollout.index_select(0, self._token_index)

    @cached_property
    def advantage(self) -> Tensor:
        return self._prepared.advantages.index_select(0, self._token_index)

    def scalar(self, name: str) -> Tensor:
        """The response's number `name` from `finish`, repeated on its tokens."""
        return self._by_response[name].to(self.logp.dtype).index_select(0, self.sequence)


@dataclass(frozen=True)
class Surrogate:
    token_loss: Callable[[TokenInputs, dict[str, Any]], TokenLoss]
    scale: Callable[[Prepared, Tensor, dict[str, Any]], Tensor]
    """(prepared, in_update [N], parameters) -> weight of each response's tokens [N]."""
    coupling: Callable[[dict[str, Any]], Coupling] = lambda parameters: "token"
    score: Callable[[TokenInputs], Tensor] | None = None
    finish: Callable[[Update, Tensor, dict[str, Any]], dict[str, Tensor]] | None = None
    """(update, summed scores [N], parameters) -> numbers by response [N]."""
    coefficient: str | None = None
    """The number of `finish` that stands in for minus the advantage."""
    holds_dropped: bool = False
    """Dropped responses stay in the loss, without a gradient."""
    replayable: bool = False
    """Responses of an earlier policy can be trained on: the loss compares with `rollout_logp`, whoever sampled them."""


def _common_scale(prepared: Prepared, inside: Tensor, parameters: dict[str, Any]) -> Tensor:
    return response_scale(prepared.surrogate_count * inside, parameters["aggregation"], parameters["norm_length"])


def _ratio(tokens: TokenInputs, parameters: dict[str, Any]) -> tuple[Tensor, Tensor]:
    if parameters["ratio"] == "sequence":
        return ratios.sequence_ratio(tokens.scalar("mean_log_ratio"))
    return ratios.token_ratio(tokens.logp, tokens.old_logp)


def _sequence_coupling(parameters: dict[str, Any]) -> Coupling:
    return "response" if parameters["ratio"] == "sequence" else "token"


def _mean_log_ratio(update: Update, sums: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    return {"mean_log_ratio": sums / update.prepared.length.clamp(min=1)}


def _clipped(tokens: TokenInputs, parameters: dict[str, Any]) -> TokenLoss:
    if parameters["ratio"] == "none":
        return ratios.weighted_log_prob(tokens.logp, 1.0, tokens.advantage)
    ratio, slope = _ratio(tokens, parameters)
    return ratios.clipped_surrogate(
        ratio, slope, tokens.advantage, parameters["clip_low"], parameters["clip_high"], parameters["dual_clip"]
    )


def _cispo(tokens: TokenInputs, parameters: dict[str, Any]) -> TokenLoss:
    if parameters["ratio"] == "none":
        return ratios.weighted_log_prob(tokens.logp, 1.0, tokens.advantage)
    ratio, _ = _ratio(tokens, parameters)
    weight = ratios.clip_band(ratio, parameters["clip_low"], parameters["clip_high"])
    loss = ratios.weighted_log_prob(tokens.logp, weight, tokens.advantage)
    return TokenLoss(loss.value, loss.slope, ratio, weight != ratio)


def _capped(tokens: TokenInputs, parameters: dict[str, Any]) -> TokenLoss:
    if parameters["ratio"] == "none":
        return ratios.weighted_log_prob(tokens.logp, 1.0, tokens.advantage)
    ratio, slope = ratios.token_ratio(tokens.logp, tokens.rollout_logp)
    return ratios.capped_surrogate(ratio, slope, tokens.advantage, parameters["clip_high"])


def _capped_scale(prepared: Prepared, inside: Tensor, parameters: dict[str, Any]) -> Tensor:
    count = prepared.surrogate_count * inside
    if parameters["normalize"] == "kept_tokens":
        return response_scale(count, "token_mean")
    extra = prepared.per_response
    winner = extra["winner"] & inside & prepared.in_batch
    return winner_scale(count, winner, extra["group_size"], prepared.group, prepared.num_groups, parameters["norm_length"])


def _listwise(tokens: TokenInputs, parameters: dict[str, Any]) -> TokenLoss:
    return ratios.clipped_log_ratio(
        tokens.logp - tokens.rollout_logp, tokens.scalar("coefficient"), parameters["clip_low"], parameters["clip_high"],
        parameters["clip_mode"],
    )  # fmt: skip


def _listwise_scale(prepared: Prepared, inside: Tensor, parameters: dict[str, Any]) -> Tensor:
    return group_scale(prepared.surrogate_count * inside, inside & prepared.in_batch, prepared.group, prepared.num_groups, mean=True)


def _listwise_scalars(update: Update, sums: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    prepared = update.prepared
    coefficient = lpo_scalars(
        sums / prepared.length.clamp(min=1), prepared.per_response, prepared.group, prepared.num_groups,
        parameters["divergence"], parameters["alpha"], parameters["pointwise"],
    )  # fmt: skip
    return {"coefficient": torch.where(prepared.kept, coefficient, 0.0)}


def _target(tokens: TokenInputs, parameters: dict[str, Any]) -> TokenLoss:
    return TokenLoss(tokens.scalar("constant") - tokens.scalar("target") * tokens.logp, tokens.scalar("coefficient"))


def _target_scale(prepared: Prepared, inside: Tensor, parameters: dict[str, Any]) -> Tensor:
    return group_scale(prepared.surrogate_count * inside, inside & prepared.in_batch, prepared.group, prepared.num_groups, mean=False)


def _target_scalars(update: Update, sums: Tensor, parameters: dict[str, Any]) -> dict[str, Tensor]:
    """-sum_k q_k ln p_k = ln Z - sum_k q_k S_k: the second part is a sum over tokens, ln Z is spread evenly over the group's tokens.

    A group without any token has p uniform and so the value ln K; it is spread over all tokens of the update.
    """
    prepared = update.prepared
    group, groups = prepared.group, prepared.num_groups
    coefficient, target, log_normaliser = tpo_scalars(sums, prepared.per_response, group, groups)
    inside = (update.in_update & prepared.in_batch).double()
    tokens = segment_sum(prepared.length * inside, group, groups)
    tokenless = ((tokens == 0)[group] * inside * log_normaliser / segment_sum(torch.ones_like(inside), group, groups)[group]).nansum()
    constant = log_normaliser / tokens[group].clamp(min=1) + tokenless / tokens.sum().clamp(min=1)
    return {"coefficient": torch.where(prepared.kept, coefficient, 0.0), "target": target, "constant": constant}


def _log_ratio_to_old(tokens: TokenInputs) -> Tensor:
    return tokens.logp - tokens.old_logp


def _log_ratio_to_rollout(tokens: TokenInputs) -> Tensor:
    return tokens.logp - tokens.rollout_logp


def _log_prob(tokens: TokenInputs) -> Tensor:
    return tokens.logp


CLIPPED = Surrogate(_clipped, _common_scale, _sequence_coupling, _log_ratio_to_old, _mean_log_ratio)
CISPO = Surrogate(_cispo, _common_scale, _sequence_coupling, _log_ratio_to_old, _mean_log_ratio)
CAPPED = Surrogate(_capped, _capped_scale)
LISTWISE = Surrogate(
    _listwise, _listwise_scale, lambda _: "group", _log_ratio_to_rollout, _listwise_scalars, "coefficient", replayable=True
)
TARGET = Surrogate(_target, _target_scale, lambda _: "group", _log_prob, _target_scalars, "coefficient", holds_dropped=True)
