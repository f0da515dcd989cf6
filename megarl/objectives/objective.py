"""The interface of every objective: prepare a rollout batch, begin an update, and the loss of any part of it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from megarl.errors import InputError
from megarl.objectives.aggregate import response_scale
from megarl.objectives.batch import TokenBatch, at_least_float32, segment_max, segment_sum
from megarl.objectives.correction import mismatch_statistics, off_policy_weights
from megarl.objectives.kl import kl_estimate
from megarl.objectives.parameters import resolve_parameters, unknown
from megarl.objectives.presets import PRESETS, Composition
from megarl.objectives.ratios import value_surrogate
from megarl.objectives.rewards import Scored, score
from megarl.objectives.schedule import Schedule
from megarl.objectives.surrogates import TokenInputs


class _Movable:
    """A dataclass of tensors that can be moved as a whole."""

    def to(self, device: torch.device | str):
        return replace(self, **{f.name: _move(getattr(self, f.name), device) for f in fields(self)})


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, (Tensor, _Movable)):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _move(item, device) for key, item in value.items()}
    return value


@dataclass
class Prepared(_Movable):
    """A rollout batch as its updates need it; plain tensors, detached. Per token [T] unless said otherwise."""

    sequence: Tensor
    mask: Tensor
    """mask=1 tokens of the responses in the batch; what `scalars` sums over."""
    surrogate_mask: Tensor
    """Tokens of the surrogate: less dropped responses and the tokens that the top-entropy rule leaves out."""
    term_mask: Tensor
    """Tokens of the KL, entropy and value terms: less dropped responses."""
    advantages: Tensor
    """0 outside `surrogate_mask`. 0 for listwise objectives, whose coefficients depend on the current log-probs."""
    weights: Tensor | None
    old_logp: Tensor | None
    """None: the update is on-policy."""
    rollout_logp: Tensor | None
    ref_logp: Tensor | None
    old_values: Tensor | None
    value_targets: Tensor | None
    nll_mask: Tensor | None
    group: Tensor
    """[N]"""
    in_batch: Tensor
    """[N] bool: not in a group that left."""
    kept: Tensor
    """[N] bool: in the batch and not dropped."""
    signal: Tensor
    """[N] bool: some term of the loss can reach the response."""
    length: Tensor
    """[N] number of tokens in `mask`; the next three likewise in the other masks."""
    surrogate_count: Tensor
    term_count: Tensor
    nll_count: Tensor
    per_response: dict[str, Tensor]
    num_groups: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Statistics of the whole batch, for the run's log."""

    @property
    def num_responses(self) -> int:
        return len(self.group)


PER_TOKEN = (
    "sequence", "mask", "surrogate_mask", "term_mask", "advantages", "weights", "old_logp", "rollout_logp", "ref_logp", "old_values",
    "value_targets", "nll_mask",
)  # fmt: skip
"""The fields of `Prepared` that have one entry per token."""


@dataclass
class Update(_Movable):
    """One mini-batch: its responses and the scales that its denominators give, [N] each unless said otherwise."""

    prepared: Prepared
    responses: Tensor
    """[n] indices."""
    in_update: Tensor
    active: Tensor
    """[n] bool. A response that is not active adds nothing to loss or gradient, so its forward pass may be left out."""
    surrogate_scale: Tensor
    term_scale: Tensor
    nll_scale: Tensor
    value_scale: Tensor

    def token_index(self, responses: Tensor | None = None) -> Tensor:
        """Positions in the prepared batch of the tokens of `responses` (default: all of the update's), in batch order."""
        chosen = torch.zeros_like(self.in_update)
        chosen[self.responses if responses is None else responses] = True
        return chosen[self.prepared.sequence].nonzero().squeeze(1)

    def select(self, responses: Tensor) -> Update:
        """The same update with the tokens of `responses` only, for a rank that holds no others; scales and denominators stay.

        Token positions are then those among the selected tokens; numbers of responses and groups do not change.
        """
        index, prepared = self.token_index(responses), self.prepared
        cut = {name: value[index] for name in PER_TOKEN if (value := getattr(prepared, name)) is not None}
        return replace(self, prepared=replace(prepared, **cut), responses=responses, active=prepared.signal[responses])


