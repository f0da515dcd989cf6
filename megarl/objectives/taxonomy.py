"""WAPO's taxonomy of token updates: peaks and valleys (2606.16154).

With C = sum_i p_i^2 the sampled token s is a peak if p_s >= C and a valley below. With the sign of the advantage A this says what a
policy-gradient step Delta z = A (e_s - p) on the logits does to the other tokens and to the entropy, to first order:
    dp_s = A p_s (1 - 2 p_s + C),  dp_i = -A p_i (p_i + p_s - C),  dH = -A [p_s (ln p_s + H) - sum_i p_i^2 (ln p_i + H)].
A valley's entropy always rises for A > 0 and always falls for A < 0: f(p) = p (ln p + H) is convex and increasing above e^-H, and by Jensen
C >= e^-H and f(C) <= sum_i p_i f(p_i); so p_s < C gives f(p_s) <= sum_i p_i f(p_i).
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = ("positive_peak", "positive_valley", "negative_peak", "negative_valley")


def collision_and_entropy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """C = sum p^2 and the entropy H in nats [...] of `logits` [..., V] at the training temperature."""
    log_p = torch.log_softmax(logits.double(), -1)
    return torch.logsumexp(2 * log_p, -1).exp(), -torch.xlogy(p := log_p.exp(), p).sum(-1)


def is_peak(sampled: Tensor, collision: Tensor) -> Tensor:
    """[t] bool from the sampled token's probability p_s and C."""
    return sampled >= collision


def bin_index(sampled: Tensor, collision: Tensor, advantage: Tensor) -> Tensor:
    """[t] long, position in BINS; A >= 0 counts as positive."""
    return 2 * (advantage < 0).long() + (~is_peak(sampled, collision)).long()


def probability_change(p: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
    """dp [t, V] per unit step, from the distributions `p` [t, V], the sampled tokens [t] long and A [t]."""
    p_s, collision = p.gather(-1, sampled[:, None]), p.square().sum(-1, keepdim=True)
    change = -advantage[:, None] * p * (p + p_s - collision)
    return change.scatter_add(-1, sampled[:, None], advantage[:, None] * p_s)


def entropy_change(p: Tensor, sampled: Tensor, advantage: Tensor) -> Tensor:
    """dH [t] per unit step, arguments as in `probability_change`."""
    plogp = torch.xlogy(p, p)
    entropy = -plogp.sum(-1, keepdim=True)
    f = plogp + p * entropy
    return -advantage * (f.gather(-1, sampled[:, None]).squeeze(-1) - (p * f).sum(-1))


def token_kinds(
    advantage: Tensor, logp: Tensor, entropy: Tensor, collision: Tensor, plogp_squares: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Metrics {name: (sum, count)} over the tokens with an advantage other than 0, from numbers [t] that need no distribution [t, V].

    `logp` of the sampled tokens, `entropy` H, `collision` C = sum_i p_i^2, `plogp_squares` sum_i p_i^2 ln p_i. By bin: its share of the
    tokens, and the mean predicted changes of the sampled token's probability and of the entropy, per unit step on the logits:
    dp_s = A p_s (1 - 2 p_s + C),  dH = -A [p_s (ln p_s + H) - sum_i p_i^2 ln p_i - C H].
    """
    counted = advantage != 0
    logp, entropy, collision, squares = (x.double() for x in (logp, entropy, collision, plogp_squares))
    sampled = logp.exp()
    dp = advantage * sampled * (1 - 2 * sampled + collision)
    dh = -advantage * (sampled * (logp + entropy) - squares - collision * entropy)
    kind = torch.where(counted, bin_index(sampled, collision, advantage), len(BINS))
    total = counted.sum()
    sums = torch.zeros(3, len(BINS) + 1, dtype=torch.float64, device=kind.device)
    sums.index_add_(1, kind, torch.stack([torch.ones_like(sampled), dp, dh]))
    metrics = {}
    for index, name in enumerate(BINS):
        count, probability, change = sums[:, index]
        metrics[f"token_kind/{name}"] = (count, total)
        metrics[f"token_kind/{name}_probability_change"] = (probability, count)
        metrics[f"token_kind/{name}_entropy_change"] = (change, count)
    return metrics
