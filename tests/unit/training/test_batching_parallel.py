"""Packing, context parallelism, alignment and balance: the promises in the docstring of megarl.training.batching."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.hf_config import ModelShape
from megarl.training.batching import collate, length_multiple, plan_micro_batches, row_cost
from megarl.training.sequences import Sequences

lengths = st.lists(st.integers(0, 60), max_size=40)
pairs = st.lists(
    st.tuples(st.lists(st.integers(1, 99), min_size=1, max_size=9), st.lists(st.integers(1, 99), max_size=15)), min_size=1, max_size=12
)
contexts = st.sampled_from([1, 2, 3, 4])


@given(st.sampled_from([1, 2, 3, 8]), st.booleans(), contexts, st.sampled_from([None, 16, 32, 128]))
def test_the_multiple_fits_every_shard(tensor, sequence_parallel, context, fp8):
    multiple = length_multiple(tensor=tensor, sequence_parallel=sequence_parallel, context=context, fp8=fp8)
    assert multiple % context == 0
    if context > 1:
        assert multiple % (2 * context) == 0
    shard, left = divmod(multiple // context, tensor if sequence_parallel else 1)
    assert left == 0 and shard % (fp8 or 1) == 0
    # No larger than it must be: a divisor of it breaks one of the three.
    for prime in (p for p in (2, 3) if multiple % p == 0):
        smaller = multiple // prime
        parts = context * (tensor if sequence_parallel else 1) * (fp8 or 1)
        assert smaller % parts or (context > 1 and smaller % (2 * context))


def test_multiples_that_people_use():
    assert length_multiple() == 1
    assert length_multiple(tensor=8) == 1
    assert length_multiple(tensor=8, sequence_parallel=True) == 8
    assert length_multiple(context=4) == 8
    assert length_multiple(tensor=8, sequence_parallel=True, context=4, fp8=16) == 4 * 8 * 16
    assert length_multiple(tensor=8, context=2, fp8=128) == 256


@given(
    lengths,
    st.integers(1, 4),
    st.integers(1, 200),
    st.sampled_from([1, 4, 6]),
    st.booleans(),
    st.booleans(),
    contexts,
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_any_plan(lengths, ranks, max_tokens, multiple, same_shape, packed, context, count_multiple, size):
    units = [range(i, min(i + size, len(lengths))) for i in range(0, len(lengths), size)]
    plan = plan_micro_batches(
        lengths,
        range(len(lengths)),
        ranks=ranks,
        max_tokens=max_tokens,
        multiple=multiple,
        same_shape=same_shape,
        units=units,
        packed=packed,
        context=context,
        count_multiple=count_multiple,
    )
    batches = [batch for of_rank in plan.rows for batch in of_rank]
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    assert len(plan.rows) == ranks and {len(of_rank) for of_rank in plan.rows} == {plan.count}
    assert plan.count >= 1 and plan.count % count_multiple == 0
    assert plan.multiple % multiple == 0 and plan.multiple % (2 * context if context > 1 else 1) == 0
    where = {row: i for i, batch in enumerate(batches) for row in batch}
    assert all(len({where[row] for row in unit}) == 1 for unit in units)

    up = lambda number, to: math.ceil(max(number, 1) / to) * to
    for batch in filter(None, batches):
        if packed:
            whole = up(sum(up(lengths[row], 2 * context if context > 1 else 1) for row in batch), plan.multiple)
        else:
            whole = len(batch) * max(up(lengths[row], plan.multiple) for row in batch)
        one_unit = len({row // size for row in batch}) == 1
        assert whole <= max_tokens * context or one_unit
        if same_shape:
            rows, width = plan.fixed_shape
            assert whole <= rows * width and width % plan.multiple == 0
            assert rows == 1 if packed else len(batch) <= rows
    assert plan.fixed_shape is None or same_shape


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 150), st.randoms(use_true_random=False))
def test_a_plan_depends_on_nothing_but_the_lengths(lengths, max_tokens, random):
    rows = list(range(len(lengths)))
    plan = plan_micro_batches(lengths, rows, ranks=3, max_tokens=max_tokens, packed=True)
    random.shuffle(rows)
    assert plan_micro_batches(lengths, rows, ranks=3, max_tokens=max_tokens, packed=True) == plan


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 200))
def test_packing_needs_at_most_twice_the_fewest_micro_batches(lengths, max_tokens):
    plan = plan_micro_batches(lengths, range(len(lengths)), ranks=1, max_tokens=max_tokens, packed=True)
    assert plan.count <= 2 * math.ceil(sum(min(length, max_tokens) for length in lengths) / max_tokens)


def test_the_budget_holds_after_rounding_up():
    plan = plan_micro_batches([17, 20], [0, 1], ranks=1, max_tokens=40, multiple=16, packed=True)  # 37 tokens, but 48 with their padding
    assert plan.count == 2


def loads(plan, costs):
    return [sum(costs[row] for batch in of_rank for row in batch) for of_rank in plan.rows]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 8), st.booleans())
def test_no_rank_has_more_than_the_mean_and_a_share_of_the_costliest(costs, ranks, packed):
    lengths = [1 + cost % 7 for cost in costs]  # the balance is that of the costs, not of the lengths
    plan = plan_micro_batches(lengths, range(len(costs)), ranks=ranks, max_tokens=20, costs=costs, packed=packed)
    assert max(loads(plan, costs)) <= sum(costs) / ranks + (1 - 1 / ranks) * max(costs) + 1e-6


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_no_rank_has_more_than_four_thirds_of_the_best_possible(costs, ranks):
    best = min(
        max(sum(cost for cost, rank in zip(costs, ranks_of) if rank == r) for r in range(ranks))
        for ranks_of in itertools.product(range(ranks), repeat=len(costs))
    )
    plan = plan_micro_batches([1] * len(costs), range(len(costs)), ranks=ranks, max_tokens=99, costs=costs)
    assert max(loads(plan, costs)) <= (4 / 3 - 1 / (3 * ranks)) * best + 1e-9


def test_the_costliest_micro_batch_comes_first():
    plan = plan_micro_batches(range(1, 33), range(32), ranks=2, max_tokens=64, costs=np.arange(1, 33) ** 2, packed=True)
    for of_rank in plan.rows:
        costs = [sum((row + 1) ** 2 for row in batch) for batch in of_rank]
        assert costs == sorted(costs, reverse=True) and costs[0] > costs[-1]


def test_cost_of_a_row_is_its_arithmetic():
    shape = ModelShape("llama", 2, 8, 16, 2, 1, 4, 10, 64, 1e4, None, 1e-5, False, False, False)
    # Per token and layer: query and output 8x8, key and value 8x4, three of 8x16; 8x10 for the head; two operations per weight.
    per_token = 2 * (2 * (2 * 64 + 2 * 32 + 3 * 128) + 80)
    attention = lambda length: 2 * 2 * 2 * 8 * length * length / 2  # layers x (scores, sums) x operations x width, half by causality
    assert row_cost([0, 1, 100], shape).tolist() == [0, per_token + attention(1), 100 * per_token + attention(100)]


def whole(local, bounds, context):
    """[ranks][b, s] of the context ranks -> [b, s * ranks], by the definition of the zig-zag."""
    out = np.zeros((local[0].shape[0], bounds[-1]), dtype=np.int64)
    for start, end in itertools.pairwise(bounds):
        chunks = np.array_split(np.arange(start, end), 2 * context)
        for rank in range(context):
            mine = np.concatenate([chunks[rank], chunks[2 * context - 1 - rank]])
            out[:, mine] = local[rank][:, start // context : end // context]
    return out


def cut(array, bounds, context, rank):
    parts = []
    for start, end in itertools.pairwise(bounds):
        chunks = np.array_split(array[:, start:end], 2 * context, axis=1)
        parts += [chunks[rank], chunks[2 * context - 1 - rank]]
    return np.concatenate(parts, axis=1)


@given(pairs, st.integers(1, 3), st.integers(10, 60), st.sampled_from([1, 4]), st.booleans(), st.booleans(), contexts)
def test_context_ranks_share_the_response_tokens(pairs, ranks, max_tokens, multiple, same_shape, packed, context):
    sequences = Sequences.of([p for p, _ in pairs], [r for _, r in pairs])
    plan = plan_micro_batches(
        sequences.lengths,
        range(len(pairs)),
        ranks=ranks,
        max_tokens=max_tokens,
        multiple=multiple,
        same_shape=same_shape,
        packed=packed,
        context=context,
    )
    seen = []
    for rows in itertools.chain(*plan.rows):
        parts = [collate(sequences, rows, plan, rank) for rank in range(context)]
        b, s = parts[0].tokens.shape
        assert all(part.tokens.shape == part.position_ids.shape == (b, s) for part in parts)
        assert s * context % plan.multiple == 0
        if same_shape:
            assert (b, s * context) == plan.fixed_shape
        bounds = parts[0].cu_seqlens_padded if packed else np.array([0, s * context])
        assert bounds[-1] == s * context
        tokens = whole([part.tokens for part in parts], bounds, context)
        position_ids = whole([part.position_ids for part in parts], bounds, context)
        # Each sequence lies where the bounds say, with its positions counted from 0, and padding is 0.
        for i, row in enumerate(rows):
            line, start = (0, bounds[i]) if packed else (i, 0)
            prompt, response = pairs[row]
            assert tokens[line, start : start + len(prompt + response)].tolist() == prompt + response
        assert tokens.sum() == sum(sum(p) + sum(r) for p, r in (pairs[row] for row in rows))
        for start, end in itertools.pairwise(bounds):
            assert (position_ids[:, start:end] == np.arange(end - start)).all()
        if packed:
            lengths = np.diff(parts[0].cu_seqlens)
            assert lengths[: len(rows)].tolist() == sequences.lengths[list(rows)].tolist() and not lengths[len(rows) :].any()
            assert (np.diff(bounds) >= lengths).all() and (np.diff(bounds) % (2 * context if context > 1 else 1) == 0).all()
            assert parts[0].max_seqlen == max(np.diff(bounds))
            assert not rows or parts[0].max_seqlen - max(lengths) < 2 * context
        # A number for each place of the whole rows, cut as the tokens are, finds every position again.
        for rank, part in enumerate(parts):
            numbers = np.arange(b * bounds[-1]).reshape(b, -1)
            local = cut(numbers, bounds, context, rank)
            assert len(part.positions) == len(part.labels) >= 1
            for position, label, index in zip(part.positions, part.labels, part.token_index):
                line, place = divmod(int(local[int(position) % b, int(position) // b]), bounds[-1])
                assert tokens[line, place + 1] == label
                seen.append((int(index), int(label)))
            assert len(part.token_index) == len(part.positions) or (len(part.token_index) == 0 and len(part.positions) == 1)
    assert sorted(seen) == list(enumerate(token for _, response in pairs for token in response))


@pytest.mark.parametrize("context", [1, 2, 4])
def test_positions_are_those_that_megatron_rotates_by(context):
    from megarl import platform

    platform.prepare_megatron()
    from megatron.core.models.common.embeddings.rope_utils import _get_thd_freqs_on_this_cp_rank

    sequences = Sequences.of([[1] * 5, [2] * 9, [3]], [[4] * 20, [5], [6] * 3])
    plan = plan_micro_batches(sequences.lengths, range(3), ranks=1, max_tokens=99, packed=True, context=context, multiple=8)
    for rank in range(context):
        part = collate(sequences, plan.rows[0][0], plan, rank)
        table = torch.arange(part.max_seqlen)
        lengths = np.diff(part.cu_seqlens_padded) // context
        wanted = [_get_thd_freqs_on_this_cp_rank(rank, context, torch.empty(int(length)), table) for length in lengths]
        assert part.position_ids[0].tolist() == torch.cat(wanted).tolist()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("context", [1, 2])
def test_an_empty_micro_batch_keeps_the_shape_and_one_position(packed, context):
    sequences = Sequences.of([[1, 2]], [[3, 4, 5]])
    plan = plan_micro_batches(sequences.lengths, [0], ranks=2, max_tokens=64, multiple=8, packed=packed, context=context, same_shape=True)
    full, empty = (collate(sequences, rows[0], plan, 0) for rows in plan.rows)
    assert full.tokens.shape == empty.tokens.shape == (1, 8 // context) and not empty.tokens.any()
    assert empty.positions.tolist() == empty.labels.tolist() == [0] and len(empty.token_index) == 0
    if packed:
        assert empty.cu_seqlens.tolist() == [0, 0] and empty.cu_seqlens_padded.tolist() == [0, 8]


def test_padding_at_the_end_is_cut_to_the_length_of_the_longest_sequence():
    sequences = Sequences.of([[1] * 30, [2] * 3], [[1] * 10, [2]])
    plan = plan_micro_batches(sequences.lengths, [0, 1], ranks=1, max_tokens=40, packed=True, same_shape=True)
    part = collate(sequences, [1], plan)
    assert part.tokens.shape == (1, 40) and part.cu_seqlens_padded.tolist() == list(range(0, 41, 4))
    assert part.cu_seqlens.tolist() == [0] + [4] * 10 and part.position_ids[0].tolist() == [0, 1, 2, 3] * 10


def test_a_context_rank_without_a_response_token_has_one_position():
    sequences = Sequences.of([[1] * 7], [[2]])  # predicted at place 6, of the last of the chunks 01 23 45 67: rank 0's
    plan = plan_micro_batches(sequences.lengths, [0], ranks=1, max_tokens=64, packed=True, context=2)
    first, second = (collate(sequences, [0], plan, rank) for rank in range(2))
    assert first.positions.tolist() == [2] and first.labels.tolist() == [2] and first.token_index.tolist() == [0]
    assert second.positions.tolist() == [0] and len(second.token_index) == 0


def test_no_rows_at_all():
    plan = plan_micro_batches([], [], ranks=2, max_tokens=8, packed=True, context=2, count_multiple=3, same_shape=True)
    assert plan.rows == (((),) * 3,) * 2 and plan.fixed_shape == (1, 4)


def test_rows_named_twice_are_refused():
    with pytest.raises(ValueError, match="each once"):
        plan_micro_batches([3, 4], [0, 1, 1], ranks=1, max_tokens=8)
