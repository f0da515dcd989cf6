"""Which sequences go through the model together, on which data-parallel rank. Pure Python and NumPy.

Invariants of a plan, for any lengths:
  * every row asked for is in exactly one micro-batch; padding never duplicates a row;
  * every rank has the same number of micro-batches, so no rank waits in a collective that another never enters;
    a rank with nothing left to do gets an empty one, whose loss is 0 and which only takes part in the communication;
  * rows times the longest row's padded length stays within the token budget, unless one unit alone exceeds it;
  * a unit (one row, or a group that the objective needs whole) is never split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megarl.training.sequences import Sequences


@dataclass(frozen=True)
class Plan:
    """Micro-batches by rank: `rows[rank][i]` are the row numbers of that rank's i-th micro-batch."""

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    fixed_shape: tuple[int, int] | None
    """(rows, length) that every micro-batch is padded to, where pipeline stages must know the shape beforehand; else None."""
    multiple: int
    """The padded length is a multiple of this."""

    @property
    def count(self) -> int:
        """Micro-batches per rank."""
        return len(self.rows[0])


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def plan_micro_batches(
    lengths: Sequence[int] | np.ndarray,
    rows: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    multiple: int = 1,
    same_shape: bool = False,
    units: Sequence[Sequence[int]] | None = None,
) -> Plan:
    """Cut `rows` into micro-batches for `ranks` data-parallel ranks.

    Args:
        lengths: [N] tokens of every row, prompt and response.
        rows: the rows to place; those not named take no part.
        max_tokens: most tokens of a micro-batch, padding included.
        multiple: padded lengths are multiples of this (the tensor-parallel size under sequence parallelism).
        same_shape: give all micro-batches one shape (pipeline parallelism).
        units: sets of rows to keep in one micro-batch; default: each row by itself. Must cover `rows` exactly.
    """
    units = [(row,) for row in rows] if units is None else [tuple(unit) for unit in units]
    if sorted(row for unit in units for row in unit) != sorted(rows):
        raise ValueError("units must hold exactly the rows to be placed, each once")
    padded = {row: round_up(max(int(lengths[row]), 1), multiple) for row in rows}
    longest = {unit: max(padded[row] for row in unit) for unit in units if unit}
    # Longest first, then dealt back and forth: each rank gets the same number of rows and nearly the same tokens.
    order = sorted((unit for unit in units if unit), key=lambda unit: (-longest[unit], unit))
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    for index, unit in enumerate(order):
        turn, place = divmod(index, ranks)
        dealt[place if turn % 2 == 0 else ranks - 1 - place].append(unit)
    per_rank = [_pack(units_of_rank, longest, max_tokens) for units_of_rank in dealt]
    count = max(1, max(len(batches) for batches in per_rank))
    per_rank = [_spread(batches, count) for batches in per_rank]
    flat = tuple(tuple(tuple(row for unit in batch for row in unit) for batch in batches) for batches in per_rank)
    shape = None
    if same_shape:
        shape = (max(1, max(len(batch) for batches in flat for batch in batches)), max(padded.values(), default=multiple))
    return Plan(flat, shape, multiple)


def _pack(units: list[tuple[int, ...]], longest: dict[tuple[int, ...], int], max_tokens: int) -> list[list[tuple[int, ...]]]:
    """Fill micro-batches in order; units come longest first, so a batch's length is that of its first unit."""
    batches: list[list[tuple[int, ...]]] = []
    rows = length = 0
    for unit in units:
        if not batches or (rows + len(unit)) * length > max_tokens:
            batches.append([])
            rows, length = 0, longest[unit]
        batches[-1].append(unit)
        rows += len(unit)
    return batches


def _spread(batches: list[list[tuple[int, ...]]], count: int) -> list[list[tuple[int, ...]]]:
    """Exactly `count` micro-batches: the largest are halved, and where single units are left, empty ones are added."""
    batches = [list(batch) for batch in batches]
    while len(batches) < count:
        largest = max(range(len(batches)), key=lambda i: (len(batches[i]), -i), default=None)
        if largest is None or len(batches[largest]) < 2:
            batches.append([])
            continue
        batch = batches[largest]
        half = (len(batch) + 1) // 2
        batches[largest : largest + 1] = [batch[:half], batch[half:]]
    return batches


@dataclass(frozen=True)
class Collated:
    """One micro-batch, padded on the right."""

    tokens: np.ndarray
    """[b, s] int64; padding is token 0, which causal attention keeps out of everything before it."""
    positions: np.ndarray
    """[n] where the response tokens are predicted, in the sequence-major flattening (position * b + row) of hidden states [s, b, h]."""
    labels: np.ndarray
    """[n] the response tokens."""
    token_index: np.ndarray
    """[t] where they lie in the flat batch of response tokens. t = n, except that an empty micro-batch has t = 0 and n = 1: one
    position whose log-prob counts for nothing keeps the shapes of collectives non-empty."""


def collate(sequences: Sequences, rows: Sequence[int], plan: Plan) -> Collated:
    """The arrays of one micro-batch of `plan`."""
    lengths, response_starts = sequences.lengths, sequences.response_starts
    longest = round_up(max((int(lengths[row]) for row in rows), default=1), plan.multiple)
    count, width = plan.fixed_shape or (max(1, len(rows)), longest)
    tokens = np.zeros((count, width), dtype=np.int64)
    positions, labels, token_index = [], [], []
    for i, row in enumerate(rows):
        start, end, prompt = sequences.starts[row], sequences.starts[row + 1], sequences.prompt_lengths[row]
        tokens[i, : end - start] = sequences.tokens[start:end]
        positions.append(np.arange(prompt - 1, end - start - 1) * count + i)
        labels.append(sequences.tokens[start + prompt : end])
        token_index.append(np.arange(response_starts[row], response_starts[row + 1]))
    flat = [np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64) for parts in (positions, labels, token_index)]
    if len(flat[0]) == 0:
        return Collated(tokens, np.zeros(1, np.int64), np.zeros(1, np.int64), flat[2])
    return Collated(tokens, *flat)
