"""Steps of several processes: Lightning's "ddp" beside ``strategy="ort"``, in turns in the same processes.

    python -m benchmarks.data_parallel --ranks 1 2 --models mlp gpt

Each rank has the same batches, so that a step is that of the single process and the exchange of gradients (weak
scaling). Ratios count: with more ranks than cores, all of them are slower.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from benchmarks.child import Batches
from benchmarks.models import MODELS, load
from lightning_ort import ORTStrategy
from lightning_ort.bench.machine import describe_machine
from lightning_ort.bench.table import markdown_table


class Steps(Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


def measure(model: str, strategy: str, steps: int) -> float:
    """Median milliseconds of the second half of ``steps``."""
    world = int(os.environ["WORLD_SIZE"])
    seed_everything(0, verbose=False)
    timed = Steps()
    plain = "ddp" if world > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=plain if strategy == "torch" else ORTStrategy(print_report=False),
        max_steps=steps, callbacks=[timed], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(load(model).make_module(), Batches(model))
    return 1e3 * statistics.median(timed.seconds[steps // 2 :])


def rank_main(models: Sequence[str], rounds: int, steps: int) -> None:
    """What each process runs; rank 0 prints."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    for model in models:
        found: dict[str, list[float]] = {"torch": [], "ort": []}
        for _ in range(rounds):
            for strategy, times in found.items():
                times.append(measure(model, strategy, steps))
        if os.environ["RANK"] == "0":
            print("RESULT", json.dumps({"model": model, **found}), flush=True)


def launch(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all models on so many processes."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "benchmark"}
    arguments = ["--models", *options.models, "--rounds", str(options.rounds), "--steps", str(options.steps)]
    command = [sys.executable, "-m", "benchmarks.data_parallel", "--as-rank", *arguments]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            text=True,
        )
        for rank in range(ranks)
    ]
    output, _ = processes[0].communicate()
    for process in processes:
        process.wait()
    lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
    return [{"ranks": ranks, **json.loads(line)} for line in lines]


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=__doc__)
    parser.add_argument("--models", nargs="+", default=["rl", "mlp", "cnn", "gpt"], choices=sorted(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_rank:
        rank_main(options.models, options.rounds, options.steps)
        return []
    results = [result for ranks in options.ranks for result in launch(ranks, options)]
    rows = []
    for r in results:
        ratios = [a / b for a, b in zip(r["torch"], r["ort"], strict=True)]
        ours, theirs = statistics.median(r["ort"]), statistics.median(r["torch"])
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(
            (r["model"], str(r["ranks"]), f"{theirs:.2f}", f"{ours:.2f}", f"{statistics.median(ratios):.2f}", spread)
        )
    print(markdown_table(("model", "ranks", "auto or ddp, ms", "ort, ms", "speed", "rounds"), rows))
    print(describe_machine())
    return results


if __name__ == "__main__":
    main()
