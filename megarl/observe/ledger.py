"""Where the time of a step went: seconds by phase that sum to the step's time exactly."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_TICKS_PER_SECOND = 2**30  # a power of two: multiples of a tick are exact floats, so their sums are exact in any order
_RESERVED = ("other", "step")


class Ledger:
    """Books wall-clock time. Every moment belongs to one phase, the one entered last of those running, or to `other` if none runs.

    So nested phases share their time without overlap, and so do phases of several threads (generation beside training).
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns):
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._running: list[tuple[str, object]] = []
        self._booked: dict[str, int] = {}
        self._last = self._now()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Book the time of the block under `time/<name>`, also when it raises."""
        if name in _RESERVED:
            raise ValueError(f"{name!r} is computed by the ledger and cannot be a phase")
        entry = (name, object())
        with self._lock:
            self._book()
            self._running.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._book()
                self._running.remove(entry)

    def close_step(self) -> dict[str, float]:
        """Seconds since the last call (or the start): `time/<phase>` for each phase met, `time/other`, and `time/step`, their exact sum.

        A phase that is still running is booked up to now and goes on in the next step.
        """
        with self._lock:
            self._book()
            booked, self._booked = self._booked, {}
        other = booked.pop("other", 0)
        ticks = booked | {"other": other, "step": sum(booked.values()) + other}
        return {f"time/{name}": count / _TICKS_PER_SECOND for name, count in ticks.items()}

    def _book(self) -> None:
        now = self._now()
        owner = self._running[-1][0] if self._running else "other"
        self._booked[owner] = self._booked.get(owner, 0) + now - self._last
        self._last = now

    def _now(self) -> int:
        return self._clock_ns() * _TICKS_PER_SECOND // 1_000_000_000
