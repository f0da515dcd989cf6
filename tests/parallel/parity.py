"""One update on any layout, and how far its numbers are from those of one process. No pytest here: every rank imports this."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from megarl.config.recipe import Layout, Optimizer, Training
from megarl.objectives import Objective, TokenBatch, make_objective
from megarl.training.local_ranks import run_ranks
from megarl.training.rank import RankConfig, TrainingRank, UpdateSettings, merge_metrics
from megarl.training.sequences import Sequences

RATE = 1e-3


@dataclass(frozen=True)
class Result:
    """What an update and a log-prob pass after it gave."""

    loss: float
    grad_norm: float
    clipped: float
    """Number of tokens whose ratio was clipped."""
    gradients: dict[str, np.ndarray]
    """By Hugging Face name."""
    logp: np.ndarray
    """[T] after the update."""
    token_kinds: dict[str, float]
    """WAPO's taxonomy of the update's tokens."""


def differences(got: Result, want: Result) -> dict[str, float]:
    """How far apart two results are: `loss` absolute, `logp` as root mean square (nats), `grad_norm` relative, `gradient` relative to the
    largest element of any, `clipped` a number of tokens, `token_kinds` absolute. NaN where something is missing or not finite."""
    if got.gradients.keys() != want.gradients.keys():
        return {"gradient": float("nan")}
    largest = max(np.abs(gradient).max() for gradient in want.gradients.values())
    return {
        "loss": abs(got.loss - want.loss),
        "grad_norm": abs(got.grad_norm / want.grad_norm - 1),
        "clipped": abs(got.clipped - want.clipped),
        "gradient": max(float(np.abs(got.gradients[name] - gradient).max()) for name, gradient in want.gradients.items()) / largest,
        "logp": float(np.sqrt(np.mean((got.logp - want.logp) ** 2))),
        "token_kinds": max((abs(got.token_kinds.get(name, np.nan) - value) for name, value in want.token_kinds.items()), default=0.0),
    }


def rollouts(
    groups: int = 6, n: int = 4, seed: int = 0, *, every_field: bool = False, vector: bool = False
) -> tuple[Sequences, TokenBatch]:
    """Ragged prompts and responses, one group without signal. `every_field`: also a masked token here and there, truncated responses, and
    all that objectives without a value model may ask for; `vector`: rewards as matrices (vpo)."""
    rng = np.random.default_rng(seed)
    prompts, responses, rewards = [], [], []
    for group in range(groups):
        prompt = rng.integers(2, 125, rng.integers(1, 9)).tolist()
        for _ in range(n):
            prompts.append(prompt)
            responses.append(rng.integers(2, 125, rng.integers(1, 14)).tolist())
            rewards.append(1.0 if group == 2 else float(rng.integers(0, 2)))
    sequences = Sequences.of(prompts, responses)
    tokens, count = int(sequences.response_starts[-1]), len(prompts)
    # Old log-probs near those of a uniform policy, so that some ratios are clipped.
    near_uniform = lambda spread: torch.from_numpy(rng.normal(-np.log(125), spread, tokens)).float()
    logp = near_uniform(0.3)
    batch = TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(count), torch.from_numpy(sequences.response_lengths)),
        mask=torch.ones(tokens, dtype=torch.bool),
        group=torch.arange(count) // n,
        reward=torch.tensor(rewards),
        old_logp=logp,
        rollout_logp=logp,
    )
    if every_field:
        batch.mask = torch.from_numpy(rng.random(tokens) < 0.85)
        batch.ref_logp, batch.rollout_logp = near_uniform(0.3), logp + 0.05 * torch.from_numpy(rng.normal(size=tokens)).float()
        batch.entropy = torch.from_numpy(rng.uniform(0, 4, tokens)).float()
        batch.truncated = torch.from_numpy(rng.random(count) < 0.2)
    if vector:
        batch.reward = [torch.from_numpy(rng.random((rng.integers(1, 4), 3))).float() for _ in range(count)]
    return sequences, batch


@dataclass(frozen=True)
class Case:
    """What a rank is asked to do."""

    model: str
    layout: dict
    objective: dict
    packing: bool = False
    recompute: str = "none"
    precision: str = "fp32"
    optimizer: dict = None
    max_tokens: int = 96
    skip: bool = True
    prepass: bool = False
    chunk_tokens: int | None = None
    fault: str | None = None
    """The name of a function in `faults` that spoils the rank first."""

    def config(self) -> RankConfig:
        from megarl.training.trainer import rank_config

        training = Training(
            steps=1,
            layout=Layout(**self.layout),
            packing=self.packing,
            recompute=self.recompute,
            precision=self.precision,
            # A large epsilon: with the usual one, Adam's first step is the sign of the gradient, rounding noise included.
            optimizer=Optimizer(learning_rate=RATE, epsilon=1e-4, clip_grad=0, **(self.optimizer or {})),
            threads_per_rank=1,
            logprob_chunk_tokens=self.chunk_tokens,
        )
        return rank_config(model_path=self.model, pad_vocab_to=32, training=training, objective=self.objective, temperature=0.8, seed=0)


def token_kinds(metrics: dict[str, tuple[float, float]]) -> dict[str, float]:
    """The means of an update's metrics of WAPO's taxonomy."""
    return {name: total / count for name, (total, count) in metrics.items() if name.startswith("token_kind/") and count}


def run(case: Case) -> Result:
    """One update and a log-prob pass on local ranks."""
    config = case.config()
    parts = run_ranks(config.layout.world_size, update_on_rank, case, config)
    metrics = merge_metrics(part["metrics"] for part in parts if part["metrics"] is not None)
    logp = np.full(int(rollouts()[0].response_starts[-1]), np.nan)
    for part in parts:
        if part["logprobs"] is not None:
            logp[part["logprobs"]["token_index"]] = part["logprobs"]["logp"]
    norm, ranks = metrics["grad_norm"]
    clipped = metrics.get("clip_fraction", (0.0, 1.0))[0]
    return Result(metrics["loss"][0], norm / ranks, clipped, parts[0]["gradients"], logp, token_kinds(metrics))


def update_on_rank(case: Case, config: RankConfig) -> dict:
    import torch.distributed as dist

    from tests.parallel.faults import plant

    plant(case.fault)
    if config.optimizer.overlap:
        _use_small_buckets()
    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    sequences, batch = rollouts()
    metrics = _update(
        rank, sequences, batch, make_objective(case.objective), RATE, max_tokens=case.max_tokens, skip=case.skip, prepass=case.prepass
    )
    gradients = rank.gradients()
    logprobs = rank.logprobs(sequences, config.plan(sequences, range(len(sequences)), max_tokens=case.max_tokens))
    return {"metrics": metrics, "gradients": gradients, "logprobs": logprobs}


def _use_small_buckets() -> None:
    """Some hundred kilobytes of parameters would all be in one bucket, whose communication has nothing to overlap with."""
    from megarl.training import step

    step.DistributedDataParallelConfig = functools.partial(step.DistributedDataParallelConfig, bucket_size=20_000)


def _update(
    rank: TrainingRank,
    sequences: Sequences,
    batch: TokenBatch,
    objective: Objective,
    rate: float,
    *,
    max_tokens: int = 96,
    skip: bool = True,
    prepass: bool = False,
):
    update = objective.begin_update(objective.prepare(batch))
    rows = (update.responses[update.active] if skip else update.responses).tolist()
    units = None
    if objective.coupling == "group" and not prepass:
        units = [[row for row in rows if batch.group[row] == group] for group in range(batch.num_groups)]
    plan = rank.config.plan(sequences, rows, max_tokens=max_tokens, units=units)
    rank.objective = objective
    return rank.update(sequences, update, plan, UpdateSettings(rate, prepass=prepass, token_kinds=True))


def gradients_of_objectives(config: RankConfig, specs: list[dict]) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Loss of this rank's tokens (0 where it has none) and, on rank 0, the gradients, of each objective at the weights of the folder."""
    import torch.distributed as dist

    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    results = []
    for spec in specs:
        sequences, batch = rollouts(every_field=True, vector=spec["name"] == "vpo")
        metrics = _update(rank, sequences, batch, make_objective(spec), rate=0.0)  # so the weights stay what they are
        results.append((metrics["loss"][0] if metrics else 0.0, rank.gradients()))
    return results


