"""One Megatron rank: one process, one place in the layout. The controller calls the same method on all ranks at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    packing: bool
    recompute: str
    bf16: bool
    optimizer: Optimizer
    objective: dict[str, Any]
    temperature: float
    seed: int
    threads: int | None
    logprob_chunk_tokens: int | None = None

    def plan(self, sequences: Sequences, rows: Sequence[int], *, max_tokens: int, units: Sequence[Sequence[int]] | None = None) -> Plan:
        """Micro-batches of `rows` on this layout; see `plan_micro_batches`."""
        from megarl.training.batching import length_multiple, plan_micro_batches, row_cost

        layout = self.layout
        return plan_micro_batches(
            sequences.lengths,
            rows,
            ranks=layout.data,
            max_tokens=max_tokens,
            multiple=length_multiple(tensor=layout.tensor, sequence_parallel=layout.sequence_parallel, context=layout.context),
            same_shape=layout.pipeline > 1,
            units=units,
            costs=row_cost(sequences.lengths, self.shape),
            packed=self.packing,
            context=layout.context,
            count_multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        )


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
        """Join the other ranks, then `build`."""
        from megarl import platform
        from megarl.training import parallel

        if self.config.threads is not None:
            platform.use_threads(self.config.threads)
        platform.prepare_megatron()
        parallel.join(self.rank, self.config.layout.world_size, host, port)
        return self.build()

    def build(self) -> bool:
        """Build this rank's stage, load its weights, make its optimizer. The ranks have joined each other."""
        from megarl.training import parallel

        config = self.config
        parallel.initialize(config.layout, config.seed)
        from megatron.core import parallel_state

        from megarl.models.hf_tensors import HFTensors
        from megarl.models.hf_weights import HFExporter, load_hf_weights
        from megarl.models.policy import build_policy
        from megarl.objectives import make_objective
        from megarl.training.optimizer import build_optimizer
        from megarl.training.step import wrap_for_training

        tensors = HFTensors(config.model_path)

        def build():
            chunks = build_policy(config.shape, config.layout, config.pad_vocab_to, bf16=config.bf16, recompute=config.recompute)
            load_hf_weights(chunks, config.shape, tensors)
            return chunks

        chunks = build()
        self.objective = make_objective(config.objective)
        # Always the weights of the model's folder, also in a resumed run: the anchor of a KL term must not move.
        self.reference = build() if "ref_logp" in self.objective.needs else None
        self.model = wrap_for_training(chunks, config.optimizer)
        self.optimizer = build_optimizer(config.optimizer, config.bf16, self.model)
        self.exporter = HFExporter(self.model, config.shape)
        self.reports = parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0
        self.sender: Any = None
        self.pending_save: Any = None
        return True

    # ------------------------------------------------------------------ passes

    def _run(self, model, sequences: Sequences, plan: Plan, loss, *, entropy: bool = False, collision: bool = False) -> Iterable[dict]:
        from megarl.training.step import run_micro_batches

        config = self.config
        return run_micro_batches(
            model,
            sequences,
            plan,
            temperature=config.temperature,
            vocab_size=config.shape.vocab_size,
            loss=loss,
            entropy=entropy,
            collision=collision,
            chunk_tokens=config.logprob_chunk_tokens,
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
        from megarl.training.step import sum_over_context

        objective = self.objective.at(settings.step, settings.entropy)
        update = update.to(platform.device())
        whole = self._whole_scalars(objective, sequences, update, plan) if settings.prepass else None
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

        def loss(outputs):
            index, logp = outputs.token_index, outputs.logp.detach()
            scalars = whole
            if scalars is None and (sums := sum_over_context(objective.scalars(update, index, logp))) is not None:
                scalars = objective.finish_scalars(update, sums)
            result = objective.loss(update, index, outputs.logp, entropy=outputs.entropy, scalars=scalars)
            metrics = dict(result.metrics) | {"loss": (result.loss.detach(), 1.0)}
            if settings.mismatch_tokens:
                metrics |= mismatch(update, index, logp, settings.mismatch_tokens)
            if settings.token_kinds:
                advantage = objective.coefficients(update, scalars, index)
                metrics |= token_kinds(advantage, logp, outputs.entropy.detach(), outputs.collision, outputs.collision_log)
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
        if not outputs:  # a stage before the last
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
        """Stream the weights to the engines. The ranks of the first copy of the model take part; the others return at once."""
        self.complete_weights()
        if not self.exporter.takes_part:
            return
        if self.rank == 0:
            self.sender.send(manifest, self.exporter.stream())
        else:
            for _ in self.exporter.stream():
                pass

    def export(self, folder: str) -> None:
        """Write the weights as a Hugging Face folder, with the configuration and tokenizer of the model's own folder."""
        self.complete_weights()
        if not self.exporter.takes_part:
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

        self.complete_weights()
        save(self.model, self.optimizer, folder)

    def begin_save(self, folder: str) -> None:
        """Start to save the present state; training may go on. `finish_save` must follow."""
        from megarl.training.checkpoint import begin_save

        self.complete_weights()
        self.pending_save = begin_save(self.model, self.optimizer, folder)

    def finish_save(self) -> None:
        """Wait until the save that was begun is complete."""
        from megarl.training.checkpoint import finish_save

        finish_save(self.pending_save)

    def load(self, folder: str) -> None:
        """Weights and optimizer state from `folder`. Raises InputError if it is damaged or of another model."""
        from megarl.training.checkpoint import load

        load(self.model, self.optimizer, folder)

    def gradients(self) -> dict[str, np.ndarray] | None:
        """The last update's gradients under their Hugging Face names, from rank 0. Clipping has scaled them in place, unless it is off."""
        from megarl.training.step import complete_gradients

        complete_gradients(self.model)
        if not self.exporter.takes_part:
            return None
        exported = {name: tensor.float().cpu().numpy().copy() for name, tensor in self.exporter.stream(lambda p: p.main_grad)}
        return exported if self.rank == 0 else None

    def complete_weights(self) -> None:
        """Gather the weights that an overlapped optimizer has left for the next forward pass."""
        from megarl.training.step import complete_weights

        complete_weights(self.model)


def mismatch(update: Update, token_index, logp, tokens: int) -> dict[str, tuple[float, float]]:
    """Trainer against engine on the same tokens and weights: k3 estimate of KL(rollout || train) and the largest difference in nats.

    With x = log p_train - log p_rollout at tokens drawn from the rollout policy, k3 = e^x - 1 - x (METHODS: section 12). Of the batch's
    tokens the first `tokens` are compared; without any of them the counts are 0.
    """
    import torch

    chosen = update.prepared.term_mask[token_index] & (token_index < tokens)
    x = torch.where(chosen, logp.double() - update.prepared.rollout_logp[token_index].double(), 0.0)
    largest = float(x.abs().max()) if x.numel() else 0.0
    return {"kl_rollout_train": ((x.exp() - 1 - x).sum(), chosen.sum()), "logprob_diff_max": (largest, float(chosen.any()))}


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
                before = merged.get(name, (0.0, 0.0))
                merged[name] = (max(total, before[0]), max(count, before[1]))
            elif name in AVERAGED_OVER_UPDATES:
                merged[name] = (total + merged.get(name, (0.0, 1.0))[0], 1.0)
            else:
                before = merged.get(name, (0.0, 0.0))
                merged[name] = (before[0] + total, before[1] + count)
    return merged
