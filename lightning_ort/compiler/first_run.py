"""The first run of each graph of a region, beside torch's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.checking import ForkedRNG, Results, compare, evaluate
from lightning_ort.compiler.executable import Executable
from lightning_ort.compiler.surroundings import Surroundings, drawing_as_traced
from lightning_ort.errors import MismatchError
from lightning_ort.runtime.memory import release_free_memory

__all__ = ["FirstRun"]

Incoming = Mapping[int, torch.Tensor | None]
"""Output number to incoming gradient; ``None`` stands for 1 (the loss)."""


class FirstRun:
    """Runs graphs of a region for the first time and compares what they give with torch's results.

    Args:
        graph: Dynamo's graph of the region.
        wanted: numbers of the inputs that want a gradient.
        device: what computes; tensors live there or on the CPU.
        surroundings: what the region is computed under.
    """

    def __init__(
        self, graph: fx.GraphModule, wanted: Sequence[int], device: torch.device, surroundings: Surroundings
    ) -> None:
        self._graph, self._wanted, self._device, self._surroundings = graph, wanted, device, surroundings
        self._names = _names(graph)
        self._done: set[int] = set()
        self._overflows: set[int] = set()

    def is_due(self, executable: Executable) -> bool:
        """Whether ``executable`` has not been compared yet."""
        return id(executable) not in self._done

    def run(
        self, executable: Executable, args: Sequence[Any], incoming: Incoming, scale: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Results of ``executable``.

        Args:
            executable: the graph.
            args: inputs of the region.
            incoming: the loss, if the graph computes its gradients.
            scale: of the loss, if it is scaled.

        Raises:
            MismatchError: they are not torch's.
        """
        start = ForkedRNG.state(self._device)
        with ForkedRNG(self._device):
            reference = self._evaluate(args, incoming, scale)
            end = ForkedRNG.state(self._device)
        release_free_memory()
        results = executable.run(args if scale is None else [*args, scale])
        finite = None if executable.finite is None else bool(results[executable.finite])
        overflow = finite is not None and self._overflow(executable, reference, finite)
        if overflow:
            reference.gradients.clear()
        try:
            if not all(torch.equal(a, b) for a, b in zip(end, ForkedRNG.state(self._device), strict=True)):
                raise MismatchError("the step draws other random numbers in ONNX Runtime than in torch")
            reference.outputs = {i: o for i, o in reference.outputs.items() if executable.outputs[i] is not None}
            got = Results(
                {i: results[p] for i, p in enumerate(executable.outputs) if p is not None},
                {i: results[p] for i, p in executable.gradients},
                {i: results[p] for i, p in executable.updates},
            )
            precise = functools.partial(self._precise, args, incoming, start, scale)
            compare(got, reference, self._names, precise, executable.half)
        except MismatchError:
            ForkedRNG(self._device).restore(start)
            raise
        if not overflow:
            self._done.add(id(executable))
        del reference, got
        release_free_memory()
        return results

    # a gradient asked for between two regions arrives while Dynamo watches, which must not compile the graph again
    @torch.compiler.disable
    def check_backward(
        self,
        args: Sequence[Any],
        start: Any,
        incoming: Mapping[int, torch.Tensor],
        got: Sequence[torch.Tensor | None],
        half: Collection[torch.dtype],
    ) -> None:
        """Compare the first gradients of a backward graph, which rounds to the types ``half``, with torch's."""
        with ForkedRNG(self._device, start):
            reference = self._evaluate(args, incoming)
        found = {i: g for i, g in zip(self._wanted, got, strict=True) if g is not None}
        compare(
            Results({}, found, {}),
            Results({}, reference.gradients, {}),
            self._names,
            functools.partial(self._precise, args, incoming, start),
            half,
        )

    def _precise(
        self, args: Sequence[Any], incoming: Incoming, start: Sequence[torch.Tensor], scale: torch.Tensor | None = None
    ) -> Results | None:
        """The same in float64, or ``None`` where the graph does not allow that."""
        with ForkedRNG(self._device, start):
            try:
                return self._evaluate(args, incoming, scale, torch.float64)
            except (RuntimeError, TypeError, ValueError):
                return None

    def _evaluate(
        self,
        args: Sequence[Any],
        incoming: Incoming,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> Results:
        """torch's results; with a ``scale``, gradients are those of the scaled loss, unscaled where the graph does."""
        scaled = incoming if scale is None else dict.fromkeys(incoming, scale)
        with drawing_as_traced(self._graph, self._device):
            results = evaluate(self._graph, args, scaled, self._wanted, dtype=dtype, surroundings=self._surroundings)
        if scale is None:
            return results
        wide = {i: g / scale for i, g in results.gradients.items() if args[i].dtype.itemsize >= 4}
        return dataclasses.replace(results, gradients=results.gradients | wide)

    def _overflow(self, executable: Executable, reference: Results, finite: bool) -> bool:
        """Whether a scaled loss has gradients beyond 16 bits, which cannot be compared: those of the next run can.

        That they are in ONNX Runtime but not in torch may come of rounding, once.
        """
        if not all(bool(torch.isfinite(g).all()) for g in reference.gradients.values()):
            return True
        if finite or id(executable) in self._overflows:
            return False
        self._overflows.add(id(executable))
        return True


def _names(graph: fx.GraphModule) -> dict[str, dict[int, str]]:
    """Users' names of inputs (as gradients and as changed tensors) and outputs."""
    inputs = {}
    for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder"):
        source = getattr(node, "_dynamo_source", None)
        name = source.name if source is not None else node.name
        inputs[i] = str(name() if callable(name) else name)
    results = graph.graph.output_node().args[0]
    return {
        "gradients": {i: f"the gradient of {n}" for i, n in inputs.items()},
        "updates": {i: f"the new value of {n}" for i, n in inputs.items()},
        "outputs": {i: f"output {i} ({getattr(r, 'name', r)})" for i, r in enumerate(results)},
    }
