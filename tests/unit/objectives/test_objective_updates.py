"""Promise: an update's loss and gradient do not depend on how its tokens are split, skipped, moved or stored."""

import pickle
import random

import pytest
import torch
from objective_batches import VARIANTS, advantages, batch_of, gradient, random_batch, variant_id

from megarl.errors import InputError
from megarl.objectives import TokenBatch, make_objective


def batch_for(spec: dict, seed: int, **options) -> TokenBatch:
    return random_batch(seed, vector=spec["name"] == "vpo", **options)


def run(objective, update, batch, parts, *, shared_scalars: bool):
    """Sum of the parts' losses, their gradients [T] in logp, values and entropy, and summed metrics."""
    leaves = [tensor.clone().requires_grad_() for tensor in (batch.logp, batch.values, batch.entropy)]
    logp, values, entropy = leaves
    scalars = None
    if shared_scalars and objective.coupling != "token":
        sums = [objective.scalars(update, part, logp[part]) for part in parts]
        scalars = objective.finish_scalars(update, sum(sums[1:], sums[0]))
    total, value_total, metrics = 0.0, 0.0, {}
    for part in parts:
        out = objective.loss(update, part, logp[part], entropy=entropy[part], values=values[part], scalars=scalars)
        loss = out.loss if out.value_loss is None else out.loss + 0.7 * out.value_loss
        loss.backward()
        total += out.loss.item()
        value_total += 0.0 if out.value_loss is None else out.value_loss.item()
        for name, (part_sum, count) in out.metrics.items():
            old = metrics.get(name, (0.0, 0.0))
            metrics[name] = (old[0] + float(part_sum), old[1] + float(count))
    return total, value_total, [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves], metrics


