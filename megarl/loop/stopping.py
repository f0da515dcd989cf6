"""Being told to stop: the first signal lets the step in progress end, the second does not."""

from __future__ import annotations

import signal
from collections.abc import Callable


class StopRequest:
    """Listens for SIGINT and SIGTERM from `with` on. `signal` is the first one that came, or None; `what` says what it leads to."""

    def __init__(self, announce: Callable[[str], None], what: str):
        self.signal: signal.Signals | None = None
        self._announce, self._what = announce, what
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, again if somebody has put theirs in the place."""
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._received)
            self._before.setdefault(number, before)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program that the signal ended."""
        return 128 + self.signal if self.signal else 0

    def _received(self, number: int, _frame: object) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        self._announce(f"{self.signal.name}: {self._what} (once more: at once)")
