"""Hugging Face tensors from and to a Megatron model, one tensor at a time.

One table says where each Megatron parameter comes from and how it is split over tensor ranks (`_rule`); loading and exporting both
follow it. Megatron interleaves query, key and value by group of heads, and stacks gate and up; both orders are settled in `_to_megatron`
and `_to_hf`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
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
    """HF names behind one Megatron parameter; `kind` is qkv, gate_up, columns, vocab (all split over tensor ranks) or whole."""

    names: tuple[str, ...]
    kind: str
    of_expert: bool = False
    """Split over the expert-tensor ranks, and only on the expert rank that has the expert."""

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        if self.of_expert:
            return parallel_state.get_expert_tensor_parallel_group()
        return parallel_state.get_tensor_model_parallel_group()


# An expert's matrix: by Megatron's own layer, or by Transformer Engine's grouped one, which numbers its weights.
_EXPERT = re.compile(r"mlp\.experts\.(?:local_experts\.(\d+)\.)?linear_fc([12])\.weight(\d*)")


def _rule(name: str, first_layer: int, first_expert: int) -> _Rule:
    """The rule for a Megatron parameter of a chunk whose first layer is the model's layer `first_layer`, on an expert rank whose first
    expert is `first_expert`."""
    if name.startswith("embedding.word_embeddings."):
        return _Rule(("model.embed_tokens.weight",), "vocab")
    if name.startswith("output_layer."):
        return _Rule(("lm_head.weight",), "vocab")
    if name.startswith("decoder.final_"):
        return _Rule(("model.norm.weight",), "whole")
    _, _, layer, *rest = name.split(".")
    prefix, rest, last = f"model.layers.{int(layer) + first_layer}.", ".".join(rest), name.rsplit(".", 1)[-1]
    if expert := _EXPERT.fullmatch(rest):
        prefix += f"mlp.experts.{int(expert[1] or expert[3]) + first_expert}."
        if expert[2] == "1":
            return _Rule((prefix + "gate_proj.weight", prefix + "up_proj.weight"), "gate_up", of_expert=True)
        return _Rule((prefix + "down_proj.weight",), "columns", of_expert=True)
    # Transformer Engine fuses a norm into the linear layer behind it and names it after that layer.
    whole = {
        "input_layernorm.weight": "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
        "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
        "mlp.router.weight": "mlp.gate.weight",
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


def _parameters(chunks: Sequence[torch.nn.Module], shape: ModelShape) -> Iterator[tuple[torch.nn.Parameter, _Rule]]:
    first_expert = 0
    if shape.experts is not None:
        ranks = parallel_state.get_expert_model_parallel_world_size()
        first_expert = shape.experts.number // ranks * parallel_state.get_expert_model_parallel_rank()
    for chunk in map(unwrap, chunks):
        first_layer = get_transformer_layer_offset(chunk.config, vp_stage=chunk.vp_stage)
        for name, parameter in chunk.named_parameters():
            rule = _rule(name, first_layer, first_expert)
            if rule.names == ("lm_head.weight",) and shape.tied:  # the last stage's own copy of the tied embedding
                rule = _Rule(("model.embed_tokens.weight",), "vocab")
            yield parameter, rule


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], shape: ModelShape, tensors) -> None:
    """Fill this rank's parameters from Hugging Face tensors (an HFTensors, or a dict).

    Raises:
        InputError: a tensor is missing or has another shape than config.json says.
    """
    for parameter, rule in _parameters(chunks, shape):
        whole = [tensors[name] for name in rule.names]
        group = rule.tensor_group
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
    """Streams a Megatron model's weights under their Hugging Face names.

    Its methods are collectives of the ranks that `takes_part` names: one copy of the model, with all of its experts.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], shape: ModelShape):
        self.chunks, self.shape = chunks, shape
        self.expert_group = parallel_state.get_expert_model_parallel_group()
        self.stage_group = parallel_state.get_pipeline_model_parallel_group()
        self.takes_part = _in_first_copy()
        rules = [rule for _, rule in _parameters(chunks, shape)]
        # (stage, expert rank, index among its parameters, rule), in the order of the stream
        self._plan: list[tuple[int, int, int, _Rule]] = []
        sent: set[str] = set()
        for stage, of_stage in enumerate(_gather_objects(_gather_objects(rules, self.expert_group), self.stage_group)):
            for expert_rank, of_rank in enumerate(of_stage):
                for index, rule in enumerate(of_rank):
                    if rule.names[0] not in sent:  # what expert ranks share; the last stage's copy of a tied embedding
                        self._plan.append((stage, expert_rank, index, rule))
                        sent.update(rule.names)
        self.shapes = hf_shapes(shape)

    def names(self) -> list[str]:
        """Names in the order of the stream."""
        return [name for *_, rule in self._plan for name in rule.names]

    @torch.no_grad()
    def stream(self, source=lambda parameter: parameter) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, whole tensor) on every rank that takes part; all of them must run it to the end.

        Each parameter is gathered over its tensor ranks, then sent from its expert rank and its pipeline stage to the others: no rank ever
        holds more than one whole parameter beside its own. `source` picks what is exported (`lambda p: p.main_grad`: the gradients).
        """
        mine = [source(parameter).detach().contiguous() for parameter, _ in _parameters(self.chunks, self.shape)]
        for stage, expert_rank, index, rule in self._plan:
            from_expert = expert_rank if rule.of_expert else self.expert_group.rank()
            if (stage, from_expert) == (self.stage_group.rank(), self.expert_group.rank()):
                parts = _gather_parts(mine[index], rule)
                tensors = [tensor.contiguous() for tensor in _to_hf(rule, parts, self.shape)]
            else:
                tensors = [torch.empty(self.shapes[name], dtype=mine[0].dtype, device=mine[0].device) for name in rule.names]
            if stage == self.stage_group.rank() and rule.of_expert:
                _broadcast(tensors, from_expert, self.expert_group)
            _broadcast(tensors, stage, self.stage_group)
            yield from zip(rule.names, tensors, strict=True)


def _in_first_copy() -> bool:
    """Whether this rank is among the fewest whose tensor and expert groups together hold every parameter of its stage.

    Megatron numbers the ranks of a stage tensor first, then context, then data; and anew expert-tensor first, then expert.
    """
    size = parallel_state.get_expert_tensor_parallel_world_size() * parallel_state.get_expert_model_parallel_world_size()
    per_stage = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    return dist.get_rank() % per_stage < math.lcm(parallel_state.get_tensor_model_parallel_world_size(), size)


def _gather_objects(mine, group: dist.ProcessGroup) -> list:
    if group.size() == 1:
        return [mine]
    all_of_them = [None] * group.size()
    dist.all_gather_object(all_of_them, mine, group=group)
    return all_of_them


def _gather_parts(part: torch.Tensor, rule: _Rule) -> list[torch.Tensor]:
    group = rule.tensor_group
    if rule.kind == "whole" or group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts


def _broadcast(tensors: list[torch.Tensor], source: int, group: dist.ProcessGroup) -> None:
    if group.size() > 1:
        for tensor in tensors:
            dist.broadcast(tensor, src=dist.get_global_rank(group, source), group=group)
