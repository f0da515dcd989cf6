"""One part of a step's rollouts into optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.loop.rollouts import JudgedRollouts, leave_out
from megarl.loop.step_lists import cut_into_lists
from megarl.objectives import Objective, Prepared, TokenBatch, Update
from megarl.objectives.replay import fresh_groups, kl_pull
from megarl.training.optimizer import learning_rate
from megarl.training.rank import UpdateSettings
from megarl.training.sequences import Sequences

if TYPE_CHECKING:
    from megarl.loop.run import Run


def update_policy(run: Run, rollouts: JudgedRollouts, step: int, minibatches: int) -> list[dict[str, tuple[float, float]]]:
    """Prepare the rollouts once, then update the policy mini-batch by mini-batch. Returns the metrics of each update.

    Each mini-batch holds whole groups. On the first update of a step the trainer has the very weights that the engine sampled with, so
    that is where the two are compared.
    """
    recipe, trainer = run.recipe, run.trainer
    objective = run.inputs.objective.at(step, run.entropy)
    material = gather(run, objective, rollouts, step)
    prepared = objective.prepare(material.batch)
    metrics = material.metrics | {name: (value, 1.0) for name, value in prepared.metrics.items()}
    rate = learning_rate(recipe.training.optimizer, step, recipe.training.steps)
    every = recipe.diagnostics.every
    results, pending = [], []
    for epoch in range(recipe.training.epochs):
        for number, groups in enumerate(split(material, minibatches)):
            update = objective.begin_update(prepared, torch.isin(material.batch.group, groups).nonzero().squeeze(1))
            rows, units = rows_to_run(objective, prepared, update, recipe.training.skip_without_signal)
            prepass = units is not None and not kept_whole(run, material.sequences, units)
            plan = trainer.plan(material.sequences, rows, None if prepass else units)
            first = epoch == 0 and number == 0 and rollouts.first == 0
            settings = UpdateSettings(
                rate=rate,
                step=step,
                entropy=run.entropy,
                prepass=prepass,
                mismatch_tokens=material.fresh_tokens if first else 0,
                token_kinds=bool(every) and step % every == 0,
            )
            pending.append(trainer.begin_update(material.sequences, update, plan, settings))
            if len(pending) > 1:  # the next update is prepared and sent while this one runs
                results.append(trainer.finish_update(pending.pop(0)))
    results += [trainer.finish_update(references) for references in pending]
    return [result | metrics for result in results]


@dataclass
class Material:
    """What the updates of one part of a step are made from."""

    sequences: Sequences
    batch: TokenBatch
    fresh_groups: int
    """Groups of the step itself; those of earlier steps come after them."""
    fresh_tokens: int
    """Their tokens, which come first."""
    groups: int
    """All that are trained on; those of the batch above it hold the responses that are left out of the loss."""
    metrics: dict[str, tuple[float, float]]


def gather(run: Run, objective: Objective, rollouts: JudgedRollouts, step: int) -> Material:
    """The step's rollouts and what is drawn from earlier ones, with the log-probs that the objective needs."""
    recipe, replay = run.recipe, run.replay
    fresh, ages, metrics = rollouts, np.zeros(len(rollouts.prompts)), {}
    if replay is not None:
        drawn, drawn_ages = replay.draw(step, first=rollouts.first + len(rollouts.prompts))
        replay.add(fresh, version=step - 1)
        metrics = {"replay/drawn": (float(len(drawn_ages)), 1.0), "replay/stored": (float(len(replay)), 1.0)}
        if drawn is not None:
            rollouts, ages = JudgedRollouts.joined([fresh, drawn]), np.concatenate([ages, drawn_ages])
            metrics["replay/age_mean"] = (float(drawn_ages.sum()), float(len(drawn_ages)))
    sequences = rollouts.sequences()
    found = log_probs(run, objective, rollouts, fresh, sequences)
    batch = rollouts.token_batch(step=step, seed=recipe.seed, vectors=objective.vector_rewards, **found)
    groups, tokens = len(fresh.prompts), fresh.tokens
    if len(ages) > groups:
        keep = fresh_groups(batch, recipe.replay.max_drift)
        keep[:groups] = True
        metrics["replay/drifted_share"] = (float((~keep).sum()), float(len(ages) - groups))
        if not bool(keep.all()):
            chosen = keep.nonzero().squeeze(1).tolist()
            rows = keep[batch.group].nonzero().squeeze(1)
            tokens_kept = keep[batch.group][batch.sequence].numpy()
            rollouts, ages, sequences = rollouts.groups(chosen), ages[chosen], sequences.select(rows.numpy())
            found = {name: array[tokens_kept] for name, array in found.items()}
            batch = rollouts.token_batch(step=step, seed=recipe.seed, vectors=objective.vector_rewards, **found)
        batch.pull = kl_pull(torch.from_numpy(ages)[batch.group], recipe.replay.kl_pull)
    all_groups = batch.num_groups
    batch = leave_out(batch, rollouts.verdicts)
    if recipe.training.step_lists is not None:
        sequences, lists = cut_into_lists(sequences, batch, run.inputs.ends_segment(sequences))
        batch, fresh_lists, all_groups = lists.batch, lists.source < groups, lists.batch.num_groups
        groups, tokens = int(fresh_lists.sum()), int(fresh_lists[batch.group][batch.sequence].sum())
        metrics["step_lists/lists"] = (float(batch.num_groups), 1.0)
        metrics["step_lists/segments"] = (float(batch.num_responses), 1.0)
    return Material(sequences, batch, groups, tokens, all_groups, metrics)