@dataclass
class SequenceSums(_Movable):
    """Partial sums by response [N] of token scores. Add those of other context-parallel ranks or micro-batches, then finish them."""

    total: Tensor
    count: Tensor
    """Tokens in each sum, so that an incomplete one is noticed."""

    def __add__(self, other: SequenceSums) -> SequenceSums:
        return SequenceSums(self.total + other.total, self.count + other.count)

    def packed(self) -> Tensor:
        """[2, N], for one all-reduce; `SequenceSums(*packed)` undoes it."""
        return torch.stack([self.total, self.count])


@dataclass
class Scalars(_Movable):
    """Detached numbers by response [N], from complete sums; NaN for a response without any."""

    values: dict[str, Tensor]


@dataclass
class LossOutput:
    loss: Tensor
    """This part's share of the update's policy loss; the parts add up."""
    value_loss: Tensor | None
    """Likewise, without `value_coef`; None if no values were given."""
    metrics: dict[str, tuple[Tensor, Tensor]]
    """{name: (sum, count)}, detached; add both over the parts, then divide."""


class LinearLoss(torch.autograd.Function):
    """A scalar whose gradient with respect to `inputs` [t] is known: `slope` [t]."""

    @staticmethod
    def forward(ctx, inputs: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.dtype = inputs.dtype
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (slope,) = ctx.saved_tensors
        return (gradient * slope).to(ctx.dtype), None, None


def make_objective(spec: Mapping[str, Any]) -> Objective:
    """The objective that `spec` describes: `name` and parameters, for lpo also a `schedule`.

    A name with a colon is the import path `package.module:factory` of an objective of one's own: a `Composition`, or a function of the
    parameters that returns an object with the interface of `Objective`. Raises InputError naming what is wrong.
    """
    if not isinstance(spec, Mapping):
        raise InputError(f"`objective` is {spec!r}; expected a mapping with `name` and parameters")
    given = dict(spec)
    name = given.pop("name", None)
    if not isinstance(name, str):
        raise InputError(f"`name` of the objective is {name!r}; expected one of {', '.join(PRESETS)}, or package.module:factory")
    if ":" in name:
        part = _imported(name)
        return Objective(part, given, path=name) if isinstance(part, Composition) else _made(name, part, given)
    if name not in PRESETS:
        raise unknown("objective", name, PRESETS)
    return Objective(PRESETS[name], given)


def _made(path: str, factory: Any, given: dict[str, Any]) -> Any:
    try:
        return factory(given)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        raise InputError(f"objective `{path}` cannot be made from {given} ({type(error).__name__}: {error})") from error


def _imported(path: str) -> Any:
    module, _, attribute = path.partition(":")
    try:
        part = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # whatever the user's module raises
        raise InputError(f"objective `{path}` cannot be imported: {error}; expected package.module:factory on the Python path") from error
    if not (isinstance(part, Composition) or callable(part)):
        raise InputError(f"objective `{path}` is {type(part).__name__}; expected a Composition or a function")
    return part


class Objective:
    """A composition of parts with its parameters resolved."""

    def __init__(self, composition: Composition, given: Mapping[str, Any], path: str | None = None):
        """`path`: where `composition` was imported from, if it is no preset."""
        self._spec = (composition, dict(given), path)
        given = dict(given)
        self.schedule = Schedule.parse(composition.name, given.pop("schedule", None))
        self.composition = composition
        self.name = composition.name
        self.parameters = parameters = resolve_parameters(composition.name, given, composition.parameters, composition.checks)
        self._refuse_what_cannot_work()
        self.surrogate = composition.surrogate
        self.coupling = self.surrogate.coupling(parameters)
        self.uses_value_model = composition.value_model
        self.vector_rewards = composition.vector_rewards
        """Rewards are matrices: m answers of k rewards each."""
        self.replayable = composition.surrogate.replayable
        """`TokenBatch.pull` and old groups, whose `rollout_logp` is an earlier policy's, are understood."""
        self.value_coef: float = parameters.get("value_coef", 0.0)
        self.uses_entropy = parameters["entropy_coef"] != 0
        """`loss` wants the current entropy, differentiable."""
        self.needs = self._needs()
        normalized = parameters["correction"] is not None and parameters["correction"]["normalize"]
        scaled = composition.batch_statistics and (parameters["std"] != "none" or "std" not in composition.parameters)
        self.couples_groups = bool(
            scaled or normalized or parameters["whiten"] or parameters["top_entropy_fraction"] or parameters.get("tau") == "batch_std"
        )
        """True if `prepare` computes statistics over several groups, so that it must see the whole batch."""

    def __reduce__(self):
        composition, given, path = self._spec
        if path is None and PRESETS.get(composition.name) is composition:
            path = composition.name
        # By name where there is one: a composition may hold functions that do not travel between processes.
        return (make_objective, ({"name": path, **given},)) if path else (Objective, self._spec)

    def _refuse_what_cannot_work(self) -> None:
        parameters, name = self.parameters, self.name
        if not self.composition.reads_reward:
            if parameters["kl"] is not None and parameters["kl"]["where"] == "reward":
                raise InputError(f"`kl` in the reward has no effect on objective `{name}`, which looks at `correct` only; use where: loss")
            if isinstance(parameters["overlong"], dict):
                raise InputError(f"`overlong` as a penalty has no effect on objective `{name}`, which looks at `correct` only; use mask")
        by_length = parameters["aggregation"] == "seq_mean_token_sum_norm" or parameters.get("normalize") == "norm_length"
        if by_length and parameters["norm_length"] is None:
            raise InputError(f"objective `{name}` needs `norm_length`, a number > 0 (the longest response, in tokens)")

    def _needs(self) -> frozenset[str]:
        parameters, needs = self.parameters, set()
        if self.composition.value_model:
            needs.add("old_values")
        if parameters["kl"] is not None:
            needs.add("ref_logp")
            if parameters["kl"]["where"] == "reward":
                needs.add("old_logp")
        if parameters["top_entropy_fraction"] is not None:
            needs.add("entropy")
        if parameters["correction"] is not None:
            needs.update(("old_logp", "rollout_logp"))
        if parameters["bootstrap_truncated"]:
            needs.add("bootstrap_value")
        return frozenset(needs)

    def at(self, step: int, entropy: float | None = None) -> Objective:
        """The objective of a step: itself, or with the parameters that its schedule sets there."""
        if self.schedule is None:
            return self
        composition, given, path = self._spec
        fixed = {name: value for name, value in given.items() if name != "schedule"}
        return Objective(composition, {**fixed, **self.schedule.parameters(step, entropy)}, path)

    # ------------------------------------------------------------------ once per rollout batch

    def prepare(self, batch: TokenBatch) -> Prepared:
        """Everything about `batch` that does not depend on the current log-probs. Raises InputError for a missing or bad field."""
        self._require_fields(batch)
        batch.check()
        composition, parameters = self.composition, self.parameters
        scored = score(batch, parameters, vector=composition.vector_rewards, token_rewards=composition.token_rewards)
        estimate = composition.advantage(scored)
        kept = scored.in_batch if estimate.keep is None else scored.in_batch & estimate.keep
        if parameters["overlong"] == "mask":
            kept = kept & ~batch.truncated
        term_mask = scored.mask & kept[batch.sequence]
        surrogate_mask = scored.mask if self.surrogate.holds_dropped else term_mask
        if parameters["top_entropy_fraction"] is not None:
            surrogate_mask = top_entropy(batch.entropy, surrogate_mask, parameters["top_entropy_fraction"])
        weights, metrics = self._weights(batch, scored, term_mask)
        nll_mask = term_mask & scored.correct[batch.sequence] if parameters["nll_coef"] > 0 else None
        dtype = at_least_float32(batch.dtype)
        prepared = Prepared(
            sequence=batch.sequence,
            mask=scored.mask,
            surrogate_mask=surrogate_mask,
            term_mask=term_mask,
            advantages=torch.where(surrogate_mask, estimate.advantage, 0.0).to(dtype),
            weights=None if weights is None else weights.to(dtype),
            old_logp=_detached(batch.old_logp, dtype),
            rollout_logp=_detached(batch.rollout_logp, dtype),
            ref_logp=_detached(batch.ref_logp, dtype) if self._kl_loss else None,
            old_values=_detached(batch.old_values, dtype) if composition.value_model else None,
            value_targets=_detached(estimate.targets, dtype),
            nll_mask=nll_mask,
            group=batch.group,
            in_batch=scored.in_batch,
            kept=kept,
            signal=torch.zeros_like(kept),
            length=scored.length,
            surrogate_count=_count(surrogate_mask, batch),
            term_count=_count(term_mask, batch),
            nll_count=torch.zeros_like(scored.length) if nll_mask is None else _count(nll_mask, batch),
            per_response=estimate.per_response,
            num_groups=batch.num_groups,
            metrics=metrics | _shares(batch, scored, kept),
        )
        return replace(prepared, signal=self._signal(prepared))

    def _require_fields(self, batch: TokenBatch) -> None:
        for name in sorted(self.needs):
            if getattr(batch, name) is None:
                wanted = "`values` (or `old_values`)" if name == "old_values" else f"`{name}`"
                place = batch.absent.get(name) or (batch.place(0) if batch.num_responses else "the batch")
                raise InputError(f"objective `{self.name}` needs {wanted}; {place} has none")
        for name in ("old_logp", "rollout_logp"):
            if name in batch.absent:
                raise InputError(f"`{name}` is given for some responses but not for {batch.absent[name]}")
        if len(batch.sequence) > 1 and not bool((batch.sequence[1:] >= batch.sequence[:-1]).all()):
            raise InputError("`sequence` is not in order; expected the tokens of response 0, then of response 1, ...")
        if "bootstrap_value" in self.needs:
            lacking = batch.truncated & ~batch.bootstrap_value.isfinite()
            if bool(lacking.any()):
                place = batch.place(int(lacking.nonzero()[0]))
                raise InputError(f"`bootstrap_value` of {place} is missing; `bootstrap_truncated` needs one for each truncated response")

    @property
    def _kl_loss(self) -> bool:
        return self.parameters["kl"] is not None and self.parameters["kl"]["where"] == "loss"

    def _weights(self, batch: TokenBatch, scored: Scored, term_mask: Tensor) -> tuple[Tensor | None, dict[str, float]]:
        if batch.old_logp is None or batch.rollout_logp is None:
            return None, {}
        correction, weights = self.parameters["correction"], None
        log_ratio = (batch.old_logp - batch.rollout_logp).detach().double()
        if correction is not None:
            weights = off_policy_weights(log_ratio, scored.mask, term_mask, batch.sequence, batch.num_responses, correction)
        statistics = mismatch_statistics(log_ratio[term_mask], None if weights is None else weights[term_mask])
        return weights, {f"off_policy/{name}": float(value) for name, value in statistics.items()}

    def _signal(self, prepared: Prepared) -> Tensor:
        """[N] bool, see `Update.active`."""
        if self.coupling == "group":
            reached = prepared.in_batch & (prepared.length > 0)
            if (silent := prepared.per_response.get("silent")) is not None:
                reached = reached & ~silent
        else:
            coefficient = prepared.advantages if prepared.weights is None else prepared.advantages * prepared.weights
            reached = _count_of(coefficient != 0, prepared) > 0
        if self._kl_loss or self.uses_entropy or self.uses_value_model:
            reached = reached | (prepared.term_count > 0)
        return reached | (prepared.nll_count > 0)

    # ------------------------------------------------------------------ once per mini-batch

    def begin_update(self, prepared: Prepared, responses: Tensor | None = None) -> Update:
        """Fix the denominators of the update on `responses` [n] (default: all)."""
        if responses is None:
            responses = torch.arange(prepared.num_responses, device=prepared.group.device)
        inside = torch.zeros_like(prepared.in_batch)
        inside[responses] = True
        if self.coupling == "group":
            apart = segment_max(inside.double(), prepared.group, prepared.num_groups)[prepared.group] > inside
            if bool(apart.any()):
                group = int(prepared.group[int(apart.nonzero()[0])])
                raise ValueError(f"objective {self.name} needs whole groups in an update; group {group} is split")
        parameters = self.parameters
        terms, nll = prepared.term_count * inside, prepared.nll_count * inside
        return Update(
            prepared=prepared,
            responses=responses,
            in_update=inside,
            active=prepared.signal[responses],
            surrogate_scale=self.surrogate.scale(prepared, inside, parameters),
            term_scale=response_scale(terms, parameters["aggregation"], parameters["norm_length"]),
            nll_scale=parameters["nll_coef"] * response_scale(nll, "token_mean"),
            value_scale=response_scale(terms, "token_mean"),
        )

    # ------------------------------------------------------------------ any part of an update

    def scalars(self, update: Update, token_index: Tensor, logp: Tensor) -> SequenceSums | None:
        """What the tokens at hand add to the numbers that couple tokens; None if the objective is local to each token.

        `token_index` [t] positions in the prepared batch, `logp` [t]. On the first update of a batch `prepared.old_logp` may be given.
        """
        if self.coupling == "token":
            return None
        prepared = update.prepared
        tokens = TokenInputs(prepared, token_index, logp.detach().to(at_least_float32(logp.dtype)), {})
        counted = prepared.mask.index_select(0, token_index)
        # Summed in double: a mean of log-ratios is small against its terms.
        scores = torch.where(counted, self.surrogate.score(tokens).double(), 0.0)
        size = prepared.num_responses
        return SequenceSums(segment_sum(scores, tokens.sequence, size), segment_sum(counted.double(), tokens.sequence, size))

    def finish_scalars(self, update: Update, sums: SequenceSums) -> Scalars:
        """Numbers by response from summed `sums`. Raises ValueError if a response (where groups matter: a group) is there in part only."""
        prepared = update.prepared
        complete, absent = sums.count == prepared.length, (sums.count == 0) & (prepared.length > 0)
        relevant = update.in_update & prepared.in_batch
        if self.coupling == "group":
            present = segment_max((~absent & (prepared.length > 0)).double(), prepared.group, prepared.num_groups) > 0
            silent = prepared.per_response.get("silent", torch.zeros_like(absent))
            # A group is either there with all its tokens, or not at all.
            bad = relevant & ~silent & present[prepared.group] & ~complete
        else:
            bad = relevant & ~complete & ~absent
        if bool(bad.any()):
            response = int(bad.nonzero()[0])
            raise ValueError(
                f"scalars of response {response} hold {int(sums.count[response])} of its {int(prepared.length[response])} tokens"
            )
        values = self.surrogate.finish(update, torch.where(absent, torch.nan, sums.total), self.parameters)
        return Scalars(values)

    def coefficients(self, update: Update, scalars: Scalars | None = None, token_index: Tensor | None = None) -> Tensor:
        """The numbers that multiply the surrogate: the advantages; for listwise objectives minus the coefficients of `scalars`.

        [T], or [t] for the tokens at `token_index`.
        """
        prepared = update.prepared
        pick = (lambda tokens: tokens) if token_index is None else (lambda tokens: tokens.index_select(0, token_index))
        if self.surrogate.coefficient is None:
            return pick(prepared.advantages)
        coefficient = -scalars.values[self.surrogate.coefficient][pick(prepared.sequence)]
        return torch.where(pick(prepared.surrogate_mask), coefficient, 0.0)

    def loss(
        self,
        update: Update,
        token_index: Tensor,
        logp: Tensor,
        entropy: Tensor | None = None,
        values: Tensor | None = None,
        scalars: Scalars | SequenceSums | None = None,
    ) -> LossOutput:
        """The share of the tokens at hand in the update's loss.

        `token_index` [t] positions in the prepared batch; `logp`, `entropy`, `values` [t] of the current models. Without `scalars` a
        coupled objective computes them from these tokens, which must then hold whole responses (groups).
        """
        prepared, parameters = update.prepared, self.parameters
        current = logp.detach().to(torch.promote_types(logp.dtype, prepared.advantages.dtype))
        if scalars is None:
            scalars = self.scalars(update, token_index, current)
        if isinstance(scalars, SequenceSums):
            scalars = self.finish_scalars(update, scalars)
        tokens = TokenInputs(prepared, token_index, current, {} if scalars is None else scalars.values)
        terms = prepared.term_mask.index_select(0, token_index)
        value, slope, metrics = self._surrogate(update, token_index, tokens)
        term_weight = _weight(terms, update.term_scale, tokens.sequence, current.dtype) if self._kl_loss or self.uses_entropy else None
        if self._kl_loss:
            log_ratio = current - prepared.ref_logp.index_select(0, token_index)
            estimate, derivative = kl_estimate(log_ratio, parameters["kl"]["estimator"])
            weight = parameters["kl"]["coef"] * term_weight
            value, slope = value + _dot(weight, estimate), slope + _product(weight, derivative)
            metrics["kl_reference"] = (_dot(terms, estimate), terms.sum())
        if prepared.nll_mask is not None:
            chosen = prepared.nll_mask.index_select(0, token_index)
            weight = _weight(chosen, update.nll_scale, tokens.sequence, current.dtype)
            value, slope = value - _dot(weight, current), slope - weight
            metrics["nll"] = (-_dot(chosen, current), chosen.sum())
        loss = LinearLoss.apply(logp, value, slope)
        if entropy is not None:
            metrics["entropy"] = (_dot(terms, entropy.detach()), terms.sum())
        if self.uses_entropy:
            if entropy is None:
                raise ValueError(f"objective {self.name} has entropy_coef and was given no entropy")
            loss = loss - parameters["entropy_coef"] * torch.where(terms, entropy * term_weight, 0.0).sum()
        value_loss = None
        if values is not None and self.uses_value_model:
            value_loss, value_metrics = self.value_loss(update, token_index, values)
            metrics |= value_metrics
        return LossOutput(loss, value_loss, metrics)

    def _surrogate(
        self, update: Update, token_index: Tensor, tokens: TokenInputs
    ) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The surrogate's share in the loss, its slope [t], and its metrics."""
        prepared = update.prepared
        token = self.surrogate.token_loss(tokens, self.parameters)
        chosen = prepared.surrogate_mask.index_select(0, token_index)
        weight = _weight(chosen, update.surrogate_scale, tokens.sequence, tokens.logp.dtype)
        metrics, counted = {}, weight > 0
        if prepared.weights is not None:
            weight = weight * prepared.weights.index_select(0, token_index)
        if token.ratio is not None:
            metrics["ratio"] = (_dot(counted, token.ratio), counted.sum())
        if token.clipped is not None:
            metrics["clip_fraction"] = ((counted & token.clipped).sum(), counted.sum())
        return _dot(weight, token.value), _product(weight, token.slope), metrics

    def value_loss(self, update: Update, token_index: Tensor, values: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """The share of the tokens at hand in the update's value loss, without `value_coef`. `values` [t]."""
        prepared = update.prepared
        current = values.detach().to(torch.promote_types(values.dtype, prepared.value_targets.dtype))
        terms = prepared.term_mask.index_select(0, token_index)
        weight = _weight(terms, update.value_scale, prepared.sequence.index_select(0, token_index), current.dtype)
        old_values, targets = (numbers.index_select(0, token_index) for numbers in (prepared.old_values, prepared.value_targets))
        token = value_surrogate(current, old_values, targets, self.parameters["value_clip"])
        metrics = {"value_error_squared": (2 * _dot(terms, token.value), terms.sum())}
        if token.clipped is not None:
            metrics["value_clip_fraction"] = ((terms & token.clipped).sum(), terms.sum())
        return LinearLoss.apply(values, _dot(weight, token.value), _product(weight, token.slope)), metrics


def top_entropy(entropy: Tensor, mask: Tensor, fraction: float) -> Tensor:
    """The max(1, ceil(fraction n)) of the n tokens in `mask` [T] with the highest entropy, the first in order on ties (2506.01939)."""
    positions = mask.nonzero().squeeze(1)
    if len(positions) == 0:
        return mask
    count = max(1, int(-((-(fraction * len(positions) - 1e-9)) // 1)))
    order = torch.sort(entropy.detach()[positions], descending=True, stable=True).indices
    result = torch.zeros_like(mask)
    result[positions[order[:count]]] = True
    return result


def _weight(mask: Tensor, scale: Tensor, sequence: Tensor, dtype: torch.dtype) -> Tensor:
    """[t] the response's `scale` [N] at the tokens in `mask` [t], 0 at the others."""
    return torch.where(mask, scale.to(dtype).index_select(0, sequence), 0.0)


def _dot(weight: Tensor, numbers: Tensor) -> Tensor:
    """Sum of weight * numbers; whatever a number is, it counts 0 where its weight is 0."""
    return _product(weight, numbers).sum()


def _product(weight: Tensor, numbers: Tensor) -> Tensor:
    return torch.where(weight != 0, weight * numbers, 0.0)


def _detached(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.detach().to(dtype)


def _count(mask: Tensor, batch: TokenBatch) -> Tensor:
    return segment_sum(mask.double(), batch.sequence, batch.num_responses)


def _count_of(mask: Tensor, prepared: Prepared) -> Tensor:
    return segment_sum(mask.double(), prepared.sequence, prepared.num_responses)


def _shares(batch: TokenBatch, scored: Scored, kept: Tensor) -> dict[str, float]:
    if batch.num_responses == 0:
        return {}
    of_groups = lambda responses: float(segment_max(responses.double(), batch.group, batch.num_groups).clamp(min=0).mean())
    return {
        "responses/kept_share": float(kept.double().mean()),
        "groups/left_share": of_groups(~scored.in_batch),
        "groups/equal_reward_share": of_groups(scored.equal_group),
    }
