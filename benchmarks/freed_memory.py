"""``python -m benchmarks.freed_memory``: steps with large activations, and the pages that the system hands out in them.

Convolutions over images of 256 by 256 pixels have activations of 67 MB, which glibc gives back to the system as soon as
they are freed, so that the next ones are new pages, each filled with zeros when it is touched. Under ``strategy="ort"``
freed memory is kept (``lightning_ort/runtime/heap.py``), under "auto" by glibc's own variables, which have to be set
before a process starts. Each way has processes of its own, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_ort import ORTStrategy
from lightning_ort.bench.child import peak_memory
from lightning_ort.bench.machine import described
from lightning_ort.bench.table import caption, markdown_table

_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_WAYS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("auto", "given back"): {},
    ("auto", "kept"): _KEPT,
    ("ort", "given back"): {"LIGHTNING_ORT_KEEP_MEMORY": "0"},
    ("ort", "kept"): {},
}
"""strategy and what becomes of freed memory to variables of the environment"""


class Images(LightningModule):
    """Three pairs of convolutions with batch normalization, two of them on smaller images."""

    def __init__(self) -> None:
        super().__init__()

        def pair(inputs: int, outputs: int) -> list[nn.Module]:
            first, second = (nn.Conv2d(n, outputs, 3, padding=1, bias=False) for n in (inputs, outputs))
            return [first, nn.BatchNorm2d(outputs), nn.ReLU(), second, nn.BatchNorm2d(outputs), nn.ReLU()]

        self.net = nn.Sequential(
            *pair(3, 32), nn.MaxPool2d(2), *pair(32, 64), nn.MaxPool2d(2), *pair(64, 64), nn.Upsample(scale_factor=4),
            nn.Conv2d(64, 2, 1),
        )  # fmt: skip

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Batches:
    """The same few, again and again."""

    def __init__(self, rows: int, pixels: int) -> None:
        self._batches = [torch.randn(rows, 3, pixels, pixels) for _ in range(2)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return itertools.cycle(self._batches)


class Steps(Callback):
    """When each step has ended, and the pages that the process has touched for the first time by then."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, int]] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append((time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt))


def measure(strategy: str, rows: int, pixels: int, steps: int) -> dict[str, float]:
    """Median milliseconds and pages of the second half of ``steps``, and the peak of the process, in MB."""
    seed_everything(0, verbose=False)
    ends = Steps()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=ORTStrategy(print_report=False) if strategy == "ort" else strategy,
        max_steps=steps, callbacks=[ends], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Images(), Batches(rows, pixels))
    each = [(1e3 * (b[0] - a[0]), b[1] - a[1]) for a, b in itertools.pairwise(ends.ends)][steps // 2 :]
    ms, pages = (statistics.median(values) for values in zip(*each, strict=True))
    return {"ms": ms, "pages": pages, "mb": peak_memory() / 1e6}


def _in_a_process(way: tuple[str, str], options: argparse.Namespace) -> dict[str, float]:
    sizes = [str(n) for n in (options.rows, options.pixels, options.steps)]
    command = [sys.executable, "-m", "benchmarks.freed_memory", "--child", way[0], *sizes]
    output = subprocess.run(
        command, env={**os.environ, **_WAYS[way]}, check=True, capture_output=True, text=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> list[list[str]]:
    """Measure and print the table; returns its rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.freed_memory", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (default: 3)")
    parser.add_argument("--steps", type=int, default=12, help="of which the later half counts (default: 12)")
    parser.add_argument("--rows", type=int, default=8, help="of a batch (default: 8)")
    parser.add_argument("--pixels", type=int, default=256, help="of a side, a multiple of 4 (default: 256)")
    options = parser.parse_args(arguments)
    found: dict[tuple[str, str], list[dict[str, float]]] = {way: [] for way in _WAYS}
    for _, way in itertools.product(range(options.rounds), _WAYS):
        found[way].append(_in_a_process(way, options))
    usual = statistics.median(x["ms"] for x in found["auto", "given back"])
    rows = []
    for way, turns in found.items():
        ms, pages, mb = (statistics.median(x[name] for x in turns) for name in ("ms", "pages", "mb"))
        rows.append([*way, f"{ms:.0f} ms", f"{usual / ms:.2f}x", f"{pages:,.0f}", f"{mb:,.0f} MB"])
    report = described(rounds=options.rounds, steps=options.steps, precision="32-true")
    print(markdown_table(("strategy", "freed memory", "step", "speed", "new pages", "peak memory"), rows))
    print(caption({**report, "results": [{"threads": torch.get_num_threads()}]}))
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        print(json.dumps(measure(sys.argv[2], *map(int, sys.argv[3:]))))
    else:
        main()
