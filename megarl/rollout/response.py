"""What an engine gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Response:
    """One sampled response to the prompt at `prompt_index` of its batch."""

    prompt_index: int
    sample_index: int
    token_ids: list[int]
    """The stop token included when one ended the response."""
    logprobs: list[float]
    """Natural log of the probability, at the sampling temperature, with which the engine sampled each token."""
    finish_reason: Literal["stop", "length", "abort"]
    versions: list[tuple[int, int, int]]
    """(version, start, end): the weights of that version made the tokens from `start` to `end`."""

    @property
    def mixed_versions(self) -> bool:
        """Whether weights changed while this response was being made."""
        return len({version for version, _, _ in self.versions}) > 1
