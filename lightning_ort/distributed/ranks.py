"""What became of the other processes: who has failed, who is silent, and what all agree on.

Collectives know only that something is wrong: that a connection was closed, or that a time has run out. Beside them,
every process keeps a connection to a store (torch's ``TCPStore``), where it gives a sign of life twice a second, and
leaves the reason if it fails.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

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
_FAILURE = "failure"


class Ranks:
    """The processes of torch's default group, as one of them sees the others.

    Args:
        host: name or address of the machine of rank 0, as the others reach it.

    Raises:
        RuntimeError: there is no process group.
    """

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
                    self._heard = self._beating.get(_FAILURE).decode()

    def close(self) -> None:
        """Give no more signs of life."""
        self._ended.set()
        self._thread.join()

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

    def explain(self, error: Exception) -> None:
        """Tell the others of ``error``, or find out whose error it was.

        Raises:
            RankError: a collective has failed because of another process.
        """
        if not is_of_transport(error):
            self._leave(error)
            return
        cause = self._cause()
        if cause is not None:
            raise RankError(cause) from error

    def _leave(self, error: Exception) -> None:
        text = f"rank {self.rank} of {self.world_size} has failed: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_FAILURE, "", text)
        if self.rank == 0:  # its store ends with it, and all shall have read this
            time.sleep(3 * _BEAT)

    def _cause(self) -> str | None:
        """Which other process has failed, and why; ``None`` if all are well."""
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        last: dict[int, tuple[int, float]] = {}
        began = time.monotonic()
        while time.monotonic() - began < 2 * _SILENT:
            now = time.monotonic()
            if self._heard is not None:
                return self._heard
            try:
                for rank in others:
                    beats = self._store.add(f"beats/{rank}", 0)
                    known, since = last.get(rank, (-1, now))
                    if beats != known:
                        last[rank] = beats, now
                    elif now - since > _SILENT:
                        return (
                            f"rank {rank} of {self.world_size} has ended without a word (killed, or out of memory?), "
                            "and what it was to contribute is missing. Its own output may say more. Go on from the "
                            "last checkpoint: trainer.fit(..., ckpt_path='last')."
                        )
            except RuntimeError:  # nobody serves the store any more
                return (
                    f"rank 0 of {self.world_size} has ended without a word (killed, or out of memory?). Its own output "
                    "may say more. Go on from the last checkpoint: trainer.fit(..., ckpt_path='last')."
                )
            time.sleep(_BEAT / 2)
        return None


def is_of_transport(error: BaseException) -> bool:
    """Whether a collective has failed, on this side or the other."""
    if isinstance(error, dist.DistError):
        return True
    # the reducer of DistributedDataParallel raises gloo's errors as they are
    text = str(error)
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "NCCL", "closed by peer"))
