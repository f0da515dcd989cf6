"""Promise: no input that passes the checks makes a loss or a gradient that is not finite, and float noise is no signal."""

import pytest
import torch
from objective_batches import VARIANTS, advantages, batch_of, gradient, random_batch, variant_id

from megarl.objectives import TokenBatch, make_objective
from megarl.objectives.parameters import DIVERGENCES


def finite(spec: dict, batch: TokenBatch) -> None:
    loss, grad = gradient(spec, batch)
    assert torch.isfinite(torch.tensor(loss)) and bool(grad.isfinite().all()), spec


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_ratios_of_fifty_nats(spec, dtype):
    batch = random_batch(1, vector=spec["name"] == "vpo", dtype=dtype)
    for shift in (50.0, -50.0, 800.0):
        for field in ("old_logp", "rollout_logp", "ref_logp"):
            finite(spec, TokenBatch(**{**vars(batch), field: batch.logp + shift}))


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tiny_temperatures(divergence, dtype):
    for tau in (1e-6, 1e-12, "group_std"):
        finite({"name": "lpo", "divergence": divergence, "tau": tau}, random_batch(2, dtype=dtype))
    finite({"name": "tpo", "eta": 1e-9}, random_batch(2, dtype=dtype))


@pytest.mark.parametrize("spec", [s for s in VARIANTS if s["name"] != "vpo"], ids=variant_id)
def test_huge_rewards(spec):
    batch = random_batch(3)
    for scale in (1e6, -1e6, 1e12):
        finite(spec, TokenBatch(**{**vars(batch), "reward": batch.reward * scale}))


GROUPED = ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp_baseline", "maxrl", "gspo", "cispo", "wapo", "lpo"]


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize("value", [0.1, 0.7, 1e6 / 3])
def test_equal_rewards_give_exactly_zero(name, value):
    """Sums of equal floats differ in the last digits; over a std of 1e-17 such noise would be a full step."""
    spec = {"name": name, **({"norm_length": 8} if name in ("dr_grpo", "wapo") else {})}
    noisy = [value + 1e-12 * k for k in range(16)] if value < 1 else [value] * 16
    for rewards in ([value] * 16, noisy, [value]):
        got = advantages({**spec, "std_eps": 0} if name in ("grpo", "gspo", "wapo") else spec, batch_of([rewards, [1.0, 0.0]]))
        assert got[: len(rewards)].tolist() == [0.0] * len(rewards)


def test_equal_rewards_with_a_tolerance_of_zero():
    for name in ("grpo", "rloo", "lpo", "tpo", "maxrl", "reinforce_pp", "reinforce_pp_baseline"):
        spec = {"name": name, "equal_tol": 0.0, **({"std_eps": 0} if name in ("grpo", "reinforce_pp_baseline") else {})}
        for rewards in ([[0.7] * 3], [[0.7]], [[0.0] * 4]):
            finite(spec, batch_of(rewards))


def test_a_single_response_has_no_group_signal_whatever_the_tolerance():
    got = advantages({"name": "lpo", "pointwise": True, "equal_tol": 0.0, "tau": "one"}, batch_of([[0.7], [1.0, 0.0]]))
    assert got[0] == 0 and bool((got[1:] > 0).all())


def test_a_small_difference_on_a_large_offset_is_a_signal():
    """Two-pass variance: rewards of 1e6 and 1e6 + 1 are as far apart as 0 and 1."""
    offset = advantages({"name": "grpo"}, batch_of([[1e6, 1e6 + 1, 1e6]]))
    assert torch.allclose(offset, advantages({"name": "grpo"}, batch_of([[0.0, 1.0, 0.0]])), atol=1e-6)
    lpo = advantages({"name": "lpo"}, batch_of([[1e6, 1e6 + 1, 1e6]]))
    assert torch.allclose(lpo, advantages({"name": "lpo"}, batch_of([[0.0, 1.0, 0.0]])), atol=1e-6)


def test_a_long_batch_in_single_precision():
    """64 responses of 1,000 tokens: sums and denominators keep their digits in float32."""
    generator = torch.Generator().manual_seed(0)
    tokens, responses = 64_000, 64
    sequence = torch.arange(responses).repeat_interleave(1000)
    logp = -torch.rand(tokens, generator=generator, dtype=torch.float64)
    old = logp + 0.1 * torch.randn(tokens, generator=generator, dtype=torch.float64)
    reward = (torch.rand(responses, generator=generator) < 0.4).double()
    for name in ("grpo", "dapo", "gspo", "lpo", "reinforce_pp"):
        results = []
        for dtype in (torch.float64, torch.float32):
            batch = TokenBatch(sequence, torch.ones(tokens, dtype=torch.bool), torch.arange(8).repeat_interleave(8), reward,
                               logp=logp.to(dtype), old_logp=old.to(dtype))  # fmt: skip
            results.append(gradient({"name": name, **({"clip_low": 0.2, "clip_high": 0.2} if name == "gspo" else {})}, batch))
        assert results[1][0] == pytest.approx(results[0][0], abs=2e-6), name
        assert torch.allclose(results[1][1].double(), results[0][1], rtol=2e-3, atol=1e-9), name


def test_prepare_of_a_batch_without_responses_is_refused_by_nothing_and_gives_nothing():
    empty = torch.zeros(0, dtype=torch.long)
    batch = TokenBatch(empty, empty.bool(), empty, empty.float(), old_logp=empty.float(), group_ids=[])
    objective = make_objective({"name": "grpo"})
    update = objective.begin_update(objective.prepare(batch))
    assert objective.loss(update, empty, empty.float().requires_grad_()).loss.item() == 0.0
