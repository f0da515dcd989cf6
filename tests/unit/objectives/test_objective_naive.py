"""Promise: any combination of parameters gives what the specification, read word by word as loops over lists, gives."""

import os
import random

import pytest
import torch
from naive_objective import naive

from megarl.objectives import PRESETS, TokenBatch, make_objective

SEEDS = int(os.environ.get("OBJECTIVE_SEEDS", "15"))
CHOICES = {
    "clip_low": [None, 0.0, 0.1, 0.3],
    "clip_high": [None, 0.0, 0.15, 0.4],
    "dual_clip": [None, 1.1, 3.0],
    "ratio": ["token", "sequence", "none"],
    "std": ["none", "population", "unbiased"],
    "std_eps": [1e-6, 0.1],
    "equal_tol": [1e-8, 0.2],
    "aggregation": ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"],
    "kl": [None] + [{"coef": 0.2, "estimator": k, "where": w} for k in ("k1", "k2", "k3") for w in ("loss", "reward")],
    "top_entropy_fraction": [None, 0.2, 0.5, 1.0],
    "overlong": [None, "mask", {"max_length": 4, "cache": 2, "factor": 0.5}],
    "correction": [None]
    + [
        {"kind": k, "low": low, "high": 1.3, "normalize": n}
        for n in (False, True)
        for low in (None, 0.7)
        for k in ("token_tis", "sequence_tis", "token_mis", "icepop", "sequence_mis", "geometric")
    ],
    "drop_degenerate_groups": [False, True],
    "gamma": [1.0, 0.9],
    "lambda": [0.95, 0.5, 0.0],
    "lambda_critic": [None, 1.0, 0.7],
    "bootstrap_truncated": [False, True],
    "whiten": [False, True],
    "value_clip": [None, 0.2],
    "nll_coef": [0.0, 0.3],
    "positive_weight": [0.1, 1.0],
    "normalize": ["norm_length", "kept_tokens"],
    "tau": ["group_std", "one", "group_mean", "rloo", "batch_std", 0.3],
    "clip_mode": ["hard", "pessimistic", "none"],
    "divergence": ["forward_kl", "reverse_kl", "js", "hellinger", "alpha", "tv", "chi2_reverse", "chi2_forward"],
    "pointwise": [False, True],
    "eta": [1.0, 0.4],
}


def random_spec(name: str, rng: random.Random) -> dict:
    """About half of the parameters changed."""
    spec = {"name": name, "norm_length": 5.0} if "norm_length" in PRESETS[name].parameters else {"name": name}
    for parameter in PRESETS[name].parameters:
        choices = CHOICES.get(parameter, [])
        if name == "wapo" and parameter == "ratio":
            choices = ["token", "none"]
        if not PRESETS[name].reads_reward and parameter == "kl":
            choices = [None, {"coef": 0.2, "estimator": "k3", "where": "loss"}]
        if not PRESETS[name].reads_reward and parameter == "overlong":
            choices = [None, "mask"]
        if parameter == "alpha":
            choices = {"vapo": [None, 0.05, 0.6], "lpo": [0.5, 0.3]}[name]
        if choices and rng.random() < 0.5:
            spec[parameter] = rng.choice(choices)
    return spec


def random_groups(rng: random.Random) -> list[dict]:
    def near(logp):
        return [x + rng.gauss(0, 0.4) for x in logp]

    groups = []
    for g in range(rng.randint(1, 4)):
        responses = []
        equal = rng.random() < 0.2
        for _ in range(rng.randint(1, 4)):
            logp = [-rng.random() * 2 for _ in range(rng.choice([0, 1, 2, 3, 5]))]
            responses.append(
                {
                    "reward": 0.5 if equal else rng.choice([0.0, 1.0, 0.3, -0.5]),
                    "correct": rng.random() < 0.6,
                    "truncated": rng.random() < 0.3,
                    "logp": logp,
                    "old_logp": near(logp),
                    "rollout_logp": near(logp),
                    "ref_logp": near(logp),
                    "values": [rng.gauss(0.3, 0.5) for _ in logp],
                    "old_values": [rng.gauss(0.3, 0.5) for _ in logp],
                    "bootstrap_value": rng.random(),
                    "entropy": [rng.choice([0.1, 0.5, rng.random()]) for _ in logp],
                    "mask": [int(rng.random() < 0.8) for _ in logp],
                }
            )
        groups.append({"id": f"g{g}", "responses": responses})
    return groups


def computed(objective, groups) -> dict:
    batch = TokenBatch.from_lists(groups, dtype=torch.float64)
    update, tokens = objective.begin_update(objective.prepare(batch)), torch.arange(batch.num_tokens)
    logp, values = batch.logp.clone().requires_grad_(), batch.values.clone().requires_grad_()
    sums = objective.scalars(update, tokens, logp)
    scalars = None if sums is None else objective.finish_scalars(update, sums)
    out = objective.loss(update, tokens, logp, values=values, scalars=scalars)
    out.loss.backward()
    result = {"advantages": objective.coefficients(update, scalars).tolist(), "loss": out.loss.item(), "grad_logp": logp.grad.tolist()}
    if out.value_loss is not None:
        out.value_loss.backward()
        result |= {"value_loss": out.value_loss.item(), "grad_values": values.grad.tolist()}
    return result


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "vpo"])
def test_random_settings_on_random_batches(name):
    for seed in range(SEEDS):
        rng = random.Random(f"{name}/{seed}")
        spec, groups = random_spec(name, rng), random_groups(rng)
        objective = make_objective(spec)
        got = computed(objective, groups)
        want = naive({**objective.parameters, "name": name}, groups)
        assert got.keys() == want.keys()
        for field in want:
            assert got[field] == pytest.approx(want[field], rel=1e-8, abs=1e-9), (seed, field, spec)
