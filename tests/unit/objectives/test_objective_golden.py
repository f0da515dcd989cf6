"""Promise: the parts give the worked numbers of the method sheet (those that the case format cannot express)."""

import itertools
import math

import pytest
import torch
from objective_batches import advantages, batch_of, from_scores, golden, gradient

from megarl.objectives import TokenBatch, make_objective
from megarl.objectives.correction import mismatch_statistics, off_policy_weights
from megarl.objectives.gae import generalized_advantages, length_adaptive_lambda, whiten
from megarl.objectives.kl import kl_estimate
from megarl.objectives.objective import top_entropy
from megarl.objectives.ratios import clipped_surrogate, token_ratio, value_surrogate
from megarl.objectives.rewards import overlong_penalty
from megarl.objectives.taxonomy import BINS, bin_index, collision_and_entropy, entropy_change, probability_change
from megarl.objectives.vector import exact_set_reward


def tensor(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def flat(nested) -> list:
    return list(itertools.chain.from_iterable(nested))


def close(got, want) -> bool:
    return torch.allclose(torch.as_tensor(got, dtype=torch.float64), tensor(want), rtol=1e-6, atol=1e-6)


def gae(rewards, values, gamma, lam):
    sequence = torch.zeros(len(rewards), dtype=torch.long)
    return generalized_advantages(tensor(rewards), tensor(values), sequence, tensor([0.0]), gamma, tensor([lam]))


def test_gae():
    case = golden("ppo_gae_1")
    got = gae(**case["inputs"], gamma=1.0, lam=0.95)
    assert close(got, case["expected"]["advantages"])
    assert close(got + tensor(case["inputs"]["values"]), case["expected"]["returns"])


def test_decoupled_lambdas():
    for name, lam in (("vcppo_decoupled", 0.95), ("vapo_decoupled_gae", 0.5)):
        case = golden(name)
        assert close(gae(**case["inputs"], gamma=1.0, lam=lam), case["expected"]["policy_advantages"])
        assert close(gae(**case["inputs"], gamma=1.0, lam=1.0) + tensor(case["inputs"]["values"]), case["expected"]["value_targets"])


def test_length_adaptive_lambda():
    case = golden("vapo_lambda")
    assert close(length_adaptive_lambda(tensor(case["inputs"]["lengths"]), 0.05), case["expected"]["lambda_policy"])


def test_clip_and_dual_clip():
    case = golden("ppo_clip_2_dual")
    ratio, slope = token_ratio(tensor(case["inputs"]["logp"]), tensor(case["inputs"]["old_logp"]))
    for dual, field in ((3.0, "token_loss"), (None, "no_dual")):
        assert close(clipped_surrogate(ratio, slope, tensor(case["inputs"]["adv"]), 0.2, 0.28, dual).value, case["expected"][field])


def test_value_clip():
    case = golden("ppo_value_clip")
    got = value_surrogate(*(tensor(case["inputs"][name]) for name in ("values", "old_values", "returns")), 0.2)
    assert close(got.value, case["expected"]["token_loss"])


@pytest.mark.parametrize("name", ["group_adv_1", "group_adv_2"])
def test_group_advantages(name):
    case = golden(name)
    batch = batch_of([case["inputs"]["rewards"]])
    for spec, field in [
        ({"name": "grpo", "std_eps": 0}, "grpo_pop"),
        ({"name": "grpo", "std": "unbiased", "std_eps": 0}, "grpo_unbiased"),
        ({"name": "grpo", "std": "unbiased"}, "grpo_unbiased_eps1e6"),
        ({"name": "dr_grpo", "norm_length": 1}, "drgrpo"),
        ({"name": "rloo"}, "rloo"),
        ({"name": "maxrl"}, "maxrl"),
    ]:
        assert close(advantages(spec, batch), case["expected"][field]), field


def test_overlong_penalty():
    case = golden("dapo_overlong")
    lengths = case["inputs"]["lengths"]
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    batch = TokenBatch(
        sequence, torch.ones_like(sequence, dtype=torch.bool), torch.zeros(len(lengths), dtype=torch.long), torch.zeros(len(lengths))
    )
    penalty = overlong_penalty(batch, {"max_length": 20480, "cache": 4096, "factor": 1.0})
    assert close(-penalty, case["expected"]["penalty_paper"])


def test_reinforce_pp():
    case = golden("reinforcepp_1")
    responses = [
        {"reward": r, "logp": [-1.0] * len(k1), "ref_logp": [-1.0 - x for x in k1]}
        for r, k1 in zip(case["inputs"]["rewards"], case["inputs"]["token_k1"], strict=True)
    ]
    batch = TokenBatch.from_lists([{"responses": responses}], dtype=torch.float64)
    got = advantages({"name": "reinforce_pp", "kl": {"coef": 0.1, "estimator": "k1", "where": "reward"}}, batch)
    want = [x for response in case["expected"]["normalised_token_level"] for x in response]
    assert torch.allclose(got, tensor(want), atol=1e-6)
    raw = tensor([x for response in case["expected"]["raw"] for x in response])
    assert torch.allclose(whiten(raw, 1e-8), got)


def test_reinforce_pp_baseline():
    case = golden("reinforcepp_2_baseline")
    assert torch.allclose(
        advantages({"name": "reinforce_pp_baseline"}, batch_of(case["inputs"]["groups"])), tensor(case["expected"]["adv"]), atol=1e-5
    )


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_maxrl_is_unbiased_for_its_objective(p):
    """E of the estimator over Bernoulli(p) groups of 8 is w_T(p) dp with T = N - 1 (2602.02710, thm. 5), enumerated."""
    case = golden("maxrl_weight")
    total = 0.0
    for successes in range(9):
        rewards = [1.0] * successes + [0.0] * (8 - successes)
        got = advantages({"name": "maxrl"}, batch_of([rewards]))
        score = tensor([1 / p] * successes + [-1 / (1 - p)] * (8 - successes))
        total += math.comb(8, successes) * p**successes * (1 - p) ** (8 - successes) * float((got * score).mean())
    want = case["expected"]["centred_T_equals_N_minus_1"][case["inputs"]["p"].index(p)]
    assert total == pytest.approx(want, rel=1e-6)


def test_top_entropy():
    case = golden("top_entropy_mask")
    entropy = tensor(case["inputs"]["entropy"])
    assert top_entropy(entropy, torch.ones(10, dtype=torch.bool), 0.2).tolist() == [bool(x) for x in case["expected"]["mask"]]


@pytest.mark.parametrize("kind", ["peak", "valley"])
def test_taxonomy(kind):
    case = golden(f"wapo_tax_neg_{kind}")
    p, sampled, advantage = tensor([case["inputs"]["probs"]]), torch.tensor([case["inputs"]["sampled"]]), tensor([case["inputs"]["adv"]])
    collision, entropy = collision_and_entropy(p.log())
    assert close(collision, [case["expected"]["collision"]]) and close(entropy, [case["expected"]["entropy"]])
    assert BINS[int(bin_index(p[0, sampled], collision, advantage))] == f"negative_{kind}"
    assert close(probability_change(p, sampled, advantage), [case["expected"]["dp"]])
    assert close(entropy_change(p, sampled, advantage), [case["expected"]["dH"]])


def test_vpo_exact_values():
    case = golden("vpo_exact_k2")
    for name, rows in case["inputs"]["sets"].items():
        assert exact_set_reward(tensor(rows)) == pytest.approx(case["expected"]["R"][name]), name


def test_vpo_explicit_weights():
    case = golden("vpo_explicit_W")
    responses = [{"reward": rows, "logp": [-1.0]} for rows in case["inputs"]["reward_matrices"]]
    batch = TokenBatch.from_lists([{"responses": responses, "weights": case["inputs"]["W"]}], dtype=torch.float64)
    assert torch.allclose(advantages({"name": "vpo"}, batch), tensor(case["expected"]["advantage"]), atol=1e-5)


DIVERGENCE_NAMES = {
    "fwd_kl": "forward_kl", "rev_kl": "reverse_kl", "js": "js", "sq_hellinger": "hellinger", "alpha_0.5": "alpha", "tv": "tv",
    "chi2_P_over_W": "chi2_reverse", "chi2_W_over_P": "chi2_forward",
}  # fmt: skip


def divergence_value(name: str, p: torch.Tensor, w: torch.Tensor) -> float:
    """The divergences as they are defined, for finite differences; r = w/P."""
    r = w / p
    return float({
        "forward_kl": (w * r.log()).sum(), "reverse_kl": -(p * r.log()).sum(),
        "js": 0.5 * (p * (2 / (1 + r)).log()).sum() + 0.5 * (w * (2 * r / (1 + r)).log()).sum(),
        "hellinger": 0.5 * (p.sqrt() - w.sqrt()).square().sum(), "alpha": (1 - (w.sqrt() * p.sqrt()).sum()) / 0.25,
        "tv": 0.5 * (p - w).abs().sum(), "chi2_reverse": ((p - w).square() / w).sum(), "chi2_forward": ((w - p).square() / p).sum(),
    }[name])  # fmt: skip


@pytest.mark.parametrize(("case_name", "names"), list(itertools.product(["lpo_onpolicy_grpo", "lpo_offpolicy"], DIVERGENCE_NAMES.items())))
def test_lpo_coefficients(case_name, names):
    """Against the worked numbers, and against a finite difference of the divergence in the scores."""
    case, (key, name) = golden(case_name), names
    rewards, s, start = (case["inputs"][k] for k in ("rewards", "s", "s_t"))
    spec = {"name": "lpo", "divergence": name, "tau": case["params"]["tau"]}
    c = -advantages(spec, from_scores(rewards, s, start))
    assert close(c, case["expected"]["coef"][key])
    w, scores = tensor(case["expected"]["target"]), tensor(s)
    for k in range(len(s)):
        step = torch.zeros(len(s), dtype=torch.float64)
        step[k] = 1e-6
        change = divergence_value(name, (scores + step).softmax(0), w) - divergence_value(name, (scores - step).softmax(0), w)
        assert change / 2e-6 == pytest.approx(float(c[k]), abs=1e-6)


def test_lpo_of_two_is_a_soft_label_logistic_loss():
    case = golden("lpo_k2")
    c = -advantages({"name": "lpo", "tau": 0.5}, from_scores(case["inputs"]["rewards"], case["inputs"]["s"], [0.0, 0.0]))
    assert close(c, case["expected"]["coef_fwd"])


def test_lpo_clipping():
    case = golden("lpo_clip")
    responses = [
        {"reward": r, "logp": logp, "old_logp": b, "rollout_logp": b}
        for r, logp, b in zip(*(case["inputs"][k] for k in ("rewards", "logp", "behaviour_logp")), strict=True)
    ]
    batch = TokenBatch.from_lists([{"responses": responses}], dtype=torch.float64)
    want = case["expected"]["P_from_unclipped"]
    loss, grad = gradient({"name": "lpo", "tau": 0.5}, batch)
    assert loss == pytest.approx(want["loss"]) and close(grad, flat(want["grad_wrt_token_logp"]))
    _, grad = gradient({"name": "lpo", "tau": 0.5, "clip_mode": "pessimistic"}, batch)
    assert close(grad, flat(case["expected"]["grad_pessimistic_option"]))


def test_tpo():
    case = golden("tpo_1")
    responses = [
        {"reward": r, "logp": [new], "old_logp": [old]}
        for r, new, old in zip(*(case["inputs"][k] for k in ("rewards", "new_seq_logp", "old_seq_logp")), strict=True)
    ]
    loss, grad = gradient({"name": "tpo"}, TokenBatch.from_lists([{"responses": responses}], dtype=torch.float64))
    assert loss == pytest.approx(case["expected"]["loss"]) and close(grad, case["expected"]["grad"])


def test_kl_estimators():
    case = golden("kl_estimators")
    for estimator in ("k1", "k2", "k3"):
        value, slope = kl_estimate(tensor(case["inputs"]["logp_minus_ref"]), estimator)
        assert close(value, case["expected"][estimator]) and close(slope, case["expected"][f"grad_{estimator}"])


def test_off_policy_weights():
    case = golden("offpolicy_weights")
    train, rollout = (tensor(flat(case["inputs"][k])) for k in ("train_logp", "rollout_logp"))
    sequence, mask = torch.tensor([0, 0, 0, 1, 1]), torch.ones(5, dtype=torch.bool)

    def weights(kind, low=None, high=None):
        correction = {"kind": kind, "low": low, "high": high, "normalize": False}
        return off_policy_weights(train - rollout, mask, mask, sequence, 2, correction)

    want = case["expected"]
    assert close(weights("token_tis", high=2.0), flat(want["token_tis"]))
    assert close(weights("token_mis", 0.5, 2.0), flat(want["token_mis"]))
    assert close(weights("icepop", 0.5, 5.0), flat(want["icepop"]))
    assert close(weights("sequence_tis", high=2.0)[[0, 3]], want["seq_tis"])
    assert close(weights("sequence_mis", 0.5, 2.0)[[0, 3]], want["seq_mis"])
    assert weights("geometric", 0.99, 1.01).tolist() == [0.0] * 5
    statistics = mismatch_statistics(train - rollout)
    assert close(statistics["kl_k1"], want["k1_kl"]) and close(statistics["kl_k3"], want["k3_kl"])


def test_decoupled_ppo():
    """The clip is around the proximal policy; pi_prox/pi_behaviour multiplies the clipped loss."""
    case = golden("decoupled_ppo")
    logp, prox, behave = (case["inputs"][k] for k in ("logp", "prox_logp", "behav_logp"))
    responses = [
        {"reward": r, "logp": [a], "old_logp": [b], "rollout_logp": [c]} for r, a, b, c in zip((1.0, -1.0), logp, prox, behave, strict=True)
    ]
    spec = {"name": "reinforce_rej", "drop_degenerate_groups": False, "correction": {"kind": "token_tis"}}
    loss, _ = gradient(spec, TokenBatch.from_lists([{"responses": responses}], dtype=torch.float64))
    assert loss == pytest.approx(case["expected"]["loss"])


def test_wapo():
    case = golden("wapo_loss")
    groups = [
        {"responses": [{"reward": r, "logp": a, "rollout_logp": b} for r, a, b in zip(*rows, strict=True)]}
        for rows in zip(*(case["inputs"][k] for k in ("groups", "logp", "inference_logp")), strict=True)
    ]
    loss, grad = gradient({"name": "wapo", "norm_length": 8}, TokenBatch.from_lists(groups, dtype=torch.float64))
    assert loss == pytest.approx(case["expected"]["loss"])
    assert close(grad, [x for group in case["expected"]["grad_wrt_token_logp"] for response in group for x in response])


def test_value_model_objective_has_both_losses():
    case = golden("vapo_loss")
    assert make_objective({"name": "vapo"}).parameters["nll_coef"] == case["params"]["mu"]
