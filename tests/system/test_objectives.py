"""Every objective that needs no value model trains under the loop, on real rollouts; replay and step-level lists too."""

import json
import math

import pytest

from megarl.objectives import PRESETS
from megarl.observe.metrics import read_metrics
from tests.system.conftest import QUICKSTART, megarl_here, overrides

pytestmark = pytest.mark.system

LENGTH = 12
SPECS = [
    {"name": name} | ({"norm_length": LENGTH} if name in ("dr_grpo", "wapo") else {}) for name in PRESETS if name not in ("ppo", "vapo")
]
VARIANTS = [
    {"name": "grpo", "kl": {"coef": 0.1, "estimator": "k3"}},
    {"name": "rloo", "kl": {"coef": 0.1, "estimator": "k1", "where": "reward"}},
    {"name": "grpo", "entropy_coef": 0.01, "top_entropy_fraction": 0.5},
    {"name": "dapo", "overlong": {"max_length": LENGTH, "cache": 4}, "correction": {"kind": "token_tis", "high": 2.0}},
    {"name": "gspo", "overlong": "mask", "correction": {"kind": "geometric", "low": 0.9, "high": 1.1}},
    *({"name": "lpo", "divergence": d} for d in ("reverse_kl", "js", "hellinger", "alpha", "tv", "chi2_reverse", "chi2_forward")),
    {"name": "lpo", "pointwise": True, "tau": 0.5, "clip_mode": "pessimistic"},
    {"name": "lpo", "schedule": {"divergence": {"to": "reverse_kl", "after_step": 1}, "tau": {"from": 1.0, "to": 0.2, "steps": 10}}},
]


@pytest.fixture(scope="module")
def small(settings):
    return settings | {"evaluation.every": 0, "rollout.prompts_per_step": 8, "training.optimizer.warmup_steps": 0}


def run(folder, settings, *flags, **changes):
    megarl_here("train", QUICKSTART, *overrides({"output": folder, **settings, **changes}), *flags)
    return read_metrics(folder / "metrics.jsonl")


def test_every_objective_trains(tmp_path, small):
    specs = SPECS + VARIANTS
    rotation = {"name": "tests.system.rotation:Rotation", "objectives": specs}
    changes = {
        "objective": json.dumps(rotation),
        "verifier.args.components": "true",
        "training.steps": len(specs),
        "training.old_logprobs": "recompute",
        "diagnostics.every": 1,
    }
    rows = run(tmp_path / "run", small, **changes)
    assert [row["step"] for row in rows] == list(range(1, len(specs) + 1))
    for spec, row in zip(specs, rows, strict=True):
        assert math.isfinite(row["policy/loss"]) and math.isfinite(row["policy/grad_norm"]), spec
        # 8 groups of 8 answers of which about a quarter is right: there is something to learn from, whatever the method looks at.
        assert row["policy/grad_norm"] > 0, spec
        assert row.get("policy/logprob_diff_max", 0.0) < 1e-4, spec  # not there if the first mini-batch has no signal
        kinds = [row[f"token_kind/{sign}_{kind}"] for sign in ("positive", "negative") for kind in ("peak", "valley")]
        assert sum(kinds) == pytest.approx(1), spec
        if spec["name"] in ("wapo", "raft", "raft_pp", "psr"):
            assert kinds[2] == kinds[3] == 0, spec
        if kinds[1]:  # a step on a token less likely than its distribution's collision probability spreads the distribution
            assert row["token_kind/positive_valley_entropy_change"] >= 0, spec
    assert rows[len(SPECS)]["policy/kl_reference"] >= 0
    assert sum("policy/logprob_diff_max" in row for row in rows) > len(rows) / 2


def rows_without_clocks(folder):
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "throughput/"))} for row in read_metrics(folder / "metrics.jsonl")]


def test_replay_trains_on_earlier_groups_and_resumes_with_them(tmp_path, small):
    changes = {
        "objective": "{name: lpo, divergence: reverse_kl}",
        "replay": "{capacity: 12, groups_per_step: 4, max_age: 2, kl_pull: 0.1, age_discount: 0.5}",
        "training.steps": 4,
        "checkpoint.every": 2,
    }
    rows = run(tmp_path / "whole", small, **changes)
    assert rows[0]["replay/drawn"] == 0 and all(row["replay/drawn"] > 0 for row in rows[1:])
    assert all(1 <= row["replay/age_mean"] <= 2 for row in rows[1:])
    assert rows[-1]["replay/stored"] <= 12 and all(row["policy/logprob_diff_max"] < 1e-4 for row in rows)
    run(tmp_path / "parts", small, **changes | {"training.steps": 2})
    run(tmp_path / "parts", small, "--resume", **changes)
    assert rows_without_clocks(tmp_path / "parts") == rows_without_clocks(tmp_path / "whole")


def test_step_lists_train_with_groups_kept_whole_and_by_a_prepass_alike(tmp_path, small):
    changes = {"objective": "{name: lpo}", "training.step_lists": "{separators: ['+', '-']}", "training.steps": 2}
    whole = run(tmp_path / "whole", small, **changes)
    prepass = run(tmp_path / "prepass", small, **changes | {"training.listwise_scalars": "prepass"})
    for a, b in zip(whole, prepass, strict=True):
        assert a["step_lists/segments"] > a["step_lists/lists"] >= 8  # the first segments of each prompt's answers, and some later ones
        assert a["policy/grad_norm"] > 0 and b["policy/grad_norm"] == pytest.approx(a["policy/grad_norm"], rel=1e-4)
        assert b["policy/loss"] == pytest.approx(a["policy/loss"], abs=1e-5)


def test_an_objective_on_vectors_refuses_a_verifier_that_gives_numbers(tmp_path, small):
    done = megarl_here("train", QUICKSTART, *overrides({"output": tmp_path / "run", **small, "objective": "{name: vpo}"}), check=2)
    assert "reward vectors" in done.stderr and done.stderr.count("\n") == 1
