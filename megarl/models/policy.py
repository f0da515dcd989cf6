"""A Hugging Face shape as Megatron's GPTModel, on this process's place in the layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl import platform
from megarl.models.hf_config import Experts, ModelShape
from megarl.models.layers import CoreAttention, RMSNorm
from megarl.models.logprobs import TokenStatistics, token_statistics

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


class TokenHead(ColumnParallelLinear):
    """The output layer, giving token statistics instead of logits. Called as a module: Megatron's hooks on its weight still run."""

    def forward(self, hidden, labels, weight=None, **options) -> TokenStatistics:
        """`hidden` [n, h], `labels` [n]; `weight` where it is the embedding's; the rest as `token_statistics` takes it."""
        return token_statistics(hidden, self.weight if weight is None else weight, labels, group=self.tp_group, **options)


class PolicyModel(GPTModel):
    """GPTModel whose last stage gives the statistics of chosen tokens: no logits of the prompts, and never all of the others at once."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.post_process:
            self.output_layer.__class__ = TokenHead  # GPTModel names its layer itself; the two hold the same

    def _postprocess(self, hidden_states, **_):
        return hidden_states

    def forward(self, input_ids, position_ids, positions, labels, packed_seq_params=None, **options):
        """Hidden states [s, b, h] before the last stage, TokenStatistics on it.

        Args:
            input_ids, position_ids: [b, s].
            positions: [n], where tokens are predicted, in the sequence-major flattening of the hidden states (position * rows + row).
            labels: [n], the tokens predicted there.
            options: `temperature`, `vocab_size`, `entropy`, `collision`, `chunk_tokens` of `token_statistics`.
        """
        hidden = super().forward(input_ids, position_ids, attention_mask=None, packed_seq_params=packed_seq_params)
        if not self.post_process:
            return hidden
        sequence_parallel = self.config.sequence_parallel
        if sequence_parallel:
            # Each tensor rank's rows of the vocabulary give a part of the gradient; the gather's reduce-scatter sums and shards it at once.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        chosen = hidden.flatten(0, 1).index_select(0, positions)
        return self.output_layer(chosen, labels, weight, reduce_hidden_grad=not sequence_parallel, **options)


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
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Experts are reduced over the ranks that hold the same ones. Megatron says so of expert parallelism above 1 only; at 1 it would
            # leave out the tensor ranks' tokens, or add different parts of a matrix, wherever expert_tensor is not tensor.
            parameter.allreduce = False
    model = model.to(platform.device())
    return Float16Module(config, model) if config.bf16 else model


def unwrap(model: torch.nn.Module) -> PolicyModel:
    """The PolicyModel inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model
