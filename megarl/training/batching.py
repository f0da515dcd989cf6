"""Which sequences go through the model together, on which data-parallel rank, and the arrays of each context-parallel rank.

Pure Python and NumPy. Invariants of a plan, for any lengths:
  * every row asked for is in exactly one micro-batch; padding never duplicates a row;
  * every rank has the same number of micro-batches, a multiple of `count_multiple`, so no rank waits in a collective that another never
    enters; a rank with nothing left to do gets an empty one, whose loss is 0 and which only takes part in the communication;
  * a micro-batch with its padding stays within the token budget, unless one unit alone exceeds it;
  * a unit (one row, or a group that the objective needs whole) is never split;
  * no rank's cost exceeds the mean over ranks by more than the costliest unit (Graham 1969, bound of list scheduling).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megarl.training.sequences import Sequences

if TYPE_CHECKING:
    from megarl.models.hf_config import ModelShape

Unit = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """Micro-batches by rank: `rows[rank][i]` are the row numbers of that rank's i-th micro-batch. Lengths are of whole sequences,
    before context parallelism cuts them."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    fixed_shape: tuple[int, int] | None
    """(rows, length) that every micro-batch is padded to, where pipeline stages must know the shape beforehand; else None.
    A packed micro-batch is one long row."""
    multiple: int = 1
    """The padded length of a padded row, or of a packed micro-batch, is a multiple of this."""
    packed: bool = False
    """Sequences one after another in one row (`thd`), instead of one per row with padding on its right."""
    context: int = 1
    """Context-parallel ranks that share each sequence."""

    @property
    def count(self) -> int:
        """Micro-batches per rank."""
        return len(self.rows[0])


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def length_multiple(*, tensor: int = 1, sequence_parallel: bool = False, context: int = 1, fp8: int | None = None) -> int:
    """What a micro-batch's padded length must be a multiple of.

    A context rank holds length / context tokens in two equal chunks per sequence; under sequence parallelism a tensor rank holds 1 / tensor
    of those; and what one rank multiplies in FP8 must be a multiple of `fp8` tokens (16 for delayed and tensorwise scaling, 32 for MXFP8,
    128 for blockwise; None: no FP8).
    """
    return math.lcm(_sequence_multiple(context), context * (tensor if sequence_parallel else 1) * (fp8 or 1))


def _sequence_multiple(context: int) -> int:
    """What each single sequence must be a multiple of: context parallelism cuts it into 2 * context chunks."""
    return 2 * context if context > 1 else 1


def row_cost(lengths: np.ndarray, shape: ModelShape) -> np.ndarray:
    """[N] floating-point operations of a forward pass over sequences of `lengths` [N], as if each were alone.

    Two per weight and token, and 2 * heads * head_dim * length^2 per layer for causal attention (scores and their weighted sum).
    """
    query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.layers * shape.hidden * (2 * query + 2 * key_value + 3 * shape.active_ffn) + shape.hidden * shape.vocab_size
    lengths = np.asarray(lengths, dtype=np.float64)
    return 2 * weights * lengths + 2 * shape.layers * query * lengths**2


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    rows: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    multiple: int = 1,
    same_shape: bool = False,
    units: Sequence[Sequence[int]] | None = None,
    costs: Sequence[float] | np.ndarray | None = None,
    packed: bool = False,
    context: int = 1,
    count_multiple: int = 1,
) -> Plan:
    """Cut `rows` into micro-batches for `ranks` data-parallel ranks of `context` context-parallel ranks each.

    Args:
        lengths: [N] tokens of every row, prompt and response.
        rows: the rows to place; those not named take no part.
        max_tokens: most tokens of a micro-batch on one context rank, padding included.
        multiple: padded lengths are multiples of this (`length_multiple`).
        same_shape: give all micro-batches one shape (pipeline parallelism).
        units: sets of rows to keep in one micro-batch; default: each row by itself. Must cover `rows` exactly.
        costs: [N] time that each row takes, in any unit (`row_cost`); the ranks' sums are balanced. Default: the lengths.
        packed: sequences behind each other instead of one per row.
        count_multiple: micro-batches per rank are a multiple of this (the pipeline size under an interleaved schedule).
    """
    units = [(row,) for row in rows] if units is None else [tuple(unit) for unit in units if len(unit)]
    if sorted(row for unit in units for row in unit) != sorted(set(rows)):
        raise ValueError("units must hold exactly the rows to be placed, each once")
    multiple = math.lcm(multiple, _sequence_multiple(context))
    padded = _padded_lengths(lengths, _sequence_multiple(context) if packed else multiple)
    costs = np.maximum(lengths, 1) if costs is None else np.asarray(costs)
    budget = max_tokens * context // multiple * multiple
    # A packed unit takes the sum of its rows, a padded one is as wide as its longest.
    size = {unit: int(padded[list(unit)].sum() if packed else padded[list(unit)].max()) for unit in units}
    cost = {unit: float(costs[list(unit)].sum()) for unit in units}
    dealt = [sorted(part, key=lambda unit: (-size[unit], unit)) for part in _deal(units, cost, ranks)]
    fill = _fill_packed if packed else _fill_padded
    needed, count = 1, 0
    while needed > count:  # a rank that gets more micro-batches than it needs fills them evenly
        count = round_up(needed, count_multiple)
        per_rank = [fill(part, size, count, budget) for part in dealt]
        needed = max(len(batches) for batches in per_rank)
    for batches in per_rank:  # the costliest first: ranks in step meet their like, and one that lacks the memory says so at once
        batches.sort(key=lambda batch: -sum(cost[unit] for unit in batch))
    flat = tuple(tuple(tuple(row for unit in batch for row in unit) for batch in batches) for batches in per_rank)
    shape = _common_shape(flat, padded, multiple, packed) if same_shape else None
    return Plan(flat, shape, multiple, packed, context)


