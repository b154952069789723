"""Graphs run by ONNX Runtime, with single operators in torch where that is needed or known to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.allocation import allocator, kept_buffers, pooled_allocator
from lightning_ort.compiler.executors.executable import Executable, Results
from lightning_ort.compiler.mixed_precision import CONVOLUTIONS, PRODUCTS, Widening, half_types
from lightning_ort.compiler.plan import Plan
from lightning_ort.compiler.random import drawer
from lightning_ort.compiler.trace import Traced
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["ORTExecutable"]


class ORTExecutable(Executable):
    """Draws the random numbers of a graph, allocates its results, executes its plan.

    Args:
        traced: a decomposed graph; its 16-bit operators are rewritten.
        config: how sessions are made.
        device: what computes; tensors live there or on the CPU.
        extra: further nodes to give out.

    Raises:
        Untraceable: a result's size depends on data.
    """

    executor = "onnxruntime"

    def __init__(
        self, traced: Traced, config: RuntimeConfig, device: torch.device, extra: Sequence[fx.Node] = ()
    ) -> None:
        self.half = half_types(traced.graph)
        native = config.in_bfloat16() if self.half == {torch.bfloat16} else None
        on_gpu = device.type == "cuda"
        kept = _in_16_bits(config) if on_gpu else frozenset()
        widening = Widening(traced, rounded=native is None, kept=kept)
        # what a GPU computes in float32 besides products costs it the memory it reads, and no more
        self.widened, config = (0 if on_gpu else widening.count, config) if native is None else (0, native)
        self._config, self._device = config, device
        super().__init__(traced, [widening.result(n) for n in extra])

    def _compile(self, traced: Traced, results: Results) -> None:
        others, own, sizes, device = results.others, results.own, results.sizes, self._device
        # who watches the sessions tells results by their addresses
        self._kept = {} if self._config.on_session is not None else kept_buffers(others, device)
        self._allocate = allocator([n for i, n in enumerate(others) if i not in self._kept], sizes, device)
        self._allocate_gradients = pooled_allocator(own, device) or allocator(own, sizes, device)
        self.plan = Plan(traced.module, results.inputs, results.all, self._config, device)
        self._draw = drawer(traced.draws, sizes, device)
        self.fallbacks, self.preferred, self.on_cpu = self.plan.fallbacks, self.plan.preferred, self.plan.on_cpu

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        draws = self._draw(inputs) if self.has_draws else ()
        results = self._allocate(inputs)
        for i, buffer in self._kept.items():
            results.insert(i, buffer)
        results += self._allocate_gradients(inputs)
        self.plan.run([*inputs, *draws], results)
        for i, buffer in self._kept.items():
            results[i] = buffer.clone()
        return results


def _in_16_bits(config: RuntimeConfig) -> frozenset[Any]:
    """What is computed in 16 bits on a GPU, by ONNX Runtime or (convolutions that it has no kernels for) by torch."""
    return PRODUCTS | CONVOLUTIONS if config.placement == "fastest" else PRODUCTS
