"""What takes long says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

__all__ = ["Announcement"]


class Announcement:
    """Tells what is being done once it has taken some time, and what it took in the end.

    Args:
        say: called with a text, from a thread of its own at the beginning.
        doing: what is told then.
        done: what is told when it has ended, where the beginning was; ``{seconds}`` in it are what it took.
        after: seconds until anything is told.
    """

    def __init__(self, say: Callable[[str], None], doing: str, done: str, *, after: float = 3.0) -> None:
        self._say, self._doing, self._done = say, doing, done
        self._began, self._told = time.perf_counter(), threading.Event()
        self._timer = threading.Timer(after, self._tell)
        self._timer.daemon = True
        self._timer.start()

    def _tell(self) -> None:
        self._told.set()
        self._say(self._doing)

    def end(self) -> float:
        """It has ended; returns the seconds it took."""
        seconds = time.perf_counter() - self._began
        self.drop()
        if self._told.is_set():
            self._say(self._done.replace("{seconds}", f"{seconds:.1f} s"))
        return seconds

    def drop(self) -> None:
        """Say nothing from now on that has not been said."""
        self._timer.cancel()

    def __enter__(self) -> Announcement:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        else:
            self.drop()
