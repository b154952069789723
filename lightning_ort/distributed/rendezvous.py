"""The meeting of processes that train together."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from lightning_ort.distributed.ranks import is_of_transport
from lightning_ort.errors import RankError

__all__ = ["fresh_part", "init_process_group", "naming_who_has_ended"]

_PRESENT = "lightning_ort/present"
_PAUSE = 0.05
"""seconds between two looks at who is there"""
_ROLL = 5.0
"""seconds in which others come to the end of something that has failed"""


def init_process_group(
    backend: str,
    host: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta = default_pg_timeout,
    **options: Any,
) -> dist.Store:
    """Make torch's default process group, with errors that say which process has not come.

    Processes of torchrun meet in a store of its agent, which keeps what processes have left that it has ended since
    (``--max-restarts``, or a node that joins): gloo would read the addresses of these, and wait for them. They meet in
    a new part of that store.

    Args:
        backend: see torch, as ``timeout`` and ``options``.
        host: ``MASTER_ADDR``: name or address of the machine of rank 0, as the others reach it.
        port: ``MASTER_PORT``: there, free for rank 0 to use, or in use by torchrun.
        rank: of this process.
        world_size: how many there are.

    Returns:
        The store in which they have met.

    Raises:
        RankError: not all have come within ``timeout``, or one has ended meanwhile.
    """
    # as torch itself asks whether an agent of torchrun serves the store
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = rank == 0 and not served
    try:
        store: dist.Store = dist.TCPStore(
            host, port, is_master=first, wait_for_workers=False, timeout=timeout, multi_tenant=first
        )
        store = fresh_part(store, rank, world_size, timeout)
    except dist.DistError as error:
        raise RankError(
            f"rank {rank} of {world_size} does not reach rank 0 at {host}, port {port}, within "
            f"{timeout.total_seconds():.0f} s: rank 0 of {world_size} has ended, or is elsewhere ({error}). Its own "
            "output may say more; MASTER_ADDR and MASTER_PORT are where it is looked for."
        ) from error
    with naming_who_has_ended(store, "group", rank, world_size):
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, **options)
    atexit.register(_leave)
    return store


@contextlib.contextmanager
def naming_who_has_ended(store: dist.Store, stage: str, rank: int, world_size: int) -> Iterator[None]:
    """Within: something that all processes do once; where that fails because one has ended, others find out which.

    Args:
        store: in which they have met.
        stage: what they do, in a word.
        rank: of this process.
        world_size: how many there are.

    Raises:
        RankError: names who has ended.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_of_transport(error):
            raise
        ended = _not_here(store, stage, rank, world_size)
        if not ended:
            raise
        raise RankError(
            f"{' and '.join(f'rank {other} of {world_size}' for other in ended)} has ended before the first step "
            f"({error}). Its own output may say why. Start all again."
        ) from error
    with contextlib.suppress(RuntimeError):  # what comes next finds out
        store.set(f"{stage}/{rank}", "")


def _not_here(store: dist.Store, stage: str, rank: int, world_size: int) -> list[int]:
    """Who has not come to the end of ``stage``, be it without success."""
    answers = [f"{stage}/{other}" for other in range(world_size)]
    until = time.monotonic() + _ROLL
    try:
        store.set(answers[rank], "")
        while not store.check(answers) and time.monotonic() < until:
            time.sleep(_PAUSE)
        return [other for other, answer in enumerate(answers) if not store.check([answer])]
    except RuntimeError:  # nobody serves the store any more
        return [0]


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def fresh_part(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """A part of ``store`` that is the same for all who are here, and that nobody has written to before.

    Each process leaves a name that nobody else has, and a mark in the part that is called after the names of all. When
    all marks are there, all have read the same names, and none of them is of a process that has ended.

    Args:
        store: that all reach; earlier processes may have used it in the same way.
        rank: of this process.
        world_size: how many there are.
        timeout: for all to come.

    Raises:
        RankError: not all have come.
    """
    names = [f"{_PRESENT}/{other}" for other in range(world_size)]
    store.set(names[rank], uuid.uuid4().hex)
    part, until = "", time.monotonic() + timeout.total_seconds()
    while time.monotonic() < until:
        if store.check(names):
            part = hashlib.sha256(b"".join(store.get(name) for name in names)).hexdigest()
            store.set(f"{part}/{rank}", "")
            if store.check([f"{part}/{other}" for other in range(world_size)]):
                return dist.PrefixStore(part, store)
        time.sleep(_PAUSE)
    marks = [f"{part}/{other}" for other in range(world_size)] if part else names
    missing = [str(other) for other, mark in enumerate(marks) if not store.check([mark])]
    raise RankError(
        f"rank {rank} of {world_size} has waited {timeout.total_seconds():.0f} s for rank {', '.join(missing)}, which "
        "has not come: its own output may say why. Start all again; timeout= is how long they wait for each other."
    )
