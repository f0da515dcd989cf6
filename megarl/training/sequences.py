"""Prompts with their responses as flat arrays: what travels from the controller to the training ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sequences:
    """N sequences, each a prompt followed by its response.

    The response tokens of all sequences, in order, are the T tokens of the objective's flat batch.
    """

    tokens: np.ndarray
    """[sum of lengths] int64, prompt and response of each sequence."""
    starts: np.ndarray
    """[N + 1], where each sequence begins in `tokens`."""
    prompt_lengths: np.ndarray
    """[N], at least 1: a response's first token is predicted from the prompt's last."""

    def __post_init__(self):
        if len(self.prompt_lengths) and self.prompt_lengths.min() < 1:
            raise ValueError(f"sequence {int(self.prompt_lengths.argmin())} has an empty prompt")

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Sequences:
        """From token ids; `prompts` and `responses` are of the same number."""
        prompt_lengths = np.array([len(p) for p in prompts], dtype=np.int64)
        lengths = prompt_lengths + np.array([len(r) for r in responses], dtype=np.int64)
        tokens = [token for prompt, response in zip(prompts, responses, strict=True) for part in (prompt, response) for token in part]
        return cls(np.array(tokens, dtype=np.int64), np.concatenate([[0], lengths.cumsum()]).astype(np.int64), prompt_lengths)

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """[N] tokens of prompt and response."""
        return np.diff(self.starts)

    @property
    def response_lengths(self) -> np.ndarray:
        return self.lengths - self.prompt_lengths

    @property
    def response_tokens(self) -> np.ndarray:
        """[T] the token ids of all responses."""
        position = np.arange(len(self.tokens)) - np.repeat(self.starts[:-1], self.lengths)
        return self.tokens[position >= np.repeat(self.prompt_lengths, self.lengths)]

    def select(self, rows: np.ndarray) -> Sequences:
        """Those at `rows`, in that order."""
        parts = [self.tokens[self.starts[row] : self.starts[row + 1]] for row in rows]
        starts = np.concatenate([[0], self.lengths[rows].cumsum()]).astype(np.int64)
        return Sequences(np.concatenate(parts) if parts else self.tokens[:0], starts, self.prompt_lengths[rows])

    @property
    def response_starts(self) -> np.ndarray:
        """[N + 1], where each response begins in the flat batch of response tokens."""
        return np.concatenate([[0], self.response_lengths.cumsum()]).astype(np.int64)
