"""One Megatron rank: one process, one place in the layout. The controller calls the same method on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from megarl.config.recipe import Layout, Optimizer
    from megarl.models.hf_config import ModelShape
    from megarl.objectives import Scalars, Update
    from megarl.sync.manifest import Manifest
    from megarl.training.batching import Plan
    from megarl.training.sequences import Sequences


@dataclass(frozen=True)
class RankConfig:
    """What every rank of a trainer is told."""

    model_path: str
    shape: ModelShape
    pad_vocab_to: int
    layout: Layout
    bf16: bool
    optimizer: Optimizer
    objective: dict[str, Any]
    temperature: float
    seed: int
    threads: int | None


@dataclass(frozen=True)
class UpdateSettings:
    """How one optimizer update is made; the same on every rank."""

    rate: float
    step: int = 0
    entropy: float | None = None
    """With `step`: what a scheduled objective's parameters depend on."""
    prepass: bool = False
    """Groups lie in several micro-batches, so their scalars come from a forward pass before the update."""
    mismatch_tokens: int = 0
    """The weights are those that the engine sampled the first so many tokens with: its log-probs are compared with these."""
    token_kinds: bool = False
    """Measure WAPO's taxonomy of token updates."""


class TrainingRank:
    """Methods are collectives of the ranks unless they say otherwise; results come from the ranks that have them, else None."""

    def __init__(self, config: RankConfig, rank: int):
        self.config, self.rank = config, rank

    def meeting_point(self) -> tuple[str, int]:
        """This rank's address in the cluster and a free port there. Asked of rank 0 only."""
        import ray

        from megarl.sync.transport import free_port

        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start(self, host: str, port: int) -> bool:
        """Join the other ranks, build this rank's stage, load its weights, make its optimizer."""
        from megarl import platform
        from megarl.training import parallel

        config, layout = self.config, self.config.layout
        if config.threads is not None:
            platform.use_threads(config.threads)
        parallel.initialize(self.rank, layout.world_size, host, port, tensor=layout.tensor, pipeline=layout.pipeline, seed=config.seed)
        from megatron.core import parallel_state

        from megarl.models.hf_tensors import HFTensors
        from megarl.models.hf_weights import HFExporter, load_hf_weights
        from megarl.models.policy import ParallelLayout, build_policy
        from megarl.objectives import make_objective
        from megarl.training.optimizer import build_optimizer
        from megarl.training.step import wrap_for_training

        parallel_layout = ParallelLayout(layout.tensor, layout.pipeline, layout.sequence_parallel, config.bf16)
        tensors = HFTensors(config.model_path)

        def build():
            stage = build_policy(config.shape, parallel_layout, config.pad_vocab_to)
            load_hf_weights(stage, config.shape, tensors)
            return stage

        stage = build()
        self.objective = make_objective(config.objective)
        # Always the weights of the model's folder, also in a resumed run: the anchor of a KL term must not move.
        self.reference = build() if "ref_logp" in self.objective.needs else None
        self.model = wrap_for_training(stage, distributed_optimizer=config.optimizer.distributed)
        self.optimizer = build_optimizer(config.optimizer, config.bf16, [self.model])
        self.exporter = HFExporter(self.model, config.shape)
        self.last_stage = parallel_state.is_pipeline_last_stage()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.reports = self.last_stage and parallel_state.get_tensor_model_parallel_rank() == 0
        self.sender: Any = None
        return True

    # ------------------------------------------------------------------ passes

    def _run(self, model, sequences: Sequences, plan: Plan, loss, *, entropy: bool = False, collision: bool = False) -> Iterable[dict]:
        from megarl.training.step import run_micro_batches

        wanted = {"entropy": entropy, "collision": collision}
        config = self.config
        return run_micro_batches(
            model, sequences, plan, temperature=config.temperature, vocab_size=config.shape.vocab_size, loss=loss, **wanted
        )

    def logprobs(self, sequences: Sequences, plan: Plan, role: str = "policy") -> dict[str, np.ndarray] | None:
        """Log-probs and entropies of this data rank's response tokens: `token_index`, `logp`, `entropy`, [t] each.

        `role`: the `policy` as it is now, or the `reference`.
        """
        import torch

        with torch.no_grad():
            model = self.model if role == "policy" else self.reference
            outputs = list(self._run(model, sequences, plan, None, entropy=True))
        if not self.reports:
            return None
        return {
            "token_index": np.concatenate([out["token_index"] for out in outputs]),
            "logp": torch.cat([out["logp"] for out in outputs]).cpu().numpy(),
            "entropy": torch.cat([out["entropy"] for out in outputs]).cpu().numpy(),
        }

    def update(self, sequences: Sequences, update: Update, plan: Plan, settings: UpdateSettings) -> dict[str, tuple[float, float]] | None:
        """One optimizer update. Returns metrics as (sum, count) over this data rank's tokens, and the gradient norm."""
        from megarl import platform
        from megarl.objectives.taxonomy import token_kinds
        from megarl.training.optimizer import optimizer_step

        objective = self.objective.at(settings.step, settings.entropy)
        update = update.to(platform.device())
        whole = self._whole_scalars(objective, sequences, update, plan) if settings.prepass else None
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(outputs):
            index, logp = outputs.token_index, outputs.logp.detach()
            scalars = whole
            if scalars is None and (sums := objective.scalars(update, index, logp)) is not None:
                scalars = objective.finish_scalars(update, sums)
            result = objective.loss(update, index, outputs.logp, entropy=outputs.entropy, scalars=scalars)
            metrics = dict(result.metrics) | {"loss": (result.loss.detach(), 1.0)}
            if settings.mismatch_tokens:
                metrics |= mismatch(update, index, logp, settings.mismatch_tokens)
            if settings.token_kinds:
                advantage = objective.coefficients(update, scalars, index)
                metrics |= token_kinds(advantage, logp, outputs.entropy.detach(), outputs.collision, outputs.plogp_squares)
            return result.loss + outputs.anchor, metrics

        wanted = {"entropy": objective.uses_entropy or settings.token_kinds, "collision": settings.token_kinds}
        outputs = list(self._run(self.model, sequences, plan, loss, **wanted))
        norm = optimizer_step(self.optimizer, settings.rate)
        if not self.reports:
            return None
        return merge_metrics(outputs) | {"grad_norm": (norm, 1.0)}

    def _whole_scalars(self, objective, sequences: Sequences, update: Update, plan: Plan) -> Scalars | None:
        """The update's detached scalars from a forward pass over all of its tokens, summed over the ranks that share them."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state

        from megarl import platform
        from megarl.objectives import SequenceSums

        if objective.coupling == "token":
            return None
        with torch.no_grad():
            outputs = list(self._run(self.model, sequences, plan, None))
        if not self.last_stage:
            return None
        packed = torch.zeros(2, update.prepared.num_responses, dtype=torch.float64, device=platform.device())
        for out in outputs:
            index = torch.from_numpy(out["token_index"]).to(packed.device)
            packed += objective.scalars(update, index, out["logp"]).packed()
        dist.all_reduce(packed, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return objective.finish_scalars(update, SequenceSums(*packed))

    # ------------------------------------------------------------------ weights

    def manifest(self) -> Manifest | None:
        """Names, dtypes and shapes of the exported weights, in the order of sending. From rank 0."""
        from megarl.sync.manifest import Manifest

        names = self.exporter.names()
        dtype = "bfloat16" if self.config.bf16 else "float32"
        if self.rank != 0:
            return None
        return Manifest(tuple(names), (dtype,) * len(names), tuple(tuple(self.exporter.shapes[name]) for name in names))

    def connect_sender(self, host: str, port: int, world_size: int) -> None:
        """Rank 0 alone: meet the engines."""
        from megarl import platform
        from megarl.sync.transport import GlooSender, NcclSender

        self.sender = NcclSender() if platform.has_gpu() else GlooSender()
        self.sender.connect(host, port, world_size)

    def send_weights(self, manifest: Manifest) -> None:
        """Stream the weights to the engines. The ranks of the first model replica take part; the others return at once."""
        if self.data_rank != 0:
            return
        if self.rank == 0:
            self.sender.send(manifest, self.exporter.stream())
        else:
            for _ in self.exporter.stream():
                pass

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder, with the configuration and tokenizer of the model's own folder."""
        if self.data_rank != 0:
            return
        from megarl.models.hf_folder import write_hf_folder

        if self.rank == 0:
            write_hf_folder(self.exporter.stream(), source=self.config.model_path, folder=Path(folder))
        else:
            for _ in self.exporter.stream():
                pass

    def save(self, folder: str) -> None:
        """Weights and optimizer state into `folder`, which exists."""
        from megarl.training.checkpoint import save

        save(self.model, self.optimizer, folder)

    def load(self, folder: str) -> None:
        """Weights and optimizer state from `folder`. Raises InputError if it is damaged or of another model."""
        from megarl.errors import InputError
        from megarl.training.checkpoint import load

        try:
            load(self.model, self.optimizer, folder)
        except Exception as error:  # whatever Megatron, torch and the file system raise for a file that is not what it should be
            reason = str(error).strip().splitlines()
            raise InputError(
                f"{folder}: the checkpoint cannot be loaded ({type(error).__name__}: {reason[0] if reason else ''})."
            ) from None

    def gradients(self) -> dict[str, np.ndarray] | None:
        """The last update's gradients under their Hugging Face names, from rank 0. Clipping has scaled them in place, unless it is off."""
        exported = {name: tensor.float().cpu().numpy().copy() for name, tensor in self.exporter.stream(lambda p: p.main_grad)}
        return exported if self.rank == 0 else None


