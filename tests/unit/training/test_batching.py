"""The promises in the docstring of megarl.training.batching."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.training.batching import collate, plan_micro_batches
from megarl.training.sequences import Sequences

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@given(lengths, st.integers(1, 4), st.integers(8, 200), st.sampled_from([1, 2, 4]), st.booleans(), st.data())
def test_every_row_once_the_same_count_and_within_the_budget(lengths, ranks, max_tokens, multiple, same_shape, data):
    rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True))
    plan = plan_micro_batches(lengths, rows, ranks=ranks, max_tokens=max_tokens, multiple=multiple, same_shape=same_shape)
    assert sorted(row for batches in plan.rows for batch in batches for row in batch) == sorted(rows)
    assert len(plan.rows) == ranks
    assert {len(batches) for batches in plan.rows} == {plan.count} and plan.count >= 1
    padded = lambda row: -(-lengths[row] // multiple) * multiple
    for batch in (batch for batches in plan.rows for batch in batches if batch):
        assert len(batch) * max(map(padded, batch)) <= max_tokens or len(batch) == 1


@given(lengths, st.integers(1, 3), st.integers(8, 200), st.integers(1, 5))
def test_units_stay_together(lengths, ranks, max_tokens, size):
    rows = list(range(len(lengths)))
    units = [rows[i : i + size] for i in range(0, len(rows), size)]
    plan = plan_micro_batches(lengths, rows, ranks=ranks, max_tokens=max_tokens, units=units)
    where = {row: (rank, i) for rank, batches in enumerate(plan.rows) for i, batch in enumerate(batches) for row in batch}
    assert all(len({where[row] for row in unit}) == 1 for unit in units)


def test_units_must_cover_the_rows():
    with pytest.raises(ValueError, match="units"):
        plan_micro_batches([3, 4], [0, 1], ranks=1, max_tokens=8, units=[[0]])


def test_ranks_get_nearly_the_same_tokens():
    lengths = list(range(1, 101))
    plan = plan_micro_batches(lengths, range(100), ranks=4, max_tokens=400)
    tokens = [sum(lengths[row] for batch in batches for row in batch) for batches in plan.rows]
    assert max(tokens) - min(tokens) <= 4


def test_no_rows_give_every_rank_one_empty_micro_batch():
    plan = plan_micro_batches([5, 5], [], ranks=3, max_tokens=100, same_shape=True)
    assert plan.rows == (((),),) * 3 and plan.fixed_shape == (1, 1)


sequence_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.lists(st.integers(1, 9), max_size=6)), min_size=1, max_size=12
)


@given(sequence_lists, st.integers(1, 3), st.integers(10, 60), st.sampled_from([1, 2]), st.booleans())
def test_collated_positions_predict_the_response_tokens(pairs, ranks, max_tokens, multiple, same_shape):
    sequences = Sequences.of([p for p, _ in pairs], [r for _, r in pairs])
    plan = plan_micro_batches(
        sequences.lengths, range(len(pairs)), ranks=ranks, max_tokens=max_tokens, multiple=multiple, same_shape=same_shape
    )
    flat = [token for _, response in pairs for token in response]
    seen = []
    for batch in (batch for batches in plan.rows for batch in batches):
        arrays = collate(sequences, batch, plan)
        rows, width = arrays.tokens.shape
        assert width % multiple == 0
        if plan.fixed_shape:
            assert (rows, width) == plan.fixed_shape
        assert len(arrays.positions) >= 1
        for position, label, index in zip(arrays.positions, arrays.labels, arrays.token_index):
            time, row = divmod(int(position), rows)
            assert arrays.tokens[row, time + 1] == label == flat[index]
        seen += arrays.token_index.tolist()
    assert sorted(seen) == list(range(len(flat)))


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has an empty prompt"):
        Sequences.of([[1], []], [[2], [3]])


def test_sequences_know_where_responses_begin():
    sequences = Sequences.of([[1, 2], [3]], [[4], [5, 6]])
    assert sequences.tokens.tolist() == [1, 2, 4, 3, 5, 6]
    assert sequences.response_starts.tolist() == [0, 1, 3] and sequences.response_starts.dtype == np.int64
