"""Token log-probs and other statistics of the next-token distribution, from hidden states, without ever holding all logits.

The output projection, the softmax and their backward go chunk by chunk over the tokens; between forward and backward only numbers per
token are kept, and the backward makes each chunk's logits again. Tensor ranks exchange numbers per token, never vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK_BYTES = 256 * 2**20
"""Size of a chunk's logits in fp32, where the number of its tokens is not given. Two of such buffers are alive at a time."""


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics [n] of p = softmax(logits / temperature) at n positions, float32 (float64 for hidden states in float64)."""

    logp: Tensor
    """ln p_s of the label s. Differentiable."""
    entropy: Tensor | None
    """H = -sum_i p_i ln p_i in nats. Differentiable."""
    collision: Tensor | None
    """C = sum_i p_i^2, detached: the label is a peak of WAPO's taxonomy if p_s >= C, else a valley (megarl/objectives/taxonomy.py)."""
    collision_log: Tensor | None
    """sum_i p_i^2 ln p_i, detached. For that taxonomy's entropy change: sum_i p_i^2 (ln p_i + H) = collision_log + H C."""


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    entropy: bool = False,
    collision: bool = False,
    chunk_tokens: int | None = None,
    reduce_hidden_grad: bool = True,
) -> TokenStatistics:
    """Statistics of softmax(hidden @ weight.T / temperature). The product has the dtype of its factors, all else is in fp32.

    Args:
        hidden: [n, h], the same on every tensor rank.
        weight: [vocab / tensor, h], this tensor rank's rows, in rank order.
        labels: [n], token ids below `vocab_size`.
        temperature: the sampling temperature; log-probs of another one are those of another policy.
        vocab_size: real size of the whole vocabulary; rows above it are padding and get probability 0. None: no padding.
        group: tensor-parallel group, or None for one rank.
        entropy, collision: whether these are wanted.
        chunk_tokens: tokens whose logits exist at a time. Default: as many as fill `CHUNK_BYTES`.
        reduce_hidden_grad: sum the gradient of `hidden` over the tensor ranks. False where what made `hidden` sums it in its own backward.
    """
    rows = weight.shape[0]
    first = 0 if group is None else group.rank() * rows
    real = rows if vocab_size is None else max(0, min(rows, vocab_size - first))
    chunk = chunk_tokens or max(1, CHUNK_BYTES // (4 * rows))
    head = _Head(temperature, first, real, group, entropy, collision, chunk, reduce_hidden_grad)
    logp, *rest = _TokenStatistics.apply(hidden, weight, labels, head)
    return TokenStatistics(logp, rest[0] if entropy else None, *(rest[1:] if collision else (None, None)))


@dataclass(frozen=True)
class _Head:
    temperature: float
    first: int
    """Token id of this rank's first row."""
    real: int
    """This rank's rows that are tokens. Padding lies behind them, and never enters the product."""
    group: dist.ProcessGroup | None
    entropy: bool
    collision: bool
    chunk: int
    reduce_hidden_grad: bool

    def all_reduce(self, tensor: Tensor, op=dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of the tokens; none on a rank whose rows are all padding."""
        return (slice(begin, begin + self.chunk) for begin in range(0, tokens if self.real else 0, self.chunk))

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """[c, real] over the temperature, in fp32; the caller may overwrite it."""
        z = (hidden @ weight[: self.real].t()).to(_wide(hidden))
        return z if self.temperature == 1.0 else z.div_(self.temperature)

    def place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """(the labels' columns here [n], whether each label lies here [n])."""
        column = labels - self.first
        here = (column >= 0) & (column < self.real)
        return torch.where(here, column, 0), here


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class _TokenStatistics(torch.autograd.Function):
    """With z the logits over the temperature, and everything relative to a maximum m so that no exponential overflows:

    ln p_s = z_s - m - ln S,  S = sum_v e^(z_v - m),  H = ln S - sum_v e^(z_v - m) (z_v - m) / S
    d ln p_s / d z_v = [v = s] - p_v                  d H / d z_v = -p_v (ln p_v + H)
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, head: _Head):
        column, here = head.place(labels)
        # This rank's sums, relative to its own maximum; that over no rows is the least number, since -inf times 0 is nan.
        local = torch.zeros(6, len(hidden), dtype=_wide(hidden), device=hidden.device)
        local[0] = torch.finfo(local.dtype).min
        for part in head.chunks(len(hidden)):
            _local_sums(local[:, part], head.logits(hidden[part], weight), column[part], head)
        top = head.all_reduce(local[0].clone(), dist.ReduceOp.MAX)
        target, total, mean, square, square_mean = local[1:]
        shift = local[0] - top
        scale = shift.exp()
        target, total, mean, square, square_mean = head.all_reduce(
            torch.stack(
                [
                    torch.where(here, target + shift, 0.0),
                    scale * total,
                    scale * (mean + shift * total),
                    scale**2 * square,
                    scale**2 * (square_mean + shift * square),
                ]
            )
        )
        log_total = total.log()
        entropy = log_total - mean / total
        collision = square / total**2
        collision_log = square_mean / total**2 - log_total * collision
        ctx.save_for_backward(hidden, weight, column, here, top, log_total, entropy)
        ctx.head = head
        ctx.mark_non_differentiable(collision, collision_log)
        ctx.set_materialize_grads(False)
        return target - log_total, entropy, collision, collision_log

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy, *_):
        hidden, weight, column, here, top, log_total, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        grad_logp = torch.zeros_like(top) if grad_logp is None else grad_logp / head.temperature
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=_wide(weight))
        for part in head.chunks(len(hidden)):
            ln_p = head.logits(hidden[part], weight).sub_(top[part, None]).sub_(log_total[part, None])
            grad = ln_p.exp()
            if grad_entropy is None:
                grad.mul_(-grad_logp[part, None])
            else:
                by_entropy = grad_entropy[part, None] / -head.temperature
                grad.mul_(ln_p.add_(entropy[part, None]).mul_(by_entropy).sub_(grad_logp[part, None]))
            grad.scatter_add_(1, column[part, None], torch.where(here, grad_logp, 0.0)[part, None])
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight[: head.real]
            grad_weight[: head.real] += grad.t() @ hidden[part]
            del ln_p, grad  # or they would live on beside the next chunk's
        if head.reduce_hidden_grad:
            head.all_reduce(grad_hidden)
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def _local_sums(out: Tensor, z: Tensor, column: Tensor, head: _Head) -> None:
    """Fill `out` [6, c] with the maximum m of `z` [c, real], z_s - m, and the sums over v of e, e x, e^2, e^2 x, where x = z - m and
    e = exp(x). `z` is overwritten: there are never more than two buffers of its size."""
    out[0] = z.amax(1)
    x = z.sub_(out[0, :, None])
    out[1] = x.gather(1, column[:, None])[:, 0]
    e = x.exp()
    out[2] = e.sum(1)
    if head.entropy or head.collision:
        out[3] = x.mul_(e).sum(1)
    if head.collision:
        out[5] = x.mul_(e).sum(1)
        out[4] = e.square_().sum(1)
