"""Ctrl-C while a step is compiled."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Interrupts"]


class Interrupts:
    """Holds a ``KeyboardInterrupt`` back until what is being compiled is compiled.

    Tracing goes from Python through torch's C++ into Python again. torch ends the process, by ``std::terminate``, where
    an exception wants to leave some of those inner functions, so that no callback is called and no file is closed.

    Args:
        announce: called with a text when an interrupt has to wait.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._holding = self._pending = False

    def hold(self) -> None:
        """Hold back from now on, in the thread that gets signals, and where nobody else has an own way with them."""
        is_main = threading.current_thread() is threading.main_thread()
        if not self._holding and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._holding = True

    def release(self) -> None:
        """Hold back no longer.

        Raises:
            KeyboardInterrupt: where one had to wait.
        """
        if self._holding and self.forget():
            raise KeyboardInterrupt

    def forget(self) -> bool:
        """Hold back no longer; returns whether one had to wait."""
        if self._holding:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        pending, self._holding, self._pending = self._pending, False, False
        return pending

    def _note(self, number: int, frame: Any) -> None:
        if self._pending:
            self.forget()
            raise KeyboardInterrupt
        self._pending = True
        self._announce("Interrupted: ends when this step is compiled. Ctrl-C once more ends it at once.")
