"""A recipe's model and layout made small enough for the cores at hand, with all of their kinds of communication kept."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megarl.config.recipe import Layout
from megarl.models.hf_config import ModelShape, read_model_shape
from megarl.models.hf_tensors import hf_shapes

DIMENSIONS = ("data", "context", "pipeline", "tensor")
"""The first are given up first: the later ones touch more of the arithmetic."""
HIDDEN, HEAD, FFN, VOCABULARY, POSITIONS = 64, 16, 64, 125, 128


def shrink_layout(layout: Layout, most_ranks: int) -> Layout:
    """The layout on at most `most_ranks` ranks: every dimension falls to 2 before one falls to 1.

    Two ranks in a dimension communicate as many do. Two chunks per stage are an interleaved schedule as more are.
    """
    sizes = {name: getattr(layout, name) for name in DIMENSIONS}
    for least in (2, 1):
        for name in DIMENSIONS:
            while math.prod(sizes.values()) > most_ranks and sizes[name] > least:
                sizes[name] = max(least, max((d for d in range(1, sizes[name]) if sizes[name] % d == 0), default=1))
    ranks = sizes["tensor"] * sizes["context"] * sizes["data"]
    expert = min(layout.expert, max(d for d in (1, 2, 4, layout.expert) if ranks % d == 0 and d <= layout.expert))
    expert_tensor = math.gcd(layout.expert_tensor, ranks // expert)
    return layout.model_copy(
        update=sizes
        | {
            "virtual_pipeline": min(layout.virtual_pipeline, 2) if sizes["pipeline"] > 1 else 1,
            "sequence_parallel": layout.sequence_parallel and sizes["tensor"] > 1,
            "expert": expert,
            "expert_tensor": expert_tensor,
        }
    )


def shrink_shape(shape: ModelShape, layout: Layout) -> ModelShape:
    """The smallest model of the family that `layout` can still split, with grouped queries, tying and experts as in the full one."""
    kv_heads = layout.tensor if layout.tensor > 1 else 2
    queries = min(shape.heads // shape.kv_heads, 2)
    chunks = layout.pipeline * layout.virtual_pipeline
    experts = shape.experts
    if experts is not None:
        number = max(4, 2 * layout.expert)
        experts = replace(experts, number=number, per_token=min(experts.per_token, 2), ffn=16 * layout.expert_tensor)
    return replace(
        shape,
        layers=chunks if chunks > 1 else 2,
        hidden=HIDDEN,
        ffn=FFN // math.gcd(FFN, layout.tensor) * layout.tensor,
        heads=kv_heads * queries,
        kv_heads=kv_heads,
        head_dim=HEAD,
        vocab_size=VOCABULARY,  # no multiple of anything, so that the padding is there
        max_positions=POSITIONS,
        experts=experts,
    )


def write_small_model(folder: Path, source: Path, shape: ModelShape, seed: int = 0) -> None:
    """A Hugging Face folder of `shape` with random weights; whatever config.json of `source` says beside the sizes stays.

    Norms and biases are off their usual first values, so that one that is lost shows.
    """
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    config |= {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
    }
    if shape.experts is not None:
        number = "num_local_experts" if "num_local_experts" in config else "num_experts"
        config |= {number: shape.experts.number, "num_experts_per_tok": shape.experts.per_token}
        config["moe_intermediate_size"] = shape.experts.ffn
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    assert read_model_shape(folder) == shape
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in hf_shapes(shape).items():
        around = 1.0 if "norm" in name else 0.0
        tensors[name] = around + (0.1 if len(size) == 1 else 0.05) * torch.randn(size, generator=generator)
    save_file(tensors, folder / "model.safetensors")
