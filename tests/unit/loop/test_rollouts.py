"""What the loop makes of judged responses: reward vectors, earlier groups, lists of segments."""

import json

import numpy as np
import pytest
import torch

from megarl.config.recipe import Replay as Settings
from megarl.errors import InputError
from megarl.loop.policy_update import Material, split
from megarl.loop.replay import NUMBERS, TABLE, Replay
from megarl.loop.rollouts import JudgedRollouts
from megarl.loop.step_lists import cut_into_lists
from megarl.objectives import TokenBatch, make_objective
from megarl.rollout.response import Response
from megarl.tasks.dataset import Example
from megarl.tasks.prompts import Prompt
from megarl.tasks.verdict import Verdict
from megarl.training.sequences import Sequences


def prompt(name, tokens=(5, 6)):
    return Prompt(name, tuple(tokens), name, Example(name, name, 1, {}))


def judged(rewards, first=0, vectors=None):
    """One prompt per row of `rewards`, with responses of 1, 2, ... tokens."""
    responses, verdicts = [], []
    for i, row in enumerate(rewards):
        for j, reward in enumerate(row):
            tokens = list(range(10 * i + j, 10 * i + 2 * j + 1))
            logprobs = [-0.1 * (t + 1) for t in tokens]
            responses.append(Response(first + i, j, tokens, logprobs, "stop", [(3, 0, len(tokens))]))
            verdicts.append(Verdict("ok" if reward else "wrong", reward, vector=None if vectors is None else vectors[i][j]))
    return JudgedRollouts([prompt(f"p{first + i}") for i in range(len(rewards))], responses, [""] * len(responses), verdicts, first)


def test_vectors_reach_the_objective_as_they_are():
    vectors = [[((1.0, 0.0), (0.0, 1.0)), ()]]
    batch = judged([[1.0, 0.0]], vectors=vectors).token_batch(step=1, seed=0, vectors=True)
    assert [tuple(matrix.shape) for matrix in batch.reward] == [(2, 2), (0, 0)] and batch.reward[0].tolist() == [[1, 0], [0, 1]]
    make_objective({"name": "vpo"}).prepare(batch)


def test_a_number_where_vectors_are_wanted_is_refused_but_a_crash_is_not():
    rollouts = judged([[1.0, 0.0]])
    with pytest.raises(InputError, match=r"'p0'.*reward vectors"):
        rollouts.token_batch(step=1, seed=0, vectors=True)
    rollouts.verdicts = [Verdict("crash", 0.0), Verdict("timeout", 0.0)]
    assert [len(rows) for rows in rollouts.reward_vectors()] == [0, 0]


def test_some_groups_of_a_step():
    rollouts = judged([[1.0, 0.0], [0.0, 0.5], [0.5, 1.0]], first=7)
    part = rollouts.groups([0, 2])
    assert [p.id for p in part.prompts] == ["p7", "p9"] and part.rewards.tolist() == [1.0, 0.0, 0.5, 1.0]
    assert part.token_batch(step=1, seed=0).group.tolist() == [0, 0, 1, 1]
    whole, chosen = rollouts.sequences(), np.array([0, 1, 4, 5])
    for name in ("tokens", "starts", "prompt_lengths"):
        assert getattr(whole.select(chosen), name).tolist() == getattr(part.sequences(), name).tolist()
    assert whole.response_tokens.tolist() == [t for response in rollouts.responses for t in response.token_ids]
    assert len(whole.select(np.array([], dtype=int))) == 0


