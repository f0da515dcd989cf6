"""Batches and objectives that the tests of this folder share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from megarl.objectives import PRESETS, TokenBatch, make_objective

DATA = Path(__file__).parents[2] / "data" / "conformance"


def cases(file: str) -> list[dict]:
    return json.loads((DATA / file).read_text())["cases"]


def golden(name: str) -> dict:
    return next(case for case in cases("golden.json") if case["id"] == name)


VARIANTS = [{"name": name, **({"norm_length": 8} if name in ("dr_grpo", "wapo") else {})} for name in PRESETS] + [
    {"name": "grpo", "kl": {"coef": 0.1}, "dual_clip": 1.5, "correction": {"kind": "sequence_tis", "high": 1.3}},
    {"name": "dapo", "top_entropy_fraction": 0.4, "correction": {"kind": "token_mis", "low": 0.5, "high": 2.0, "normalize": True}},
    {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1, "aggregation": "seq_mean_token_sum", "overlong": "mask"},
    {"name": "ppo", "ratio": "sequence", "whiten": True, "bootstrap_truncated": True, "kl": {"coef": 0.1, "where": "reward"}},
    {"name": "cispo", "ratio": "sequence", "clip_low": 0.1, "entropy_coef": 0.01},
    {"name": "wapo", "normalize": "kept_tokens", "kl": {"coef": 0.1, "estimator": "k2"}},
    {"name": "lpo", "divergence": "reverse_kl", "tau": "batch_std", "clip_mode": "pessimistic", "kl": {"coef": 0.1}},
    {"name": "lpo", "divergence": "chi2_forward", "pointwise": True, "overlong": "mask", "drop_degenerate_groups": True},
    {"name": "tpo", "overlong": "mask", "entropy_coef": 0.02, "eta": 0.5},
    {"name": "vapo", "alpha": 0.6, "overlong": "mask"},
]
"""Every preset as it is, and settings that reach the other branches."""


def variant_id(spec: dict) -> str:
    return "-".join([spec["name"], *(key for key in spec if key not in ("name", "norm_length"))])


def random_batch(
    seed: int, *, vector: bool = False, groups: int = 4, largest: int = 7, spread: float = 0.5, dtype=torch.float64
) -> TokenBatch:
    """A batch with every field, uneven groups and lengths, masked tokens, an empty and a fully masked response, equal and single groups."""
    rng = random.Random(seed)

    def tokens(count: int, around: list[float] | None = None) -> list[float]:
        return [-(rng.random() + 0.05) if around is None else around[i] + rng.gauss(0, spread) for i in range(count)]

    result = []
    for g in range(groups):
        equal = g == groups - 1
        responses = []
        for k in range(1 if g == groups - 2 else rng.randint(3, 5)):
            count = 0 if (g, k) == (0, 1) else rng.randint(1, largest)
            logp = tokens(count)
            reward = 0.7 if equal else rng.choice([0.0, 1.0, 0.3, 1.0])
            if vector:
                reward = [[rng.random() for _ in range(3)] for _ in range(rng.randint(0 if k else 1, 3))]
            responses.append({
                "reward": reward, "correct": rng.random() < 0.5 or (equal and k > 0), "truncated": rng.random() < 0.25, "logp": logp,
                "old_logp": tokens(count, logp), "rollout_logp": tokens(count, logp), "ref_logp": tokens(count, logp),
                "values": [rng.gauss(0.5, 0.4) for _ in range(count)], "old_values": [rng.gauss(0.5, 0.4) for _ in range(count)],
                "bootstrap_value": rng.random(), "entropy": [rng.random() for _ in range(count)],
                "mask": [0] * count if (g, k) == (0, 2) else [int(rng.random() < 0.8) for _ in range(count)],
            })  # fmt: skip
        result.append({"id": f"prompt-{g}", "responses": responses})
    return TokenBatch.from_lists(result, dtype=dtype, step=3, seed=seed)


def batch_of(rewards: list[list[float]], **fields) -> TokenBatch:
    """One token per response, log-prob -1, with the given rewards by group; `fields` by response, flat."""
    flat = iter(range(sum(map(len, rewards))))
    groups = [
        {"responses": [{"reward": r, "logp": [-1.0], **{k: v[i] for k, v in fields.items()}} for r in group for i in [next(flat)]]}
        for group in rewards
    ]
    return TokenBatch.from_lists(groups, dtype=torch.float64)


def advantages(spec: dict, batch: TokenBatch) -> torch.Tensor:
    """The coefficients [T] of the whole batch as one update, at `batch.logp`."""
    objective = make_objective(spec)
    update = objective.begin_update(objective.prepare(batch))
    sums = objective.scalars(update, torch.arange(batch.num_tokens), batch.logp)
    return objective.coefficients(update, None if sums is None else objective.finish_scalars(update, sums))


def gradient(spec: dict, batch: TokenBatch, logp: torch.Tensor | None = None) -> tuple[float, torch.Tensor]:
    """Loss and its gradient [T] of the whole batch as one update."""
    objective = make_objective(spec)
    update = objective.begin_update(objective.prepare(batch))
    logp = (batch.logp if logp is None else logp).clone().requires_grad_()
    out = objective.loss(update, torch.arange(batch.num_tokens), logp, entropy=batch.entropy)
    out.loss.backward()
    return out.loss.item(), logp.grad


def from_scores(rewards: list[float], scores: list[float], start: list[float]) -> TokenBatch:
    """One group of one-token responses whose listwise scores are s = `scores` now and s_t = `start` at the start of the step."""
    responses = [
        {"reward": r, "logp": [-1.0 + s], "old_logp": [-1.0 + t], "rollout_logp": [-1.0]}
        for r, s, t in zip(rewards, scores, start, strict=True)
    ]
    return TokenBatch.from_lists([{"responses": responses}], dtype=torch.float64)
