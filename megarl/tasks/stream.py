"""The endless stream of training prompts: epoch after epoch, each a permutation of the data set, resumable at any prompt."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megarl.errors import InputError
from megarl.tasks.prompts import Prompt

STATE_KEYS = ("fingerprint", "count", "seed", "shuffle", "epoch", "position", "head", "deferred")


class PromptStream:
    """Prompts in the order of (seed, epoch); within an epoch each prompt comes once, within a `take` none comes twice.

    Where a take crosses into the next epoch, the prompts that it already holds are deferred: in that epoch they come right after the
    take. So the state is small: epoch, position, the number of prompts that the crossing take drew (`head`) and the deferred ones.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        if not prompts:
            raise InputError("the data set holds no prompts.")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        self._start_epoch(0, head=0, deferred=[])

    @property
    def epoch(self) -> int:
        """Epoch of the last prompt taken, from 0."""
        return self._epoch

    @property
    def prompts(self) -> Sequence[Prompt]:
        """All of them, in the order of the data set."""
        return self._prompts

    def __len__(self) -> int:
        """Number of prompts in an epoch."""
        return len(self._prompts)

    def check_batch(self, n: int) -> None:
        """Raise InputError if `n` prompts cannot be taken at once without repeating one."""
        if n > len(self._prompts):
            raise InputError(
                f"a step takes {n} prompts (`rollout.prompts_per_step`), but the data set holds {len(self._prompts)}; lower it or add data."
            )

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, all different."""
        if n < 0:
            raise ValueError(f"take({n})")
        self.check_batch(n)
        taken = self._order[self._position : self._position + n]
        self._position += len(taken)
        missing = n - len(taken)
        if missing:
            before = set(taken)
            self._start_epoch(self._epoch + 1, *_defer(self._permutation(self._epoch + 1), before, missing))
            taken = taken + self._order[:missing]
            self._position = missing
        return [self._prompts[index] for index in taken]

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after the last prompt taken; JSON-safe."""
        return {
            "fingerprint": self._fingerprint,
            "count": len(self._prompts),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "head": self._head,
            "deferred": list(self._deferred),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. InputError if it belongs to other data, another seed or another order; then nothing changes."""
        missing = [key for key in STATE_KEYS if key not in state]
        if missing:
            raise InputError(f"the saved data position lacks {', '.join(missing)}: the checkpoint is damaged.")
        if state["count"] != len(self._prompts):
            raise InputError(
                f"the run was started with a data set of {state['count']} prompts, this one has {len(self._prompts)}; "
                "resume with the same data file and prompt settings."
            )
        if state["fingerprint"] != self._fingerprint:
            raise InputError(
                f"the run was started with another data set of {state['count']} prompts: their text, tokens or answers differ; "
                "resume with the same data file, prompt settings and tokenizer."
            )
        for key, now in (("seed", self._seed), ("shuffle", self._shuffle)):
            if state[key] != now:
                raise InputError(f"the run was started with {key} {state[key]}, the recipe now says {now}; resume with the same.")
        if not (_is_index(state["epoch"]) and _is_index(state["position"], len(self) + 1)):
            raise InputError(f"the saved data position is epoch {state['epoch']}, prompt {state['position']}: the checkpoint is damaged.")
        deferred = state["deferred"]
        damaged = not isinstance(deferred, list) or not all(_is_index(item, len(self)) for item in deferred)
        if damaged or len(set(deferred)) < len(deferred) or not _is_index(state["head"], len(self) + 1 - len(deferred)):
            raise InputError("the saved data position has an impossible order: the checkpoint is damaged.")
        self._start_epoch(state["epoch"], state["head"], list(deferred))
        self._position = state["position"]

    def _start_epoch(self, epoch: int, head: int, deferred: list[int]) -> None:
        self._epoch, self._head, self._deferred, self._position = epoch, head, deferred, 0
        order = self._permutation(epoch)
        later = set(deferred)
        kept = [index for index in order if index not in later]
        self._order = kept[:head] + deferred + kept[head:]

    def _permutation(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._prompts)))
        return np.random.default_rng([self._seed, epoch]).permutation(len(self._prompts)).tolist()


class MixtureStream:
    """Prompts of several sources in given proportions; each source is a stream of its own, with its own epochs.

    The source of each prompt in turn is the one that is furthest behind its share, so that after any number of prompts no source is off
    by more than one or so. `weights` need not sum to 1.
    """

    def __init__(self, sources: Mapping[str, PromptStream], weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._sources = dict(sources)
        self._shares = {name: weights[name] / total for name in sources}
        self._taken = dict.fromkeys(sources, 0)

    @property
    def epoch(self) -> int:
        """The least of the sources' epochs."""
        return min(source.epoch for source in self._sources.values())

    @property
    def prompts(self) -> list[Prompt]:
        """All of them, source by source."""
        return [prompt for source in self._sources.values() for prompt in source.prompts]

    def __len__(self) -> int:
        """Number of different prompts."""
        return sum(map(len, self._sources.values()))

    def check_batch(self, n: int) -> None:
        """Raise InputError if `n` prompts cannot be taken at once without repeating one."""
        for name, source in self._sources.items():
            most = int(n * self._shares[name]) + 1
            if most > len(source):
                raise InputError(
                    f"a step takes up to {most} of its {n} prompts (`rollout.prompts_per_step`) from {name}, which holds {len(source)}; "
                    "lower its weight, or add data."
                )

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts, all different."""
        order = []
        for _ in range(n):
            place = sum(self._taken.values()) + 1
            name = max(self._sources, key=lambda name: place * self._shares[name] - self._taken[name])
            self._taken[name] += 1
            order.append(name)
        parts = {name: iter(self._sources[name].take(count)) for name, count in Counter(order).items()}
        return [next(parts[name]) for name in order]

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on after the last prompt taken; JSON-safe."""
        return {"taken": dict(self._taken), "sources": {name: source.state_dict() for name, source in self._sources.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. InputError if it belongs to other sources or other data."""
        taken, sources = state.get("taken"), state.get("sources")
        if not isinstance(taken, dict) or not isinstance(sources, dict) or not all(map(_is_index, taken.values())):
            raise InputError("the saved data position is not that of a mixture: the checkpoint is damaged, or the run had one data file.")
        if not taken.keys() == sources.keys() == self._sources.keys():
            raise InputError(f"the run was started with the data {', '.join(sources)}, the recipe now names {', '.join(self._sources)}.")
        for name, source in self._sources.items():
            source.load_state_dict(sources[name])
        self._taken = {name: taken[name] for name in self._sources}


def make_stream(
    train: str | Mapping[str, float], read: Callable[[str], list[Prompt]], seed: int, shuffle: bool
) -> PromptStream | MixtureStream:
    """The stream of one path, or of a mixture of paths with weights, in which ids begin with the path; `read` gives a path's prompts."""
    if isinstance(train, str):
        return PromptStream(read(train), seed, shuffle)
    named = {path: [replace(prompt, id=f"{path}:{prompt.id}") for prompt in read(path)] for path in train}
    return MixtureStream({path: PromptStream(prompts, seed, shuffle) for path, prompts in named.items()}, train)


def _defer(order: list[int], before: set[int], head: int) -> tuple[int, list[int]]:
    """(head, those of `before` that come up in `order` before `head` others do)."""
    deferred: list[int] = []
    others = 0
    for index in order:
        if others == head:
            break
        if index in before:
            deferred.append(index)
        else:
            others += 1
    return head, deferred


def _is_index(value: Any, below: int | None = None) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (below is None or value < below)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over ids, tokens and answers: a change of the file, of what was dropped or of the tokenizer shows."""
    digest = hashlib.sha256()
    for prompt in prompts:
        example = prompt.example
        digest.update(json.dumps([prompt.id, prompt.token_ids, prompt.text, example.answer, example.metadata], sort_keys=True).encode())
        digest.update(b"\n")
    return digest.hexdigest()
