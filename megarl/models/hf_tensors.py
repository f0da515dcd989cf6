"""The tensors of a Hugging Face folder: which there must be, and reading them one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from megarl.errors import InputError
from megarl.models.hf_config import ModelShape

# What some folders hold beside the weights: a table of rotary frequencies, the copy of a tied embedding.
_NO_WEIGHTS = ("rotary_emb.inv_freq", "lm_head.weight")


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a Hugging Face folder of this shape."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    names: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, shape.hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        names |= {
            f"{prefix}input_layernorm.weight": (shape.hidden,),
            f"{prefix}self_attn.q_proj.weight": (q, shape.hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, shape.hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, shape.hidden),
            f"{prefix}self_attn.o_proj.weight": (shape.hidden, q),
            f"{prefix}post_attention_layernorm.weight": (shape.hidden,),
        }
        if shape.experts is None:
            names |= _mlp(f"{prefix}mlp.", shape.hidden, shape.ffn)
        else:
            names[f"{prefix}mlp.gate.weight"] = (shape.experts.number, shape.hidden)
            for expert in range(shape.experts.number):
                names |= _mlp(f"{prefix}mlp.experts.{expert}.", shape.hidden, shape.experts.ffn)
        if shape.qkv_bias:
            names |= {f"{prefix}self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
        if shape.qk_norm:
            names |= {f"{prefix}self_attn.{x}_norm.weight": (shape.head_dim,) for x in "qk"}
    names["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        names["lm_head.weight"] = (shape.vocab_size, shape.hidden)
    return names


def _mlp(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (ffn, hidden),
        f"{prefix}up_proj.weight": (ffn, hidden),
        f"{prefix}down_proj.weight": (hidden, ffn),
    }


class HFTensors:
    """Random access to the tensors of a Hugging Face folder, whether in one file or many."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                self.files = {name: str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(f"{index}: cannot be read ({error!r}).") from None
        elif (self.folder / "model.safetensors").is_file():
            self.files = dict.fromkeys(_open(self.folder / "model.safetensors").keys(), "model.safetensors")
        else:
            raise InputError(f"{self.folder}: has no weights (model.safetensors, or model.safetensors.index.json with its files).")
        lost = sorted({name for name in self.files.values() if not (self.folder / name).is_file()})
        if lost:
            raise InputError(f"{self.folder}: model.safetensors.index.json names files that are not there: {', '.join(lost)}.")
        self._open: dict[str, object] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._file(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the file's header."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def _file(self, name: str):
        if name not in self.files:
            raise InputError(f"{self.folder}: the weights have no tensor {name}.")
        file = self.files[name]
        if file not in self._open:
            self._open[file] = _open(self.folder / file)
        return self._open[file]


def _open(path: Path):
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error}).") from None


def check_weights(folder: str | Path, shape: ModelShape) -> None:
    """Refuse a folder whose weights are not those that its config.json describes, from the files' headers alone.

    Raises:
        InputError: no weights, a damaged file, a tensor that is missing or has another shape.
    """
    tensors = HFTensors(folder)
    unknown = [name for name in tensors.files if name not in hf_shapes(shape) and not name.endswith(_NO_WEIGHTS)]
    if unknown:
        raise InputError(f"{folder}: the weights hold {unknown[0]}, of which its config.json knows nothing ({len(unknown)} such tensors).")
    for name, wanted in hf_shapes(shape).items():
        if tensors.shape(name) != wanted:
            raise InputError(f"{folder}: {name} has shape {tensors.shape(name)}; its config.json asks for {wanted}.")
