"""Diagnostics of the value model and of token weighting.

The definitions are ours; they make observable what 2505.17997 names as limitations of VAPO (value function, lambda, token weighting).
G is the Monte-Carlo return of a token's response (its reward, gamma 1), V the value, both [n] over trained tokens unless said otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.objectives.batch import segment_sum
from megarl.objectives.gae import generalized_advantages, length_adaptive_lambda

SMALLEST_VARIANCE = 1e-12


def explained_variance(values: Tensor, returns: Tensor) -> float | None:
    """1 - Var(G - V) / Var(G), population variances; None if the returns do not vary."""
    spread = returns.double().var(correction=0) if len(returns) else returns.new_zeros(())
    if float(spread) < SMALLEST_VARIANCE:
        return None
    return float(1 - (returns - values).double().var(correction=0) / spread)


def within_prompt_explained_variance(values: Tensor, returns: Tensor, prompt: Tensor) -> float | None:
    """As `explained_variance` with both centred per prompt [n]: a critic that only knows how hard the prompt is scores 0."""
    values, returns = values.double(), returns.double()
    error, spread = _centred(returns - values, prompt), _centred(returns, prompt)
    if not len(returns) or float(spread.square().mean()) < SMALLEST_VARIANCE:
        return None
    return float(1 - error.square().mean() / spread.square().mean())


def _centred(numbers: Tensor, index: Tensor) -> Tensor:
    size = int(index.max()) + 1 if len(index) else 0
    return numbers - (segment_sum(numbers, index, size) / segment_sum(torch.ones_like(numbers), index, size).clamp(min=1))[index]


def error_against_group_baseline(first_values: Tensor, reward: Tensor, group: Tensor, groups: int) -> float | None:
    """MSE of V at the first token over MSE of the leave-one-out group mean, [N] by response; above 1 the critic is worse than no critic.

    Groups of one response have no such baseline and are left out; None if none is left or the baseline is exact.
    """
    reward = reward.double()
    size = segment_sum(torch.ones_like(reward), group, groups)[group]
    usable = size > 1
    baseline = (segment_sum(reward, group, groups)[group] - reward) / (size - 1).clamp(min=1)
    denominator = (baseline - reward)[usable].square().mean()
    if not bool(usable.any()) or float(denominator) == 0:
        return None
    return float((first_values.double() - reward)[usable].square().mean() / denominator)


def binned_error(values: Tensor, returns: Tensor, bins: Tensor, count: int) -> dict[str, Tensor]:
    """`bias` = mean(V - G), `rmse`, `tokens` of each of `count` bins; NaN where a bin is empty. `bins` [n] long."""
    error = (values - returns).double()
    tokens = segment_sum(torch.ones_like(error), bins, count)
    return {
        "bias": segment_sum(error, bins, count) / tokens,
        "rmse": (segment_sum(error.square(), bins, count) / tokens).sqrt(),
        "tokens": tokens,
    }


def relative_position_bins(position: Tensor, length: Tensor, count: int = 10) -> Tensor:
    """[n] long: bin of t/l, from the position t (from 0) and the length l of each token's response."""
    return (position * count // length.clamp(min=1)).clamp(max=count - 1).long()


def log2_position_bins(position: Tensor) -> Tensor:
    """[n] long: 0 for t = 0, then 1 + floor(log2 t)."""
    return torch.where(position > 0, 1 + position.clamp(min=1).double().log2().floor(), 0.0).long()


def expected_calibration_error(values: Tensor, returns: Tensor, count: int = 10) -> float:
    """Mean over tokens of |mean V - mean G| of the token's bin; `count` bins of equal width between the least and the greatest V."""
    values, returns = values.double(), returns.double()
    width = (values.max() - values.min()).clamp(min=SMALLEST_VARIANCE)
    bins = ((values - values.min()) / width * count).long().clamp(max=count - 1)
    gap = segment_sum(values - returns, bins, count).abs()
    return float(gap.sum() / len(values))


def terminal_reach(lambdas: Tensor, length: Tensor, position: Tensor) -> Tensor:
    """lambda^(l - 1 - t) [n], the weight of the outcome's TD error at position t (gamma 1); 0^0 = 1."""
    return lambdas.double().pow((length - 1 - position).double())


def terminal_share(deltas: Tensor, sequence: Tensor, lambdas: Tensor, responses: int) -> Tensor:
    """[N] share of |lambda^j delta| at the first token that the last TD error contributes; NaN for an empty response or all zeros.

    `deltas`, `sequence` [n], `lambdas` [N].
    """
    length = torch.bincount(sequence, minlength=responses)
    position = torch.arange(len(sequence), device=sequence.device) - (length.cumsum(0) - length)[sequence]
    weighted = (lambdas.double()[sequence].pow(position.double()) * deltas.double()).abs()
    last = segment_sum(torch.where(position == length[sequence] - 1, weighted, 0.0), sequence, responses)
    return last / segment_sum(weighted, sequence, responses)


def lambda_sweep(
    rewards: Tensor, values: Tensor, sequence: Tensor, responses: int, lambdas: tuple[float, ...] = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0),
    adaptive_alpha: float | None = 0.05,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """For each lambda: `correlation`, `sign_agreement` and `variance_ratio` of A^lambda with the Monte-Carlo advantage G - V.

    `rewards` (of tokens), `values`, `sequence` [n]. `adaptive`: VAPO's lambda with `adaptive_alpha`. NaN where nothing varies.
    """
    after_last = values.new_zeros(responses, dtype=torch.float64)
    length = torch.bincount(sequence, minlength=responses).double()
    decays = {f"{value:g}": torch.full_like(length, value) for value in lambdas}
    if adaptive_alpha is not None:
        decays["adaptive"] = length_adaptive_lambda(length, adaptive_alpha)
    rewards, values = rewards.double(), values.double()
    reference = generalized_advantages(rewards, values, sequence, after_last, 1.0, torch.ones_like(length))
    result = {}
    for name, decay in decays.items():
        advantage = generalized_advantages(rewards, values, sequence, after_last, 1.0, decay)
        result[name] = {
            "correlation": correlation(advantage, reference),
            "sign_agreement": float((advantage.sign() == reference.sign()).double().mean()),
            "variance_ratio": float(advantage.var(correction=0) / reference.var(correction=0)),
        }
    return result


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's; NaN if either does not vary."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())


def token_weighting(length: Tensor, advantage: Tensor, correct: Tensor) -> dict[str, float]:
    """How a token-level mean weighs responses, from length, mean advantage and correctness [N].

    `effective_responses` = (sum l)^2 / sum l^2; `length_sign_correlation` of l and sign(A); shares of tokens and |A| l in incorrect ones.
    """
    length, advantage = length.double(), advantage.double()
    mass = advantage.abs() * length
    return {
        "effective_responses": float(length.sum().square() / length.square().sum()),
        "length_sign_correlation": correlation(length, advantage.sign()),
        "incorrect_token_share": float(length[~correct].sum() / length.sum()),
        "incorrect_mass_share": float(mass[~correct].sum() / mass.sum()),
    }


def lambda_audit(length: Tensor, correct: Tensor, alpha: float) -> dict[str, float]:
    """VAPO's lambdas: their range, the share clamped to 0 (l <= 1/alpha), and the correlation of length with the outcome."""
    lambdas = length_adaptive_lambda(length.double(), alpha)
    return {
        "least": float(lambdas.min()),
        "mean": float(lambdas.mean()),
        "greatest": float(lambdas.max()),
        "clamped_share": float((length.double() * alpha <= 1).double().mean()),
        "length_outcome_correlation": correlation(length, correct.double()),
    }
