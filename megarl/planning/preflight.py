"""`megarl preflight RECIPE`: does the recipe's layout change its result?

The recipe's model is shrunk, its layout kept as far as the ranks allow, and one update with its objective is made on gloo ranks of this
machine and on one process. Loss, gradient norm, every gradient and the log-probs after the update must agree, and those of the reference.
Everything runs in fp32: rounding would hide what is looked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config.load import Loaded
from megarl.config.recipe import Layout, Recipe, Training
from megarl.errors import CheckFailed, InputError
from megarl.models.hf_config import ModelShape, check_layout, read_model_shape
from megarl.objectives import TokenBatch, make_objective
from megarl.planning.shrink import shrink_layout, shrink_shape, write_small_model
from megarl.training.local_ranks import run_ranks
from megarl.training.rank import RankConfig, TrainingRank, UpdateSettings, merge_metrics
from megarl.training.sequences import Sequences
from megarl.training.trainer import rank_config

RANKS = 8
LIMITS = {"loss": 1e-5, "gradient norm": 1e-5, "gradients": 1e-5, "log-probs after it": 1e-5, "log-probs": 1e-5}
"""Loss and log-probs relative to the largest where that is above 1, the norm relative, gradients relative to the largest of all. What
another order of summation makes of them in fp32 lies below."""


@dataclass(frozen=True)
class Row:
    role: str
    what: str
    one_process: float | None
    layout: float | None
    difference: float
    where: str = ""

    @property
    def agrees(self) -> bool:
        return self.difference <= LIMITS[self.what]  # not so for NaN


@dataclass(frozen=True)
class Outcome:
    loss: float
    grad_norm: float
    gradients: dict[str, np.ndarray]
    logp: np.ndarray
    reference: np.ndarray | None


@dataclass(frozen=True)
class Job:
    """What every rank of a trial is told."""

    config: RankConfig
    settings: UpdateSettings
    max_tokens: int
    group_in_micro_batch: bool


def preflight(loaded: Loaded[Recipe], most_ranks: int = RANKS, say: Callable[[str], None] = print) -> list[Row]:
    """Compare the recipe's layout with one process; `say` gets a line for each thing that is made smaller. No rows if it is one.

    Raises InputError for a recipe that cannot be laid out, CheckFailed where there is no gradient to compare.
    """
    recipe = loaded.recipe
    source = Path(recipe.model.path)
    shape = read_model_shape(source)
    check_layout(shape, recipe.training.layout, source=str(source))
    with loaded.naming("objective"):
        if make_objective(recipe.objective).uses_value_model:
            raise InputError(f"objective.name: {recipe.objective['name']!r} trains with a value model, which this version has not got.")
    layout = shrink_layout(recipe.training.layout, most_ranks)
    if layout.world_size == 1:
        if recipe.training.layout.world_size > 1:
            raise InputError(f"--ranks {most_ranks}: one process cannot be compared with itself; expected 2 or more.")
        say("layout: one process, which has nothing to be compared with")
        return []
    small = shrink_shape(shape, layout)
    for line in reductions(recipe.training.layout, layout, shape, small):
        say(line)
    with tempfile.TemporaryDirectory(prefix="megarl-preflight-") as folder:
        write_small_model(Path(folder) / "model", source, small)
        trial = lambda layout: run_trial(recipe, str(Path(folder) / "model"), layout)
        got, want = trial(layout), trial(Layout())
    if got.grad_norm == want.grad_norm == 0:
        raise CheckFailed("the objective has no gradient on made-up rollouts, so its layout cannot be judged")
    return compare(got, want)


def reductions(layout: Layout, kept: Layout, shape: ModelShape, small: ModelShape) -> list[str]:
    """What was made smaller, as lines for people."""
    changed = [f"{name} {was} -> {now}" for name, was in layout.model_dump().items() if (now := getattr(kept, name)) != was]
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "vocab_size")
    model = [f"{name} {getattr(shape, name)} -> {getattr(small, name)}" for name in sizes]
    if shape.experts is not None:
        model.append(f"experts {shape.experts.number} -> {small.experts.number}")
    return [
        f"layout: {', '.join(changed) if changed else 'as in the recipe'}; {kept.world_size} ranks on this machine, over gloo, in fp32",
        f"model: {', '.join(model)}; random weights",
    ]


def run_trial(recipe: Recipe, folder: str, layout: Layout) -> Outcome:
    """One update and the log-prob passes on the ranks of `layout`."""
    training = recipe.training
    objective = make_objective(recipe.objective)
    sequences, _ = rollouts(layout_independent_groups(recipe), vector=objective.vector_rewards)
    whole = objective.coupling == "group" and training.listwise_scalars != "prepass"
    longest = int(sequences.lengths.max())
    job = Job(
        config=rank_config(
            model_path=folder,
            pad_vocab_to=32,
            training=Training(
                steps=1,
                layout=layout,
                packing=training.packing,
                recompute=training.recompute,
                logprob_chunk_tokens=7,
                # A large epsilon: with the usual one, Adam's first step is the sign of the gradient, rounding included.
                optimizer=training.optimizer.model_copy(update={"clip_grad": 0.0, "epsilon": 1e-4}),
                threads_per_rank=1,
            ),
            objective=recipe.objective,
            temperature=max(recipe.rollout.temperature, 0.3),  # a lower one multiplies the rounding of the logits
            seed=recipe.seed,
        ),
        settings=UpdateSettings(1e-3, step=1, prepass=objective.coupling == "group" and not whole),
        # So small that every rank has several micro-batches.
        max_tokens=longest * (SAMPLES if whole else 2),
        group_in_micro_batch=whole,
    )
    parts = run_ranks(layout.world_size, trial_on_rank, job, layout_independent_groups(recipe))
    metrics = merge_metrics(part["metrics"] for part in parts if part["metrics"] is not None)
    norm, ranks = metrics["grad_norm"]
    tokens = int(sequences.response_starts[-1])
    gather = lambda name: _gathered([part[name] for part in parts], tokens)
    has_reference = "ref_logp" in objective.needs
    return Outcome(metrics["loss"][0], norm / ranks, parts[0]["gradients"], gather("logp"), gather("reference") if has_reference else None)


def trial_on_rank(job: Job, groups: int) -> dict[str, Any]:
    import torch.distributed as dist

    config = job.config
    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    objective = make_objective(config.objective).at(job.settings.step)
    sequences, batch = rollouts(groups, vector=objective.vector_rewards)
    every_row = config.plan(sequences, range(len(sequences)), max_tokens=job.max_tokens)
    reference = rank.logprobs(sequences, every_row, "reference") if rank.reference is not None else None
    update = objective.begin_update(objective.prepare(batch))
    rows = update.responses[update.active].tolist()
    units = None
    if job.group_in_micro_batch:
        units = [[row for row in rows if batch.group[row] == group] for group in range(batch.num_groups)]
    metrics = rank.update(sequences, update, config.plan(sequences, rows, max_tokens=job.max_tokens, units=units), job.settings)
    gradients = rank.gradients()
    return {"metrics": metrics, "gradients": gradients, "logp": rank.logprobs(sequences, every_row), "reference": reference}


def _gathered(parts: list[dict[str, np.ndarray] | None], tokens: int) -> np.ndarray:
    whole = np.full(tokens, np.nan)
    for part in parts:
        if part is not None:
            whole[part["token_index"]] = part["logp"]
    return whole


SAMPLES = 4


def layout_independent_groups(recipe: Recipe) -> int:
    """Enough groups for every data rank of the full trial to have some, whatever the layout that is compared."""
    return max(6, 2 * min(recipe.training.layout.data, RANKS))


def rollouts(groups: int, *, vector: bool = False, seed: int = 0) -> tuple[Sequences, TokenBatch]:
    """Made-up rollouts with every field that an objective may need: ragged, some truncated, one group of equal rewards."""
    rng = np.random.default_rng(seed)
    prompts, responses, rewards = [], [], []
    for group in range(groups):
        prompt = rng.integers(2, 125, rng.integers(1, 9)).tolist()
        for _ in range(SAMPLES):
            prompts.append(prompt)
            responses.append(rng.integers(2, 125, rng.integers(1, 14)).tolist())
            rewards.append(1.0 if group == 2 else float(rng.integers(0, 2)))
    sequences = Sequences.of(prompts, responses)
    count, tokens = len(prompts), int(sequences.response_starts[-1])
    # Near the log-probs of a uniform policy, as random weights have them, so that some ratios are clipped and some are not.
    near = lambda spread: torch.from_numpy(rng.normal(-np.log(125), spread, tokens)).float()
    old = near(0.3)
    matrices = [torch.from_numpy(rng.integers(0, 2, (rng.integers(1, 4), 3))).double() for _ in range(count)]
    batch = TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(count), torch.from_numpy(sequences.response_lengths)),
        mask=torch.ones(tokens, dtype=torch.bool),
        group=torch.arange(count) // SAMPLES,
        reward=matrices if vector else torch.tensor(rewards, dtype=torch.float64),
        correct=torch.tensor(rewards) > 0,
        truncated=torch.from_numpy(rng.random(count) < 0.1),
        old_logp=old,
        rollout_logp=old + torch.from_numpy(rng.normal(0, 0.05, tokens)).float(),
        ref_logp=near(0.1),
        entropy=torch.from_numpy(rng.uniform(1, 5, tokens)).float(),
    )
    return sequences, batch


def compare(got: Outcome, want: Outcome) -> list[Row]:
    """The table's rows; a difference is NaN where something is missing or not finite."""
    largest = max((float(np.abs(gradient).max()) for gradient in want.gradients.values()), default=np.nan)
    names = want.gradients.keys() | got.gradients.keys()
    off = lambda name: (
        float(np.abs(got.gradients[name] - want.gradients[name]).max()) / largest
        if name in got.gradients and name in want.gradients
        else np.nan
    )
    worst = max(names, key=lambda name: np.nan_to_num(off(name), nan=np.inf))
    rows = [
        Row("policy", "loss", want.loss, got.loss, _scaled(got.loss, want.loss)),
        Row(
            "policy", "gradient norm", want.grad_norm, got.grad_norm, abs(got.grad_norm / want.grad_norm - 1) if want.grad_norm else np.nan
        ),
        Row("policy", "gradients", None, None, off(worst), worst),
        Row("policy", "log-probs after it", None, None, _scaled(got.logp, want.logp)),
    ]
    if want.reference is not None:
        rows.append(Row("reference", "log-probs", None, None, _scaled(got.reference, want.reference)))
    return rows


def _scaled(got: np.ndarray | float, want: np.ndarray | float) -> float:
    """Largest difference, relative to the largest number where that is above 1. NaN if one of them is."""
    return float(np.max(np.abs(got - want)) / max(1.0, np.max(np.abs(want))))


def table(rows: list[Row]) -> str:
    """The rows for the terminal."""
    lines = [f"{'role':<10} {'one update':<19} {'one process':>13} {'layout':>13} {'difference':>11} {'limit':>8}"]
    number = lambda value: "" if value is None else f"{value:.6g}"
    for row in rows:
        mark = "ok" if row.agrees else "DIFFERS"
        line = f"{row.role:<10} {row.what:<19} {number(row.one_process):>13} {number(row.layout):>13} {row.difference:>11.1e} "
        lines.append(f"{line}{LIMITS[row.what]:>8.0e}  {mark}" + (f"  most: {row.where}" if row.where else ""))
    return "\n".join(lines)
