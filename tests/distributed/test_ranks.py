"""What one process knows of the others: which errors are of a transport, and who waits for whom."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from lightning_ort import RankError
from lightning_ort.distributed import ranks
from lightning_ort.distributed.ranks import Ranks, is_of_transport

pytestmark = pytest.mark.stock_only

CLOSED = RuntimeError(
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:29608."
)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        CLOSED,
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms"),
        RuntimeError("Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] no error"),
        RuntimeError("Application timeout caused pair closure"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited"),
        dist.DistNetworkError("failed to recv, got 0 bytes"),
        caused(ValueError("could not sum"), CLOSED),
    ],
)
def test_errors_of_a_transport(error):
    assert is_of_transport(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("my own words about gloo"),
        RuntimeError("[mine] gloo/ and NCCL: closed by peer"),
        RuntimeError("NCCL is what I wanted"),
        ValueError(str(CLOSED)),
        caused(RuntimeError("mine"), ValueError("gloo")),
    ],
)
def test_errors_of_a_user(error):
    assert not is_of_transport(error)


class OfTwo(Ranks):
    """Rank 0 of two, whose other process is the test."""

    def _opened(self):
        self.world_size = 2
        return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def first(monkeypatch):
    monkeypatch.setattr(ranks, "_BEAT", 0.02)
    monkeypatch.setattr(ranks, "_SILENT", 0.4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = OfTwo("localhost")
    yield found
    found.close()
    dist.destroy_process_group()


@pytest.fixture
def second(first):
    """What the other process has: a connection to the store, on which it beats while this is set."""
    beats = threading.Event()
    beats.set()
    store = dist.TCPStore("localhost", first._store.port, is_master=False, wait_for_workers=False)

    def beat() -> None:
        while beats.is_set():
            store.add("beats/1", 1)
            time.sleep(0.02)

    thread = threading.Thread(target=beat)
    thread.start()
    yield beats
    beats.clear()
    thread.join()


def test_the_first_rank_tells_who_is_silent(first):
    with pytest.raises(RankError, match=r"^rank 1 of 2 has ended without a word"):
        first.explain(CLOSED)
    assert first._store.get("failure").startswith(b"1 rank 1 of 2 has ended without a word")


def test_the_first_rank_waits_for_those_who_live_to_read(first, second):
    reader = dist.TCPStore("localhost", first._store.port, is_master=False, wait_for_workers=False)
    late = threading.Timer(1.0, reader.set, ("read/1", ""))
    late.start()
    began = time.monotonic()
    first.explain(ValueError("mine"))
    assert 1.0 <= time.monotonic() - began < 4.0
    assert first._store.get("failure") == b"0 rank 0 of 2 has failed: ValueError: mine"
    late.join()


def test_the_first_rank_waits_no_longer_than_that(first, second, monkeypatch):
    monkeypatch.setattr(ranks, "_READING", 0.8)
    began = time.monotonic()
    first.explain(ValueError("mine"))
    assert 0.8 <= time.monotonic() - began < 4.0


@pytest.mark.parametrize("error", [CLOSED, RuntimeError("Application timeout caused pair closure")])
def test_a_failed_collective_of_which_all_live_is_told_as_ones_own(first, second, error):
    second_has_read = threading.Timer(0.1, lambda: first._beating.set("read/1", ""))
    second_has_read.start()
    with pytest.raises(RankError, match="rank 0 of 2 could not exchange with the others, of whom all live") as raised:
        first.explain(error)
    assert ("timeout=" in str(raised.value)) == (error is not CLOSED)
    assert first._store.get("failure").startswith(b"0 rank 0 of 2 could not exchange")
    second_has_read.join()


def test_who_is_done_is_not_taken_for_killed(first):
    first._store.set("done/1", "")  # as the other one's close does
    with pytest.raises(RankError, match="rank 1 of 2 has come to the end of its program"):
        first.explain(CLOSED)


def test_the_end_is_told(first):
    first.close()
    assert first._store.check(["done/0"])


def test_a_signal_to_end_does_not_take_the_place_of_the_reason(first):
    """Lightning's handler makes a collective, which fails as well."""

    def fails(number, frame):
        raise CLOSED

    before = signal.signal(signal.SIGTERM, fails)
    ending = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    ending.start()
    try:
        with pytest.raises(RankError, match="rank 1 of 2 has ended without a word"):
            first.explain(CLOSED)
        assert signal.getsignal(signal.SIGTERM) is fails
    finally:
        ending.join()
        signal.signal(signal.SIGTERM, before)


def test_who_is_taken_for_dead_learns_that(first, second):
    first._store.set("failure", "0 rank 0 of 2 has ended without a word")
    first._store.set("read/1", "")
    until = time.monotonic() + 5
    while first._heard is None and time.monotonic() < until:
        time.sleep(0.01)
    with pytest.raises(RankError, match="taken rank 0 of 2, which is this one, for ended, as it gave no sign of life"):
        first.explain(CLOSED)
