"""Graphs run by ONNX Runtime, with single operators in torch where that is needed or known to be faster."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.allocation import allocator, kept_buffers, pooled_allocator
from lightning_ort.compiler.executors.executable import Executable, Results
from lightning_ort.compiler.mixed_precision import CONVOLUTIONS, PRODUCTS, Widening, half_types
from lightning_ort.compiler.plan import build_plan
from lightning_ort.compiler.random import drawer
from lightning_ort.compiler.trace import Traced
from lightning_ort.report import timeline
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["ONE_THREAD", "ORTExecutable"]

ONE_THREAD = "onnxruntime-one-thread"
"""what :class:`ORTExecutable` is called where all of its sessions have one thread, though there is work for several"""


class ORTExecutable(Executable):
    """Draws the random numbers of a graph, allocates its results, executes its plan.

    Args:
        traced: a decomposed graph; its 16-bit operators are rewritten.
        sessions: makes them, for the device that computes; tensors live there or on the CPU.
        extra: further nodes to give out.
        executor: what it is called.

    Raises:
        Untraceable: a result's size depends on data.
    """

    def __init__(
        self, traced: Traced, sessions: SessionFactory, extra: Sequence[fx.Node] = (), executor: str = "onnxruntime"
    ) -> None:
        self.executor = executor
        self.half = half_types(traced.graph)
        native = sessions.in_bfloat16() if self.half == {torch.bfloat16} else None
        widening = Widening(traced, rounded=native is None, kept=_in_16_bits(sessions))
        # what a GPU computes in float32 besides products costs it the memory it reads, and no more
        free = native is not None or sessions.provider.in_16_bits
        self.widened = 0 if free else widening.count
        self._sessions = sessions if native is None else native
        super().__init__(traced, [widening.result(n) for n in extra])

    def _compile(self, traced: Traced, results: Results) -> None:
        others, own, sizes, device = results.others, results.own, results.sizes, self._sessions.device
        # who watches the sessions tells results by their addresses
        self._kept = {} if self._sessions.is_watched else kept_buffers(others, device)
        into_inputs = {p for _, p in self.updates} - {*self.outputs, *self.extra}
        self._given_out = [i for i in self._kept if i not in into_inputs]  # the others are copied from by the region
        given_out = {others[p] for p in self.outputs if p is not None and p < len(others)}
        self._allocate = allocator([n for i, n in enumerate(others) if i not in self._kept], sizes, device, given_out)
        self._allocate_gradients = pooled_allocator(own, device) or allocator(own, sizes, device)
        self.plan = build_plan(traced.module, results.inputs, results.all, self._sessions)
        # a result is never an input itself, but a copy
        self._draw = drawer(traced.draws, sizes, device, in_place=not self._sessions.is_watched)
        self.fallbacks, self.preferred, self.on_cpu = self.plan.fallbacks, self.plan.preferred, self.plan.on_cpu
        self.segments = self.plan.segments

    @property
    def is_threaded(self) -> bool:
        return any(session.is_threaded for session in self.plan.sessions)

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        recording = timeline.present
        began = 0.0 if recording is None else perf_counter()
        draws = self._draw(inputs) if self.has_draws else ()
        if draws and recording is not None:
            recording.add("torch", "random numbers", began)
        results = self._allocate(inputs)
        for i, buffer in self._kept.items():
            results.insert(i, buffer)
        results += self._allocate_gradients(inputs)
        self.plan.run([*inputs, *draws], results)
        for i in self._given_out:
            results[i] = self._kept[i].clone()
        if recording is not None:
            recording.add("python", "graph", began, self.report)
        return results


def _in_16_bits(sessions: SessionFactory) -> frozenset[Any]:
    """What is computed in 16 bits, by ONNX Runtime or (convolutions that it has no kernels for) by torch."""
    if not sessions.provider.in_16_bits:
        return frozenset()
    return PRODUCTS | CONVOLUTIONS if sessions.config.by_speed else PRODUCTS
