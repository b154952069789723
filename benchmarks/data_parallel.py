"""Steps of several processes: Lightning's "ddp" beside ``strategy="ort"``, in turns in the same processes.

    python -m benchmarks.data_parallel --ranks 1 2 --models mlp gpt
    python -m benchmarks.data_parallel --save && python -m benchmarks.page

Weak scaling: each rank has whole batches, so that a step is that of the single process and the exchange of gradients.
Strong scaling: each rank has its part of the rows of a batch. Ratios count: with more ranks than cores, all of them are
slower. The traffic is what the loopback interface has sent in a step, by all ranks; nothing else should use it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning_utilities.core.apply_func import apply_to_collection

from benchmarks import scaling
from benchmarks.child import Batches
from benchmarks.models import MODELS, load
from lightning_ort import ORTStrategy
from lightning_ort.bench.machine import described
from lightning_ort.bench.table import caption, markdown_table

_MODELS, _RANKS, _SCALINGS = ["rl", "mlp", "cnn", "gpt"], [1, 2, 4], ["weak", "strong"]
_STEPS = {"rl": 1000, "mlp": 1000, "cnn": 200, "gpt": 24}
"""of a turn: who has the steps is decided in the first half, of short steps from up to 400 of them"""
_SENT = Path("/sys/class/net/lo/statistics/tx_bytes")


class Steps(Callback):
    """Seconds of each step, and bytes that all processes of this machine have sent each other in it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sent: list[int] = []
        self._last: tuple[float, int] | None = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter(), int(_SENT.read_text()) if _SENT.exists() else 0
        if self._last is not None:
            self.seconds.append(now[0] - self._last[0])
            self.sent.append(now[1] - self._last[1])
        self._last = now


class Parts:
    """Batches of which this rank has its part of the rows."""

    def __init__(self, model: str, rank: int, world: int) -> None:
        self._batches = [
            apply_to_collection(batch, torch.Tensor, lambda rows: rows[rank::world].clone())
            for batch in itertools.islice(Batches(model), 8)
        ]

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def measure(model: str, strategy: str, scaling: str, steps: int) -> dict[str, float]:
    """Median milliseconds, and bytes of all ranks, of the second half of ``steps``."""
    rank, world = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    seed_everything(0, verbose=False)
    timed = Steps()
    plain = "ddp" if world > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=plain if strategy == "torch" else ORTStrategy(print_report=False),
        max_steps=steps, callbacks=[timed], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = load(model).make_module()
    module.logs = False
    trainer.fit(module, Batches(model) if scaling == "weak" else Parts(model, rank, world))
    return {
        "ms": 1e3 * statistics.median(timed.seconds[steps // 2 :]),
        "sent": statistics.median(timed.sent[steps // 2 :]),
        "gradients": sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad),
    }


def rank_main(options: argparse.Namespace) -> None:
    """What each process runs; rank 0 prints."""
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    world = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    for model, kind in itertools.product(options.models, options.scaling if world > 1 else ["weak"]):
        found: dict[str, list[dict[str, float]]] = {"torch": [], "ort": []}
        for _ in range(options.rounds):
            for strategy, turns in found.items():
                turns.append(measure(model, strategy, kind, options.steps or _STEPS.get(model, 60)))
        if os.environ["RANK"] == "0":
            result = {
                "model": model,
                "scaling": kind,
                "threads": torch.get_num_threads(),
                "gradient_bytes": found["ort"][0]["gradients"],
                # of one rank; what the first one has sent stands for all, a ring has no other
                "sent_bytes": statistics.median(turn["sent"] for turn in found["ort"]) / world,
                "torch_ms": [turn["ms"] for turn in found["torch"]],
                "ort_ms": [turn["ms"] for turn in found["ort"]],
            }
            print("RESULT", json.dumps(result), flush=True)


def launch(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all models on so many processes."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    common |= {"LOCAL_WORLD_SIZE": str(ranks), "TORCHELASTIC_RUN_ID": "benchmark"}
    arguments = ["--models", *options.models, "--scaling", *options.scaling]
    arguments += ["--rounds", str(options.rounds)]
    if options.steps:
        arguments += ["--steps", str(options.steps)]
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
    output, results = [], []
    assert processes[0].stdout is not None
    with processes[0].stdout as lines:
        for line in lines:
            output.append(line)
            if line.startswith("RESULT "):
                results.append({"ranks": ranks, **json.loads(line.removeprefix("RESULT "))})
                print("done:", _in_words(results[-1]), file=sys.stderr, flush=True)
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"{ranks} ranks have ended with {codes}:\n{''.join(output)[-3000:]}")
    return results


def _in_words(result: dict[str, Any]) -> str:
    torch_ms, ort_ms = (statistics.median(result[name]) for name in ("torch_ms", "ort_ms"))
    return (
        f"{result['ranks']} ranks, {result['model']}, {result['scaling']}: torch {torch_ms:.3g} ms, ort {ort_ms:.3g} ms"
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print the table, write the file if asked to; returns the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=__doc__)
    parser.add_argument("--models", nargs="+", default=_MODELS, choices=sorted(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=_RANKS)
    parser.add_argument("--scaling", nargs="+", default=_SCALINGS, choices=_SCALINGS, help="with more than one rank")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each strategy (default: 5)")
    parser.add_argument("--steps", type=int, help="of a turn, of which the later half counts (default: 24 to 1000)")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/, of which `python -m benchmarks.page` makes docs"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write a file of the same name to another folder")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.as_rank:
        rank_main(options)
        return {}
    if options.steps is not None and options.steps < 3:
        parser.error(f"--steps {options.steps}: at least 3, of which the first is not timed")
    if options.save and (options.models, options.ranks, options.scaling) != (_MODELS, _RANKS, _SCALINGS):
        parser.error(
            "--save keeps all models, ranks and scalings, as the documentation shows them: use --output FOLDER"
        )
    report = {
        "part": scaling.PART,
        **described(rounds=options.rounds, steps=options.steps or _STEPS, precision="32-true"),
    }
    report["results"] = [result for ranks in options.ranks for result in launch(ranks, options)]
    print(markdown_table(scaling.COLUMNS, scaling.rows(report)))
    print(caption(report))
    for folder in [scaling.RESULTS] * options.save + [options.output] * (options.output is not None):
        path = folder / scaling.path_of(report).name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
        print(f"Wrote {path}")
    return report


if __name__ == "__main__":
    main()
