"""How the outputs that Dynamo expects are made from the tensors of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from lightning_ort.compiler.autograd_functions import calls_function
from lightning_ort.compiler.executors.executable import Executable
from lightning_ort.compiler.functional_graph import Untraceable
from lightning_ort.compiler.symbolic_shapes import Sizes, entries_in_order
from lightning_ort.runtime.memory import storage_key

__all__ = ["InputView", "OutputLayout", "overlap", "repeats_itself"]


class OutputLayout:
    """How the outputs that Dynamo expects are made from the tensors of a run.

    Attributes:
        values: the outputs, as Dynamo has traced them.
        views: by number, those that are inputs, other outputs, or views of such.
        differentiable: numbers of the others that have gradients.
        leads_on: gradients of some output, or view, go on to inputs.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        if any(map(_is_at_fixed_place, graph.graph.nodes)):
            raise Untraceable("as_strided with a storage_offset reads an input's memory at a fixed place")
        results = graph.graph.output_node().args[0]
        self.values = [r.meta.get("example_value") if isinstance(r, fx.Node) else r for r in results]
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            node.meta.setdefault("val", node.meta.get("example_value"))
        sizes = Sizes(placeholders)
        self.views: dict[int, InputView | OutputView] = {**_input_views(graph, sizes)}
        self.views |= _again(self.values)
        self.views |= output_views(self.values, self.views, sizes)
        for i, view in self.views.items():
            source = (placeholders if isinstance(view, InputView) else results)[view.source]
            if view.differentiable and _by_function(results[i], source):
                raise Untraceable("it gives a view by a torch.autograd.Function, whose gradient is not that of a view")
        self.differentiable = [
            i
            for i, v in enumerate(self.values)
            if isinstance(v, torch.Tensor) and i not in self.views and _has_gradient(v)
        ]
        self.leads_on = bool(self.differentiable) or any(
            v.differentiable and self.values[i].grad_fn is not None
            for i, v in self.views.items()
            if self.values[i].requires_grad
        )

    def learn(self, executable: Executable) -> None:
        """Take over the positions of ``executable``; they are the same for every graph of a region."""
        positions = [None if i in self.views else p for i, p in enumerate(executable.outputs)]
        self.n_unique = 1 + max((p for p in executable.outputs if p is not None), default=-1)
        self.differentiable_positions = {p: i for i in self.differentiable if (p := positions[i]) is not None}
        self.not_differentiable = [p for p in range(self.n_unique) if p not in self.differentiable_positions]
        first: dict[int, int] = {}
        self._parts: list[Any] = []
        for i, position in enumerate(positions):
            if i in self.views:
                self._parts.append(self.views[i])
            elif position is None:
                self._parts.append(None)
            elif position not in first:
                first[position] = i
                as_it_is = i in self.differentiable or position in self.not_differentiable
                self._parts.append((position, None if as_it_is else torch.Tensor.detach))
            elif _same_storage(self.values[i], self.values[first[position]]):
                self._parts.append((position, _alias if i in self.differentiable else torch.Tensor.detach))
            else:
                self._parts.append((position, torch.clone if i in self.differentiable else _detached_copy))
        simple = [p[0] for p in self._parts if isinstance(p, tuple) and p[1] is None]
        self._simple = simple if len(simple) == len(self._parts) else None
        orders = {position: _memory_order(self.values[i]) for position, i in first.items()}
        self._orders = {position: order for position, order in orders.items() if order is not None}

    def unique(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors of a run that outputs are made from, their entries in memory in eager's order.

        What follows may see it: random draws fill tensors in the order of their memory.
        """
        if not self._orders:
            return results[: self.n_unique]
        laid_out = list(results[: self.n_unique])
        for position, order in self._orders.items():
            x = laid_out[position]
            y = torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device)
            if y.stride() != x.stride():
                laid_out[position] = y.copy_(x)
        return laid_out

    def arrange(self, executable: Executable, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """Outputs in Dynamo's order."""
        if self._simple is not None:
            return [tensors[i] for i in self._simple]
        numbers = executable.numbers(args) if executable.has_numbers else ()
        outputs: list[Any] = []
        for i, part in enumerate(self._parts):
            if part is None or isinstance(part, OutputView):
                outputs.append(numbers[i] if numbers and part is None else None)
            elif isinstance(part, tuple):
                position, change = part
                outputs.append(tensors[position] if change is None else change(tensors[position]))
            else:
                outputs.append(part(args))
        for i, part in enumerate(self._parts):
            if isinstance(part, OutputView):
                outputs[i] = part(args, outputs)
        return outputs


def _memory_order(fake: Any) -> list[int] | None:
    """The dimensions from the slowest to the fastest, unless that is their own order or entries do not lie densely."""
    if not isinstance(fake, torch.Tensor):
        return None
    hints = [n if isinstance(n, int) else n.node.hint for n in [*fake.shape, *fake.stride()]]
    if None in hints:
        return None
    sizes, strides = hints[: fake.dim()], hints[fake.dim() :]
    order = sorted(range(len(sizes)), key=lambda d: (-strides[d], d))
    count = 1
    for d in reversed(order):
        if sizes[d] != 1 and strides[d] != count:
            return None
        count *= sizes[d]
    moved = [d for d in order if sizes[d] != 1]
    return order if moved != sorted(moved) else None


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


@dataclasses.dataclass(frozen=True)
class InputView:
    """An output that torch would give as a view of input number ``source``.

    Its place is told from where the input lies, which may be elsewhere in its memory at each call, as ``rows[i]`` does.
    Without ``geometry`` it is the input itself, as ``weight.contiguous()`` is.
    """

    source: int
    geometry: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    rank: int
    differentiable: bool

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        if self.geometry is None:
            whole: torch.Tensor = args[self.source]
            return whole
        numbers = self.geometry(args)
        size, stride, offset = numbers[: self.rank], numbers[self.rank : 2 * self.rank], numbers[-1]
        whole = args[self.source] if self.differentiable else args[self.source].detach()
        return whole.as_strided(size, stride, whole.storage_offset() + offset)


@dataclasses.dataclass(frozen=True)
class OutputView:
    """An output that torch would give as a view of output number ``source``, which fills its memory from the start.

    A change in place of one is a change of the other. Without ``geometry`` it is that output once more: the same
    tensor, as ``h`` and ``h.contiguous()`` are.
    """

    source: int
    geometry: Callable[[Sequence[Any]], tuple[Any, ...]] | None
    rank: int
    differentiable: bool

    def __call__(self, args: Sequence[Any], outputs: Sequence[Any]) -> torch.Tensor:
        if self.geometry is None:
            again: torch.Tensor = outputs[self.source]
            return again
        numbers = self.geometry(args)
        size, stride, offset = numbers[: self.rank], numbers[self.rank : 2 * self.rank], numbers[-1]
        whole = outputs[self.source] if self.differentiable else outputs[self.source].detach()
        return whole.contiguous().as_strided(size, stride, whole.storage_offset() + offset)


def _again(values: Sequence[Any]) -> dict[int, OutputView]:
    """Output number to the earlier output that it is, whose gradients are its own."""
    first: dict[int, int] = {}  # by identity: fake tensors are what torch gave, and know when it gave one again
    tensors = ((i, x) for i, x in enumerate(values) if isinstance(x, torch.Tensor))
    return {i: OutputView(j, None, x.dim(), False) for i, x in tensors if (j := first.setdefault(id(x), i)) != i}


def output_views(values: Sequence[Any], known: Collection[int], sizes: Sizes) -> dict[int, OutputView]:
    """Output number to the view of another output that it is, apart from those that are ``known`` to be views."""
    tensors = {i: x for i, x in enumerate(values) if isinstance(x, torch.Tensor) and i not in known}
    views: dict[int, OutputView] = {}
    for i, x in tensors.items():
        for j, whole in tensors.items():
            if x is whole or j in views or not _same_storage(x, whole) or not _read_alike(x, whole):
                continue
            of_two_the_first = j < i or not _fills_memory(x)
            if of_two_the_first and _fills_memory(whole) and (_has_gradient(whole) or not _has_gradient(x)):
                geometry = sizes.evaluator([*x.shape, *x.stride(), x.storage_offset()])
                views[i] = OutputView(j, geometry, x.dim(), _follows(x, whole))
                break
    return views


def _read_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the same entries of memory are the same numbers."""
    return (one.dtype, one.is_conj(), one.is_neg()) == (other.dtype, other.is_conj(), other.is_neg())


def _follows(view: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether gradients of ``view`` go to ``whole``, now or once a change in place has given it one: ``x.detach()`` and
    views made without gradients share the memory alone.
    """
    if view.requires_grad or whole.requires_grad:
        return view.requires_grad and (view is whole or not _leads_nowhere(view))
    base = whole._base if whole._is_view() else whole
    return view._is_view() and view._base is base


def _has_gradient(x: torch.Tensor) -> bool:
    return x.requires_grad and not _leads_nowhere(x)


def _leads_nowhere(x: torch.Tensor) -> bool:
    """Whether it is a view made while gradients were off, which says all the same that it requires one.

    Raises:
        Untraceable: that cannot be told.
    """
    try:
        return x._is_view() and x.grad_fn is None
    except (RuntimeError, ValueError):
        raise Untraceable(
            "it changes the shape of a tensor in place, and gives a view that was made before: the derivative of that "
            "view is not to be had any more"
        ) from None


def _fills_memory(x: torch.Tensor) -> bool:
    """Whether ``x`` is known to lie in all of its memory, row by row, whatever the open sizes are."""
    entries = entries_in_order(x.shape, x.stride())
    return entries is not None and statically_known_true(entries * x.itemsize == x.untyped_storage().nbytes())


def _same_storage(a: Any, b: Any) -> bool:
    """Whether two tensors, fake ones too, lie in the same memory."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return storage_key(a) == storage_key(b)


def _input_views(graph: fx.GraphModule, sizes: Sizes) -> dict[int, InputView]:
    """Output number to the view it is, for Dynamo's ``graph``.

    Raises:
        Untraceable: the graph hides which input the view is of.
    """
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    views = {}
    for i, result in enumerate(graph.graph.output_node().args[0]):
        val = result.meta.get("example_value") if isinstance(result, fx.Node) else None
        if not isinstance(val, torch.Tensor):
            continue
        sources = [
            j
            for j, node in enumerate(placeholders)
            if _same_storage(val, x := node.meta.get("example_value")) and val.dtype == x.dtype
        ]
        if any(not _read_alike(val, placeholders[j].meta["example_value"]) for j in sources):
            raise Untraceable("it gives the conjugate of an input, or its negative part, as a view")
        if sources:
            # two inputs may be views of one tensor: gradients go by way of the one this is made from
            itself = [placeholders[j] for j in sources if placeholders[j].meta["example_value"] is val]
            origin = itself[0] if itself else _origin(result) if len(sources) > 1 else placeholders[sources[0]]
            if origin not in (placeholders[j] for j in sources):
                raise Untraceable("it gives a view of one of two inputs in the same memory, and does not tell of which")
            source = placeholders.index(origin)
            whole = origin.meta["example_value"]
            offset = val.storage_offset() - whole.storage_offset()
            geometry = None if val is whole else sizes.evaluator([*val.shape, *val.stride(), offset])
            views[i] = InputView(source, geometry, val.dim(), _follows(val, whole))
    return views


def _origin(node: fx.Node) -> fx.Node:
    """The first of a chain of views, and of changes in place, that ends in ``node``: each is made from its first
    argument in the same memory.
    """
    while True:
        val = node.meta.get("example_value")
        before = (n for n in node.all_input_nodes if _same_storage(n.meta.get("example_value"), val))
        source = next(before, None)
        if source is None:
            return node
        node = source


def _by_function(node: fx.Node, source: fx.Node) -> bool:
    """Whether the view ``node`` of ``source`` has passed a ``torch.autograd.Function``, with a gradient of its own."""
    seen, todo = {source}, [node]
    while todo:
        node = todo.pop()
        if calls_function(node):
            return True
        seen.add(node)
        todo += [n for n in node.all_input_nodes if n not in seen and _may_share_memory(n, node)]
    return False


def _may_share_memory(one: fx.Node, other: fx.Node) -> bool:
    values = [n.meta.get("example_value") for n in (one, other)]
    if not all(isinstance(v, torch.Tensor) for v in values):  # several results
        return True
    return _same_storage(*values)


def _is_at_fixed_place(node: fx.Node) -> bool:
    """Whether it reads an input from a given place in its memory on, wherever in there the input itself begins."""
    if node.target not in (torch.as_strided, torch.Tensor.as_strided, "as_strided"):
        return False
    given = node.kwargs.get("storage_offset", node.args[3] if len(node.args) > 3 else None)
    return given is not None and _origin(node).op == "placeholder"


def overlap(tensors: Sequence[Any], changed: Sequence[int]) -> bool:
    """Whether one of ``tensors`` that is ``changed``, by number, may share memory with another one."""
    if not changed:
        return False
    storages = [storage_key(x) if isinstance(x, torch.Tensor) else None for x in tensors]
    written = {storages[i] for i in changed}
    if len(written) == len(changed) and sum(key in written for key in storages) == len(changed):
        return False
    ranges = [_range(x) if key in written else None for key, x in zip(storages, tensors, strict=True)]
    for i in changed:
        for j, key in enumerate(storages):
            if key != storages[i] or j == i:
                continue
            one, other = ranges[i], ranges[j]
            if one is None or other is None or (one[0] < other[1] and other[0] < one[1]):
                return True
    return False


def repeats_itself(x: torch.Tensor) -> bool:
    """Whether ``x`` has the same memory for several entries along some dimension."""
    return any(
        isinstance(step, int) and step == 0 and str(size) != "1" for size, step in zip(x.shape, x.stride(), strict=True)
    )


def _range(x: torch.Tensor) -> tuple[int, int] | None:
    """First and last byte in the storage of ``x``; ``None`` where sizes are symbolic."""
    numbers = [*x.shape, *x.stride(), x.storage_offset()]
    if not all(isinstance(n, int) for n in numbers):
        return None
    if not x.numel():
        return 0, 0
    first = int(x.storage_offset())
    last = first + sum((size - 1) * int(stride) for size, stride in zip(x.shape, x.stride(), strict=True))
    return first * x.itemsize, (last + 1) * x.itemsize
