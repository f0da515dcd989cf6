"""Promise: LPO's schedules, replay and step-level lists are functions of what is stored, so that a resumed run repeats them."""

import pickle

import pytest
import torch
from objective_batches import advantages, gradient

from megarl.errors import InputError
from megarl.objectives import TokenBatch, make_objective
from megarl.objectives.replay import ReplayBuffer, fresh_groups, group_drift, kl_pull
from megarl.objectives.segments import step_lists

# ---------------------------------------------------------------------- schedule


def scheduled(**schedule):
    return make_objective({"name": "lpo", "schedule": schedule})


def test_the_divergence_switches_after_a_step():
    objective = scheduled(divergence={"to": "reverse_kl", "after_step": 50})
    assert [objective.at(step).parameters["divergence"] for step in (1, 50, 51, 52)] == ["forward_kl"] * 2 + ["reverse_kl"] * 2


def test_the_divergence_switches_below_an_entropy_and_back():
    objective = scheduled(divergence={"to": "hellinger", "below_entropy": 0.3})
    assert [objective.at(5, entropy).parameters["divergence"] for entropy in (None, 0.31, 0.29, 0.4)] == [
        "forward_kl", "forward_kl", "hellinger", "forward_kl",
    ]  # fmt: skip


def test_the_temperature_falls_geometrically():
    objective = scheduled(tau={"from": 1.0, "to": 0.25, "steps": 2})
    assert [objective.at(step).parameters["tau"] for step in (1, 2, 3, 9)] == pytest.approx([1.0, 0.5, 0.25, 0.25])


def test_the_scheduled_objective_is_the_plain_one_with_these_parameters():
    responses = [{"reward": r, "logp": [-1.0, -0.4], "old_logp": [-0.9, -0.5]} for r in (1.0, 0.0, 0.5)]
    batch = TokenBatch.from_lists([{"responses": responses}])
    objective = make_objective({"name": "lpo", "clip_mode": "none", "schedule": {"divergence": {"to": "js", "after_step": 3}}}).at(4)
    logp = batch.logp.clone().requires_grad_()
    objective.loss(objective.begin_update(objective.prepare(batch)), torch.arange(6), logp).loss.backward()
    assert torch.equal(logp.grad, gradient({"name": "lpo", "clip_mode": "none", "divergence": "js"}, batch)[1])
    assert make_objective({"name": "grpo"}).at(7).name == "grpo"
    again = pickle.loads(pickle.dumps(scheduled(divergence={"to": "js", "after_step": 1})))
    assert again.at(2).parameters["divergence"] == "js"


BAD = [
    ({"divergence": {"to": "js"}}, "after_step"), ({"divergence": {"after_step": 3}}, "to"),
    ({"divergence": {"to": "kl", "after_step": 3}}, "to"),
    ({"divergence": {"to": "js", "after_step": -1}}, "after_step"), ({"tau": {"from": 1.0, "to": 0.0, "steps": 5}}, "to"),
    ({"tau": {"from": 1.0, "to": 0.5, "steps": 0}}, "steps"), ({"taus": {}}, "taus"), ("js", "schedule"),
]  # fmt: skip


@pytest.mark.parametrize(("schedule", "text"), BAD)
def test_wrong_schedules_are_refused(schedule, text):
    with pytest.raises(InputError, match=text):
        make_objective({"name": "lpo", "schedule": schedule})


def test_only_lpo_takes_a_schedule():
    with pytest.raises(InputError, match=r"grpo.*schedule"):
        make_objective({"name": "grpo", "schedule": {"tau": {"from": 1.0, "to": 0.5, "steps": 5}}})


# ---------------------------------------------------------------------- replay


def filled(**options) -> ReplayBuffer:
    buffer = ReplayBuffer(**{"capacity": 8, "max_age": 3, **options})
    for version in range(5):
        for number, reward in enumerate((1.0, 0.2)):
            buffer.add(f"{version}.{number}", version, [reward, 0.0, 0.0], payload=version)
    return buffer


def test_old_groups_are_forgotten_and_the_newest_are_not_their_own_replay():
    drawn = filled(capacity=20).draw(100, version=4, seed=0)
    assert {group.version for group in drawn} == {1, 2, 3}
    assert filled(capacity=2).draw(100, version=5, seed=0)[0].version == 4
    assert filled().draw(100, version=20, seed=0) == [] and ReplayBuffer(4, 1).draw(2, 1, 0) == []


def test_groups_without_a_signal_are_not_stored():
    buffer = ReplayBuffer(4, 4)
    assert not buffer.add("a", 0, [0.7, 0.7 + 1e-12], None) and not buffer.add("b", 0, [1.0], None)
    assert buffer.add("c", 0, [1.0, 0.0], None) and len(buffer.groups) == 1


def test_draws_are_repeatable_and_survive_a_checkpoint():
    buffer, other = filled(), ReplayBuffer(8, 3)
    other.restore(pickle.loads(pickle.dumps(buffer.state())))
    first = [g.group_id for g in buffer.draw(3, 4, seed=1)]
    assert first == [g.group_id for g in other.draw(3, 4, seed=1)] and len(set(first)) == 3
    draws = {tuple(g.group_id for g in filled().draw(2, 4, seed=seed)) for seed in range(20)}
    assert len(draws) > 3


