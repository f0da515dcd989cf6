"""From responses to verdicts with their effects, as a recipe states them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from megarl.errors import InputError, RunFailed
from megarl.tasks.dataset import Example
from megarl.tasks.pool import VerifierPool
from megarl.tasks.verdict import Status, Verdict
from megarl.tasks.verifiers import PURE, judge, make_verifier

Effect = Literal["zero", "drop"]


class Judge:
    """Judges responses with one verifier: in worker processes with limits, or here where the verifier is pure and its time bounded.

    workers: processes that judge at the same time; None: one per core that this process may use. timeout_s: for one response.
    memory_mib: for one worker, beside what the loaded verifier takes. InputError for an unknown verifier or argument.
    """

    def __init__(self, name: str, args: Mapping[str, Any], *, workers: int | None = None, timeout_s: float = 10.0, memory_mib: int = 2048):
        self._verifier = make_verifier(name, dict(args))  # here, so that a mistake is found before any process is started
        own = getattr(self._verifier, "time_s", 0.0)
        if own >= timeout_s:
            raise InputError(
                f"verifier.timeout_s is {timeout_s:g} s, but {name} takes up to verifier.args.time_s = {own:g} s; raise it above."
            )
        self._pool = None
        if name not in PURE:
            count = workers or len(os.sched_getaffinity(0))
            self._pool = VerifierPool(name, dict(args), workers=count, timeout_s=timeout_s, memory_mib=memory_mib)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker processes. Without it they end with this process."""
        if self._pool is not None:
            self._pool.close()

    def __call__(self, responses: Sequence[str], examples: Sequence[Example]) -> list[Verdict]:
        """One verdict per response, in order. InputError for an example that the verifier cannot judge."""
        if self._pool is None:
            return judge(self._verifier, responses, examples)
        return self._pool.judge(responses, examples)


def apply_effects(verdicts: Sequence[Verdict], effects: Mapping[Status, Effect]) -> list[Verdict]:
    """The verdicts with the reward 0 where nothing is known about the response, left out of the loss if the effect is `drop`.

    `effects`: of `timeout` and `crash`. A response that was skipped on purpose is always left out.
    """
    effects = {**effects, "skipped": "drop"}
    return [
        replace(verdict, reward=0.0, vector=None, in_loss=effects[verdict.status] == "zero") if verdict.status in effects else verdict
        for verdict in verdicts
    ]


def check_shares(verdicts: Sequence[Verdict], largest: Mapping[Status, float]) -> None:
    """RunFailed if a larger share of the verdicts than allowed has a status: the verifier is broken, and training on it would be, too.

    `largest`: status -> the share that is allowed; the recipe key is `verifier.max_<status>_share`.
    """
    for status, share in largest.items():
        found = [verdict for verdict in verdicts if verdict.status == status]
        if len(found) > share * len(verdicts):
            raise RunFailed(
                f"{len(found)} of {len(verdicts)} verdicts are `{status}`, `verifier.max_{status}_share` allows a share of {share:g}; "
                f"the first: {found[0].detail or 'without a reason'}. Mend the verifier or raise its limits"
            )
