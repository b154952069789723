"""What became of the other processes: who has failed, who is silent, and what all agree on.

Collectives know only that something is wrong: that a connection was closed, or that a time has run out. Beside them,
every process keeps a connection to a store (torch's ``TCPStore``), where it gives a sign of life twice a second, and
leaves the reason if it fails.
"""

from __future__ import annotations

import atexit
import contextlib
import re
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist

from lightning_ort.errors import RankError

__all__ = ["Ranks", "is_of_transport"]

_BEAT = 0.5
"""seconds between two signs of life"""
_SILENT = 4.0
"""seconds without one after which a process is taken for dead: one that compiles may be late"""
_PATIENCE = timedelta(seconds=20)
_COLLECTING = 10.0
"""seconds that rank 0 waits for what others have to tell it"""
_READING = 8.0
"""seconds that rank 0, with whom the store ends, waits at most for others to have read why"""
_FAILURE = "failure"
_OF_TRANSPORT = re.compile(
    r"(Gloo \w+ failed with )?\[[^]\n]*\bgloo/[^]\n]*\]|Application timeout caused pair closure|NCCL Error \d"
)
"""how messages of gloo begin, with its source file as a rule, and those of NCCL that are of no type of their own"""
_GO_ON = "Go on from the last checkpoint: trainer.fit(..., ckpt_path='last')."


