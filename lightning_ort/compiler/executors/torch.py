"""Graphs run by torch itself: native ATen operators, called one after the other by generated code."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.executors.executable import Executable, Results
from lightning_ort.compiler.functional_graph import TRACED_KEYS
from lightning_ort.compiler.mixed_precision import half_types
from lightning_ort.compiler.random import drawer
from lightning_ort.compiler.trace import Traced
from lightning_ort.report import timeline
from lightning_ort.runtime.memory import storage_key

__all__ = ["TorchExecutable"]

aten = torch.ops.aten

# What gave a view when the graph was traced may lie otherwise in a run, after kernels whose fake ones differ in that.
_TOLERANT = {
    aten.view.default: aten.reshape.default,
    aten._unsafe_view.default: aten.reshape.default,
}


class TorchExecutable(Executable):
    """Draws the random numbers of a graph and computes its results one operator after the other, as eager does.

    Args:
        traced: a graph of ATen operators, decomposed or not.
        device: what computes; tensors live there or on the CPU.
        extra: further nodes to give out.

    Raises:
        Untraceable: the size of a random draw depends on data.
    """

    executor = "torch"

    def __init__(self, traced: Traced, device: torch.device, extra: Sequence[fx.Node] = ()) -> None:
        self.half = half_types(traced.graph)
        self._device = device
        super().__init__(traced, extra)

    def _compile(self, traced: Traced, results: Results) -> None:
        self._draw = drawer(traced.draws, results.sizes, self._device)
        self._compute = self._function(traced.module, results)
        given = {p for p in self.outputs if p is not None} | {p for _, p in self.gradients}
        self._kept = {p for p in self.extra if p not in given}
        self._copied = sorted(_not_alone(results.all, self._kept))
        # kernels ask whether gradients will be wanted, and keep more or choose others then
        self._for_gradients = bool(self.extra or self.gradients)
        self._is_first = True

    def _function(self, module: fx.GraphModule, results: Results) -> Callable[[list[Any]], list[Any]]:
        """What computes ``results`` from the values of their inputs, a list that it may empty."""
        return generate(module, results.inputs, results.all)

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        recording = timeline.present
        began = 0.0 if recording is None else perf_counter()
        values = [*inputs, *self._draw(inputs)] if self.has_draws else [*inputs]
        grad = torch.is_grad_enabled() or self._for_gradients
        with torch._C._ExcludeDispatchKeyGuard(TRACED_KEYS), torch.set_grad_enabled(grad):
            results = self._compute(values)
            for i in self._copied:
                results[i] = results[i].clone()
            if self._is_first:
                self._separate(results, [x for x in inputs if isinstance(x, torch.Tensor)])
                self._is_first = False
        if recording is not None:
            recording.add("torch", "graph", began, self.report)
        return results

    def _separate(self, results: list[torch.Tensor], inputs: Iterable[torch.Tensor]) -> None:
        """Copy results that share memory although no operator says so, in this run and those to come."""
        seen = {storage_key(x) for x in inputs}
        for i in _users_first(results, self._kept):
            key = storage_key(results[i])
            if key in seen:
                results[i] = results[i].clone()
                self._copied.append(i)
            elif i not in self._kept:
                seen.add(key)


def _users_first(results: Sequence[Any], kept: Collection[int]) -> list[int]:
    """Positions of ``results``, those ``kept`` at the end."""
    return sorted(range(len(results)), key=kept.__contains__)


def _not_alone(results: Sequence[fx.Node], kept: Collection[int]) -> set[int]:
    """Positions of results that may share memory with inputs, constants or results that users get.

    Args:
        results: all of them.
        kept: positions of those that only a backward graph reads: they may share memory with each other, or be draws.
    """
    found = set()
    taken: set[fx.Node] = set()
    for i in _users_first(results, kept):
        root = _root(results[i])
        foreign = root.op != "call_function" and "draw" not in root.meta
        if foreign or root in taken or _overlaps_itself(results[i]):
            found.add(i)
        elif i not in kept:
            taken.add(root)
    return found


def _root(node: fx.Node) -> fx.Node:
    """The node in whose memory the value of ``node`` may lie."""
    while node.op == "call_function":
        source = node
        if node.target is operator.getitem:
            source = node.args[0]
        schema = getattr(source.target, "_schema", None)
        if schema is None or not any(r.alias_info for r in schema.returns):
            return node
        shared = [a for a, s in zip(source.args, schema.arguments, strict=False) if s.alias_info is not None]
        if not shared or not isinstance(shared[0], fx.Node):
            return node
        node = shared[0]
    return node


def _overlaps_itself(node: fx.Node) -> bool:
    """Whether entries of a tensor may share memory, as after ``expand``."""
    val = node.meta["val"]
    return any(isinstance(stride, int) and stride == 0 for stride in val.stride())


def generate(
    module: fx.GraphModule, inputs: Sequence[fx.Node], results: Sequence[fx.Node]
) -> Callable[[list[Any]], list[Any]]:
    """A function that runs the graph of ``module``.

    It takes the values of ``inputs`` as a list, which it empties, and gives those of ``results``. Values are let go
    after their last use.
    """
    names: dict[fx.Node, str] = {node: f"x{i}" for i, node in enumerate(inputs)}
    space: dict[str, Any] = {}
    functions: dict[Any, str] = {}
    nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
    last = {source: node for node in nodes for source in node.all_input_nodes}
    kept = set(results)
    lines = [f"[{', '.join(names[n] for n in inputs)}] = values", "values.clear()"] if inputs else []
    unread = [names[n] for n in inputs if n not in last and n not in kept]
    if unread:
        lines.append(f"{' = '.join(unread)} = None")

    def written(value: Any) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, (list, tuple)):
            inside = ", ".join(map(written, value))
            return f"[{inside}]"
        if isinstance(value, slice):
            return f"slice({written(value.start)}, {written(value.stop)}, {written(value.step)})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        name = f"c{len(space)}"
        space[name] = value
        return name

    for i, node in enumerate(nodes):
        name = names[node] = f"v{i}"
        if node.op == "get_attr":
            space[name] = attrgetter(str(node.target))(module)
            continue
        if node.target is operator.getitem and isinstance(node.args[1], int):
            lines.append(f"{name} = {names[node.args[0]]}[{node.args[1]}]")
        else:
            target = _TOLERANT.get(node.target, node.target)
            if target not in functions:
                functions[target] = f"f{len(functions)}"
                # what a call of the overload does, without a frame of Python
                space[functions[target]] = getattr(target, "_op", target)
            arguments = [*map(written, node.args), *(f"{k}={written(v)}" for k, v in node.kwargs.items())]
            lines.append(f"{name} = {functions[target]}({', '.join(arguments)})")
        done = [names[s] for s in node.all_input_nodes if last[s] is node and s not in kept and s.op != "get_attr"]
        if not node.users and node not in kept:
            done.append(name)
        if done:
            lines.append(f"{' = '.join(done)} = None")
    lines.append(f"return [{', '.join(names[n] for n in results)}]")
    source = "def compute(values):\n    " + "\n    ".join(lines)
    exec(compile(source, "<a graph in torch>", "exec"), space)  # names of values are ours, not the user's
    compute: Callable[[list[Any]], list[Any]] = space["compute"]
    return compute
