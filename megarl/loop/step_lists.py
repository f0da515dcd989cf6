"""Step-level lists: segments of responses as the sequences that the trainer runs."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from megarl.objectives import TokenBatch
from megarl.objectives.segments import StepLists, step_lists
from megarl.training.sequences import Sequences


def cut_into_lists(sequences: Sequences, batch: TokenBatch, ends_segment: np.ndarray) -> tuple[Sequences, StepLists]:
    """Each segment that has siblings as a sequence: the prompt and the segments before it, then its own tokens as the response.

    `ends_segment` [T] bool: the response token is the last of its segment. The batch of the lists has the lists as its groups.
    """
    starts, response_starts = sequences.starts, sequences.response_starts
    ends = torch.from_numpy(ends_segment)
    before = torch.cumsum(ends.long(), 0) - ends.long()  # segments that ended before the token; rising within a response
    token_ids = torch.from_numpy(sequences.response_tokens)
    lists = step_lists(batch, token_ids, before)
    index = lists.token_index.numpy()
    bounds = np.concatenate([[0], np.bincount(lists.batch.sequence.numpy(), minlength=lists.batch.num_responses).cumsum()])
    prompts, responses = [], []
    for first, last in itertools.pairwise(bounds):
        row = int(batch.sequence[index[first]])
        start = int(starts[row])
        # Response tokens are consecutive in both arrays, so the segment's place in the row follows from its first token's.
        segment = start + int(sequences.prompt_lengths[row]) + int(index[first]) - int(response_starts[row])
        prompts.append(sequences.tokens[start:segment].tolist())
        responses.append(sequences.tokens[segment : segment + last - first].tolist())
    return Sequences.of(prompts, responses), lists
