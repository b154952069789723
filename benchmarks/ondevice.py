"""``python -m benchmarks.ondevice``: a step of Module and Optimizer, ours and ONNX Runtime's own, in turns."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_ort import ondevice

SIZES = {"mlp": ((20, 32, 16, 10), 16, 500), "wide mlp": ((784, 256, 256, 10), 64, 50)}
"""name to the widths of the layers, the size of a batch and the number of steps per turn"""

Step = Callable[[], Any]


def _network(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _loop(api: Any, folder: Path, options: Any, x: np.ndarray, labels: np.ndarray) -> Step:
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    training, evaluation = str(folder / "training_model.onnx"), str(folder / "eval_model.onnx")
    module = api.Module(training, state, evaluation, session_options=options)
    optimizer = api.Optimizer(str(folder / "optimizer_model.onnx"), module)

    def step() -> Any:
        loss = module(x, labels)
        optimizer.step()
        module.lazy_reset_grad()
        return loss

    return step


def _wheels_artifacts(network: nn.Module, x: torch.Tensor, folder: Path) -> None:
    """Artifacts by ONNX Runtime's own tools."""
    from onnxruntime.training import artifacts

    path = folder / "forward.onnx"
    sizes = {"x": {0: "batch"}, "logits": {0: "batch"}}
    warnings.simplefilter("ignore", DeprecationWarning)  # the tools take what the older exporter writes
    torch.onnx.export(
        network, (x,), str(path), dynamo=False, input_names=["x"], output_names=["logits"], dynamic_axes=sizes,
        opset_version=14, do_constant_folding=False,
    )  # fmt: skip
    model = onnx.load(path)
    names = [i.name for i in model.graph.initializer]
    loss, optimizer = artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW
    artifacts.generate_artifacts(
        model, requires_grad=names, loss=loss, optimizer=optimizer, artifact_directory=str(folder)
    )
    # it stamps a version that it does not read
    update = onnx.load(folder / "optimizer_model.onnx")
    update.ir_version = 10
    onnx.save(update, folder / "optimizer_model.onnx")


def contestants(name: str, folder: Path, threads: int) -> dict[str, Step]:
    """A function per contestant that makes one step."""
    widths, size, _ = SIZES[name]
    torch.manual_seed(0)
    network = _network(widths)
    x, labels = torch.randn(size, widths[0]), torch.randint(0, widths[-1], (size,))
    config = ondevice.OptimizerConfig("AdamW", 1e-3, eps=1e-6, decay="after")
    ours, theirs = folder / "ours", folder / "theirs"
    ondevice.generate_artifacts(
        network, ours, inputs=(x, labels), loss="CrossEntropyLoss", optimizer=config, flavour="ort-training"
    )
    found = {"lightning_ort": _loop(ondevice, ours, None, x.numpy(), labels.numpy())}
    if importlib.util.find_spec("onnxruntime.training") is not None:
        from onnxruntime.training import api

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 3, threads
        theirs.mkdir()
        _wheels_artifacts(network, x, theirs)
        found["onnxruntime"] = _loop(api, theirs, options, x.numpy(), labels.numpy())
        found["onnxruntime, our artifacts"] = _loop(api, ours, options, x.numpy(), labels.numpy())
    reference = _network(widths)
    reference.load_state_dict(network.state_dict())
    optimizer = torch.optim.AdamW(reference.parameters(), 1e-3, eps=1e-6, weight_decay=0.0, fused=True)

    def eager() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    return found | {"eager, fused AdamW": eager}


def measure(name: str, rounds: int, threads: int) -> dict[str, list[float]]:
    """Seconds of each step, of all contestants."""
    with tempfile.TemporaryDirectory() as folder:
        steps = contestants(name, Path(folder), threads)
        for step in steps.values():
            for _ in range(20):
                step()
        times: dict[str, list[float]] = {contestant: [] for contestant in steps}
        for _ in range(rounds):
            for contestant, step in steps.items():
                for _ in range(SIZES[name][2]):
                    start = time.perf_counter()
                    step()
                    times[contestant].append(time.perf_counter() - start)
        return times


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure and print medians in microseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ondevice", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1, help="of torch and ONNX Runtime")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    table = Table(title="Median of a step (fastest), µs", title_justify="left")
    results: dict[str, dict[str, float]] = {}
    rows = []
    for name in options.models:
        times = {c: [1e6 * t for t in found] for c, found in measure(name, options.rounds, options.threads).items()}
        results[name] = {c: median(found) for c, found in times.items()}
        rows.append([name, *(f"{median(found):.1f} ({min(found):.1f})" for found in times.values())])
    for column in ("model", *next(iter(results.values()))):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)
    return results


if __name__ == "__main__":
    main()
