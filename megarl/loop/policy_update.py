"""One part of a step's rollouts into optimizer updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.loop.rollouts import JudgedRollouts
from megarl.objectives import Objective, Prepared, Update
from megarl.training.optimizer import learning_rate
from megarl.training.sequences import Sequences

if TYPE_CHECKING:
    from megarl.loop.run import Run


def update_policy(run: Run, rollouts: JudgedRollouts, step: int, minibatches: int) -> list[dict[str, tuple[float, float]]]:
    """Prepare the rollouts once, then update the policy mini-batch by mini-batch. Returns the metrics of each update.

    Each mini-batch holds whole groups. On the first update of a step the trainer has the very weights that the engine sampled with, so
    that is where the two are compared.
    """
    recipe, trainer = run.recipe, run.trainer
    state = (step, run.entropy)
    objective = run.inputs.objective.at(*state)
    sequences = rollouts.sequences()
    prepared = objective.prepare(rollouts.token_batch(step=step, seed=recipe.seed, **log_probs(run, objective, rollouts, sequences)))
    rate = learning_rate(recipe.training.optimizer, step, recipe.training.steps)
    results, pending = [], []
    for epoch in range(recipe.training.epochs):
        for number, groups in enumerate(np.array_split(np.arange(len(rollouts.prompts)), minibatches)):
            rows = torch.from_numpy((groups[:, None] * rollouts.n + np.arange(rollouts.n)).reshape(-1))
            update = objective.begin_update(prepared, rows)
            plan = trainer.plan(sequences, *rows_to_run(objective, prepared, update, recipe.training.skip_without_signal))
            first = epoch == 0 and number == 0 and rollouts.first == 0
            pending.append(trainer.begin_update(sequences, update, plan, rate, state, measure_mismatch=first))
            if len(pending) > 1:  # the next update is prepared and sent while this one runs
                results.append(trainer.finish_update(pending.pop(0)))
    return results + [trainer.finish_update(references) for references in pending]


def log_probs(run: Run, objective: Objective, rollouts: JudgedRollouts, sequences: Sequences) -> dict[str, Any]:
    """The log-probs that the objective needs beside the engine's, by the fewest passes.

    With `old_logprobs: rollout` the engine's log-probs stand for the old policy's. With `recompute` a single update needs no pass either:
    the old log-probs are its own, exactly. Otherwise the old policy's are computed now, before the first update.
    """
    recipe = run.recipe.training
    found: dict[str, Any] = {}
    single_update = recipe.minibatches == recipe.epochs == 1
    if recipe.old_logprobs == "rollout":
        logprobs = [x for response in rollouts.responses for x in response.logprobs]
        found["old_logp"] = np.array(logprobs, dtype=np.float32)
    if "entropy" in objective.needs or ("old_logp" not in found and (not single_update or "old_logp" in objective.needs)):
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
    """(responses that go through the model, the groups to keep together or None).

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
