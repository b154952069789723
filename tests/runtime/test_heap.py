"""What the C library does with freed memory while something trains."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback
from modules import Classifier, table
from parity import fit, needs_ort

from lightning_ort import ORTFabricStrategy, ORTStrategy
from lightning_ort.runtime import heap

pytestmark = [needs_ort, pytest.mark.stock_only]
is_glibc = heap._function("mallopt") is not None
needs_glibc = pytest.mark.skipif(not is_glibc, reason="the C library is not glibc")

KEPT, USUAL = [(-3, 2**31 - 1), (-1, -1)], [(-3, 32 << 20), (-1, 64 << 20)]


class Owner:
    pass


@pytest.fixture
def calls(monkeypatch):
    """What the C library is told, in the place of telling it."""
    found = []

    def function(name):
        return lambda *args: found.append(args if name == "mallopt" else name)

    for name in (*heap._SETTINGS, "GLIBC_TUNABLES", "LIGHTNING_ORT_KEEP_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(heap, "_function", function)
    monkeypatch.setattr(heap, "_has_room", lambda: True)
    monkeypatch.setattr(heap._Heap, "owners", 0)
    monkeypatch.setattr(heap._Heap, "keeps", False)
    return found


def test_from_the_first_owner_to_the_last(calls):
    first, second = Owner(), Owner()
    let_go = heap.keep_freed_memory(first)
    heap.keep_freed_memory(second)
    assert calls == KEPT
    let_go()
    let_go()
    assert calls == KEPT
    del second
    gc.collect()
    assert calls == [*KEPT, *USUAL, "malloc_trim"]
    heap.keep_freed_memory(first)
    assert calls[5:] == KEPT


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LIGHTNING_ORT_KEEP_MEMORY", "0"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1"),
    ],
)
def test_where_others_have_set_it(name, value, calls, monkeypatch):
    monkeypatch.setenv(name, value)
    owner = Owner()
    heap.keep_freed_memory(owner)()
    assert not calls


def test_where_the_library_is_another(calls, monkeypatch):
    monkeypatch.setattr(heap, "_function", lambda name: None)
    owner = Owner()
    let_go = heap.keep_freed_memory(owner)
    heap.watch()
    heap.trim()
    let_go()
    assert not calls


def test_when_memory_runs_out(calls, monkeypatch):
    owner = Owner()
    let_go = heap.keep_freed_memory(owner)
    heap.watch()
    assert calls == KEPT
    monkeypatch.setattr(heap, "_has_room", lambda: False)
    heap.watch()
    assert calls == [*KEPT, *USUAL, "malloc_trim"]
    heap.watch()
    let_go()
    assert len(calls) == 5
    heap.keep_freed_memory(owner)
    assert len(calls) == 5


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("rows", "room"),
    [
        ({}, True),
        ({"memory.max": "max"}, True),
        ({"memory.max": "{}"}, True),
        ({"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 5\ninactive_file 100000"}, False),
        ({"memory.max": "{}", "memory.current": "0", "memory.stat": "inactive_file 0"}, True),
    ],
    ids=["no group", "no limit", "version 1", "little", "much"],
)
def test_room_in_a_container(rows, room, tmp_path, monkeypatch):
    for name, text in rows.items():
        (tmp_path / name).write_text(text.format(1 << 50) + "\n")
    monkeypatch.setattr(heap, "_CGROUP", tmp_path)
    pretend_machine(tmp_path, monkeypatch)
    assert heap._has_room() is room


def pretend_machine(folder, monkeypatch, pages=1000, free=1 << 40):
    """The process has taken so many pages, and so many KiB are free."""
    (folder / "self").mkdir()
    (folder / "self" / "statm").write_text(f"{2 * pages} {pages} 7")
    (folder / "meminfo").write_text(f"MemTotal: {1 << 41} kB\nMemAvailable:   {free} kB\n")
    monkeypatch.setattr(heap, "_PROC", folder)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_room_of_the_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(heap, "_free_of_group", lambda: float("inf"))
    pretend_machine(tmp_path, monkeypatch, free=3000)
    assert not heap._has_room()
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    assert not heap._has_room()
    monkeypatch.setattr(heap, "_PROC", tmp_path / "nothing")
    assert not heap._has_room()


PROGRAM = """
import resource
import numpy as np
from lightning_ort.runtime.heap import keep_freed_memory
class Owner: pass
owner = Owner()
let_go = keep_freed_memory(owner)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        np.full(64 << 20, 1, np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
faults()
kept, before = faults(), resident()
let_go()
print(kept, faults(), before - resident())
"""


@needs_glibc
def test_pages_are_touched_once():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, given_back, released = map(int, found.stdout.split())
    assert kept < 100 < given_back  # of pages of 4 KiB, there are 81920; huge pages are fewer
    assert released > 60 << 20


class Looking(Callback):
    def __init__(self, error=None):
        self.seen, self.error = [], error

    def on_train_batch_end(self, *args):
        self.seen.append(heap._Heap.keeps)
        if self.error is not None:
            raise self.error


def test_while_a_trainer_fits(calls):
    looking = Looking()
    fit(Classifier, table, table, strategy=ORTStrategy(print_report=False), callbacks=lambda: [looking], max_steps=3)
    assert all(looking.seen) and len(looking.seen) == 3
    assert not heap._Heap.keeps and heap._Heap.owners == 0


def test_after_a_fit_that_has_failed(calls):
    looking = Looking(KeyError("of the test"))
    with pytest.raises(KeyError, match="of the test"):
        fit(Classifier, table, strategy=ORTStrategy(print_report=False), callbacks=lambda: [looking], max_steps=3)
    assert looking.seen == [True]
    assert not heap._Heap.keeps and heap._Heap.owners == 0


def test_while_a_module_of_fabric_lives(calls):
    fabric = Fabric(accelerator="cpu", devices=1, strategy=ORTFabricStrategy())
    module = fabric.setup_module(torch.nn.Linear(3, 2))
    module(torch.randn(4, 3)).sum().backward()
    assert heap._Heap.keeps
    del module, fabric
    torch._dynamo.reset()
    gc.collect()
    assert not heap._Heap.keeps
