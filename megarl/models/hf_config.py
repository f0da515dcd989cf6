"""What a Hugging Face folder says about a model, checked once, and the Megatron configuration that follows from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.errors import InputError

if TYPE_CHECKING:
    from megarl.config.recipe import Layout

# Families whose layers Megatron's GPT layer reproduces exactly: pre-norm RMSNorm, rotary positions, SwiGLU, grouped queries.
_FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
    "qwen3_moe": {"qkv_bias": False, "qk_norm": True},
}


@dataclass(frozen=True)
class Experts:
    """The experts of every layer of a mixture-of-experts model."""

    number: int
    per_token: int
    ffn: int
    normalize: bool
    """The weights of a token's chosen experts add up to 1."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder's dimensions. `vocab_size` is that of the folder, without padding for tensor parallelism."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float
    rope_scaling_factor: float | None
    norm_epsilon: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    experts: Experts | None = None
    """None: every layer has one dense MLP of width `ffn`."""

    @property
    def active_ffn(self) -> int:
        """Width of the MLP that one token goes through."""
        return self.ffn if self.experts is None else self.experts.per_token * self.experts.ffn

    def padded_vocab(self, multiple: int, tensor_parallel: int) -> int:
        """Vocabulary rows of the Megatron model: the next multiple of `multiple * tensor_parallel`."""
        unit = multiple * tensor_parallel
        return -(-self.vocab_size // unit) * unit


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: cannot be read as JSON ({error}).") from None


def read_model_shape(folder: str | Path) -> ModelShape:
    """The shape of the model in a Hugging Face folder.

    Raises:
        InputError: no folder, no config.json, a family or a variant that is not supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. `model.path` must be a Hugging Face folder with config.json and safetensors.")
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder}: has no config.json. `model.path` must be a Hugging Face folder with config.json and safetensors.")
    config = _read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object.")
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise InputError(f"{path}: model_type {family!r} is not supported; supported: {', '.join(_FAMILIES)}.")
    theta, scaling = _rope(config, path)
    optional = [key for key in ("num_key_value_heads", "head_dim", "max_position_embeddings") if config.get(key) is not None]
    _require_sizes(config, ["num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", *optional], path)
    _refuse_variants(config, family, path)
    heads = config["num_attention_heads"]
    return ModelShape(
        family=family,
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        rope_theta=theta,
        rope_scaling_factor=scaling,
        norm_epsilon=config.get("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config, path) if family == "qwen3_moe" else None,
        **_FAMILIES[family],
    )


def _require_sizes(config: dict, keys: list[str], path: Path) -> None:
    missing = [key for key in keys if key not in config]
    if missing:
        raise InputError(f"{path}: lacks {', '.join(missing)}.")
    for key in keys:
        if type(config[key]) is not int or config[key] < 1:
            raise InputError(f"{path}: {key} is {config[key]!r}; expected a whole number above 0.")


def _experts(config: dict, path: Path) -> Experts:
    """Routing without an auxiliary loss: `router_aux_loss_coef` is a matter of pre-training, and would change the objective."""
    number = "num_local_experts" if "num_local_experts" in config else "num_experts"
    _require_sizes(config, [number, "num_experts_per_tok", "moe_intermediate_size"], path)
    if config["num_experts_per_tok"] > config[number]:
        raise InputError(f"{path}: num_experts_per_tok is {config['num_experts_per_tok']}; expected at most the {config[number]} experts.")
    normalize = bool(config.get("norm_topk_prob", False))
    if normalize and config["num_experts_per_tok"] == 1:
        raise InputError(f"{path}: norm_topk_prob with one expert per token leaves the router no gradient; expected norm_topk_prob false.")
    return Experts(config[number], config["num_experts_per_tok"], config["moe_intermediate_size"], normalize)


def _rope(config: dict, path: Path) -> tuple[float, float | None]:
    """Rotary base and Llama 3's scaling factor (None: no scaling), from either place where transformers keeps them."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind == "llama3":
        fixed = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        if all(float(rope.get(key, value)) == value for key, value in fixed.items()):
            return float(theta), float(rope["factor"])
    raise InputError(f"{path}: rotary positions of kind {kind!r} with {rope} are not supported; supported: default, llama3.")


def _refuse_variants(config: dict, family: str, path: Path) -> None:
    """What the family's folder may switch on and this model would silently get wrong."""
    expected = {"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False, "quantization_config": None}
    if family == "qwen3_moe":
        expected |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if family != "qwen2":  # Qwen2 has its query, key and value biases without a key that says so
        expected["attention_bias"] = False
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise InputError(f"{path}: {key} = {config[key]!r} is not supported for {family}; expected {value!r}.")


def check_layout(shape: ModelShape, layout: Layout, *, source: str) -> None:
    """Refuse a layout that the model cannot be split into.

    Raises:
        InputError: names the recipe key, the model's number and what would divide it.
    """
    experts = shape.experts
    split = {"attention heads": shape.heads, "key-value heads": shape.kv_heads} | ({} if experts else {"FFN width": shape.ffn})
    for what, number in split.items():
        fitting = [d for d in _divisors(shape.kv_heads) if all(n % d == 0 for n in split.values())]
        _require_division("tensor", layout.tensor, number, what, fitting, source)
    _require_division("pipeline", layout.pipeline, shape.layers, "layers", _divisors(shape.layers), source)
    per_stage = shape.layers // layout.pipeline
    _require_division("virtual_pipeline", layout.virtual_pipeline, per_stage, "layers per stage", _divisors(per_stage), source)
    if experts is None:
        for key, size in (("expert", layout.expert), ("expert_tensor", layout.expert_tensor)):
            if size > 1:
                raise InputError(f"training.layout.{key} = {size}, but {source} is a dense model without experts; leave it at 1.")
        return
    if layout.tensor > 1 and not layout.sequence_parallel:
        raise InputError(f"training.layout.tensor = {layout.tensor} with the experts of {source} needs sequence_parallel: true beside it.")
    _require_division("expert", layout.expert, experts.number, "experts", _divisors(experts.number), source)
    _require_division("expert_tensor", layout.expert_tensor, experts.ffn, "FFN width of an expert", _divisors(experts.ffn), source)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, 64) + 1) if number % divisor == 0]


def _require_division(key: str, size: int, number: int, what: str, fitting: list[int], source: str) -> None:
    if number % size:
        raise InputError(
            f"training.layout.{key} = {size} does not divide the {number} {what} of {source}; "
            f"possible here: {', '.join(map(str, fitting))}."
        )
