"""Promise: a response about which nothing is known changes neither the loss nor what the others learn."""

import pytest
import torch

from megarl.loop.rollouts import JudgedRollouts, leave_out
from megarl.objectives import make_objective
from megarl.rollout.response import Response
from megarl.tasks.dataset import Example
from megarl.tasks.prompts import Prompt
from megarl.tasks.verdict import Verdict


def rollouts(rewards, left_out=()):
    """One group per row; `left_out`: (group, response) pairs."""
    prompts = [Prompt(f"p{g}", (1,), "p", Example(f"p{g}", "p", 0)) for g in range(len(rewards))]
    responses, verdicts = [], []
    for g, row in enumerate(rewards):
        for i, reward in enumerate(row):
            tokens = list(range(2, 4 + i))
            responses.append(Response(g, i, tokens, [-0.5 - 0.1 * i] * len(tokens), "stop", []))
            verdicts.append(Verdict("ok" if reward >= 1 else "wrong", reward, in_loss=(g, i) not in left_out))
    return JudgedRollouts(prompts, responses, [""] * len(responses), verdicts)


def prepare(name, judged):
    batch = leave_out(judged.token_batch(step=1, seed=0), judged.verdicts)
    batch.old_logp = batch.rollout_logp
    return batch, make_objective({"name": name}).prepare(batch)


@pytest.mark.parametrize("name", ["grpo", "rloo", "dapo", "gspo", "cispo"])
def test_the_others_learn_as_if_it_had_not_been_sampled(name):
    batch, prepared = prepare(name, rollouts([[1.0, 0.0, 0.3, 0.0], [0.0, 1.0, 0.0, 1.0]], left_out={(0, 3)}))
    _, without = prepare(name, rollouts([[1.0, 0.0, 0.3]]))
    there = batch.sequence < 3
    assert torch.equal(prepared.advantages[there], without.advantages)
    assert (without.advantages != 0).any()
    left_out = batch.sequence == 3
    assert not batch.mask[left_out].any() and (prepared.advantages[left_out] == 0).all()
    assert batch.group.tolist() == [0, 0, 0, 2, 1, 1, 1, 1] and batch.group_ids == ["p0", "p1", "left out 0"]


def test_a_group_of_which_nothing_is_known():
    batch, prepared = prepare("grpo", rollouts([[0.0, 0.0], [0.0, 1.0]], left_out={(0, 0), (0, 1)}))
    assert prepared.advantages.isfinite().all()
    assert (prepared.advantages[batch.sequence < 2] == 0).all() and (prepared.advantages[batch.sequence >= 2] != 0).all()
