"""What eager's autograd would keep of a region for its gradients."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.global_state import without_autocast
from lightning_ort.runtime.memory import storage_key

__all__ = ["EagerGraph", "arrivals"]


@dataclasses.dataclass(frozen=True)
class EagerGraph:
    """Per differentiable output of a region, by number, what eager's gradient of it reads and reaches.

    A value that is kept *by reference* is one whose change in place eager answers with an error. A value derived from
    it, such as ``p.exp()`` or ``p.clone()``, is eager's own.

    Attributes:
        saved: numbers of the inputs that are kept by reference.
        saved_outputs: numbers of the outputs that are.
        reached: numbers of the inputs that get a gradient; all where that is not known.
        used: numbers of the functions that keep something, which their first backward lets go of.
        inner: numbers of the outputs by which gradients of other outputs come.
    """

    saved: dict[int, frozenset[int]]
    saved_outputs: dict[int, frozenset[int]]
    reached: dict[int, frozenset[int]]
    used: dict[int, frozenset[int]]
    inner: frozenset[int] = frozenset()

    @classmethod
    def of(cls, region: fx.GraphModule, differentiable: Sequence[int]) -> EagerGraph:
        """Read it from the autograd graph of the fake tensors with which Dynamo made ``region``."""
        results = region.graph.output_node().args[0]
        inputs = [n.meta.get("example_value") for n in region.graph.nodes if n.op == "placeholder"]
        outputs = [r.meta.get("example_value") if isinstance(r, fx.Node) else r for r in results]
        of_inputs, of_outputs = _by_storage(inputs), _by_storage(outputs)
        # what computed an input lies before the region
        sources = {
            f: i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and (f := _function_of(x)) is not None
        }
        leaves = {id(x): i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.is_leaf}
        saved, saved_outputs, reached, used = {}, {}, {}, {}
        functions: dict[Any, int] = {}
        keeping_nothing = _resizing(region)
        made: dict[Any, list[int]] = {}
        for number, x in enumerate(outputs):  # also views of other results
            if isinstance(x, torch.Tensor) and x.requires_grad:
                made.setdefault(_function_of(x), []).append(number)
        inner: set[int] = set(made.pop(None, ())).intersection(differentiable)
        for output in differentiable:
            kept: set[int] = set()
            ends: set[int] = set()
            keeping: set[int] = set()
            first, seen = _function_of(outputs[output]), set()
            pending = [first]
            unknown = first is None
            while pending:
                function = pending.pop()
                if function is None or function in seen:
                    continue
                seen.add(function)
                if function is not first:
                    inner.update(made.get(function, ()))
                if function in sources:
                    ends.add(sources[function])
                elif hasattr(function, "variable"):
                    unknown |= id(function.variable) not in leaves
                    ends.add(leaves.get(id(function.variable), -1))
                else:
                    tensors = [] if function in keeping_nothing else list(_saved_by(function))
                    kept.update(storage_key(t) for t in tensors if t is not None)
                    # a write through a view keeps the function of what was written
                    if tensors or function.name().endswith("CopySlices"):
                        keeping.add(functions.setdefault(function, len(functions)))
                    pending += [source for source, _ in function.next_functions]
            saved[output] = frozenset(i for key in kept for i in of_inputs.get(key, ()))
            saved_outputs[output] = frozenset(i for key in kept for i in of_outputs.get(key, ()))
            reached[output] = frozenset(range(len(inputs)) if unknown else ends)
            used[output] = frozenset(keeping)
        return cls(saved, saved_outputs, reached, used, frozenset(inner))


def arrivals(region: fx.GraphModule, starts: Sequence[int], differentiable: Sequence[int]) -> list[int]:
    """Numbers of the leaves among the inputs of ``region``, in the order in which eager has their gradients.

    Torch's engine tells, on the fake tensors with which Dynamo made ``region``. Where it cannot go all the way, what is
    used last comes first.

    Args:
        region: Dynamo's graph.
        starts: numbers of the outputs from which gradients come.
        differentiable: all from which they may come; what only those lead to is at the end.
    """
    inputs = [n.meta.get("example_value") for n in region.graph.nodes if n.op == "placeholder"]
    leaves = {i: x for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf}
    results = region.graph.output_node().args[0]
    found: list[int] = []
    handles = [x.register_hook(functools.partial(_note, found, i)) for i, x in leaves.items()]
    try:
        with torch.enable_grad(), without_autocast():
            for outputs in (starts, differentiable):
                roots = [results[output].meta["example_value"] for output in outputs]
                seeds = [torch.ones_like(root) for root in roots]
                torch.autograd.grad(roots, list(leaves.values()), seeds, retain_graph=True, allow_unused=True)
    except Exception:
        found += reversed(leaves)
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))


def _note(found: list[int], number: int, gradient: torch.Tensor) -> None:
    found.append(number)


def _resizing(region: fx.GraphModule) -> set[Any]:
    """The functions that stand for interpolations in ``region``: decomposed for fake tensors, but not in eager, where
    their gradients read sizes only.
    """
    found: set[Any] = set()
    for node in region.graph.nodes:
        if "interpolate" not in (name := str(node.target)) and "upsample" not in name:
            continue
        before = {_function_of(s.meta["example_value"]) for s in node.all_input_nodes if _is_tensor(s)}
        pending = [_function_of(node.meta["example_value"])] if _is_tensor(node) else []
        while pending:
            function = pending.pop()
            if function is not None and function not in found and function not in before:
                found.add(function)
                pending += [source for source, _ in function.next_functions]
    return found


def _function_of(tensor: torch.Tensor) -> Any:
    """What computed ``tensor``; ``None`` also for one of several views, whose base has changed: it has no gradient."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), torch.Tensor)


def _by_storage(values: Sequence[Any]) -> dict[int, list[int]]:
    numbers: dict[int, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            numbers.setdefault(storage_key(value), []).append(i)
    return numbers


_ATTRIBUTES: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _attributes(kind: type) -> list[str]:
    names = _ATTRIBUTES.get(kind)
    if names is None:
        there = dir(kind)
        # Of tensors there is a raw form as well. A number is not to be read: one that changes would be settled by that.
        names = [name for name in there if name.startswith("_saved_") and f"_raw{name}" in there]
        names += [name for name in there if name == "saved_tensors"]  # a torch.autograd.Function's
        _ATTRIBUTES[kind] = names
    return names


def _saved_by(function: Any) -> Iterator[torch.Tensor | None]:
    """Tensors that a function keeps; ``None`` for one that cannot be had any more."""
    for name in _attributes(type(function)):
        try:
            value = getattr(function, name)
        except RuntimeError:  # changed in place by the region itself: tracing its gradients says so
            yield None
            continue
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(tensor, torch.Tensor):
                yield tensor
