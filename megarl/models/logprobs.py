"""Token log-probs and entropy from vocabulary-parallel logits, without gathering the vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _all_reduce(tensor: torch.Tensor, op, group) -> torch.Tensor:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


class _TokenLogProbs(torch.autograd.Function):
    """log p_y = z_y - logsumexp(z) and H = logsumexp(z) - sum_v p_v z_v, each tensor rank holding a slice of the vocabulary.

    d log p_y / d z_v = [v = y] - p_v        d H / d z_v = p_v (sum_u p_u z_u - z_v)
    """

    @staticmethod
    def forward(ctx, logits, labels, temperature, first, real_rows, group, want_entropy):
        z = logits.float()
        if temperature != 1.0:
            z = z / temperature
        if real_rows < z.shape[1]:  # padding of the vocabulary is no token: it must not take part in the softmax
            if z.data_ptr() == logits.data_ptr():
                z = z.clone()
            z[:, real_rows:] = float("-inf")
        top = _all_reduce(z.max(dim=1).values, dist.ReduceOp.MAX, group)
        shifted = z - top[:, None]
        exp = shifted.exp()
        local = labels - first
        here = (local >= 0) & (local < z.shape[1])
        local = local.clamp(0, z.shape[1] - 1)
        target = torch.where(here, shifted.gather(1, local[:, None])[:, 0], 0.0)
        # One all-reduce for the three sums.
        expectation = torch.where(exp > 0, shifted * exp, 0.0).sum(1) if want_entropy else torch.zeros_like(target)
        sums = _all_reduce(torch.stack([exp.sum(1), target, expectation]), dist.ReduceOp.SUM, group)
        log_total = sums[0].log()
        logp = sums[1] - log_total
        mean_shifted = sums[2] / sums[0]
        entropy = log_total - mean_shifted
        ctx.save_for_backward(shifted, log_total, local, here, mean_shifted)
        ctx.temperature, ctx.dtype = temperature, logits.dtype
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        shifted, log_total, local, here, mean_shifted = ctx.saved_tensors
        p = (shifted - log_total[:, None]).exp()
        grad = torch.zeros_like(p)
        if grad_logp is not None:
            grad = p * -grad_logp[:, None]
            grad.scatter_add_(1, local[:, None], torch.where(here, grad_logp, 0.0)[:, None])
        if grad_entropy is not None:
            deviation = torch.where(p > 0, mean_shifted[:, None] - shifted, 0.0)
            grad = grad + p * deviation * grad_entropy[:, None]
        return (grad / ctx.temperature).to(ctx.dtype), None, None, None, None, None, None


def token_logprobs(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group=None,
    entropy: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probs and entropies (nats) of the distribution softmax(logits / temperature).

    Args:
        logits: [n, vocab / tensor], this tensor rank's slice, in rank order.
        labels: [n], token ids.
        temperature: the sampling temperature; log-probs of another one are those of another policy.
        vocab_size: real size of the whole vocabulary; rows above it are padding and get probability 0. None: no padding.
        group: tensor-parallel group, or None for one rank.

    Returns:
        float32 [n] log-probs and [n] entropies (None if not asked for), both differentiable.
    """
    rank = 0 if group is None else group.rank()
    width = logits.shape[1]
    first = rank * width
    real = width if vocab_size is None else max(0, min(width, vocab_size - first))
    logp, h = _TokenLogProbs.apply(logits, labels, temperature, first, real, group, entropy)
    return logp, h if entropy else None


@torch.no_grad()
def collision_statistics(logits, *, temperature=1.0, vocab_size=None, group=None):
    """(sum_i p_i^2, sum_i p_i^2 ln p_i), float32 [n] each; arguments as in `token_logprobs`."""
    rank = 0 if group is None else group.rank()
    z = logits.float() / temperature
    if vocab_size is not None:
        z[:, max(0, vocab_size - rank * z.shape[1]) :] = float("-inf")
    top = _all_reduce(z.max(dim=1).values, dist.ReduceOp.MAX, group)
    shifted = z - top[:, None]
    exp = shifted.exp()
    square = exp * exp
    sums = torch.stack([exp.sum(1), square.sum(1), torch.where(exp > 0, shifted * square, 0.0).sum(1)])
    total, squares, weighted = _all_reduce(sums, dist.ReduceOp.SUM, group)
    return squares / total**2, (weighted - total.log() * squares) / total**2
