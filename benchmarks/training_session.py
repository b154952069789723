"""``python -m benchmarks.training_session``: a run of TrainingSession with Adam against eager torch's, in turns."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import onnx
import onnx.parser
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_ort import TrainingParameters, TrainingSession

SIZES = {"mlp": ((20, 32, 16, 10), 16, 500), "wide mlp": ((784, 256, 256, 10), 64, 50)}
"""name to the widths of the layers, the size of a batch and the number of steps per turn"""

OURS, EAGER = "TrainingSession", "eager, fused Adam"


def _network(widths: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _file(network: nn.Sequential) -> bytes:
    """The network and its loss, as an ONNX file of opset 17."""
    linear = [(name, layer) for name, layer in network.named_children() if isinstance(layer, nn.Linear)]
    nodes, value = [], "x"
    for name, _ in linear:
        nodes.append(f"h{name} = Gemm<transB=1>({value}, w{name}, b{name})")
        value = f"h{name}"
        if name != linear[-1][0]:
            nodes.append(f"r{name} = Relu({value})")
            value = f"r{name}"
    body = " ".join([*nodes, f"loss = SoftmaxCrossEntropyLoss({value}, y)"])
    inputs = f"float[N,{linear[0][1].in_features}] x, int64[N] y"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => (float loss) {{ {body} }}'
    )
    for name, layer in linear:
        for kind, tensor in (("w", layer.weight), ("b", layer.bias)):
            model.graph.initializer.append(numpy_helper.from_array(tensor.detach().numpy(), f"{kind}{name}"))
    return model.SerializeToString()


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, of both."""
    widths, size, steps = SIZES[name]
    torch.manual_seed(0)
    network = _network(widths)
    x, labels = torch.randn(size, widths[0]), torch.randint(0, widths[-1], (size,))
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "AdamOptimizer"
    session = TrainingSession(_file(network), parameters)
    feed = {"x": x.numpy(), "y": labels.numpy(), "Learning_Rate": [1e-3]}
    optimizer = torch.optim.Adam(network.parameters(), 1e-3, fused=True)

    def eager() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), labels)
        loss.backward()
        optimizer.step()
        return loss

    contestants: dict[str, Callable[[], Any]] = {OURS: lambda: session.run(["loss"], feed), EAGER: eager}
    for step in contestants.values():
        for _ in range(20):
            step()
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant, step in contestants.items():
            for _ in range(steps):
                start = time.perf_counter()
                step()
                times[contestant].append(time.perf_counter() - start)
    return times


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure and print medians in microseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training_session", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, help="threads of torch and ONNX Runtime (default: torch's choice)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table(title="Median of a step (fastest), µs", title_justify="left")
    for column in ("model", OURS, EAGER, "eager / TrainingSession"):
        table.add_column(column)
    results = {}
    for name in options.models:
        ours, theirs = ([1e6 * t for t in found] for found in measure(name, options.rounds).values())
        results[name] = {OURS: median(ours), EAGER: median(theirs)}
        cells = [f"{median(t):.1f} ({min(t):.1f})" for t in (ours, theirs)]
        table.add_row(name, *cells, f"{median(theirs) / median(ours):.2f} ({min(theirs) / min(ours):.2f})")
    Console(width=100).print(table)
    return results


if __name__ == "__main__":
    main()