class Ranks:
    """The processes of torch's default group, as one of them sees the others.

    A thread gives the signs of life, until :meth:`close` or the end of the interpreter.

    Args:
        host: name or address of the machine of rank 0, as the others reach it.

    Raises:
        RuntimeError: there is no process group.
    """

    _kept: ClassVar[Ranks | dist.DistError | None] = None
    _kept_for: ClassVar[weakref.ref[dist.ProcessGroup] | None] = None

    def __init__(self, host: str) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._host = host
        self._heard: str | None = None
        self._collections = 0
        self._store = self._opened()
        # a store serves one call at a time
        self._beating = self._client(host, self._store.port)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lightning_ort ranks", daemon=True)
        self._thread.start()
        # no thread may be within the store when the interpreter goes: C++ ends the process by std::terminate
        atexit.register(self.close)

    @classmethod
    def of_group(cls, host: str) -> Ranks:
        """Those of the present process group, which are made once for it and kept until the process ends.

        Args:
            host: see the class.

        Raises:
            RuntimeError: there is no process group.
            torch.distributed.DistError: this process did not reach rank 0 when they were to be made.
        """
        group = dist.group.WORLD
        if group is None or cls._kept_for is None or cls._kept_for() is not group:
            if isinstance(cls._kept, Ranks):
                cls._kept.close()
            # a failure is kept too: the others do not try again
            try:
                cls._kept = cls(host)
            except dist.DistError as error:
                cls._kept = error
            cls._kept_for = None if group is None else weakref.ref(group)
        if isinstance(cls._kept, Ranks):
            return cls._kept
        assert cls._kept is not None
        raise cls._kept

    def _opened(self) -> dist.TCPStore:
        """The store, which rank 0 serves on a free port."""
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if self.rank == 0 else None
        told = [store.port if store is not None else 0]
        dist.broadcast_object_list(told, 0)
        return store or self._client(self._host, told[0])

    @staticmethod
    def _client(host: str, port: int) -> dist.TCPStore:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)

    def _beat(self) -> None:
        # the process ends, or rank 0 and its store have: who finds that out says so
        with contextlib.suppress(RuntimeError):
            while self._heard is None and not self._ended.wait(_BEAT):
                self._beating.add(f"beats/{self.rank}", 1)
                if self._beating.check([_FAILURE]):
                    self._heard = self._understood(self._beating.get(_FAILURE))
                    self._beating.set(f"read/{self.rank}", "")

    def close(self) -> None:
        """Give no more signs of life, and say that this is the end."""
        atexit.unregister(self.close)
        with contextlib.suppress(RuntimeError):  # rank 0 was first
            self._store.set(f"done/{self.rank}", "")
        self._ended.set()
        self._thread.join(_READING)  # a call whose other side has lost its network may take longer

    def agreed(self, key: str, proposal: str) -> str:
        """What the first process has proposed that was asked about ``key``."""
        try:
            found = self._store.compare_set(key, "", proposal)
        except RuntimeError:
            return proposal  # the next collective says what has happened
        return found.decode()

    def collected(self, text: str) -> dict[int, str | None]:
        """On rank 0, what each rank gives in its call of this method, one call after the other; elsewhere, nothing.

        It is no collective: who waits is rank 0, for at most some seconds, and ``None`` stands for what has not come.
        """
        self._collections += 1
        keys = [f"collected/{self._collections}/{rank}" for rank in range(self.world_size)]
        found: dict[int, str | None] = dict.fromkeys(range(self.world_size))
        with contextlib.suppress(RuntimeError):  # rank 0 has ended
            self._store.set(keys[self.rank], text)
            if self.rank == 0:
                until = time.monotonic() + _COLLECTING
                while not self._store.check(keys) and self._heard is None and time.monotonic() < until:
                    time.sleep(_BEAT / 20)
                for rank, key in enumerate(keys):
                    if self._store.check([key]):
                        found[rank] = self._store.get(key).decode()
        return found if self.rank == 0 else {}

    def explain(self, error: BaseException) -> None:
        """Tell the others of ``error``, or find out whose error it was and tell them that.

        Raises:
            RankError: a collective has failed because of another process.
        """
        if not is_of_transport(error):
            self._tell(self.rank, f"rank {self.rank} of {self.world_size} {_fate(error)}")
            return
        with _not_terminated():
            whose, text = self._cause() or (self.rank, self._of_living(error))
        if whose is not None:
            self._tell(whose, text)
        elif self.rank == 0:
            self._wait_for_readers()
        raise RankError(text) from error

    def _tell(self, whose: int, text: str) -> None:
        """Leave for the others what has become of rank ``whose``; what was left before stays."""
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_FAILURE, "", f"{whose} {text}")
            for rank in {whose, self.rank}:  # who need not read it
                self._store.set(f"read/{rank}", "")
        if self.rank == 0:
            self._wait_for_readers()

    def _wait_for_readers(self) -> None:
        """On rank 0, whose store ends with it: let all who live read what is in it; later they may be busy."""
        last: dict[int, tuple[int, float]] = {}
        until = time.monotonic() + _READING
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < until:
                late = [rank for rank in range(1, self.world_size) if not self._store.check([f"read/{rank}"])]
                living = [rank for rank in late if not self._is_silent(rank, last)]
                if not living:
                    return
                time.sleep(_BEAT / 4)

    def _understood(self, told: bytes) -> str:
        whose, _, text = told.decode().partition(" ")
        if int(whose) != self.rank:
            return text
        return (
            f"the other ranks have taken rank {whose} of {self.world_size}, which is this one, for ended, as it gave "
            f"no sign of life for {_SILENT:.0f} s, and have ended themselves. {_GO_ON}"
        )

    def _is_silent(self, rank: int, last: dict[int, tuple[int, float]]) -> bool:
        """Whether ``rank`` has given no sign of life for long.

        Args:
            rank: another one.
            last: rank to the signs of earlier looks, and when they were new.
        """
        beats, now = self._store.add(f"beats/{rank}", 0), time.monotonic()
        known, since = last.get(rank, (-1, now))
        if beats != known:
            last[rank] = beats, now
            return False
        return now - since > _SILENT

    def _cause(self) -> tuple[int | None, str] | None:
        """Which other process has failed, and why; ``None`` if all are well.

        Returns:
            Its rank, if this one is the first to know it, and what is to be said.
        """
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        last: dict[int, tuple[int, float]] = {}
        began = time.monotonic()
        while time.monotonic() - began < 2 * _SILENT:
            if self._heard is not None:
                return None, self._heard
            try:
                for rank in others:
                    if self._is_silent(rank, last):
                        return rank, self._of_silent(rank)
            except RuntimeError:  # nobody serves the store any more
                return None, (
                    f"rank 0 of {self.world_size} has ended without a word (killed, out of memory, or done before the "
                    f"others?). Its own output may say more. {_GO_ON}"
                )
            time.sleep(_BEAT / 2)
        return None

    def _of_living(self, error: BaseException) -> str:
        """What is to be said of a collective that has failed although all are there."""
        text = f"rank {self.rank} of {self.world_size} could not exchange with the others, of whom all live: {error}"
        if not re.search("timed? ?out", str(error), re.IGNORECASE):
            return text
        return (
            f"{text}. They may be slower, or have fewer batches, or exchange something else. ORTStrategy(timeout=...) "
            "waits longer."
        )

    def _of_silent(self, rank: int) -> str:
        """What is to be said of a process without signs of life."""
        name = f"rank {rank} of {self.world_size}"
        if self._store.check([f"done/{rank}"]):
            return (
                f"{name} has come to the end of its program, and what it was to contribute is missing: it had fewer "
                "batches than this one, or stopped on its own. All ranks must make the same steps."
            )
        return (
            f"{name} has ended without a word (killed, or out of memory?), and what it was to contribute is missing. "
            f"Its own output may say more. {_GO_ON}"
        )


@contextlib.contextmanager
def _not_terminated() -> Iterator[None]:
    """While it is found out why a process ends, whoever started it may want it to end as well.

    Lightning's handler for that makes a collective, whose error would take the place of the one to be explained.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _fate(error: BaseException) -> str:
    """What has become of a process that has ended by ``error``."""
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    if isinstance(error, KeyboardInterrupt):
        return f"was interrupted ({what}). {_GO_ON}"
    if isinstance(error, SystemExit):
        return f"has left its program ({what}). {_GO_ON}"
    return f"has failed: {what}"


def is_of_transport(error: BaseException) -> bool:
    """Whether a collective has failed, on this side or the other, be it as the cause of ``error``."""
    cause: BaseException | None = error
    while cause is not None:
        # the reducer of DistributedDataParallel raises gloo's errors as they are, and so does a user's work.wait(): how
        # the message begins is all that tells them from others
        if isinstance(cause, dist.DistError) or (isinstance(cause, RuntimeError) and _OF_TRANSPORT.match(str(cause))):
            return True
        cause = cause.__cause__
    return False