def losses_of_updates(config: RankConfig, seeds: list[int], load: str | None = None, save: str | None = None) -> list[float]:
    """This rank's part of the losses of several updates, each on the rollouts of its seed, between loading and saving a checkpoint."""
    import torch.distributed as dist

    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    if load:
        rank.load(load)
    losses = []
    for seed in seeds:
        metrics = _update(rank, *rollouts(seed=seed), make_objective(config.objective), RATE)
        losses.append(metrics["loss"][0] if metrics else 0.0)
    if save:
        rank.save(save)
    return losses


def losses_while_saving(config: RankConfig, folder: str) -> list[float]:
    """Two updates, then three more while the state between them is written. Rank 0 checks that it is no checkpoint before it is whole."""
    import torch.distributed as dist

    from megarl.errors import InputError

    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    losses = []
    for seed in range(5):
        if seed == 2:
            rank.begin_save(folder)
            try:
                rank.load(folder)
            except InputError:
                pass
            else:
                raise AssertionError("a checkpoint that is still being written was loaded")
        metrics = _update(rank, *rollouts(seed=seed), make_objective(config.objective), RATE)
        losses.append(metrics["loss"][0] if metrics else 0.0)
    rank.finish_save()
    return losses


def exported(config: RankConfig, updates: int = 0, fault: str | None = None) -> dict[str, np.ndarray] | None:
    """The weights as rank 0 streams them, by Hugging Face name, after some updates."""
    import torch.distributed as dist

    from tests.parallel.faults import plant

    plant(fault)
    rank = TrainingRank(config, dist.get_rank())
    rank.build()
    for seed in range(updates):
        _update(rank, *rollouts(seed=seed), make_objective(config.objective), RATE)
    rank.complete_weights()
    if not rank.exporter.takes_part:
        return None
    tensors = {name: tensor.float().numpy().copy() for name, tensor in rank.exporter.stream()}
    if dist.get_rank() != 0:
        return None
    assert rank.exporter.names() == list(tensors)
    return tensors
