"""Ctrl-C, and alarms, while a step is compiled."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Interrupts"]

_ALARM = getattr(signal, "SIGALRM", None)
"""by which timeouts come, of tests and of jobs; Windows has none"""


class Interrupts:
    """Holds Ctrl-C, and handlers of alarms, back until what is being compiled is compiled.

    Tracing goes from Python through torch's C++ into Python again. torch ends the process, by ``std::terminate``, where
    an exception wants to leave some of those inner functions, so that no callback is called and no file is closed.
    Others take whatever is raised in them for a reason to compile in another way, and go on.

    Args:
        announce: called with a text when Ctrl-C has to wait.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        # signal to the handler that it has, and those of them that have come
        self._held: dict[int, Callable[[int, Any], Any]] = {}
        self._pending: list[int] = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold back in a block; what has come then is raised behind it."""
        self.hold()
        try:
            yield
        except BaseException:
            self.forget()
            raise
        self.release()

    def hold(self) -> None:
        """Hold back from now on, in the thread that gets signals, and where nobody else has an own way with Ctrl-C."""
        if self._held or threading.current_thread() is not threading.main_thread():
            return
        for number in filter(None, (signal.SIGINT, _ALARM)):
            handler = signal.getsignal(number)
            if handler is signal.default_int_handler or (number == _ALARM and callable(handler)):
                self._held[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Hold back no longer.

        Raises:
            KeyboardInterrupt: where one had to wait. So does what a handler of an alarm raises.
        """
        held, pending = self._held, self._pending
        self.forget()
        for number in pending:
            held[number](number, sys._getframe())

    def forget(self) -> None:
        """Hold back no longer; what had to wait does not come."""
        for number, handler in self._held.items():
            signal.signal(number, handler)
        self._held, self._pending = {}, []

    def _note(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT:
            if number in self._pending:
                self.forget()
                raise KeyboardInterrupt
            self._announce("Interrupted: ends when this step is compiled. Ctrl-C once more ends it at once.")
        if number not in self._pending:
            self._pending.append(number)
