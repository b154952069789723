"""The inputs of a run, kept as they were for gradients that are computed later."""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.eager_graph import EagerGraph
from lightning_ort.compiler.symbolic_shapes import is_number
from lightning_ort.compiler.trace import Traced
from lightning_ort.runtime.memory import storage_key

__all__ = ["Keeping", "Kept", "before_update", "before_write", "in_torch"]


@dataclasses.dataclass
class Keeping:
    """What a region keeps of its inputs.

    Nothing is copied that stays as it is: an input is kept by reference, and the count of its changes in place tells
    whether it is still what the run read. Where eager keeps it by reference too, a change is eager's error. What eager
    computes from a value of its own is put at risk by a change; it is copied when a region is about to make one.

    Attributes:
        eager: what eager would keep.
        read: output number to the numbers of the tensors from which it is computed.
        written: inputs that the region itself changes.
        copied: inputs that the region changes after an output was computed from them.
        at_risk: inputs from which an output is computed and that eager does not keep by reference.
        watched: all inputs whose changes matter.
        name: user's name of an input.
    """

    eager: EagerGraph
    read: dict[int, frozenset[int]]
    written: frozenset[int]
    name: Callable[[int], str]

    def __post_init__(self) -> None:
        everything = frozenset[int]().union(*self.read.values())
        self.copied = sorted(self.written & everything)
        self.at_risk = [
            i
            for i in sorted(everything - self.written)
            if any(i in inputs and i not in self.eager.saved[output] for output, inputs in self.read.items())
        ]
        self.watched = sorted(everything.union(*self.eager.saved.values()))
        get = operator.itemgetter(*self.watched) if len(self.watched) > 1 else None
        self._pick = get or (lambda args: [args[i] for i in self.watched])

    @classmethod
    def of(cls, traced: Traced, eager: EagerGraph, name: Callable[[int], str]) -> Keeping:
        """Read it from a trace of the region."""
        number = {n: i for i, n in enumerate(traced.inputs) if not is_number(n)}
        read = {}
        for output in eager.saved:
            pending, seen = [traced.outputs[output]], set()
            while pending:
                node = pending.pop()
                if node not in seen:
                    seen.add(node)
                    pending += _sources(node)
            read[output] = frozenset(number[n] for n in seen if n in number)
        return cls(eager, read, frozenset(traced.updates), name)

    def versions(self, args: Sequence[Any]) -> list[int]:
        """How often each of the ``watched`` inputs was changed in place."""
        tensors = self._pick(args)
        try:
            return [x._version for x in tensors]
        except RuntimeError:  # tensors of inference mode do not count
            return [-1 if x.is_inference() else x._version for x in tensors]


_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def _sources(node: fx.Node) -> list[fx.Node]:
    """What the values that can be differentiated depend on: not on the statistics that a batch norm is updating."""
    if node.target is _BATCH_NORM and node.args[5]:
        return [a for a in node.args[:3] if isinstance(a, fx.Node)]
    return node.all_input_nodes


