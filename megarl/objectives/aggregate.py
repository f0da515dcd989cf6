"""From token losses to one number: every aggregation is a weight per response, fixed before the first micro-batch.

The loss of an update is sum over its tokens of scale[response] * token loss, so the parts of an update (micro-batches, ranks) just add up.
"""

from __future__ import annotations

from torch import Tensor

from megarl.objectives.batch import segment_max


def response_scale(count: Tensor, aggregation: str, norm_length: float | None = None) -> Tensor:
    """Weight [N] of each response's tokens from the number `count` [N] that it has left, 0 for responses outside the update.

    token_mean: 1 / all tokens. seq_mean_token_mean: 1 / (responses l). seq_mean_token_sum: 1 / responses (with a token).
    seq_mean_token_sum_norm: the last / `norm_length`. 0 if there is no token.
    """
    present = (count > 0).to(count.dtype)
    if aggregation == "token_mean":
        return present / count.sum().clamp(min=1)
    scale = present / present.sum().clamp(min=1)
    if aggregation == "seq_mean_token_mean":
        scale = scale / count.clamp(min=1)
    elif aggregation == "seq_mean_token_sum_norm":
        scale = scale / norm_length
    return scale


def groups_present(inside: Tensor, group: Tensor, groups: int) -> Tensor:
    """Number of groups with at least one response in `inside` [N] bool, a 0-dimensional float64 tensor."""
    return (segment_max(inside.double(), group, groups) > 0).double().sum()


def winner_scale(count: Tensor, winner: Tensor, group_size: Tensor, group: Tensor, groups: int, norm_length: float) -> Tensor:
    """WAPO's 1 / (G norm_length max(1, groups with a winner)) [N]; an empty winner still makes its group count."""
    present = (count > 0).to(count.dtype)
    return present / (group_size * norm_length * groups_present(winner, group, groups).clamp(min=1))


def group_scale(count: Tensor, inside: Tensor, group: Tensor, groups: int, *, mean: bool) -> Tensor:
    """LPO's and TPO's 1 / number of groups [N]; with `mean` also over the response's tokens."""
    present = (count > 0).to(count.dtype)
    scale = present / groups_present(inside, group, groups).clamp(min=1)
    return scale / count.clamp(min=1) if mean else scale
