"""The two layers of the unfused model that Megatron's own local versions do not cover.

Used where Transformer Engine is not (a CPU, or a GPU without it): Megatron's torch norm refuses sequence parallelism, and its local core
attention refuses context parallelism and packed sequences.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
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
    Sequences are padded on the right, so a causal mask already keeps padding out of real tokens.

    With context parallelism s and t are this rank's tokens, of each sequence the chunks r and 2 * cp - 1 - r out of 2 * cp. Keys and
    values are gathered over the context ranks; the gather's backward sums their gradients back to where they came from.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **_):
        super().__init__(config=config)
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups
        self.context_group = parallel_state.get_context_parallel_group()

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        key, value = self._gather(key), self._gather(value)
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded.tolist()
        outputs = []
        for start, end in itertools.pairwise(bound // self.context_group.size() for bound in bounds):
            outputs.append(self._attend(query[start:end, None], key[:, start:end, None], value[:, start:end, None]))
        return torch.cat(outputs).flatten(1)

    def _gather(self, local: torch.Tensor) -> torch.Tensor:
        """[s, ...] -> [cp, s, ...], all context ranks' in rank order."""
        ranks = self.context_group.size()
        if ranks > 1:
            local = gather_from_sequence_parallel_region(local, tensor_parallel_output_grad=True, group=self.context_group)
        return local.unflatten(0, (ranks, -1))

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Query [s, b, heads, d] of this rank, key and value [cp, s, b, kv_heads, d] of all -> [s, b, heads, d]."""
        mask = self._mask(len(query), query.device)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, _whole(key), _whole(value)))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=self.grouped)
        return out.permute(2, 0, 1, 3)

    def _mask(self, local: int, device: torch.device) -> torch.Tensor | None:
        """[s, cp * s] which tokens of the whole sequence each of this rank's may see; None: just a causal mask."""
        ranks, rank = self.context_group.size(), self.context_group.rank()
        if ranks == 1:
            return None
        chunk = torch.arange(local // 2, device=device)
        mine = torch.cat([chunk + chunks * len(chunk) for chunks in (rank, 2 * ranks - 1 - rank)])
        return mine[:, None] >= torch.arange(ranks * local, device=device)


def _whole(gathered: torch.Tensor) -> torch.Tensor:
    """[cp, s, ...], each rank's two chunks -> [cp * s, ...], the sequence in order."""
    if len(gathered) == 1:
        return gathered[0]
    first, second = gathered.chunk(2, 1)
    return torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])
