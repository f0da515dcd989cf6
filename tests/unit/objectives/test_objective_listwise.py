"""Promise: LPO's coefficients have the properties that the method rests on (2605.06139), whatever the list."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_batches import advantages, from_scores

from megarl.objectives import make_objective
from megarl.objectives.batch import segment_log_softmax
from megarl.objectives.listwise import lpo_coefficients
from megarl.objectives.parameters import DIVERGENCES

BOUNDED = settings(max_examples=40, deadline=None)
scores = st.floats(-3, 3).map(lambda x: round(x, 6))
rewards = st.sampled_from([0.0, 0.1, 0.5, 1.0, -1.0])


@st.composite
def lists(draw):
    """Rewards (not all equal), scores s and starting scores s_t of one group."""
    size = draw(st.integers(2, 8))
    r = draw(st.lists(rewards, min_size=size, max_size=size).filter(lambda r: max(r) > min(r)))
    return r, *(draw(st.lists(scores, min_size=size, max_size=size)) for _ in range(2))


def coefficients(r, s, start, **spec) -> torch.Tensor:
    return -advantages({"name": "lpo", **spec}, from_scores(r, s, start))


def policy_and_target(r, s, start, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """ln P and ln w [K] of the list, w as the code under test fixes it for the step."""
    targets = make_objective({"name": "lpo", "tau": tau}).prepare(from_scores(r, s, start)).per_response
    log_target = segment_log_softmax(targets["logit"] + targets["start"], torch.zeros(len(s), dtype=torch.long), 1)
    return torch.tensor(s, dtype=torch.float64).log_softmax(0), log_target


def kl(log_p: torch.Tensor, log_q: torch.Tensor) -> float:
    return float((log_p.exp() * (log_p - log_q)).sum())


@pytest.mark.parametrize("divergence", DIVERGENCES)
@BOUNDED
@given(lists())
def test_coefficients_sum_to_zero(divergence, sample):
    """A listwise update moves probability between the responses; it does not push all of them up or down."""
    c = coefficients(*sample, divergence=divergence)
    assert float(c.sum().abs()) <= 1e-9 * float(1 + c.abs().sum())


@BOUNDED
@given(lists(), st.floats(1e-6, 10))
def test_forward_kl_coefficients_are_bounded_by_one(sample, tau):
    assert float(coefficients(*sample, tau=tau).abs().max()) <= 1


@pytest.mark.parametrize("divergence", [d for d in DIVERGENCES if d != "tv"])
@BOUNDED
@given(st.lists(scores, min_size=2, max_size=8), st.integers(0, 2**20))
def test_coefficients_vanish_at_the_target(divergence, s, seed):
    """c -> 0 in proportion to the distance as P -> w (tv: a subgradient of constant size, exempt)."""
    log_w = torch.tensor(s, dtype=torch.float64).log_softmax(0)
    direction = torch.randn(len(s), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    group = torch.zeros(len(s), dtype=torch.long)
    sizes = []
    for distance in (1e-2, 1e-4, 1e-6):
        log_p = segment_log_softmax(log_w + distance * direction, group, 1)
        sizes.append(float(lpo_coefficients(log_p, log_w, group, 1, divergence, 0.5).abs().max()))
    assert sizes[1] <= 0.02 * sizes[0] + 1e-12 and sizes[2] <= 0.02 * sizes[1] + 1e-12


HOSTS = [("grpo", "group_std"), ("dr_grpo", "one"), ("rloo", "rloo"), ("maxrl", "group_mean"), ("reinforce_pp_baseline", "batch_std")]


@pytest.mark.parametrize(("host", "tau"), HOSTS)
@BOUNDED
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=2, max_size=8).filter(lambda r: max(r) > min(r)))
def test_on_policy_reverse_kl_is_the_hosts_policy_gradient(host, tau, r):
    """Proposition 1: c_k = -A_k / K with the host's advantage, its temperature inherited."""
    zeros = [0.0] * len(r)
    c = coefficients(r, zeros, zeros, divergence="reverse_kl", tau=tau)
    spec = {
        "name": host,
        **({"norm_length": 1} if host == "dr_grpo" else {}),
        **({"std_eps": 0} if host.startswith(("grpo", "reinf")) else {}),
    }
    assert torch.allclose(c, -advantages(spec, from_scores(r, zeros, zeros)) / len(r), atol=1e-9)


