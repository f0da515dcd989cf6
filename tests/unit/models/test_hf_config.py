import json

import pytest

from megarl.config.recipe import Layout
from megarl.errors import InputError
from megarl.models.hf_config import Experts, check_layout, read_model_shape

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 125,
    "tie_word_embeddings": True,
    "rope_theta": 5000.0,
}

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}


def folder(tmp_path, **changes):
    config = {k: v for k, v in (QWEN3 | changes).items() if v is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_shape(tmp_path):
    shape = read_model_shape(folder(tmp_path))
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.tied, shape.qk_norm, shape.qkv_bias) == (8, 2, 16, True, True, False)
    assert shape.rope_theta == 5000.0 and shape.rope_scaling_factor is None


@pytest.mark.parametrize("multiple, tensor, rows", [(64, 1, 128), (64, 2, 128), (64, 3, 192), (1, 1, 125), (25, 5, 125)])
def test_padded_vocabulary_divides_evenly(tmp_path, multiple, tensor, rows):
    assert read_model_shape(folder(tmp_path)).padded_vocab(multiple, tensor) == rows


def test_head_size_follows_from_hidden_size_where_it_is_not_given(tmp_path):
    assert read_model_shape(folder(tmp_path, head_dim=None)).head_dim == 8


def test_rope_in_the_newer_place(tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 7.0, "factor": 32.0, "original_max_position_embeddings": 8192}
    shape = read_model_shape(folder(tmp_path, model_type="llama", rope_theta=None, rope_parameters=rope))
    assert (shape.rope_theta, shape.rope_scaling_factor) == (7.0, 32.0)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"hidden_size": True}, "hidden_size"),
        ({"head_dim": 0}, "head_dim"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_what_would_be_computed_wrong_is_refused(tmp_path, changes, said):
    with pytest.raises(InputError, match=said):
        read_model_shape(folder(tmp_path, **changes))


def test_missing_and_damaged_folders(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        read_model_shape(tmp_path / "none")
    with pytest.raises(InputError, match=r"no config\.json"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="JSON object"):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(
    "layout, said",
    [
        ({"tensor": 3}, r"layout\.tensor = 3 .* 8 attention heads .* 1, 2\."),
        ({"tensor": 4}, "2 key-value heads"),
        ({"pipeline": 4}, r"6 layers .* 1, 2, 3, 6\."),
        ({"pipeline": 2, "virtual_pipeline": 2}, r"virtual_pipeline = 2 .* 3 layers per stage .* 1, 3\."),
        ({"data": 2, "expert": 2}, "expert = 2, but m is a dense model"),
        ({"data": 2, "expert_tensor": 2}, "expert_tensor = 2, but m is a dense model"),
    ],
)
def test_layouts_that_do_not_divide_the_model(tmp_path, layout, said):
    with pytest.raises(InputError, match=said):
        check_layout(read_model_shape(folder(tmp_path)), Layout(**layout), source="m")


@pytest.mark.parametrize(
    "layout, said",
    [
        ({"tensor": 2}, "tensor = 2 with the experts of m needs sequence_parallel"),
        ({"data": 8, "expert": 8}, r"expert = 8 .* 4 experts .* 1, 2, 4\."),
        ({"data": 64, "expert_tensor": 64}, "expert_tensor = 64 .* 48 FFN width of an expert"),
    ],
)
def test_layouts_that_do_not_divide_the_experts(tmp_path, layout, said):
    with pytest.raises(InputError, match=said):
        check_layout(read_model_shape(folder(tmp_path, **EXPERTS)), Layout(**layout), source="m")


def test_layouts_that_do(tmp_path):
    dense, experts = read_model_shape(folder(tmp_path)), read_model_shape(folder(tmp_path, **EXPERTS))
    for layout in ({"tensor": 2, "pipeline": 3}, {"pipeline": 2, "virtual_pipeline": 3}, {"context": 4, "data": 2}):
        check_layout(dense, Layout(**layout), source="m")
    for layout in ({"tensor": 2, "sequence_parallel": True, "expert": 2}, {"data": 8, "expert": 4, "expert_tensor": 2}):
        check_layout(experts, Layout(**layout), source="m")


@pytest.mark.parametrize("number", ["num_experts", "num_local_experts"])
def test_experts(tmp_path, number):
    shape = read_model_shape(folder(tmp_path, **(EXPERTS | {"num_experts": None, number: 4})))
    assert shape.experts == Experts(number=4, per_token=2, ffn=48, normalize=True)
    assert read_model_shape(folder(tmp_path)).experts is None


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"num_experts": None}, "lacks num_experts"),
        ({"num_experts_per_tok": 5}, "at most the 4 experts"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    ],
)
def test_experts_that_are_not_supported(tmp_path, changes, said):
    with pytest.raises(InputError, match=said):
        read_model_shape(folder(tmp_path, **(EXPERTS | changes)))
