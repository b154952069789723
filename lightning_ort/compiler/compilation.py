"""A region compiled for one executor: one graph, or a graph forward and another one for gradients."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from lightning_ort.compiler.cheap_tracing import collecting_rarely
from lightning_ort.compiler.eager_graph import EagerGraph
from lightning_ort.compiler.executors.channels_last import (
    CHANNELS_LAST,
    ChannelsLastExecutable,
    gains_by_channels_last,
)
from lightning_ort.compiler.executors.executable import Executable
from lightning_ort.compiler.executors.onnxruntime import ONE_THREAD, ORTExecutable
from lightning_ort.compiler.executors.torch import TorchExecutable
from lightning_ort.compiler.functional_graph import Untraceable
from lightning_ort.compiler.global_state import GlobalState
from lightning_ort.compiler.kept import Keeping
from lightning_ort.compiler.outputs import OutputLayout, overlap, repeats_itself
from lightning_ort.compiler.partition import split
from lightning_ort.compiler.trace import Derivative, Traced, trace
from lightning_ort.compiler.trace_cache import TRACES, TraceKey, copied, size_facts
from lightning_ort.report import timeline
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["OVERLAP", "Compilation", "Pair"]

OVERLAP = "it changes a tensor that shares memory with another one it reads"


@dataclasses.dataclass
class Pair:
    """Forward and backward as two graphs, for gradients that arrive at several outputs."""

    forward: Executable
    backward: Executable
    kept: list[int | None]
    """inputs of ``backward``: number of a region input, or ``None`` for the next of ``forward.extra``"""
    copied: frozenset[int]
    """region inputs that are kept as copies, because eager keeps no reference to them"""
    own: list[tuple[int, bool]]
    """per entry of ``forward.extra``, its position and whether it is kept as a copy of an output"""
    verified: bool = False
    general: bool = False
    """gradients were seen at more than a scalar loss"""

    @property
    def graphs(self) -> Sequence[Executable]:
        """Both."""
        return (self.forward, self.backward)

    def rehearse(self, inputs: Sequence[Any], incoming: Sequence[torch.Tensor]) -> None:
        """Run both for the time it takes, with the gradients ``incoming``."""
        saved = self.saved(self.forward.run(inputs))
        self.backward.run([*self.inputs(inputs, saved), *incoming])

    def saved(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward graph reads of the results of the forward graph."""
        return [results[p].clone() if own else results[p] for p, own in self.own]

    def inputs(
        self, args: Sequence[Any], saved: Sequence[torch.Tensor], copies: Mapping[int, torch.Tensor] | None = None
    ) -> list[Any]:
        """Inputs of the backward graph, from those of the region, ``copies`` of some, and what was computed."""
        computed, own = iter(saved), self.copied if copies else ()
        return [next(computed) if i is None else copies[i] if copies and i in own else args[i] for i in self.kept]