def test_earlier_groups_come_back_as_they_were(tmp_path):
    replay = Replay(Settings(capacity=3, groups_per_step=5, max_age=2), seed=0)
    assert replay.draw(1, first=2)[0] is None
    replay.add(judged([[1.0, 0.0], [1.0, 1.0], [0.0, 0.1]]), version=0)  # the second has no signal
    assert len(replay) == 2 and replay.draw(1, first=2)[0] is None  # nothing is older than the step itself
    replay.save(tmp_path)
    again = Replay(Settings(capacity=3, groups_per_step=5, max_age=2), seed=0)
    again.load(tmp_path, [prompt(f"p{i}") for i in range(3)])
    for buffer in (replay, again):
        drawn, ages = buffer.draw(3, first=4)
        assert ages.tolist() == [2, 2] and [p.id for p in drawn.prompts] == ["p0", "p2"]
        assert [r.prompt_index for r in drawn.responses] == [4, 4, 5, 5] and drawn.rewards.tolist() == [1.0, 0.0, 0.0, 0.1]
        assert [r.token_ids for r in drawn.responses] == [[0], [1, 2], [20], [21, 22]]
        assert drawn.responses[3].logprobs == pytest.approx([-2.2, -2.3])
        fresh = judged([[1.0, 0.0]], first=3)
        assert len(JudgedRollouts.joined([fresh, drawn]).sequences()) == 6
        assert buffer.draw(4, first=0)[0] is None and len(buffer) == 0  # too old


@pytest.mark.parametrize("damage", ["missing", "json", "tokens", "prompt"])
def test_a_damaged_buffer_is_refused(tmp_path, damage):
    replay = Replay(Settings(), seed=0)
    replay.add(judged([[1.0, 0.0]]), version=0)
    replay.save(tmp_path)
    prompts = [prompt("p0")]
    if damage == "missing":
        (tmp_path / NUMBERS).unlink()
    elif damage == "json":
        (tmp_path / TABLE).write_text("{")
    elif damage == "tokens":
        table = json.loads((tmp_path / TABLE).read_text())
        table[0]["responses"][0]["length"] += 1
        (tmp_path / TABLE).write_text(json.dumps(table))
    else:
        prompts = [prompt("other")]
    with pytest.raises(InputError, match="replay buffer"):
        Replay(Settings(), seed=0).load(tmp_path, prompts)


def test_each_mini_batch_has_its_share_of_earlier_groups():
    batch = TokenBatch(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool), torch.arange(9), torch.zeros(9))
    parts = split(Material(None, batch, fresh_groups=6, fresh_tokens=0, groups=9, metrics={}), 3)
    assert [part.tolist() for part in parts] == [[0, 1, 6], [2, 3, 7], [4, 5, 8]]


def test_segments_as_sequences():
    # Two prompts; 9 ends a segment. The first prompt's answers share the segment (1, 9) and part after it.
    responses = [[1, 9, 2, 9], [1, 9, 3], [4, 4], [7, 9, 8], [7, 9, 8]]
    sequences = Sequences.of([[5, 6]] * 3 + [[5]] * 2, responses)
    tokens = sequences.response_tokens
    lengths = torch.tensor([len(response) for response in responses])
    batch = TokenBatch(
        sequence=torch.repeat_interleave(torch.arange(5), lengths),
        mask=torch.ones(len(tokens), dtype=torch.bool),
        group=torch.tensor([0, 0, 0, 1, 1]),
        reward=torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0], dtype=torch.float64),
        old_logp=torch.arange(len(tokens)).float(),
    )
    batch.pull = torch.tensor([0.0, 0.0, 0.0, 0.5, 0.5])
    cut, found = cut_into_lists(sequences, batch, tokens == 9)
    lists = found.batch
    assert found.source.tolist() == [0, 0] and lists.pull.tolist() == [0, 0, 0, 0]
    rows = [cut.tokens[a:b].tolist() for a, b in zip(cut.starts[:-1], cut.starts[1:], strict=True)]
    # First segments of prompt 0, then what follows (1, 9); the second prompt's answers are the same, so they form no list.
    assert rows == [[5, 6, 1, 9], [5, 6, 4, 4], [5, 6, 1, 9, 2, 9], [5, 6, 1, 9, 3]]
    assert cut.prompt_lengths.tolist() == [2, 2, 4, 4]
    assert lists.group.tolist() == [0, 0, 1, 1] and lists.reward.tolist() == [0.5, 0.5, 1.0, 0.0]
    assert lists.old_logp.tolist() == [0, 1, 7, 8, 2, 3, 6]
    assert cut.response_tokens.tolist() == [tokens[i] for i in lists.old_logp.long().tolist()]
