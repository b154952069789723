"""Runs the graph of a step on memory that stays where it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import onnxruntime
import torch
from numpy import ndarray
from torch import Tensor

from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.passes import has_doubles, has_extreme_factor, with_training_kernels
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers.cpu import has_training_kernels
from lightning_ort.runtime.tensors import NUMPY, TORCH

__all__ = ["StepRunner"]

_INDEXING = {"Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND"}
"""Operators whose second input holds positions."""

_SMALL = 1 << 14
"""Bytes up to which a tensor is copied to and from memory that stays bound: quicker than binding it where it is."""

_QUICK = 1 << 14
"""Elements of all parameters below which a step is so short that a second thread does not pay."""


class StepRunner:
    """Runs a :class:`~lightning_ort.compiler.aot.step_graph.StepGraph` in one session.

    Args:
        graph: what is computed.
        tensors: parameters and buffers by name; they are read where they are, at each run.
        gradients: where gradients are written, by parameter; all parameters in ``graph.gradients``.
        sessions: makes the one session, on the CPU.

    Raises:
        ValueError: ONNX Runtime does not accept the graph.

    Attributes:
        session: of ONNX Runtime.
    """

    def __init__(
        self,
        graph: StepGraph,
        tensors: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
        sessions: SessionFactory,
    ) -> None:
        self.graph, self._tensors = graph, tensors
        values = graph.model.graph
        small = sum(t.numel() for t in tensors.values()) < _QUICK
        if small and sessions.config.session_options is None:
            # one allocation for all activations takes an eighth off the run of a small network
            sessions = sessions.with_options(enable_mem_pattern=True)
        model = with_training_kernels(graph.model) if has_training_kernels() else graph.model
        serialized = ir.to_proto(model).SerializeToString()
        self._session = sessions.session(
            serialized,
            double=has_doubles(model),
            small=small,
            extreme=has_extreme_factor(model),
            places=_places(model.graph, {i.name for i in graph.inputs}),
        )
        self.session = self._session.inner
        self._infos = {i.name: i for i in graph.inputs}
        self._order = self._session.input_names
        self._outputs = [(str(v.name), _info(v)) for v in values.outputs]
        self._new = {name: torch.empty_like(tensors[name]) for name in graph.updates}
        self._fixed = {graph.gradients[n]: t for n, t in gradients.items()}
        self._fixed |= {graph.updates[n]: t for n, t in self._new.items()}
        self._plans: dict[tuple[torch.Size, ...], _Plan | None] = {}
        self._last: _Plan | None = None
        self._run_again: Callable[[], None]  # once there is a last plan

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Results in memory of their own, in the order of ``graph.outputs``; gradients and buffers are written.

        Args:
            inputs: in the order of ``graph.inputs``, checked.

        Raises:
            ValueError: one of them has no entries, and kernels of this ONNX Runtime would end the process.
        """
        shapes = tuple([x.shape for x in inputs])
        if shapes not in self._plans:
            if len(self._plans) > 64:
                self._plans.clear()
            self._plans[shapes] = self._plan(inputs)
        plan = self._plans[shapes]
        results = self._unplanned(inputs) if plan is None else self._planned(plan, inputs)
        for name, value in self._new.items():
            self._tensors[name].copy_(value)
        return results

    def again(self, inputs: Sequence[Any]) -> ndarray | tuple[ndarray, ...] | None:
        """The result or results for arrays of the same form as those of the last call, sooner than by a call.

        ``None``, and nothing done, for anything else. Nothing is converted here.
        """
        plan = self._last
        if plan is None or not plan.fixed or len(inputs) != len(plan.arrays):
            return None
        for x, (target, dtype, shape) in zip(inputs, plan.arrays):  # noqa: B905  strict takes time
            if type(x) is not ndarray or x.dtype is not dtype or x.shape != shape:
                return None
            target[...] = x  # what is staged for a step that is not made does no harm
        try:
            self._run_again()
        except Exception as error:
            self._last = None  # there is no result to be followed by another of the same form
            self._session.explain(error)
        if self._new:
            for name, value in self._new.items():
                self._tensors[name].copy_(value)
        results = plan.result_arrays
        return results[0].copy() if len(results) == 1 else tuple([a.copy() for a in results])

    def _planned(self, plan: _Plan, inputs: Sequence[Tensor]) -> list[Tensor]:
        for staged, x in zip(plan.staged, inputs, strict=True):
            if staged is not None:
                staged.copy_(x)
        if plan is self._last and plan.fixed:
            try:
                self._run_again()
            except Exception as error:
                self._session.explain(error)
            return [t.clone() for t in plan.results]
        given = [x if s is None else s for s, x in zip(plan.staged, inputs, strict=True)]
        results = [t if kept else torch.empty_like(t) for t, kept in zip(plan.results, plan.kept, strict=True)]
        reads = [given[k] if isinstance(k, int) else k for k in plan.reads]
        writes = [results[k] if isinstance(k, int) else k for k in plan.writes]
        self._last = None  # also if this fails: it binds what the last plan had bound
        self._session.run(reads, writes)
        self._last, self._run_again = plan, self._session.repeat()
        return [t.clone() if kept else t for t, kept in zip(results, plan.kept, strict=True)]

    def _unplanned(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Where sizes of results are known only when they have been computed."""
        given = dict(zip(self._infos, inputs, strict=True))
        reads = [given[n] if n in given else self._tensors[self.graph.tensors[n]] for n in self._order]
        found = dict(zip([n for n, _ in self._outputs], self._session.run_unbound(reads), strict=True))
        for name, target in self._fixed.items():
            target.copy_(torch.from_numpy(found[name]))
        return [torch.from_numpy(found[n]) for n in self.graph.outputs]

    def _plan(self, inputs: Sequence[Tensor]) -> _Plan | None:
        sizes: dict[str, int] = {}
        for info, x in zip(self.graph.inputs, inputs, strict=True):
            if not x.numel() and has_training_kernels():  # which divide by the number of labels
                raise ValueError(
                    f"Input {info.name!r} has no entries, its shape is {tuple(x.shape)}: onnxruntime-training "
                    f"{onnxruntime.__version__} cannot run a step on that. Leave the batch out. Nothing was changed."
                )
            sizes |= {s: n for s, n in zip(info.shape, x.shape, strict=True) if isinstance(s, str)}
        results: list[Tensor] = []
        declared = dict(self._outputs)
        for name in self.graph.outputs:
            dtype, shape = declared[name]
            known = [sizes.get(s) if isinstance(s, str) else s for s in shape] if shape is not None else [None]
            if any(s is None for s in known):
                return None
            results.append(torch.empty([s for s in known if s is not None], dtype=dtype))
        numbers = {name: i for i, name in enumerate(self._infos)}
        places = {name: i for i, name in enumerate(self.graph.outputs)}
        return _Plan(
            staged=[
                torch.empty_like(x, memory_format=torch.contiguous_format) if _is_small(x) else None for x in inputs
            ],
            results=results,
            kept=[_is_small(t) for t in results],
            reads=[numbers[n] if n in numbers else self._tensors[self.graph.tensors[n]] for n in self._order],
            writes=[places[n] if n in places else self._fixed[n] for n, _ in self._outputs],
        )


def _places(graph: ir.Graph, inputs: Collection[str]) -> dict[str, str]:
    """Name of each node that reads positions to where they come from, for errors about values."""
    places: dict[str, str] = {}
    for node in graph:
        if node.op_type not in _INDEXING or node.domain:
            continue
        pending, seen = [node.inputs[1]], set()
        while pending:
            value = pending.pop()
            if value is not None and value not in seen:
                seen.add(value)
                producer = value.producer()
                pending += producer.inputs if producer is not None else ()
        found = sorted(str(v.name) for v in seen if v.is_graph_input() and v.name in inputs)
        if found:
            named = f"input{'s' * (len(found) > 1)} {', '.join(map(repr, found))}"
            places[str(node.name)] = f"the node {str(node.name)!r} of the graph, whose indices come from the {named}"
    return places


class _Plan:
    """Memory for inputs of certain shapes.

    Attributes:
        staged: per input a copy that stays bound, or ``None`` where it is bound where it is.
        results: per result memory that stays bound, or its form.
        kept: per result whether it stays bound.
        reads: per graph input a tensor, or the number of an input.
        writes: per graph output a tensor, or the number of a result.
        fixed: nothing need be bound anew, and numpy has all of the types.
        arrays: ``staged`` as arrays, each with its element type and its shape.
        result_arrays: ``results`` as arrays.
    """

    def __init__(
        self,
        staged: list[Tensor | None],
        results: list[Tensor],
        kept: list[bool],
        reads: list[Tensor | int],
        writes: list[Tensor | int],
    ) -> None:
        self.staged, self.results, self.kept, self.reads, self.writes = staged, results, kept, reads, writes
        bound = [t for t in staged if t is not None]
        known = all(t.dtype in NUMPY for t in [*bound, *results])
        self.fixed = len(bound) == len(staged) and all(kept) and known
        arrays = [t.numpy() for t in bound] if known else []
        self.arrays = [(a, a.dtype, a.shape) for a in arrays]
        self.result_arrays = [t.numpy() for t in results] if known else []


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL


def _info(value: ir.Value) -> tuple[torch.dtype, list[int | str | None] | None]:
    assert value.dtype is not None
    shape = None if value.shape is None else [s if isinstance(s, int) else s.value for s in value.shape]
    return TORCH[value.dtype], shape
