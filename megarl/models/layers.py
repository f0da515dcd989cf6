"""The two layers of the unfused model that Megatron's own local versions do not cover.

Used where Transformer Engine is not (a CPU, or a GPU without it): Megatron's torch norm refuses sequence parallelism, and its local core
attention refuses context parallelism and packed sequences.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule


class RMSNorm:
    """torch's RMSNorm, made by Megatron's layer builder; its weight's gradient is summed over tensor ranks under sequence parallelism."""

    def __new__(cls, config, hidden_size: int, eps: float = 1e-5, **_):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm


class CoreAttention(MegatronModule):
    """Causal attention by torch's scaled dot product.

    Shapes: query [s, b, heads/tp, d], key and value [s, b, kv_heads/tp, d] -> [s, b, heads/tp * d];
    packed (thd): [t, heads/tp, d] with the sequences' bounds in `packed_seq_params` -> [t, heads/tp * d].
    Rows are padded on the right, so a causal mask already keeps padding out of real tokens.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **_):
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise NotImplementedError("context parallelism needs Transformer Engine's attention")
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.cu_seqlens_q.tolist())
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, query, key, value, bounds: list[int]):
        outs = []
        for start, end in itertools.pairwise(bounds):
            q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped)
            outs.append(out[0].transpose(0, 1))
        if bounds[-1] < query.shape[0]:
            outs.append(torch.zeros_like(query[bounds[-1] :]))
        return torch.cat(outs).flatten(1)
