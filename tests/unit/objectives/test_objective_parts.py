"""Promise: the vectorised parts give what the definitions, written as loops, give."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import advantages, batch_of, gradient, random_batch

from megarl.objectives import TokenBatch, make_objective
from megarl.objectives.batch import segment_log_softmax, segment_max, segment_sum
from megarl.objectives.gae import discounted_sums, generalized_advantages
from megarl.objectives.objective import top_entropy
from megarl.objectives.taxonomy import BINS, bin_index, collision_and_entropy, entropy_change, probability_change, token_kinds
from megarl.objectives.vector import draw_weights, exact_set_reward, inverse_gamma_cdf, set_rewards, weight_seed


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 2**20), st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_backward_loop(lengths, seed, gamma, lam):
    generator = torch.Generator().manual_seed(seed)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    rewards, values = torch.randn(2, len(sequence), generator=generator, dtype=torch.float64)
    after_last = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    decay = torch.full((len(lengths),), lam, dtype=torch.float64)
    got = generalized_advantages(rewards, values, sequence, after_last, gamma, decay)
    position = 0
    for response, length in enumerate(lengths):
        following, value = 0.0, float(after_last[response])
        for t in reversed(range(position, position + length)):
            following = float(rewards[t]) + gamma * value - float(values[t]) + gamma * lam * following
            value = float(values[t])
            assert float(got[t]) == pytest.approx(following, rel=1e-9, abs=1e-9)
        position += length


def test_gae_of_a_long_response_does_not_underflow():
    """lambda^(32768) is 0 in floats; nothing is divided by it."""
    terms = torch.zeros(32768, dtype=torch.float64)
    terms[-1] = 1.0
    got = discounted_sums(terms, torch.full_like(terms, 0.95), torch.zeros(32768, dtype=torch.long))
    assert float(got[-100]) == pytest.approx(0.95**99) and bool(got.isfinite().all())
    undiscounted = discounted_sums(
        torch.ones(32768, dtype=torch.float64), torch.ones(32768, dtype=torch.float64), torch.zeros(32768, dtype=torch.long)
    )
    assert float(undiscounted[0]) == 32768


def test_gae_steps_over_gaps_in_the_mask():
    """Tool tokens between two trained ones change nothing but their own, which are 0."""
    dense = {"reward": 1.0, "logp": [-1.0] * 3, "values": [0.2, 0.5, 0.6]}
    gaps = {"reward": 1.0, "logp": [-1.0] * 6, "values": [9.0, 0.2, 7.0, 0.5, 0.6, -4.0], "mask": [0, 1, 0, 1, 1, 0]}
    for spec in ({"name": "ppo"}, {"name": "vapo", "alpha": 0.6}, {"name": "ppo", "whiten": True}):
        a, b = (advantages(spec, TokenBatch.from_lists([{"responses": [r]}], dtype=torch.float64)) for r in (dense, gaps))
        assert torch.allclose(a, b[[1, 3, 4]]) and b[[0, 2, 5]].tolist() == [0.0, 0.0, 0.0]


def test_segments():
    values, index = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([0, 2, 0])
    assert segment_sum(values, index, 4).tolist() == [3.0, 0.0, 5.0, 0.0]
    assert segment_max(values, index, 4).tolist() == [2.0, -math.inf, 5.0, -math.inf]
    got = segment_log_softmax(values, index, 4)
    assert torch.allclose(got[[0, 2]], values[[0, 2]].log_softmax(0)) and float(got[1]) == 0.0


@pytest.mark.parametrize(
    "spec", [{"name": "grpo"}, {"name": "rloo"}, {"name": "dr_grpo", "norm_length": 4}, {"name": "grpo", "std": "unbiased"}]
)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 1.0, -1.0]), min_size=1, max_size=6), min_size=1, max_size=4))
def test_group_advantages_equal_the_textbook(spec, groups):
    got = iter(advantages(spec, batch_of(groups)).tolist())
    for rewards in groups:
        size, mean = len(rewards), sum(rewards) / len(rewards)
        for reward in rewards:
            if len(set(rewards)) == 1:
                want = 0.0
            elif spec["name"] == "rloo":
                want = reward - (sum(rewards) - reward) / (size - 1)
            else:
                square = sum((r - mean) ** 2 for r in rewards)
                std = {"grpo": math.sqrt(square / (size - (spec.get("std") == "unbiased"))) + 1e-6, "dr_grpo": 1.0}[spec["name"]]
                want = (reward - mean) / std
            assert next(got) == pytest.approx(want, abs=1e-9)


def test_groups_need_not_be_contiguous():
    """Responses of two groups that alternate give what they give in order."""
    ordered = batch_of([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
    mixed = batch_of([[1.0, 0.0, 0.0, 0.0, 0.5, 1.0]])
    mixed.group, mixed.group_ids = torch.tensor([0, 1, 0, 1, 0, 1]), ["0", "1"]
    order = [0, 3, 1, 4, 2, 5]
    for spec in ({"name": "grpo"}, {"name": "lpo"}, {"name": "tpo"}, {"name": "wapo", "norm_length": 2}, {"name": "maxrl"}):
        assert torch.allclose(advantages(spec, mixed), advantages(spec, ordered)[order]), spec


def test_top_entropy_takes_the_first_of_equals_and_counts_what_is_left():
    entropy, mask = torch.tensor([0.5, 0.5, 0.9, 0.5]), torch.tensor([True, True, False, True])
    assert top_entropy(entropy, mask, 0.4).tolist() == [True, True, False, False]
    assert top_entropy(entropy, mask, 1e-6).tolist() == [True, False, False, False]
    assert top_entropy(entropy, torch.zeros(4, dtype=torch.bool), 0.5).tolist() == [False] * 4


def test_groups_that_left_are_in_no_statistic_over_the_batch():
    """Batch std, whitening and tau: batch_std are those of the batch without the degenerate groups."""
    rewards = [[1.0, 0.0, 0.0], [1.0, 0.0], [1.0, 2.0, 5.0]]  # the last one is all correct, its rewards differ
    for spec in ({"name": "reinforce_pp_baseline"}, {"name": "reinforce_pp"}, {"name": "lpo", "tau": "batch_std"}):
        whole = advantages({**spec, "drop_degenerate_groups": True}, batch_of(rewards))
        assert torch.allclose(whole[:5], advantages(spec, batch_of(rewards[:2])), atol=1e-9), spec
        assert whole[5:].tolist() == [0.0] * 3


def test_whitened_returns_have_mean_zero_and_variance_one_over_tokens():
    batch = random_batch(2)
    got = advantages({"name": "reinforce_pp"}, batch)[batch.mask]
    assert float(got.mean()) == pytest.approx(0, abs=1e-9) and float(got.var(correction=0)) == pytest.approx(1, rel=1e-6)


# ---------------------------------------------------------------------- vector rewards


def vpo(groups: list[list[list[list[float]]]], ids=None, **fields) -> TokenBatch:
    lists = [{"id": i, "responses": [{"reward": rows, "logp": [-1.0]} for rows in group]}
             for i, group in zip(ids or [str(n) for n in range(len(groups))], groups, strict=True)]  # fmt: skip
    return TokenBatch.from_lists(lists, dtype=torch.float64, **fields)


SETS = [[[1, 0], [0, 1]], [[0.6, 0.6]], [[1, 0], [0, 1], [0.6, 0.6]], [[1, 0], [0.5, 0]], [[0.2, 0.9], [0.7, 0.1]], []]


@pytest.mark.parametrize(("sampler", "tolerance"), [("iid", 0.03), ("sobol", 2e-3)])
def test_drawn_weights_estimate_the_exact_expectation(sampler, tolerance):
    parameters = {"num_weights": 4096, "alpha": 1.0, "sampler": sampler}
    got = set_rewards(vpo([SETS]), parameters)
    for rows, value in zip(SETS, got.tolist(), strict=True):
        assert value == pytest.approx(exact_set_reward(torch.tensor(rows).reshape(-1, 2)), abs=tolerance), rows


@pytest.mark.parametrize("sampler", ["iid", "sobol"])
@pytest.mark.parametrize("k", [2, 3, 5])
def test_best_of_the_unit_vectors_is_the_harmonic_mean(sampler, k):
    """E max_j w_j = H_k / k for w ~ Dir(1)."""
    rows = torch.eye(k).tolist()
    got = set_rewards(vpo([[rows]]), {"num_weights": 8192, "alpha": 1.0, "sampler": sampler})
    assert float(got[0]) == pytest.approx(sum(1 / j for j in range(1, k + 1)) / k, abs=0.01)
    assert exact_set_reward(torch.eye(k)) == (pytest.approx(0.75) if k == 2 else None)


@pytest.mark.parametrize("sampler", ["iid", "sobol"])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 4.0])
def test_weights_are_dirichlet(sampler, alpha):
    """On the simplex, with the mean 1/k and the variance of the symmetric Dirichlet."""
    k = 3
    weights = draw_weights(8192, k, alpha, seed=5, sampler=sampler)
    assert torch.allclose(weights.sum(1), torch.ones(8192, dtype=torch.float64)) and bool((weights >= 0).all())
    assert torch.allclose(weights.mean(0), torch.full((k,), 1 / k, dtype=torch.float64), atol=0.015)
    variance = (1 / k) * (1 - 1 / k) / (k * alpha + 1)
    assert torch.allclose(weights.var(0), torch.full((k,), variance, dtype=torch.float64), rtol=0.08)


def test_extreme_dirichlet_parameters_stay_on_the_simplex():
    for sampler in ("iid", "sobol"):
        for alpha in (1e-4, 1e4):
            weights = draw_weights(64, 4, alpha, seed=1, sampler=sampler)
            assert bool(weights.isfinite().all()) and torch.allclose(weights.sum(1), torch.ones(64, dtype=torch.float64))


def test_inverse_gamma():
    u = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert torch.allclose(inverse_gamma_cdf(u, 1.0), -torch.log1p(-u), rtol=1e-10)


def test_weights_depend_on_seed_step_and_group_and_nothing_else():
    rows = [[[0.3, 0.9], [0.8, 0.1]], [[0.5, 0.6]]]
    parameters = {"num_weights": 16, "alpha": 1.0, "sampler": "iid"}
    first = set_rewards(vpo([rows, rows], ["a", "b"], step=1, seed=2), parameters)
    swapped = set_rewards(vpo([rows, rows], ["b", "a"], step=1, seed=2), parameters)
    assert torch.equal(first, swapped[[2, 3, 0, 1]]) and not torch.equal(first[:2], first[2:])
    assert not torch.equal(first, set_rewards(vpo([rows, rows], ["a", "b"], step=2, seed=2), parameters))
    assert not torch.equal(first, set_rewards(vpo([rows, rows], ["a", "b"], step=1, seed=3), parameters))
    assert len({weight_seed(*key) for key in [(0, 1, "a"), (0, 11, "a"), (1, 1, "a"), (0, 1, "1/a")]}) == 4


def test_groups_of_different_width_and_no_rows_share_a_batch():
    batch = vpo([[[[1.0, 0.0, 0.0]], []], [[[1.0, 1.0]], [[0.0, 0.0]]], [[], []]])
    got = set_rewards(batch, {"num_weights": 2000, "alpha": 1.0, "sampler": "iid"})
    assert got[1] == 0 and got[4] == 0 and float(got[2]) == pytest.approx(1) and float(got[0]) == pytest.approx(1 / 3, abs=0.02)
    assert advantages({"name": "vpo"}, batch)[4:].tolist() == [0.0, 0.0]


def test_correct_of_vector_rewards_is_read_off_the_set_reward():
    batch = vpo([[[[1.0, 1.0]], [[0.0, 0.0]]], [[[1.0, 1.0]], [[0.5, 0.5]]]])
    prepared = make_objective({"name": "vpo", "drop_degenerate_groups": True}).prepare(batch)
    assert prepared.in_batch.tolist() == [True, True, False, False]


# ---------------------------------------------------------------------- taxonomy


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 12), st.integers(0, 2**20), st.sampled_from([-1.0, 0.7]))
def test_taxonomy_is_the_first_order_change(size, seed, advantage):
    """dp and dH against a small step on the logits; a valley's entropy always rises for A > 0 and falls for A < 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(size, generator=generator, dtype=torch.float64)
    sampled = torch.randint(size, (1,), generator=generator)
    p, a = logits.softmax(0), torch.tensor([advantage], dtype=torch.float64)
    direction = a * (torch.nn.functional.one_hot(sampled[0], size) - p)
    after, before = (collision_and_entropy(logits + sign * 1e-5 * direction)[1] for sign in (1, -1))
    dh = float(entropy_change(p[None], sampled, a))
    assert dh == pytest.approx(float(after - before) / 2e-5, abs=1e-7)
    moved = ((logits + 1e-5 * direction).softmax(0) - (logits - 1e-5 * direction).softmax(0)) / 2e-5
    assert torch.allclose(probability_change(p[None], sampled, a)[0], moved, atol=1e-7)
    collision, _ = collision_and_entropy(logits)
    if int(bin_index(p[sampled], collision, a)) % 2 == 1:
        assert dh * advantage >= -1e-12