class Kept:
    """The inputs of one run.

    Made before the run, which may change some of them; :meth:`seal` ends it.

    Args:
        keeping: what the region keeps.
        args: inputs of the region.
        copied: further inputs to copy.
    """

    __slots__ = ("__weakref__", "_keeping", "_versions", "args", "copies")

    def __init__(self, keeping: Keeping, args: Sequence[Any], copied: Iterable[int] = ()) -> None:
        self._keeping, self.args = keeping, args
        self.copies = {i: args[i].detach().clone() for i in {*keeping.copied, *copied}}

    def seal(self) -> None:
        """Take down the state in which the run has left the inputs."""
        self._versions = self._keeping.versions(self.args)
        if self._keeping.at_risk:
            _SEALED.add(self)

    def changed(self) -> set[int]:
        """Numbers of the inputs that were changed in place since the run."""
        versions = self._keeping.versions(self.args)
        if versions == self._versions:
            return set()
        pairs = zip(self._keeping.watched, versions, self._versions, strict=True)
        return {i for i, now, then in pairs if now != then}

    def used_for(self, outputs: Collection[int]) -> frozenset[int]:
        """What gradients that arrive at ``outputs`` use up in eager, see :class:`EagerGraph`."""
        used = self._keeping.eager.used
        if len(outputs) == 1:  # a loss, in each step
            (output,) = outputs
            return used[output]
        return frozenset[int]().union(*[used[output] for output in outputs])

    def reads_outputs(self, outputs: Collection[int], changed: Collection[int]) -> bool:
        """Whether eager's gradients at ``outputs`` read one of the outputs that were ``changed``."""
        return any(not self._keeping.eager.saved_outputs[output].isdisjoint(changed) for output in outputs)

    def check(self, outputs: Collection[int]) -> None:
        """Refuse gradients that arrive at ``outputs`` where eager does.

        Raises:
            RuntimeError: an input that eager keeps by reference was changed.
        """
        for i in self.changed():
            if any(i in self._keeping.eager.saved[output] for output in outputs):
                x = self.args[i]
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"{self._keeping.name(i)} ({x.dtype}, {list(x.shape)}) is at version {x._version}; expected "
                    f"version {self._versions[self._keeping.watched.index(i)]} instead."
                )

    def inputs(self, outputs: Collection[int], *, with_graph: bool = False) -> list[Any]:
        """The inputs as the run has read them, as far as ``outputs`` were computed from them.

        Args:
            outputs: numbers of outputs.
            with_graph: gradients of what is computed from them flow on to the inputs themselves.

        Raises:
            RuntimeError: one was changed, by no region, and is lost.
        """
        changed = self.changed()
        args = list(self.args)
        for i, copy in self.copies.items():
            if i in changed or i in self._keeping.written:
                args[i] = _Restored.apply(args[i], copy) if with_graph and args[i].requires_grad else copy
        for i in sorted(changed.difference(self.copies)):
            # an empty tensor has nothing to lose
            if self.args[i].numel() and any(i in self._keeping.read[output] for output in outputs):
                raise RuntimeError(
                    f"{self._keeping.name(i)} was changed in place after a step has read it, and before gradients of "
                    "the step were computed from its inputs (create_graph=True, or a gradient at another output than "
                    "the loss). Change it after those gradients, or let the step read a copy (.clone())."
                )
        return args

    def before_write(self, storages: Collection[int]) -> None:
        """Copy what is at risk in memory that is about to be changed."""
        changed: set[int] | None = None
        for i in self._keeping.at_risk:
            if i not in self.copies and storage_key(self.args[i]) in storages:
                changed = self.changed() if changed is None else changed
                if i not in changed:
                    self.copies[i] = self.args[i].detach().clone()


_SEALED: weakref.WeakSet[Kept] = weakref.WeakSet()


def before_write(tensors: Iterable[torch.Tensor]) -> None:
    """Let the runs that may still be asked for gradients copy what they need of ``tensors``."""
    if _SEALED:
        storages = {storage_key(x) for x in tensors}
        for kept in list(_SEALED):
            kept.before_write(storages)


def before_update(optimizer: torch.optim.Optimizer) -> None:
    """The same for what ``optimizer`` is about to change."""
    if _SEALED:
        before_write([p for group in optimizer.param_groups for p in group["params"]])


def in_torch(graph: fx.GraphModule) -> Callable[..., Any]:
    """Dynamo's ``graph``, run by torch; what it changes in place is copied for the runs that need it."""
    examples = [n.meta.get("example_value") for n in graph.graph.nodes if n.op == "placeholder"]
    written = [i for i, x in enumerate(examples) if isinstance(x, torch.Tensor) and x._version]
    if not written:
        return graph.forward

    def call(*args: Any) -> Any:
        before_write([args[i] for i in written])
        return graph.forward(*args)

    return call


class _Restored(torch.autograd.Function):
    """What a tensor was before a change in place; gradients are those of the tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        return incoming[0], None
