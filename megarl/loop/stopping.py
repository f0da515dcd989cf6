"""Being told to stop: the first signal lets the step in progress end, the second does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from megarl.errors import Interrupted


class StopRequest:
    """Listens for SIGINT and SIGTERM from `with` on. `signal` is the first one that came, or None; `what` says what it leads to.

    The second (with `at_once` the first) is raised as KeyboardInterrupt wherever the program is, also out of a wait for Ray, and leaves
    the block as Interrupted once everything that was started in it has been ended. One more ends this process itself.
    """

    def __init__(self, announce: Callable[[str], None], what: str, *, at_once: bool = False):
        self.signal: signal.Signals | None = None
        self._announce, self._what, self._at_once = announce, what, at_once
        self._interrupted_by: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        self.listen()
        return self

    def listen(self) -> None:
        """Install the handlers, again if somebody has put theirs in the place."""
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.signal(number, self._received)
            self._before.setdefault(number, before)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Not raised by the handler: where Ray was waiting it puts a KeyboardInterrupt of its own in the place. And whatever ends a block
        # that is being cut off, it is no news.
        if kind is not None and self._interrupted_by is not None:
            raise Interrupted(self._interrupted_by) from None

    @property
    def exit_code(self) -> int:
        """What a shell reports for a program that the signal ended."""
        return 128 + self.signal if self.signal else 0

    def _received(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        if self._interrupted_by is not None:
            # Ending the roles takes too long, or hangs. They are not left behind: the cluster ends with the process that owns it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.signal is None and not self._at_once:
            self.signal = signal.Signals(number)
            self._announce(f"{name}: {self._what} (once more: at once)")
        else:
            self.signal = self.signal or signal.Signals(number)
            self._interrupted_by = number
            self._announce(f"{name}: {self._what if self._at_once else 'stopping at once'}")
            raise KeyboardInterrupt
