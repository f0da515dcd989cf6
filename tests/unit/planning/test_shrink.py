"""A small trial keeps what the full run has: every kind of communication, and a model that its layout can split."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.recipe import Layout
from megarl.models.hf_config import check_layout, read_model_shape
from megarl.models.hf_tensors import check_weights
from megarl.planning.shrink import DIMENSIONS, shrink_layout, shrink_shape, write_small_model

QWEN = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}
EXPERTS = QWEN | {
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
powers = st.sampled_from([1, 2, 4, 8, 16])


def shape_of(config, folder):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_shape(folder)


@settings(max_examples=200, deadline=None)
@given(
    powers, powers, powers, st.integers(1, 64), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8, 16])
)
def test_every_dimension_survives_as_long_as_the_ranks_allow(tensor, pipeline, context, data, virtual, expert, most):
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "data": data}
    expert = expert if (tensor * context * data) % expert == 0 else 1
    layout = Layout(**sizes, virtual_pipeline=virtual if pipeline > 1 else 1, sequence_parallel=tensor > 1, expert=expert)
    small = shrink_layout(layout, most)
    assert small.world_size <= most
    Layout.model_validate(small.model_dump())  # the rules of a layout hold
    if layout.world_size <= most:
        assert small.model_copy(update={"virtual_pipeline": 1}) == layout.model_copy(update={"virtual_pipeline": 1})
    kept, had = (sum(getattr(x, name) > 1 for name in DIMENSIONS) for x in (small, layout))
    assert kept == min(had, most.bit_length() - 1) or any(getattr(small, name) % 2 for name in DIMENSIONS if getattr(small, name) > 1)
    assert (small.virtual_pipeline > 1) == (layout.virtual_pipeline > 1 and small.pipeline > 1)


@pytest.mark.parametrize(
    "config", [QWEN, EXPERTS, QWEN | {"num_key_value_heads": 64, "tie_word_embeddings": True}], ids=["dense", "experts", "mha"]
)
@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2, "sequence_parallel": True}, {"tensor": 4, "sequence_parallel": True, "pipeline": 2, "virtual_pipeline": 2}]
)
def test_the_small_model_can_be_split_and_is_whole(tmp_path, config, layout):
    shape, layout = shape_of(config, tmp_path / "full"), Layout(**layout)
    small = shrink_shape(shape, layout)
    check_layout(small, layout, source="small")
    write_small_model(tmp_path / "small", tmp_path / "full", small)
    check_weights(tmp_path / "small", small)
    assert (small.tied, small.qk_norm, small.rope_theta, small.family) == (shape.tied, shape.qk_norm, shape.rope_theta, shape.family)
    assert (small.heads > small.kv_heads) == (shape.heads > shape.kv_heads)
