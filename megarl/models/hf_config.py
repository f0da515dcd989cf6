"""What a Hugging Face folder says about a model, checked once, and the Megatron configuration that follows from it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import InputError

# Families whose layers Megatron's GPT layer reproduces exactly: pre-norm RMSNorm, rotary positions, SwiGLU, grouped queries.
_FAMILIES = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder's dimensions. `vocab_size` is that of the folder, without padding for tensor parallelism."""

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
    missing = [
        key for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if key not in config
    ]
    if missing:
        raise InputError(f"{path}: lacks {', '.join(missing)}.")
    sizes = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    optional = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    for key in (*sizes, *(key for key in optional if config.get(key) is not None)):
        if type(config[key]) is not int or config[key] < 1:
            raise InputError(f"{path}: {key} is {config[key]!r}; expected a whole number above 0.")
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
        **_FAMILIES[family],
    )


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
    if family != "qwen2":  # Qwen2 has its query, key and value biases without a key that says so
        expected["attention_bias"] = False
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise InputError(f"{path}: {key} = {config[key]!r} is not supported for {family}; expected {value!r}.")


def check_layout(shape: ModelShape, *, tensor: int, pipeline: int, source: str) -> None:
    """Refuse a layout that the model cannot be split into.

    Raises:
        InputError: names the recipe key, the model's number and what would divide it.
    """
    for what, number in (("attention heads", shape.heads), ("key-value heads", shape.kv_heads), ("FFN width", shape.ffn)):
        if number % tensor:
            fitting = [d for d in range(1, min(shape.heads, 64) + 1) if all(n % d == 0 for n in (shape.heads, shape.kv_heads, shape.ffn))]
            raise InputError(
                f"training.layout.tensor = {tensor} does not divide the {number} {what} of {source}; "
                f"possible here: {', '.join(map(str, fitting))}."
            )
    if shape.layers % pipeline:
        fitting = [d for d in range(1, shape.layers + 1) if shape.layers % d == 0]
        raise InputError(
            f"training.layout.pipeline = {pipeline} does not divide the {shape.layers} layers of {source}; "
            f"possible here: {', '.join(map(str, fitting))}."
        )