def test_token_kinds_from_sums_over_the_vocabulary_equal_those_from_whole_distributions():
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(200, 7, generator=generator, dtype=torch.float64)
    sampled = torch.randint(7, (200,), generator=generator)
    advantage = torch.randn(200, generator=generator, dtype=torch.float64).round()  # some are 0
    log_p = logits.log_softmax(-1)
    p, logp = log_p.exp(), log_p.gather(-1, sampled[:, None])[:, 0]
    collision, entropy = collision_and_entropy(logits)
    metrics = token_kinds(advantage, logp, entropy, collision, (p.square() * log_p).sum(-1))
    kind, counted = bin_index(logp.exp(), collision, advantage), advantage != 0
    dp = probability_change(p, sampled, advantage).gather(-1, sampled[:, None])[:, 0]
    dh = entropy_change(p, sampled, advantage)
    for index, name in enumerate(BINS):
        chosen = counted & (kind == index)
        assert [float(x) for x in metrics[f"token_kind/{name}"]] == [float(chosen.sum()), float(counted.sum())]
        for what, change in (("probability", dp), ("entropy", dh)):
            total, count = metrics[f"token_kind/{name}_{what}_change"]
            assert float(total) == pytest.approx(float(change[chosen].sum()), abs=1e-12) and float(count) == float(chosen.sum()) > 0


