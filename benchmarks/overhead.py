"""``python -m benchmarks.overhead``: what a compiled region adds to ONNX Runtime's own time for a tiny MLP.

ONNX Runtime's ``run_with_iobinding`` is timed inside of every call of the compiled function, so both times belong to
the same run on the same inputs. What is left is Dynamo's guards, the autograd function, the choice of output memory
and the binding. How much of it ``torch.compile`` takes by itself shows a backend that computes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import onnxruntime
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_ort.compiler.backend import ORTBackend

_INPUTS, _WIDTH, _CLASSES, _BATCH = 8, 64, 4, 32


class _RunTimer:
    """Adds up the seconds spent in ``InferenceSession.run_with_iobinding`` while it is entered."""

    def __enter__(self) -> _RunTimer:
        self.seconds, self.runs = 0.0, 0
        self._original = original = onnxruntime.InferenceSession.run_with_iobinding

        def timed(session: onnxruntime.InferenceSession, *args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            original(session, *args, **kwargs)
            self.seconds += time.perf_counter() - start
            self.runs += 1

        onnxruntime.InferenceSession.run_with_iobinding = timed
        return self

    def __exit__(self, *exception: object) -> None:
        onnxruntime.InferenceSession.run_with_iobinding = self._original


def _nothing(graph: torch.fx.GraphModule, example_inputs: Sequence[torch.Tensor]) -> Any:
    """A backend whose loss and gradients are always the same: what no backend can be faster than."""
    wanted = [i for i, x in enumerate(example_inputs) if x.requires_grad]
    loss, gradients = torch.zeros(()), [torch.zeros_like(example_inputs[i]) for i in wanted]

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
            return (*gradients,)

    return lambda *args: [Nothing.apply(*[args[i] for i in wanted])]


def measure_overhead(steps: int = 3000, warmup_steps: int = 100) -> dict[str, float]:
    """Medians over ``steps`` training steps of a tiny MLP, in microseconds.

    Returns:
        ``run``: inside of ONNX Runtime; ``call``: the rest of calling the compiled loss function; ``backward``:
        ``loss.backward()``, which hands out the gradients (torch's own part of it included); ``call of nothing`` and
        ``backward of nothing``: the same with a backend that computes nothing.
    """
    net = nn.Sequential(
        nn.Linear(_INPUTS, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _CLASSES)
    )
    inputs, labels = torch.randn(_BATCH, _INPUTS), torch.randint(0, _CLASSES, (_BATCH,))

    def loss_of(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(inputs), labels)

    def measure(backend: Any, runs: int) -> dict[str, list[float]]:
        torch.compiler.reset()
        compiled = torch.compile(loss_of, backend=backend)
        times: dict[str, list[float]] = {"run": [], "call": [], "backward": []}
        with _RunTimer() as timer:
            for step in range(warmup_steps + steps):
                net.zero_grad()
                timer.seconds, timer.runs = 0.0, 0
                start = time.perf_counter()
                loss = compiled(inputs, labels)
                called = time.perf_counter()
                loss.backward()
                done = time.perf_counter()
                if timer.runs != runs:
                    raise RuntimeError(f"Expected {runs} runs of ONNX Runtime in a step, but there were {timer.runs}.")
                if step >= warmup_steps:
                    times["run"].append(timer.seconds)
                    times["call"].append(called - start - timer.seconds)
                    times["backward"].append(done - called)
        return times

    times = measure(ORTBackend(on_unsupported="error"), runs=1)
    nothing = measure(_nothing, runs=0)
    times |= {f"{part} of nothing": nothing[part] for part in ("call", "backward")}
    return {part: 1e6 * median(seconds) for part, seconds in times.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--threads", type=int, help="threads of torch and ONNX Runtime (default: torch's choice)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    parts = measure_overhead(options.steps)
    table = Table(title="Median of a step's parts", title_justify="left")
    table.add_column("part")
    table.add_column("µs", justify="right")
    table.add_row("ONNX Runtime's run: forward and gradients", f"{parts['run']:.1f}")
    table.add_row("added by calling the compiled region", f"{parts['call']:.1f}")
    table.add_row("of that, torch.compile with a backend that computes nothing", f"{parts['call of nothing']:.1f}")
    table.add_row("backward(): gradients handed to autograd", f"{parts['backward']:.1f}")
    table.add_row("of that, with a backend that computes nothing", f"{parts['backward of nothing']:.1f}")
    Console().print(table)
    return parts


if __name__ == "__main__":
    main()