def mismatch(update: Update, token_index, logp, tokens: int) -> dict[str, tuple[float, float]]:
    """Trainer against engine on the same tokens and weights: k3 estimate of KL(rollout || train) and the largest difference in nats.

    With x = log p_train - log p_rollout at tokens drawn from the rollout policy, k3 = e^x - 1 - x (METHODS: section 12). Of the batch's
    tokens the first `tokens` are compared.
    """
    import torch

    chosen = update.prepared.term_mask[token_index] & (token_index < tokens)
    x = torch.where(chosen, logp.double() - update.prepared.rollout_logp[token_index].double(), 0.0)
    largest = float(x.abs().max()) if x.numel() else 0.0
    return {"kl_rollout_train": ((x.exp() - 1 - x).sum(), chosen.sum()), "logprob_diff_max": (largest, 1.0)}


MAXIMA = frozenset({"logprob_diff_max"})
"""Metrics that are merged by their maximum; all others are sums over counts."""
AVERAGED_OVER_UPDATES = frozenset({"loss"})


def merge_metrics(parts: Iterable[dict[str, tuple[Any, Any]]]) -> dict[str, tuple[float, float]]:
    """(sum, count) metrics of several micro-batches or ranks as one. The loss is a plain sum: its parts are already divided."""
    merged: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            total, count = float(total), float(count)
            if name in MAXIMA:
                merged[name] = (max(total, merged.get(name, (0.0, 1.0))[0]), 1.0)
            elif name in AVERAGED_OVER_UPDATES:
                merged[name] = (total + merged.get(name, (0.0, 1.0))[0], 1.0)
            else:
                before = merged.get(name, (0.0, 0.0))
                merged[name] = (before[0] + total, before[1] + count)
    return merged