@pytest.mark.parametrize("r", [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.1, 1.0, 0.5, 0.5]])
def test_the_gap_to_the_policy_gradient_grows_with_drift(r):
    """Off-policy the reverse-KL coefficient holds the pull back to s_t: the further s has moved, the less it is -A/K."""
    zeros = [0.0] * len(r)
    host = advantages({"name": "grpo", "std_eps": 0}, from_scores(r, zeros, zeros)) / len(r)
    direction = torch.randn(len(r), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    gaps = []
    for drift in (0.0, 0.05, 0.1, 0.2, 0.4, 0.8):
        c = coefficients(r, (drift * direction).tolist(), zeros, divergence="reverse_kl")
        gaps.append(float((c + host).abs().max()))
    assert gaps[0] < 1e-9 and all(a < b for a, b in pairwise(gaps))


@BOUNDED
@given(lists(), st.floats(-5, 5))
def test_a_shift_of_all_rewards_changes_nothing(sample, shift):
    """The softmax and the group mean cancel it: not for maxrl and tau: group_mean, which divide by the mean."""
    r, s, start = sample
    for spec in (
        {"name": "lpo"}, {"name": "lpo", "tau": "one", "divergence": "js"}, {"name": "tpo"}, {"name": "grpo"}, {"name": "rloo"},
        {"name": "dr_grpo", "norm_length": 4}, {"name": "gspo"}, {"name": "wapo", "norm_length": 4}, {"name": "reinforce_pp"},
    ):  # fmt: skip
        moved = advantages(spec, from_scores([x + shift for x in r], s, start))
        assert torch.allclose(advantages(spec, from_scores(r, s, start)), moved, atol=1e-6), spec


@BOUNDED
@given(lists(), st.floats(0.05, 5))
def test_monotone_improvement_bound(sample, tau):
    """A policy near the target earns more than the one it started from, by a bound that can be computed.

    With J(P) = <P, R> and P_t = softmax(s_t), the target w = softmax(R/tau + s_t) maximises J(w) - tau KL(w || P_t), and
    ln w - ln P_t = R/tau - const gives J(w) - J(P_t) = tau (KL(w || P_t) + KL(P_t || w)) exactly. By Pinsker,
    |J(P) - J(w)| <= (max R - min R) TV(P, w) <= (max R - min R) sqrt(KL(w || P) / 2). Hence, for every P,

        J(P) >= J(P_t) + tau (KL(w || P_t) + KL(P_t || w)) - (max R - min R) sqrt(KL(w || P) / 2).
    """
    r, s, start = sample
    log_p, log_w = policy_and_target(r, s, start, tau)
    reward, log_before = torch.tensor(r, dtype=torch.float64), torch.tensor(start, dtype=torch.float64).log_softmax(0)
    gain = tau * (kl(log_w, log_before) + kl(log_before, log_w))
    assert float((log_w.exp() - log_before.exp()) @ reward) == pytest.approx(gain, abs=1e-9)
    slack = (max(r) - min(r)) * math.sqrt(max(kl(log_w, log_p), 0.0) / 2)
    assert float(log_p.exp() @ reward) >= float(log_before.exp() @ reward) + gain - slack - 1e-9


@BOUNDED
@given(lists(), st.floats(0.05, 5), st.floats(0.01, 1))
def test_a_step_descends(sample, tau, rate):
    """A gradient step on the scores lowers the forward KL.

    D(s) = KL(w || softmax(s)) has the gradient c = P - w and the Hessian diag(P) - P P', whose largest eigenvalue is at most 1/2. So
    D(s - rate c) <= D(s) - rate (1 - rate/4) |c|^2.
    """
    r, s, start = sample
    log_p, log_w = policy_and_target(r, s, start, tau)
    c = coefficients(r, s, start, tau=tau)
    after = (torch.tensor(s, dtype=torch.float64) - rate * c).log_softmax(0)
    assert kl(log_w, after) <= kl(log_w, log_p) - rate * (1 - rate / 4) * float(c @ c) + 1e-9


@BOUNDED
@given(lists(), st.floats(0.05, 5))
def test_mode_coverage_bound(sample, tau):
    """A small forward KL leaves no response of the target without probability.

    Coarsen to the event {k} (data processing): w ln(w/P) + (1-w) ln((1-w)/(1-P)) <= D with w = w_k, P = P_k, D = KL(w || P). The second
    term is at least (1-w) ln(1-w) >= -w. So w ln(w/P) <= D + w, that is P_k >= w_k exp(-(1 + D / w_k)).
    """
    log_p, log_w = policy_and_target(*sample, tau)
    distance = max(kl(log_w, log_p), 0.0)
    assert bool((log_p >= log_w - 1 - distance / log_w.exp() - 1e-9).all())


def test_reverse_kl_has_no_such_bound():
    """Dropping a mode costs the reverse KL less than -ln(1 - w): the coefficient that would bring it back fades with P_k."""
    w = torch.tensor([0.5, 0.5], dtype=torch.float64)
    group = torch.zeros(2, dtype=torch.long)
    pulls = {}
    for divergence in ("forward_kl", "reverse_kl"):
        log_p = torch.tensor([0.0, -12.0], dtype=torch.float64).log_softmax(0)
        pulls[divergence] = -float(lpo_coefficients(log_p, w.log(), group, 1, divergence)[1])
        reverse = kl(log_p, w.log())
    assert reverse < math.log(2) and pulls["forward_kl"] > 0.49 and 0 < pulls["reverse_kl"] < 1e-3


def test_the_first_coefficient_falls_as_its_reward_rises():
    """Monotone in the reward: raising R_1 alone moves c_1 down (more push towards it)."""
    c = [float(coefficients([x, 0.5, 0.0], [0.1, 0.0, -0.2], [0.0] * 3, tau=0.5)[0]) for x in (0.0, 0.25, 0.5, 1.0, 2.0)]
    assert all(a > b for a, b in pairwise(c))


def test_pull_of_a_replayed_list_raises_its_temperature():
    batch = from_scores([1.0, 0.0, 0.0], [0.1, 0.0, -0.1], [0.05, 0.0, 0.0])
    batch.pull = torch.tensor([0.5, 0.5, 0.5])
    want = advantages({"name": "lpo", "tau": 0.75}, from_scores([1.0, 0.0, 0.0], [0.1, 0.0, -0.1], [0.05, 0.0, 0.0]))
    assert torch.allclose(advantages({"name": "lpo", "tau": 0.5}, batch), want)
