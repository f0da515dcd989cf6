"""How responses are sampled, and where their randomness comes from."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Sampling from the whole distribution: top-p and top-k would make the engine's log-probs those of another, renormalised policy."""

    temperature: float
    max_tokens: int
    """Largest response, the end-of-sequence token included."""
    stop_token_ids: tuple[int, ...]
    """Tokens that end a response and stay in it; empty: every response runs to `max_tokens`."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, not {self.max_tokens}")


def request_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one response: 63 bits that depend on nothing but these four numbers, in every process and on every machine."""
    numbers = struct.pack("<4q", run_seed, step, prompt_index, sample_index)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8, person=b"megarl-sample").digest(), "little") >> 1
