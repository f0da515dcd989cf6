"""The controller's side of the training ranks: Ray actors that are told the same thing at the same time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from megarl.errors import InputError, RunFailed
from megarl.models.hf_config import check_layout, read_model_shape
from megarl.models.hf_tensors import check_weights
from megarl.objectives import Update
from megarl.platform.device import rank_environment, rank_resources
from megarl.sync.manifest import Manifest
from megarl.training.batching import Plan
from megarl.training.rank import RankConfig, TrainingRank, UpdateSettings, merge_metrics
from megarl.training.sequences import Sequences


class Trainer:
    """All ranks of one model. Make it with `start`, in a Ray cluster; `shutdown` ends the rank processes."""

    def __init__(self, actors: list[Any], config: RankConfig, max_tokens: int):
        self._actors, self.config, self.max_tokens = actors, config, max_tokens
        self._manifest: Manifest | None = None
        self._starting: list[Any] = []

    @classmethod
    def start(cls, config: RankConfig, *, max_tokens: int, wait: bool = True) -> Trainer:
        """Start the ranks. With `wait=False` it returns at once, and `wait_ready` must follow."""
        world = config.layout.world_size
        if config.threads is None:
            config = _with_threads(config, max(1, (os.cpu_count() or 1) // world))
        actor_class = ray.remote(TrainingRank).options(
            max_restarts=0, runtime_env={"env_vars": rank_environment(config.threads)}, **rank_resources()
        )
        trainer = cls([actor_class.remote(config, rank) for rank in range(world)], config, max_tokens)
        host, port = trainer.meeting_point()
        trainer._starting = [actor.start.remote(host, port) for actor in trainer._actors]
        if wait:
            trainer.wait_ready()
        return trainer

    def wait_ready(self) -> None:
        """Block until every rank has its weights. Raises InputError for weights that do not fit."""
        _get(self._starting)
        self._manifest = self._all("manifest")[0]

    @property
    def manifest(self) -> Manifest:
        """What `send_weights` sends."""
        return self._manifest

    # ------------------------------------------------------------------ passes

    def plan(self, sequences: Sequences, rows: Sequence[int], units: Sequence[Sequence[int]] | None = None) -> Plan:
        """Micro-batches of `rows` on this trainer's layout."""
        return self.config.plan(sequences, rows, max_tokens=self.max_tokens, units=units)

    def logprobs(self, sequences: Sequences, role: str = "policy", rows: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Log-probs and entropies [T] of the response tokens, by the policy's present weights or by the `reference`.

        `rows`: the sequences that are run, default all; NaN at the tokens of the others.
        """
        plan = self.plan(sequences, range(len(sequences)) if rows is None else rows)
        logp, entropy = (np.full(int(sequences.response_starts[-1]), np.nan, dtype=np.float32) for _ in range(2))
        for part in self._all("logprobs", ray.put(sequences), plan, role):
            if part is not None:
                logp[part["token_index"]] = part["logp"]
                entropy[part["token_index"]] = part["entropy"]
        return logp, entropy

    def begin_update(self, sequences: Sequences, update: Update, plan: Plan, settings: UpdateSettings) -> list[Any]:
        """Start one optimizer update on all ranks; `finish_update` waits for it. Updates run in the order in which they are begun."""
        arguments = (ray.put(sequences), ray.put(update), plan, settings)
        return [actor.update.remote(*arguments) for actor in self._actors]

    @staticmethod
    def finish_update(references: list[Any]) -> dict[str, tuple[float, float]]:
        """The metrics of an update, (sum, count) over all its tokens."""
        return merge_metrics(part for part in _get(references) if part is not None)

    # ------------------------------------------------------------------ weights

    def meeting_point(self) -> tuple[str, int]:
        """Rank 0's address and a free port there, for a process group that it will listen for."""
        return _get([self._actors[0].meeting_point.remote()])[0]

    def connect_sender(self, host: str, port: int, world_size: int) -> list[Any]:
        return [self._actors[0].connect_sender.remote(host, port, world_size)]

    def send_weights(self) -> list[Any]:
        """Start sending the weights to the engines; returns Ray references."""
        return [actor.send_weights.remote(self.manifest) for actor in self._actors]

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder."""
        self._all("export", folder)

    def save(self, folder: str) -> None:
        """Weights and optimizer state into an existing, empty folder."""
        self._all("save", folder)

    def begin_save(self, folder: str) -> None:
        """Start to save the present state and go on; it is a checkpoint once `finish_save` has returned."""
        self._all("begin_save", folder)

    def finish_save(self) -> None:
        self._all("finish_save")

    def load(self, folder: str) -> None:
        self._all("load", folder)

    def gradients(self) -> dict[str, np.ndarray]:
        """The last update's gradients by Hugging Face name (for tests and checks of a layout)."""
        return self._all("gradients")[0]

    def shutdown(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            ray.kill(actor)

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        return _get([getattr(actor, method).remote(*arguments) for actor in self._actors])


class TrainerFailure(RunFailed):
    """A training rank died, or could not do what it was told."""


def _get(references: list[Any]) -> list[Any]:
    """All results. The first failure of any rank is raised at once: the others may wait for the failed one for ever.

    Raises InputError as the rank raised it (weights that do not fit), TrainerFailure for anything else.
    """
    pending = list(references)
    while pending:
        ready, pending = ray.wait(pending, num_returns=1)
        try:
            ray.get(ready[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, InputError):
                raise error.cause from None
            raise TrainerFailure(f"training rank {references.index(ready[0])} failed: {error.cause!r}") from error
        except ray.exceptions.RayActorError as error:
            raise TrainerFailure(f"training rank {references.index(ready[0])} died") from error
    return ray.get(references)


def _with_threads(config: RankConfig, threads: int) -> RankConfig:
    from dataclasses import replace

    return replace(config, threads=threads)


def rank_config(
    *, model_path: str, pad_vocab_to: int, training: Any, objective: dict[str, Any], temperature: float, seed: int
) -> RankConfig:
    """The ranks' configuration from recipe sections, checked against the model. InputError if the layout does not fit it."""
    shape = read_model_shape(model_path)
    check_layout(shape, training.layout, source=model_path)
    check_weights(model_path, shape)
    return RankConfig(
        model_path=model_path,
        shape=shape,
        pad_vocab_to=pad_vocab_to,
        layout=training.layout,
        packing=training.packing,
        recompute=training.recompute,
        bf16=training.precision == "bf16",
        optimizer=training.optimizer,
        objective=objective,
        temperature=temperature,
        seed=seed,
        threads=training.threads_per_rank,
        logprob_chunk_tokens=training.logprob_chunk_tokens,
    )