class Compilation:
    """Traces a region and has its graphs compiled, also long after Dynamo has gone on.

    Args:
        graph: Dynamo's graph.
        fakes: its inputs, from :func:`~.trace.fake_inputs`.
        layout: of its outputs.
        sessions: makes them, for the device that computes; tensors live there or on the CPU.
        global_state: what the region is computed under.
        name: user's name of an input.
        scaled: losses are scaled.
        verify: gradients of pairs are to be checked.

    Attributes:
        keeping: what a region keeps of its inputs, once a graph with gradients has been made.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        fakes: Sequence[Any],
        layout: OutputLayout,
        sessions: SessionFactory,
        global_state: GlobalState,
        *,
        name: Callable[[int], str],
        scaled: bool,
        verify: bool,
    ) -> None:
        self._graph, self._fakes, self._layout = graph, fakes, layout
        self._sessions, self._global_state = sessions, global_state
        self._name, self._scaled, self._verify = name, scaled, verify
        self._context, self._grad_enabled = TracingContext.get(), torch.is_grad_enabled()
        self.keeping: Keeping | None = None
        self._gains_by_channels_last = False

    def make(self, executor: str, derivative: Derivative, differentiated: Sequence[int]) -> Executable | Pair:
        """Compile for ``executor``: a pair if gradients arrive from outside.

        Raises:
            Untraceable: the graph has no functional form, or this executor cannot run it.
        """
        timeline.spoil()
        with self._tracing(derivative), collecting_rarely():
            return self._make(executor, derivative, differentiated)

    def rivals(self, unit: Executable | Pair) -> list[str]:
        """Executors that may be faster than ``unit``, which ONNX Runtime runs, the most promising first."""
        names = [CHANNELS_LAST, "torch"] if self._gains_by_channels_last else ["torch"]
        if self._sessions.placement == "fastest+inductor":
            names.append("inductor")
        if self._sessions.may_take_one_thread and any(graph.is_threaded for graph in unit.graphs):
            names.append(ONE_THREAD)
        return names

    def _make(self, executor: str, derivative: Derivative, differentiated: Sequence[int]) -> Executable | Pair:
        facts = size_facts(self._context.fake_mode)
        native = not executor.startswith("onnxruntime")
        request = (derivative, list(differentiated), self._scaled, native, facts)
        # inductor wants fake values of its own time
        of = (self._graph, self._fakes, self._global_state, *request)
        key = None if executor == "inductor" else TraceKey.of(*of, gradients=derivative is not Derivative.NONE)
        traced = None if key is None else TRACES.get(key, self._fakes, self._context.fake_mode)
        spare = None
        if traced is None:
            traced = self._trace(derivative, differentiated, native=native)
            spare = None if key is None else copied(traced)
        self._keep(traced, derivative)
        self._gains_by_channels_last = gains_by_channels_last(traced)
        unit = self._unit(executor, traced, derivative)
        # what was assumed of open sizes on the way is known to the guards of this region only
        if key is not None and spare is not None and size_facts(self._context.fake_mode) == facts:
            TRACES.put(key, spare)
        return unit

    def _unit(self, executor: str, traced: Traced, derivative: Derivative) -> Executable | Pair:
        if derivative is not Derivative.TANGENTS:
            return self._compile(executor, traced)
        assert self.keeping is not None
        partition = split(traced, self.keeping.eager)
        forward = self._compile(executor, partition.forward, partition.saved)
        backward = self._compile(executor, partition.backward)
        own = [(p, n in partition.own) for p, n in zip(forward.extra, partition.saved, strict=True)]
        return Pair(forward, backward, partition.kept, partition.copied, own, verified=not self._verify)

    def _keep(self, traced: Traced, derivative: Derivative) -> None:
        if derivative is not Derivative.NONE and self.keeping is None:
            eager = EagerGraph.of(self._graph, self._layout.differentiable)
            self.keeping = Keeping.of(traced, eager, self._name)

    def _compile(self, executor: str, traced: Traced, extra: Sequence[fx.Node] = ()) -> Executable:
        if executor == "onnxruntime":
            return ORTExecutable(traced, self._sessions, extra)
        if executor == ONE_THREAD:
            return ORTExecutable(traced, self._sessions.on_one_thread(), extra, executor)
        if executor == CHANNELS_LAST and gains_by_channels_last(traced):
            return ChannelsLastExecutable(traced, self._sessions.device, extra)
        # importing inductor takes longer than a small fit
        kind = _inductor() if executor == "inductor" else TorchExecutable
        return kind(traced, self._sessions.device, extra)

    def _trace(self, derivative: Derivative, differentiated: Sequence[int], *, native: bool) -> Traced:
        scaled = self._scaled and derivative is Derivative.LOSS
        request = (self._graph, self._fakes, derivative, differentiated, self._global_state)
        try:
            traced = trace(*request, scaled=scaled, native=native)
        except Untraceable:
            if not native:
                raise
            # some of torch's own operators are known to autograd, and not to a trace
            traced = trace(*request, scaled=scaled)
        traced.outputs = [None if i in self._layout.views else o for i, o in enumerate(traced.outputs)]
        if overlap(self._fakes, list(traced.updates)):
            raise Untraceable(OVERLAP)
        if any(repeats_itself(self._fakes[i]) for i in traced.updates):
            raise Untraceable("it changes a tensor whose entries share memory with each other, as those of expand do")
        return traced

    @contextlib.contextmanager
    def _tracing(self, derivative: Derivative) -> Iterator[None]:
        """Dynamo's context of this region, which is no longer the present one when a graph is compiled late.

        Nor is its grad mode: to leave inference mode enables gradients, and a trace made without is not found then.

        Dynamo has written its guards by then. What a late trace assumes of open sizes beyond them nobody would check.
        """
        is_present = TracingContext.try_get() is self._context
        facts = () if is_present else size_facts(self._context.fake_mode)
        grad_enabled = self._grad_enabled or derivative is not Derivative.NONE
        with contextlib.ExitStack() as stack:
            if not is_present:
                stack.enter_context(tracing(self._context))
            # what torch remembers of fakes it looks up by inference mode
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad_enabled))
            yield
        if not is_present and size_facts(self._context.fake_mode) != facts:
            raise Untraceable("it fits some sizes only, and is compiled after those that it is used for were settled")


def _inductor() -> type[TorchExecutable]:
    from lightning_ort.compiler.executors.inductor import InductorExecutable

    return InductorExecutable
