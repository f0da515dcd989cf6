"""Engine side of the gloo weight transport, as a backend of vLLM's own weight-transfer registry.

Importing this module registers the backend; `WorkerExtension` makes every worker process of an engine import it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megarl.sync.manifest import Manifest, buckets, unpack
from megarl.sync.transport import broadcast, process_group

BACKEND = "megarl_gloo"


@dataclass
class InitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    """Rank in the transfer group of the engine's first worker; every engine has its own."""
    world_size: int
    bucket_bytes: int
    timeout_s: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives the buckets that `megarl.sync.transport.GlooSender` broadcasts and loads them through vLLM's layerwise reload.

    Plain `load_weights` into a running model corrupts it where the engine keeps weights in a layout of its own, as it does on a CPU.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _group = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        worker = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        rank = init_info.rank_offset + worker
        self._bucket_bytes = init_info.bucket_bytes
        self._parameters = {name for name, _ in self.model.named_parameters()}
        self._group = process_group(init_info.master_address, init_info.master_port, rank, init_info.world_size, init_info.timeout_s)

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # the base class also synchronises an accelerator: a CPU has none

    def receive_weights(self, update_info: UpdateInfo) -> None:
        if self._group is None:
            raise RuntimeError("weight sync: the engine was never connected to a trainer")
        manifest = Manifest(tuple(update_info.names), tuple(update_info.dtype_names), tuple(tuple(shape) for shape in update_info.shapes))
        loaded: set[str] = set()
        for bucket in buckets(manifest, self._bucket_bytes):
            # A new buffer each time: the reload keeps views of it until all weights of a layer are there.
            buffer = torch.empty(bucket.nbytes, dtype=torch.uint8)
            if bucket.nbytes:
                broadcast(self._group, buffer)
            pairs = [(name, tensor.to(self.device)) for name, tensor in unpack(bucket, manifest, buffer)]
            loaded |= self.model.load_weights(pairs) or set()
        if missing := self._parameters - loaded:
            names = ", ".join(sorted(missing)[:5])
            raise RuntimeError(f"weight sync: the trainer sent nothing for {len(missing)} parameters of the engine: {names}")

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # An output layer tied to the embedding gets no weights of its own, so the reload leaves it alone; but on a CPU it multiplies by a
        # packed copy of the weights, which is still the old one.
        for layer in self.model.modules():
            if isinstance(layer, VocabParallelEmbedding) and isinstance(layer.quant_method, UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        if self._group is not None:
            self._group.shutdown()
            self._group = None


class WorkerExtension:
    """Mixed into vLLM's worker class; its module is this one, which is the point."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, GlooReceiver)