def split(material: Material, minibatches: int) -> list[torch.Tensor]:
    """The groups of each mini-batch: the step's own in order, and an equal share of those of earlier steps with each."""
    own = torch.arange(material.fresh_groups).tensor_split(minibatches)
    earlier = torch.arange(material.fresh_groups, material.groups).tensor_split(minibatches)
    return [torch.cat(pair) for pair in zip(own, earlier, strict=True)]


def log_probs(run: Run, objective: Objective, rollouts: JudgedRollouts, fresh: JudgedRollouts, sequences: Sequences) -> dict[str, Any]:
    """The log-probs that the objective needs beside the engine's, by the fewest passes.

    With `old_logprobs: rollout` the engine's log-probs stand for the old policy's. With `recompute` a single update needs no pass either:
    the old log-probs are its own, exactly. Otherwise the old policy's are computed now, before the first update. The engine's log-probs
    of responses that come after the `fresh` ones are those of an earlier policy, so theirs are always computed.
    """
    recipe = run.recipe.training
    found: dict[str, Any] = {}
    replayed = len(rollouts.prompts) > len(fresh.prompts)
    single_update = recipe.minibatches == recipe.epochs == 1
    if recipe.old_logprobs == "rollout":
        found["old_logp"] = np.array([x for response in rollouts.responses for x in response.logprobs], dtype=np.float32)
        if replayed:
            with run.ledger.phase("logprobs"):
                logp, _ = run.trainer.logprobs(sequences, rows=range(len(fresh.responses), len(rollouts.responses)))
            found["old_logp"][fresh.tokens :] = logp[fresh.tokens :]
    without_pass = "old_logp" in found or (single_update and not replayed and "old_logp" not in objective.needs)
    if "entropy" in objective.needs or not without_pass:
        with run.ledger.phase("logprobs"):
            logp, entropy = run.trainer.logprobs(sequences)
        found.setdefault("old_logp", logp)
        found["entropy"] = entropy
    if "ref_logp" in objective.needs:
        with run.ledger.phase("logprobs"):
            found["ref_logp"], _ = run.trainer.logprobs(sequences, role="reference")
    return found


def rows_to_run(
    objective: Objective, prepared: Prepared, update: Update, skip_without_signal: bool
) -> tuple[list[int], list[list[int]] | None]:
    """(responses that go through the model, the groups that are computed together or None).

    Leaving out responses without a gradient is exact: they stay in every statistic and denominator. All may be left out; the update is
    made all the same, since Adam's moments move the weights without a gradient too.
    """
    rows = update.responses[update.active] if skip_without_signal else update.responses
    rows = rows.tolist()
    if objective.coupling != "group":
        return rows, None
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(int(prepared.group[row]), []).append(row)
    return rows, list(groups.values())


def kept_whole(run: Run, sequences: Sequences, units: list[list[int]]) -> bool:
    """Whether each group is to lie in one micro-batch, so that its scalars need no pass of their own."""
    training = run.recipe.training
    if training.listwise_scalars != "auto":
        return training.listwise_scalars == "micro_batch"
    lengths = sequences.lengths
    return all(len(unit) * int(lengths[unit].max()) <= training.micro_batch_tokens for unit in units)
