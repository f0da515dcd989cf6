"""A Hugging Face shape as Megatron's GPTModel, on this process's place in the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl import platform
from megarl.models.hf_config import Experts, ModelShape
from megarl.models.layers import CoreAttention, RMSNorm

if TYPE_CHECKING:
    from megarl.config.recipe import Layout


def transformer_config(shape: ModelShape, layout: Layout, *, bf16: bool = False, recompute: str = "none") -> TransformerConfig:
    """Megatron's configuration. Dropout is off: with Megatron's default of 0.1 the log-probs are off by most of a nat per token."""
    fused = platform.fused_kernels()
    dtype = torch.bfloat16 if bf16 else torch.float32
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=bf16,
        # Initialised on the CPU and with Megatron's own initialisation: in this release, leaving it out loses the attributes that
        # tell tensor-parallel parameters from replicated ones, and the gradient norm is wrong under tensor parallelism.
        use_cpu_initialization=True,
        perform_initialization=True,
        # The trainer's losses carry their own whole-batch denominators (see training/step.py).
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=fused,
        bias_dropout_fusion=fused,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        persist_layer_norm=fused,
        **_parallel(layout),
        **_RECOMPUTE[recompute],
        **_routing(shape.experts, fused),
    )


_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _parallel(layout: Layout) -> dict[str, Any]:
    interleaved = layout.virtual_pipeline > 1
    return {
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if interleaved else None,
        # With two stages, Megatron's batched sends of an interleaved pipeline mix up the two directions: silently wrong numbers.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def _routing(experts: Experts | None, fused: bool) -> dict[str, Any]:
    """Every token reaches its experts, none is dropped, and nothing but the objective moves the router."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.number,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalize,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": fused,
        "moe_permute_fusion": fused,
    }


def _layer_spec(config: TransformerConfig, virtual_stage: int | None):
    if platform.fused_kernels():
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual_stage)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=virtual_stage)
    for layer in block.layer_specs:
        modules = layer.submodules
        modules.input_layernorm = modules.pre_mlp_layernorm = RMSNorm
        attention = modules.self_attention.submodules
        attention.core_attention = CoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    block.layer_norm = RMSNorm
    return block


class PolicyModel(GPTModel):
    """GPTModel whose last stage computes logits only at the positions that are asked for.

    `forward(..., positions=[n])`, positions in the sequence-major flattening of the hidden states (index = position * rows + row), gives
    [n, vocab / tensor]; the prompts' logits are never made.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._positions: torch.Tensor | None = None
        if self.post_process:
            self._gather_sequence = self.config.sequence_parallel
            # The hook below gathers the sequence, so the layer itself must not; it then owes the all-reduce of its input's gradient.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = self.config.tensor_model_parallel_size > 1
            self.output_layer.register_forward_pre_hook(self._select_positions)

    def _select_positions(self, _layer, inputs):
        hidden, *rest = inputs
        if self._gather_sequence:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if self._positions is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self._positions).unsqueeze(1)
        return (hidden, *rest)

    def forward(self, input_ids, position_ids, positions=None, packed_seq_params=None):
        """Token ids and positions [b, s] -> logits [n, vocab / tensor] on the last stage, hidden states [s, b, h] before it."""
        self._positions = positions
        try:
            out = super().forward(input_ids, position_ids, attention_mask=None, packed_seq_params=packed_seq_params)
        finally:
            self._positions = None
        return out.squeeze(0) if self.post_process and positions is not None else out


def build_policy(
    shape: ModelShape, layout: Layout, pad_vocab_to: int, *, bf16: bool = False, recompute: str = "none"
) -> list[torch.nn.Module]:
    """This rank's stage of the policy, weights not yet loaded: its chunks, one unless pipeline stages are virtual. Needs Megatron's
    parallel state."""
    config = transformer_config(shape, layout, bf16=bf16, recompute=recompute)
    virtual_stages = range(layout.virtual_pipeline) if layout.virtual_pipeline > 1 else [None]
    return [_build_chunk(config, shape, shape.padded_vocab(pad_vocab_to, layout.tensor), stage) for stage in virtual_stages]


def _build_chunk(config: TransformerConfig, shape: ModelShape, vocab_size: int, virtual_stage: int | None) -> torch.nn.Module:
    place = {"ignore_virtual": False, "vp_stage": virtual_stage}
    model = PolicyModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, virtual_stage),
        vocab_size=vocab_size,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 8.0,
        vp_stage=virtual_stage,
    )
    model = model.to(platform.device())
    return Float16Module(config, model) if config.bf16 else model


def unwrap(model: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