# ---------------------------------------------------------------------- a few whole losses by hand


def test_loss_of_a_batch_whose_kept_responses_have_no_group_signal():
    loss, grad = gradient({"name": "dapo"}, batch_of([[1.0, 1.0], [0.0]]))
    assert loss == 0.0 and grad.tolist() == [0.0, 0.0, 0.0]


def test_truncated_responses_leave_the_loss_but_not_the_statistics():
    batch = batch_of([[1.0, 0.0, 0.0]])
    batch.truncated = torch.tensor([False, False, True])
    got = advantages({"name": "dr_grpo", "norm_length": 1, "overlong": "mask"}, batch)
    assert torch.allclose(got, torch.tensor([2 / 3, -1 / 3, 0.0], dtype=torch.float64))


def test_off_policy_statistics_are_reported():
    batch = random_batch(1)
    metrics = make_objective({"name": "grpo", "correction": {"kind": "token_mis", "low": 0.9, "high": 1.1}}).prepare(batch).metrics
    assert {"off_policy/ratio_mean", "off_policy/kl_k3", "off_policy/zero_share", "off_policy/effective_share"} <= metrics.keys()
    assert 0 < metrics["off_policy/zero_share"] < 1 and metrics["groups/equal_reward_share"] > 0


def test_shares_of_groups_do_not_weigh_groups_by_their_size():
    metrics = make_objective({"name": "dapo"}).prepare(batch_of([[1.0, 1.0, 1.0], [0.0, 1.0]])).metrics
    assert metrics["groups/equal_reward_share"] == metrics["groups/left_share"] == 0.5