def assert_same(first, second):
    assert first[0] == pytest.approx(second[0], abs=1e-12, rel=1e-9)
    assert first[1] == pytest.approx(second[1], abs=1e-12, rel=1e-9)
    for a, b in zip(first[2], second[2], strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert first[3].keys() == second[3].keys()
    for name in first[3]:
        assert first[3][name] == pytest.approx(second[3][name], abs=1e-9), name


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_any_split_of_the_tokens_gives_the_same_loss_and_gradient(spec, seed):
    """Within responses as context parallelism cuts, scalars summed; and by whole groups as micro-batches, each with its own scalars."""
    objective, batch = make_objective(spec), batch_for(spec, seed)
    prepared = objective.prepare(batch)
    update = objective.begin_update(prepared)
    tokens = torch.arange(batch.num_tokens)
    whole = run(objective, update, batch, [tokens], shared_scalars=True)
    rng = random.Random(seed)
    owner = torch.tensor([rng.randrange(4) for _ in tokens])
    assert_same(whole, run(objective, update, batch, [tokens[owner == rank] for rank in range(4)], shared_scalars=True))
    group = batch.group[batch.sequence]
    assert_same(whole, run(objective, update, batch, [tokens[group % 2 == half] for half in (0, 1)], shared_scalars=False))
    if objective.coupling != "group":
        parts = [tokens[batch.sequence % 3 == third] for third in range(3)]
        assert_same(whole, run(objective, update, batch, parts, shared_scalars=False))


@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_responses_that_are_not_active_may_be_skipped(spec):
    """Nothing but metrics changes; and someone is active, or the whole loss is 0."""
    for seed in range(3):
        objective, batch = make_objective(spec), batch_for(spec, seed)
        update = objective.begin_update(objective.prepare(batch))
        whole = run(objective, update, batch, [torch.arange(batch.num_tokens)], shared_scalars=True)
        active = update.token_index(update.responses[update.active])
        short = run(objective, update, batch, [active], shared_scalars=True)
        assert_same((*whole[:3], {}), (*short[:3], {}))


@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_minibatches_have_denominators_of_their_own(spec):
    """An update on some groups equals one on a batch of these groups only, where no statistic runs over the whole batch."""
    objective, batch = make_objective(spec), batch_for(spec, 5)
    if objective.couples_groups:
        pytest.skip("statistics over the batch")
    chosen = (batch.group % 2 == 0).nonzero().squeeze(1)
    update = objective.begin_update(objective.prepare(batch), chosen)
    index = update.token_index()
    got = run(objective, update, batch, [index], shared_scalars=True)
    alone = select_groups(batch, [g for g in range(batch.num_groups) if g % 2 == 0])
    other = objective.begin_update(objective.prepare(alone))
    want = run(objective, other, alone, [torch.arange(alone.num_tokens)], shared_scalars=True)
    assert_same((*got[:2], [g[index] for g in got[2]], got[3]), want)


def select_groups(batch: TokenBatch, groups: list[int]) -> TokenBatch:
    inside = torch.isin(batch.group, torch.tensor(groups))
    number = torch.full((batch.num_groups,), -1).scatter(0, torch.tensor(groups), torch.arange(len(groups)))
    tokens = inside[batch.sequence]
    rename = inside.long().cumsum(0) - 1
    changes = {}
    for name in ("mask", "logp", "old_logp", "rollout_logp", "ref_logp", "values", "old_values", "entropy"):
        changes[name] = getattr(batch, name)[tokens]
    for name in ("correct", "truncated", "bootstrap_value"):
        changes[name] = None if getattr(batch, name) is None else getattr(batch, name)[inside]
    if isinstance(batch.reward, list):
        reward = [rows for rows, keep in zip(batch.reward, inside.tolist(), strict=True) if keep]
    else:
        reward = batch.reward[inside]
    return TokenBatch(sequence=rename[batch.sequence[tokens]], group=number[batch.group[inside]], reward=reward,
                      group_ids=[batch.group_ids[g] for g in groups], step=batch.step, seed=batch.seed, **changes)  # fmt: skip


@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_gradient_is_the_derivative_of_the_loss(spec):
    """Finite differences of the loss with coefficients held fixed; cispo and the sequence ratio are no derivatives, by design."""
    objective, batch = make_objective(spec), batch_for(spec, 7)
    if spec["name"] == "cispo" or objective.parameters["ratio"] == "sequence":
        pytest.skip("the gradient is defined apart from the value")
    update, tokens = objective.begin_update(objective.prepare(batch)), torch.arange(batch.num_tokens)
    sums = objective.scalars(update, tokens, batch.logp)
    scalars = None if sums is None else objective.finish_scalars(update, sums)
    logp = batch.logp.clone().requires_grad_()
    objective.loss(update, tokens, logp, entropy=batch.entropy, scalars=scalars).loss.backward()
    tpo = spec["name"] == "tpo"  # its value is that of the whole group: ln Z moves with the log-probs
    for token in range(batch.num_tokens):
        ends = []
        for step in (1e-6, -1e-6):
            moved = batch.logp.clone()
            moved[token] += step
            own = None if tpo else scalars
            ends.append(objective.loss(update, tokens, moved, entropy=batch.entropy, scalars=own).loss.item())
        if tpo and not bool(objective.prepare(batch).kept[batch.sequence[token]]):
            continue
        assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(float(logp.grad[token]), abs=1e-7)


@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_what_travels_between_processes_survives(spec):
    objective, batch = make_objective(spec), batch_for(spec, 1)
    update = objective.begin_update(objective.prepare(batch))
    tokens = [torch.arange(batch.num_tokens)]
    there = pickle.loads(pickle.dumps((objective, update))), update.to("cpu")
    whole = run(objective, update, batch, tokens, shared_scalars=True)
    assert_same(whole, run(*there[0], batch, tokens, shared_scalars=True))
    assert_same(whole, run(objective, there[1], batch, tokens, shared_scalars=True))


@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_single_precision_agrees_with_double(spec):
    """Float32 batches are computed in float32, bfloat16 log-probs in float32; both stay near the float64 result."""
    double, single = batch_for(spec, 2), batch_for(spec, 2, dtype=torch.float32)
    loss, grad = gradient(spec, double)
    loss32, grad32 = gradient(spec, single)
    assert loss32 == pytest.approx(loss, rel=1e-4, abs=1e-4)
    assert torch.allclose(grad32.double(), grad, rtol=1e-3, atol=1e-4)
    narrow = single.logp.bfloat16()
    _, grad16 = gradient(spec, single, narrow)
    assert grad16.dtype == torch.bfloat16 and bool(grad16.isfinite().all())


@pytest.mark.parametrize("spec", VARIANTS, ids=variant_id)
def test_ranks_may_hold_their_own_responses_only(spec):
    """Data-parallel ranks with the tokens of their groups: the sum of their losses and gradients is that of the whole update."""
    objective, batch = make_objective(spec), batch_for(spec, 9)
    update = objective.begin_update(objective.prepare(batch))
    whole = run(objective, update, batch, [torch.arange(batch.num_tokens)], shared_scalars=True)
    loss, grad = 0.0, torch.zeros_like(batch.logp)
    for rank in range(2):
        mine = (batch.group % 2 == rank).nonzero().squeeze(1)
        part, index = update.select(mine), update.token_index(mine)
        tokens = part.token_index()
        assert len(tokens) == len(part.prepared.sequence) == len(index)
        logp = batch.logp[index].clone().requires_grad_()
        out = objective.loss(part, tokens, logp, entropy=batch.entropy[index])
        out.loss.backward()
        loss, grad[index] = loss + out.loss.item(), logp.grad
    assert loss == pytest.approx(whole[0], abs=1e-12) and torch.allclose(grad, whole[2][0], atol=1e-12)


def test_without_old_log_probs_the_update_is_on_policy():
    """The first update of a batch needs no forward pass of its own: the log-probs given are the old ones, and the ratio is exactly 1."""
    for spec in VARIANTS:
        objective = make_objective(spec)
        if "old_logp" in objective.needs:
            continue
        batch = batch_for(spec, 4)
        given = TokenBatch(**{**vars(batch), "old_logp": batch.logp})
        absent = TokenBatch(**{**vars(batch), "old_logp": None, "logp": None})
        results = []
        for version in (given, absent):
            update, logp = objective.begin_update(objective.prepare(version)), batch.logp.clone().requires_grad_()
            out = objective.loss(update, torch.arange(batch.num_tokens), logp, entropy=batch.entropy)
            out.loss.backward()
            results.append((out.loss.item(), logp.grad))
        assert results[0][0] == pytest.approx(results[1][0], abs=1e-12)
        assert torch.allclose(results[0][1], results[1][1], atol=1e-12)


def test_incomplete_scalars_are_refused():
    """A loss from half a response's, or half a group's, log-probs would be silently wrong."""
    for spec in ({"name": "gspo"}, {"name": "lpo"}, {"name": "tpo"}):
        objective, batch = make_objective(spec), batch_for(spec, 3)
        update = objective.begin_update(objective.prepare(batch))
        part = torch.arange(batch.num_tokens // 2 + 1)
        with pytest.raises(ValueError, match="of its"):
            objective.loss(update, part, batch.logp[part])
    whole_response = update.token_index((batch.group == 1).nonzero()[0])
    with pytest.raises(ValueError, match="of its"):
        objective.loss(update, whole_response, batch.logp[whole_response])


def test_split_groups_are_refused_where_groups_matter():
    batch = batch_for({"name": "lpo"}, 3)
    objective = make_objective({"name": "lpo"})
    with pytest.raises(ValueError, match="whole groups"):
        objective.begin_update(objective.prepare(batch), torch.tensor([0, 1]))
    grpo = make_objective({"name": "grpo"})
    grpo.begin_update(grpo.prepare(batch), torch.tensor([0, 1]))


def test_metrics_count_what_they_average():
    batch = batch_of([[1.0, 0.0]], old_logp=[[-1.5], [-1.0]])
    objective = make_objective({"name": "grpo", "kl": {"coef": 0.1}})
    batch.ref_logp = batch.logp - 0.5
    out = objective.loss(objective.begin_update(objective.prepare(batch)), torch.arange(2), batch.logp, entropy=torch.ones(2))
    assert [float(x) for x in out.metrics["clip_fraction"]] == [1.0, 2.0]
    assert out.metrics["ratio"][0] == pytest.approx(torch.tensor(0.5).exp() + 1)
    assert out.metrics["entropy"][0] == 2 and out.metrics["kl_reference"][1] == 2


def test_entropy_bonus_lowers_the_loss_by_its_mean():
    batch = random_batch(3)
    spec = {"name": "grpo", "entropy_coef": 0.3}
    with_bonus, without = gradient(spec, batch)[0], gradient({"name": "grpo"}, batch)[0]
    length = torch.zeros(batch.num_responses, dtype=torch.float64).index_add_(0, batch.sequence, batch.mask.double())
    mean = torch.zeros_like(length).index_add_(0, batch.sequence, batch.entropy * batch.mask) / length.clamp(min=1)
    assert without - with_bonus == pytest.approx(0.3 * float(mean.sum() / (length > 0).sum()))
    objective = make_objective(spec)
    with pytest.raises(ValueError, match="entropy"):
        objective.loss(objective.begin_update(objective.prepare(batch)), torch.arange(batch.num_tokens), batch.logp)


def test_garbage_outside_the_mask_reaches_nothing():
    """Log-probs of tool tokens or padding may be anything, NaN included."""
    for spec in VARIANTS:
        batch = batch_for(spec, 6)
        dirty = {name: torch.where(batch.mask, getattr(batch, name), torch.nan)
                 for name in ("logp", "old_logp", "rollout_logp", "ref_logp", "values", "old_values", "entropy")}  # fmt: skip
        loss, grad = gradient(spec, batch)
        got, got_grad = gradient(spec, TokenBatch(**{**vars(batch), **dirty}))
        assert got == pytest.approx(loss, abs=1e-12) and torch.allclose(grad, got_grad), spec


@pytest.mark.parametrize(("field", "value"), [("old_logp", torch.nan), ("rollout_logp", -torch.inf), ("reward", torch.nan)])
def test_numbers_that_are_not_finite_are_refused(field, value):
    """-inf or NaN from the engine is a fault to raise, not to mask."""
    batch = random_batch(0)
    broken = getattr(batch, field).clone()
    broken[int(batch.mask.nonzero()[2]) if len(broken) == batch.num_tokens else 2] = value
    with pytest.raises(InputError, match=rf"`{field}` of group 'prompt-0'"):
        make_objective({"name": "grpo"}).prepare(TokenBatch(**{**vars(batch), field: broken}))


def test_shapes_and_order_are_checked():
    batch = random_batch(0)
    for field in ("mask", "old_logp", "truncated", "reward"):
        with pytest.raises(InputError, match=field):
            make_objective({"name": "grpo"}).prepare(TokenBatch(**{**vars(batch), field: getattr(batch, field)[:-1]}))
    with pytest.raises(InputError, match="order"):
        make_objective({"name": "grpo"}).prepare(TokenBatch(**{**vars(batch), "sequence": batch.sequence.flip(0)}))


def test_batches_without_a_usable_token_give_zero():
    empty = TokenBatch.from_lists([{"responses": [{"reward": 1.0, "logp": []}, {"reward": 0.0, "logp": []}]}], dtype=torch.float64)
    for spec in VARIANTS:
        if spec["name"] != "vpo":
            objective = make_objective(spec)
            update = objective.begin_update(objective.prepare(TokenBatch(**{**vars(empty), "values": empty.logp, "entropy": empty.logp})))
            logp = empty.logp.clone().requires_grad_()
            out = objective.loss(update, torch.arange(0), logp, entropy=empty.logp)
            out.loss.backward()
            assert out.loss.item() == 0.0 and logp.grad.shape == (0,)


def test_couples_groups_tells_what_needs_the_whole_batch():
    """Where it is False the advantages of a group are the same whether or not the other groups are there."""
    for spec in VARIANTS:
        objective, batch = make_objective(spec), batch_for(spec, 8)
        part = select_groups(batch, [0])
        inside = batch.group[batch.sequence] == 0
        try:
            same = torch.allclose(advantages(spec, batch)[inside], advantages(spec, part), atol=1e-9)
        except InputError:
            continue
        assert same or objective.couples_groups, spec
    coupled = {variant_id(spec) for spec in VARIANTS if make_objective(spec).couples_groups}
    assert {"reinforce_pp", "reinforce_pp_baseline"} <= coupled
    assert not coupled & {"grpo", "dapo", "lpo", "ppo", "wapo", "gspo"}