def _padded_lengths(lengths: Sequence[int] | np.ndarray, multiple: int) -> np.ndarray:
    return round_up(np.maximum(np.asarray(lengths, dtype=np.int64), 1), multiple)


def _deal(units: list[Unit], cost: dict[Unit, float], ranks: int) -> list[list[Unit]]:
    """Longest processing time first: each unit, costliest first, goes to the rank with the least so far. At most 4/3 of the optimum."""
    dealt: list[list[Unit]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-cost[unit], unit)):
        load, rank = loads[0]
        dealt[rank].append(unit)
        heapq.heapreplace(loads, (load + cost[unit], rank))
    return dealt


def _fill_packed(units: list[Unit], size: dict[Unit, int], count: int, budget: int) -> list[list[Unit]]:
    """At least `count` micro-batches, filled evenly: each unit, largest first, goes to the emptiest, or a new one where that has no room.

    Never more than the larger of `count` and twice the tokens over the budget: when one is opened, all others are more than half full.
    """
    count = max(count, -(-sum(min(size[unit], budget) for unit in units) // max(budget, 1)))
    batches: list[list[Unit]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    for unit in units:
        load, i = loads[0]
        if load and load + size[unit] > budget:
            load, i = 0, len(batches)
            batches.append([])
            heapq.heappush(loads, (size[unit], i))
        else:
            heapq.heapreplace(loads, (load + size[unit], i))
        batches[i].append(unit)
    return batches


def _fill_padded(units: list[Unit], size: dict[Unit, int], count: int, budget: int) -> list[list[Unit]]:
    """At least `count` micro-batches of units of like length; units come longest first, so a batch's length is that of its first unit."""
    batches: list[list[Unit]] = []
    rows = length = 0
    for unit in units:
        if not batches or (rows + len(unit)) * length > budget:
            batches.append([])
            rows, length = 0, size[unit]
        batches[-1].append(unit)
        rows += len(unit)
    while len(batches) < count:  # the largest are halved, and where single units are left, empty ones are added
        largest = max(range(len(batches)), key=lambda i: (len(batches[i]), -i), default=None)
        if largest is None or len(batches[largest]) < 2:
            batches.append([])
            continue
        batch = batches[largest]
        half = (len(batch) + 1) // 2
        batches[largest : largest + 1] = [batch[:half], batch[half:]]
    return batches


def _common_shape(rows: tuple, padded: np.ndarray, multiple: int, packed: bool) -> tuple[int, int]:
    batches = [padded[list(batch)] for batches in rows for batch in batches if batch]
    if packed:
        return 1, round_up(max((int(batch.sum()) for batch in batches), default=1), multiple)
    return max((len(batch) for batch in batches), default=1), max((int(batch.max()) for batch in batches), default=multiple)


@dataclass(frozen=True)
class Collated:
    """One context rank's part of a micro-batch: b rows of s local tokens. Packed: b = 1.

    A sequence is padded on its right. Under context parallelism it is cut into 2 * context equal chunks, and rank r holds the chunks
    r and 2 * context - 1 - r, in this order, so that all ranks have the same share of causal attention (Megatron's convention).
    """

    tokens: np.ndarray
    """[b, s] int64; padding is token 0, which causal attention keeps out of everything before it."""
    position_ids: np.ndarray
    """[b, s] int64, the place of each token in its own sequence."""
    positions: np.ndarray
    """[n] where the response tokens are predicted, in the sequence-major flattening (position * b + row) of the local hidden states
    [s, b, h]."""
    labels: np.ndarray
    """[n] the response tokens."""
    token_index: np.ndarray
    """[t] where they lie in the flat batch of response tokens. t = n, except that without a response token t = 0 and n = 1: one
    position whose log-prob counts for nothing keeps the shapes of collectives non-empty."""
    cu_seqlens: np.ndarray | None = None
    """[sequences + 1] int32, packed only: running sum of the real lengths of the whole sequences, before the cut."""
    cu_seqlens_padded: np.ndarray | None = None
    """[sequences + 1] int32, packed only: where each whole sequence begins with its padding, up to the micro-batch's whole length.
    Padding at the end counts as sequences of real length 0."""

    @property
    def max_seqlen(self) -> int:
        """Longest padded sequence of a packed micro-batch. Of this one alone: Megatron takes rotary positions from a table of that many,
        and takes a table as long as the micro-batch for one that holds the positions of all its sequences."""
        return int(np.diff(self.cu_seqlens_padded).max())


def collate(sequences: Sequences, rows: Sequence[int], plan: Plan, context_rank: int = 0) -> Collated:
    """The arrays that `context_rank` gets of one micro-batch of `plan`."""
    real, padded = _layout(sequences, rows, plan)
    bounds = np.concatenate([[0], np.cumsum(padded)])
    count = 1 if plan.packed else len(padded)
    tokens, position_ids = np.zeros((2, count, (bounds[-1] if plan.packed else padded[0]) // plan.context), dtype=np.int64)
    positions, labels, token_index = [], [], []
    response_starts = sequences.response_starts
    for i, length in enumerate(padded):
        line, column = (0, bounds[i] // plan.context) if plan.packed else (i, 0)
        row = rows[i] if i < len(rows) else None
        for begin, end in _chunks(length, plan.context, context_rank):
            position_ids[line, column : column + end - begin] = np.arange(begin, end)
            if row is not None and begin < real[i]:
                start, prompt, last = sequences.starts[row], sequences.prompt_lengths[row], min(end, real[i])
                tokens[line, column : column + last - begin] = sequences.tokens[start + begin : start + last]
                # The places whose next token is of the response. It is read from the whole sequence: a chunk's last has it elsewhere.
                places = np.arange(max(begin, prompt - 1), min(end, real[i] - 1))
                positions.append((column + places - begin) * count + line)
                labels.append(sequences.tokens[start + places + 1])
                token_index.append(response_starts[row] + places + 1 - prompt)
            column += end - begin
    flat = [np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64) for parts in (positions, labels, token_index)]
    if len(flat[0]) == 0:
        flat[:2] = np.zeros((2, 1), np.int64)
    if not plan.packed:
        return Collated(tokens, position_ids, *flat)
    return Collated(tokens, position_ids, *flat, np.concatenate([[0], np.cumsum(real)]).astype(np.int32), bounds.astype(np.int32))


def _layout(sequences: Sequences, rows: Sequence[int], plan: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Real and padded lengths of a micro-batch's sequences: those of `rows`, then padding as sequences of real length 0."""
    real = sequences.lengths[list(rows)]
    if not plan.packed:
        padded = _padded_lengths(real, plan.multiple)
        count, width = plan.fixed_shape or (max(1, len(rows)), max(padded, default=plan.multiple))
        return np.pad(real, (0, count - len(rows))), np.full(count, width)
    padded = _padded_lengths(real, _sequence_multiple(plan.context))
    total = plan.fixed_shape[1] if plan.fixed_shape else round_up(max(int(padded.sum()), 1), plan.multiple)
    # In parts no longer than the longest sequence, so that the padding neither attends further nor needs more rotary positions.
    left = total - int(padded.sum())
    longest = int(padded.max(initial=0)) or left
    parts = [longest] * (left // longest) + [left % longest] * (left % longest > 0)
    return np.pad(real, (0, len(parts))), np.concatenate([padded, parts]).astype(np.int64)


def _chunks(length: int, context: int, rank: int) -> list[tuple[int, int]]:
    """(begin, end) of the parts of a sequence that a context rank holds."""
    if context == 1:
        return [(0, length)]
    size = length // (2 * context)
    return [(chunk * size, (chunk + 1) * size) for chunk in (rank, 2 * context - 1 - rank)]
