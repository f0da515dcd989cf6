"""Hugging Face tensors from and to a Megatron model, one tensor at a time.

One table says where each Megatron parameter comes from and how it is split over tensor ranks (`_rule`); loading and exporting both
follow it. Megatron interleaves query, key and value by group of heads, and stacks gate and up; both orders are settled in `_merge` and
`_split`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.errors import InputError
from megarl.models.hf_config import ModelShape
from megarl.models.hf_tensors import hf_shapes
from megarl.models.policy import unwrap


@dataclass(frozen=True)
class _Rule:
    """HF names behind one Megatron parameter; `kind` is qkv, gate_up, rows (split by rows), columns, vocab or whole."""

    names: tuple[str, ...]
    kind: str


def _rule(name: str, first_layer: int) -> _Rule:
    """The rule for a Megatron parameter of a stage whose first layer is the model's layer `first_layer`."""
    if name.startswith("embedding.word_embeddings."):
        return _Rule(("model.embed_tokens.weight",), "vocab")
    if name.startswith("output_layer."):
        return _Rule(("lm_head.weight",), "vocab")
    if name.startswith("decoder.final_"):
        return _Rule(("model.norm.weight",), "whole")
    _, _, layer, *rest = name.split(".")
    prefix, rest, last = f"model.layers.{int(layer) + first_layer}.", ".".join(rest), name.rsplit(".", 1)[-1]
    # Transformer Engine fuses a norm into the linear layer behind it and names it after that layer.
    whole = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    }
    if rest in whole:
        return _Rule((prefix + whole[rest],), "whole")
    if rest.startswith("self_attention.linear_qkv."):
        return _Rule(tuple(f"{prefix}self_attn.{x}_proj.{last}" for x in "qkv"), "qkv")
    if rest == "self_attention.linear_proj.weight":
        return _Rule((prefix + "self_attn.o_proj.weight",), "columns")
    if rest == "mlp.linear_fc1.weight":
        return _Rule((prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight"), "gate_up")
    if rest == "mlp.linear_fc2.weight":
        return _Rule((prefix + "mlp.down_proj.weight",), "columns")
    raise KeyError(f"no Hugging Face name is known for the Megatron parameter {name}")


def _merge_qkv(shape: ModelShape, q, k, v) -> torch.Tensor:
    """q, k, v of Hugging Face -> Megatron's rows: for each group its queries, its key, its value."""
    groups = [x.reshape(shape.kv_heads, -1, *x.shape[1:]) for x in (q, k, v)]
    return torch.cat(groups, 1).reshape(-1, *q.shape[1:])


def _split_qkv(shape: ModelShape, merged: torch.Tensor) -> list[torch.Tensor]:
    queries = shape.heads // shape.kv_heads * shape.head_dim
    groups = merged.reshape(shape.kv_heads, -1, *merged.shape[1:])
    return [x.reshape(-1, *merged.shape[1:]) for x in groups.split([queries, shape.head_dim, shape.head_dim], 1)]


def _to_megatron(rule: _Rule, tensors: list[torch.Tensor], shape: ModelShape, like: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """This tensor rank's part of a parameter, from the whole HF tensors."""
    shard = lambda tensor, dim: tensor.chunk(ranks, dim)[rank]
    if rule.kind == "qkv":
        return shard(_merge_qkv(shape, *tensors), 0)
    if rule.kind == "gate_up":
        return torch.cat([shard(x, 0) for x in tensors])
    if rule.kind == "columns":
        return shard(tensors[0], 1)
    if rule.kind == "vocab":
        padding = like.shape[0] * ranks - tensors[0].shape[0]
        return shard(F.pad(tensors[0], (0, 0, 0, padding)), 0)
    return tensors[0]


def _to_hf(rule: _Rule, parts: list[torch.Tensor], shape: ModelShape) -> list[torch.Tensor]:
    """Whole HF tensors from the parts of all tensor ranks, in rank order. Rows that pad the vocabulary are cut off."""
    if rule.kind == "qkv":
        return _split_qkv(shape, torch.cat(parts))
    if rule.kind == "gate_up":
        return [torch.cat(halves) for halves in zip(*(part.chunk(2) for part in parts), strict=True)]
    if rule.kind == "columns":
        return [torch.cat(parts, 1)]
    if rule.kind == "vocab":
        return [torch.cat(parts)[: shape.vocab_size]]
    return [parts[0]]


def _parameters(model: torch.nn.Module, shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, _Rule]]:
    inner = unwrap(model)
    first_layer = get_transformer_layer_offset(inner.config)
    for name, parameter in inner.named_parameters():
        rule = _rule(name, first_layer)
        if rule.names == ("lm_head.weight",) and shape.tied:  # the last stage's own copy of the tied embedding
            rule = _Rule(("model.embed_tokens.weight",), "vocab")
        yield parameter, rule


@torch.no_grad()
def load_hf_weights(model: torch.nn.Module, shape: ModelShape, tensors) -> None:
    """Fill this rank's parameters from Hugging Face tensors (an HFTensors, or a dict).

    Raises:
        InputError: a tensor is missing or has another shape than config.json says.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    for parameter, rule in _parameters(model, shape):
        whole = [tensors[name] for name in rule.names]
        try:
            part = _to_megatron(rule, whole, shape, parameter, group.rank(), group.size())
            fits = part.shape == parameter.shape
        except RuntimeError:
            fits = False
        if not fits:
            shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(rule.names, whole, strict=True))
            raise InputError(f"{getattr(tensors, 'folder', 'weights')}: {shapes} does not fit the sizes in config.json.")
        parameter.copy_(part)


class HFExporter:
    """Streams a Megatron model's weights under their Hugging Face names. Its methods are collectives of one model replica."""

    def __init__(self, model: torch.nn.Module, shape: ModelShape):
        self.model, self.shape = model, shape
        self.tensor_group = parallel_state.get_tensor_model_parallel_group()
        self.stage_group = parallel_state.get_pipeline_model_parallel_group()
        rules = [rule for _, rule in _parameters(model, shape)]
        by_stage = [rules]
        if self.stage_group.size() > 1:
            by_stage = [None] * self.stage_group.size()
            dist.all_gather_object(by_stage, rules, group=self.stage_group)
        self._plan: list[tuple[int, int, _Rule]] = []  # (stage, index of its parameter, rule), in the order of the stream
        sent: set[str] = set()
        for stage, stage_rules in enumerate(by_stage):
            for index, rule in enumerate(stage_rules):
                if rule.names[0] not in sent:  # the last stage's copy of a tied embedding comes second
                    self._plan.append((stage, index, rule))
                    sent.update(rule.names)
        self.shapes = hf_shapes(shape)

    def names(self) -> list[str]:
        """Names in the order of the stream."""
        return [name for _, _, rule in self._plan for name in rule.names]

    @torch.no_grad()
    def stream(self, source=lambda parameter: parameter) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) on every rank of the replica; all its ranks must run it to the end.

        Each parameter is gathered over its tensor ranks, then sent from its pipeline stage to the others: no rank ever holds more than
        one whole parameter beside its own. `source` picks what is exported (`lambda p: p.main_grad`: the gradients).
        """
        mine = [source(parameter).detach().contiguous() for parameter, _ in _parameters(self.model, self.shape)]
        ranks = self.tensor_group.size()
        for stage, index, rule in self._plan:
            if stage == self.stage_group.rank():
                part = mine[index]
                parts = [part]
                if rule.kind != "whole" and ranks > 1:
                    parts = [torch.empty_like(part) for _ in range(ranks)]
                    dist.all_gather(parts, part, group=self.tensor_group)
                tensors = [tensor.contiguous() for tensor in _to_hf(rule, parts, self.shape)]
            else:
                tensors = [torch.empty(self.shapes[name], dtype=mine[0].dtype, device=mine[0].device) for name in rule.names]
            if self.stage_group.size() > 1:
                for tensor in tensors:
                    dist.broadcast(tensor, src=dist.get_global_rank(self.stage_group, stage), group=self.stage_group)
            yield from zip(rule.names, tensors, strict=True)