def test_priority_and_age_decide_how_often():
    def share(predicate, **options):
        return sum(predicate(filled(**options).draw(1, 4, seed=seed)[0]) for seed in range(200)) / 200

    assert share(lambda g: g.group_id.endswith(".0"), priority=2.0) > 0.9 > 0.6 > share(lambda g: g.group_id.endswith(".0"), priority=0.0)
    assert share(lambda g: g.version == 3, age_discount=0.2) > 0.7 > share(lambda g: g.version == 3)


def test_weights_that_underflow_can_still_be_drawn_from():
    buffer = ReplayBuffer(capacity=10, max_age=5, priority=5000.0)
    for i in range(4):
        buffer.add(str(i), 0, [0.0, 0.1 * (i + 1)], None)
    assert len(buffer.draw(4, version=1, seed=0)) == 4
    assert [group.group_id for group in buffer.draw(1, version=1, seed=0)] == ["3"]


@pytest.mark.parametrize("bad", [{"capacity": 0}, {"max_age": 0}, {"priority": -1}, {"age_discount": 0}])
def test_wrong_buffers_are_refused(bad):
    with pytest.raises(ValueError, match="replay needs"):
        ReplayBuffer(**{"capacity": 1, "max_age": 1, **bad})


def test_drift_filters_whole_groups():
    def response(drift):
        return {"reward": 1.0, "logp": [-1.0, -1.0], "old_logp": [-1.0 + drift, -1.0 + drift], "rollout_logp": [-1.0, -1.0]}

    batch = TokenBatch.from_lists(
        [{"responses": [response(0.01), response(-0.3)]}, {"responses": [response(0.05), {"reward": 0.0, "logp": []}]}], dtype=torch.float64
    )
    assert group_drift(batch).tolist() == pytest.approx([0.3, 0.05])
    assert fresh_groups(batch, 0.1).tolist() == [False, True]


def test_older_lists_are_pulled_more():
    assert kl_pull(torch.tensor([0, 2, -1]), 0.25).tolist() == [0.0, 0.5, 0.0]
    sizes = []
    for age in (0, 1, 4):
        batch = TokenBatch.from_lists([{"responses": [{"reward": r, "logp": [-1.0]} for r in (1.0, 0.0)]}], dtype=torch.float64)
        batch.pull = kl_pull(torch.full((2,), age), 0.5)
        sizes.append(float(advantages({"name": "lpo"}, batch).abs().max()))
    assert sizes[0] > sizes[1] > sizes[2] > 0


# ---------------------------------------------------------------------- step-level lists


def tree() -> tuple[TokenBatch, torch.Tensor, torch.Tensor]:
    """Three responses: two share the first segment (tokens 1 2) and part at the second, the third differs at once."""
    texts = [([1, 2], [3]), ([1, 2], [4, 5]), ([6], [7])]
    groups = [{"id": "p", "responses": [
        {"reward": r, "logp": [-0.1 * t for s in segments for t in s]} for r, segments in zip((1.0, 0.0, 0.2), texts, strict=True)
    ]}]  # fmt: skip
    ids = torch.tensor([t for segments in texts for s in segments for t in s])
    segment = torch.tensor([n for segments in texts for n, s in enumerate(segments) for _ in s])
    return TokenBatch.from_lists(groups, dtype=torch.float64), ids, segment


def test_segments_that_share_a_prefix_form_a_list():
    lists = step_lists(*tree())
    assert lists.batch.group_ids == ["p/0.0", "p/1.1"]
    assert lists.batch.group.tolist() == [0, 0, 1, 1]
    assert lists.batch.reward.tolist() == [0.5, 0.2, 1.0, 0.0]
    assert lists.batch.sequence.tolist() == [0, 0, 1, 2, 3, 3]
    assert lists.token_index.tolist() == [0, 1, 7, 2, 5, 6]
    assert torch.equal(lists.batch.logp, tree()[0].logp[lists.token_index])


def test_step_rewards_and_single_lists():
    batch, ids, segment = tree()
    rewards = torch.arange(len(ids), dtype=torch.float64)
    lists = step_lists(batch, ids, segment, rewards)
    assert lists.batch.reward.tolist() == [(1 + 4) / 2, 7.0, 2.0, 6.0]
    assert step_lists(batch, ids, segment, least=1).batch.num_groups == 3
    alone = TokenBatch.from_lists([{"responses": [{"reward": 1.0, "logp": [-1.0]}]}])
    assert step_lists(alone, torch.tensor([1]), torch.tensor([0])).batch.num_responses == 0
    with pytest.raises(ValueError, match="decreases"):
        step_lists(batch, ids, segment.flip(0))


def test_lpo_runs_on_step_lists():
    """Between siblings the better continuation is pushed up, whatever its whole response earned relative to others."""
    lists = step_lists(*tree())
    got = advantages({"name": "lpo", "tau": 0.5}, lists.batch)
    assert got[0] > 0 > got[2] and got[3] > 0 > got[4] and got[0] == got[1]
    batch = lists.batch
    objective = make_objective({"name": "lpo", "tau": 0.5})
    logp = tree()[0].logp.clone().requires_grad_()
    objective.loss(
        objective.begin_update(objective.prepare(batch)), torch.arange(batch.num_tokens), logp[lists.token_index]
    ).loss.backward()
    assert logp.grad[[3, 4]].tolist() == [0.0, 0.0] and bool((logp.grad[lists.token_index] != 0).all())
