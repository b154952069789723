"""One ONNX graph that updates all parameters."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper, numpy_helper
from onnx_ir.passes.common import IdentityEliminationPass
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort.compiler import decompositions
from lightning_ort.compiler.lowering import GraphBuilder
from lightning_ort.compiler.passes import optimize
from lightning_ort.optim.rules.rule import Rule

__all__ = ["CHUNK", "CHUNK_ON_GPU", "SMALL", "Part", "Piece", "Slot", "UpdateGraph", "append_update", "pieces_of"]


@dataclasses.dataclass(frozen=True)
class Slot:
    """What an input or output of the graph stands for.

    ``what`` is ``"param"``, ``"grad"``, the number of a state, ``"scale"``, ``"limit"``, ``"coefficient"`` or
    ``"finite"``. ``where`` is the part of a parameter for the first three, ``(group, index)`` for a coefficient, and
    the group for a limit.
    """

    what: Literal["param", "grad", "scale", "limit", "coefficient", "finite"] | int
    where: Part | tuple[int, int] | int | None = None


class UpdateGraph:
    """Writes the graph.

    Args:
        rule: applied to every piece.
        pieces: see :func:`~lightning_ort.optim.update.graph.pieces_of`.
        dtypes: element type per group.
        clip: divide the gradients of a group by ``norm / limit`` where the norm of all gradients, scaled, is larger
            than the limit of the group.
        guard: leave everything as it is if a gradient is not finite, and tell so.

    Attributes:
        model: the finished graph, to be executed without further optimization.
        inputs: what each of its inputs is.
        outputs: what each of its outputs is.
        wide: the element type of the scale and the limits, the widest there is.
    """

    def __init__(
        self, rule: Rule, pieces: Sequence[Piece], dtypes: Sequence[torch.dtype], *, clip: bool, guard: bool
    ) -> None:
        self._rule, self._dtypes = rule, dtypes
        self._fake = FakeTensorMode()
        self._graph = fx.Graph()
        self._placeholders: dict[Slot, fx.Node] = {}
        self._traces: dict[Any, fx.Graph] = {}
        results: dict[Slot, fx.Node] = {}
        gradients = [self._joined("grad", piece) for piece in pieces]
        self.wide = torch.float64 if torch.float64 in dtypes else torch.float32
        scale = self._input(Slot("scale"), (), self.wide)
        factors = {g: self._cast(scale, dtypes[g]) for g in sorted({p.group for p in pieces})}
        if clip or guard:
            squares = [self._call(_dot, [g])[0] for g in gradients]
            squares = [self._cast(s, self.wide) for s in squares]
            total = squares[0] if len(squares) == 1 else self._call(_total, squares)[0]
        if clip:
            for group in factors:
                limit = self._input(Slot("limit", group), (), self.wide)
                factors[group] = self._cast(self._call(_clipped, [total, scale, limit])[0], dtypes[group])
        finite = self._call(torch.isfinite, [total])[0] if guard else None
        if finite is not None:
            results[Slot("finite")] = finite
        for piece, gradient in zip(pieces, gradients, strict=True):
            self._update(piece, gradient, factors[piece.group], finite, results)
        self._lower(results)

    # -- the fx graph ---------------------------------------------------------------------------------------------

    def _update(
        self, piece: Piece, gradient: fx.Node, factor: fx.Node, finite: fx.Node | None, results: dict[Slot, fx.Node]
    ) -> None:
        rule, dtype = self._rule, self._dtypes[piece.group]
        states = range(len(rule.states))
        whats: list[Any] = ["param", *states]
        old = [self._joined(what, piece) for what in whats]
        names = rule.coefficients
        numbers = [self._input(Slot("coefficient", (piece.group, k)), (), dtype) for k in range(len(names))]

        def formula(param: Tensor, grad: Tensor, scale: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            return rule.formula(
                param, grad, scale, rest[: len(states)], dict(zip(names, rest[len(states) :], strict=True))
            )

        new = self._call(formula, [old[0], gradient, factor, *old[1:], *numbers], key=rule)
        if finite is not None:
            new = [self._call(torch.where, [finite, n, o])[0] for n, o in zip(new, old, strict=True)]
        for what, value in zip(whats, new, strict=True):
            if len(piece.parts) == 1:
                results[Slot(what, piece.parts[0])] = value
                continue
            split = self._call(torch.split, [value], [len(part) for part in piece.parts])
            results |= {Slot(what, part): node for part, node in zip(piece.parts, split, strict=True)}

    def _input(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        if slot not in self._placeholders:
            node = self._graph.placeholder(f"{slot.what}_{len(self._placeholders)}")
            with self._fake:
                node.meta["val"] = torch.empty(tuple(shape), dtype=dtype)
            self._placeholders[slot] = node
        return self._placeholders[slot]

    def _joined(self, what: Any, piece: Piece) -> fx.Node:
        parts = [self._input(Slot(what, part), [len(part)], self._dtypes[piece.group]) for part in piece.parts]
        return parts[0] if len(parts) == 1 else self._call(_joined, parts)[0]

    def _cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return node if node.meta["val"].dtype == dtype else self._call(Tensor.to, [node], dtype)[0]

    def _call(
        self, function: Callable[..., Any], arguments: Sequence[fx.Node], *constants: Any, key: Any = None
    ) -> list[fx.Node]:
        """``function`` traced and copied into the graph; the nodes of its results."""
        vals = [n.meta["val"] for n in arguments]
        signature = (key or function, str(constants), *[(tuple(v.shape), v.dtype) for v in vals])
        trace = self._traces.get(signature)
        if trace is None:

            def flat(*tensors: Tensor) -> list[Tensor]:
                result = function(*tensors, *constants)
                return list(result) if isinstance(result, (tuple, list)) else [result]

            with self._fake:
                # nodes copied from one trace share their fake tensor, by which make_fx would take them for one value
                fakes = [torch.empty(v.shape, dtype=v.dtype) for v in vals]
                table = decompositions.table()
                trace = make_fx(flat, decomposition_table=table, _allow_non_fake_inputs=True)(*fakes).graph
            self._traces[signature] = trace
        copies = dict(zip([n for n in trace.nodes if n.op == "placeholder"], arguments, strict=True))
        for node in trace.nodes:
            if node.op == "call_function":
                copies[node] = self._graph.node_copy(node, copies.__getitem__)
        flat_results: Any = trace.output_node().args[0]
        return [copies[n] for n in flat_results]

    # -- the ONNX graph -------------------------------------------------------------------------------------------

    def _lower(self, results: dict[Slot, fx.Node]) -> None:
        builder = GraphBuilder()
        slots = {builder.add_input(node).name: slot for slot, node in self._placeholders.items()}
        for node in self._graph.nodes:
            if node.op == "call_function":
                builder.lower(node)
        # each result was given its name by an Identity, which would be one more pass over the tensor
        self.model = IdentityEliminationPass()(optimize(builder.model(list(results.values())))).model
        self.inputs = [slots[value.name] for value in self.model.graph.inputs]
        self.outputs = list(results)
        for slot, value in zip(self.outputs, self.model.graph.outputs, strict=True):
            if isinstance(slot.where, Part):
                value.shape = ir.Shape([len(slot.where)])


def _joined(*parts: Tensor) -> Tensor:
    return torch.cat(parts)


def _dot(gradient: Tensor) -> Tensor:
    return gradient.dot(gradient)


def _total(*squares: Tensor) -> Tensor:
    return torch.stack(squares).sum()


def _clipped(total: Tensor, scale: Tensor, limit: Tensor) -> Tensor:
    """``scale``, divided by how much longer than ``limit`` the scaled gradient is; not by less than 1."""
    norm = total.sqrt() * scale
    return torch.where(norm > limit, scale * limit / norm, scale)


_PREFIX = "apply_update/"


def append_update(
    graph: onnx.GraphProto,
    update: UpdateGraph,
    shapes: Sequence[Sequence[int]],
    sources: Mapping[Slot, str],
    target: Callable[[Slot], str],
) -> None:
    """Add the nodes of ``update``, whose tensors are flat, and its results as outputs of the shapes of the parameters.

    Args:
        graph: gets the nodes; must define the values ``sources``.
        update: made of one piece per parameter.
        shapes: per parameter.
        sources: for each input of ``update`` the value that it reads.
        target: name of the output for a result.
    """
    proto = ir.to_proto(update.model).graph
    for value in [*proto.input, *proto.output, *proto.initializer]:
        value.name = _PREFIX + value.name
    for node in proto.node:
        node.name = _PREFIX + node.name
        for values in (node.input, node.output):
            values[:] = [name and _PREFIX + name for name in values]
    nodes: list[onnx.NodeProto] = []
    for slot, value in zip(update.inputs, proto.input, strict=True):
        if isinstance(slot.where, Part):
            nodes.append(helper.make_node("Reshape", [sources[slot], f"{_PREFIX}flat"], [value.name]))
        else:
            nodes.append(helper.make_node("Identity", [sources[slot]], [value.name]))
    nodes += proto.node
    for slot, value in zip(update.outputs, proto.output, strict=True):
        shape = list(shapes[slot.where.param]) if isinstance(slot.where, Part) else []
        name = target(slot)
        graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), f"{name}/shape"))
        nodes.append(helper.make_node("Reshape", [value.name, f"{name}/shape"], [name]))
        graph.output.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, shape))
    graph.initializer.append(numpy_helper.from_array(np.array([-1], np.int64), f"{_PREFIX}flat"))
    graph.initializer.extend(proto.initializer)
    graph.node.extend(nodes)


CHUNK = 1 << 17
"""Elements of a piece. Each node of an update is one pass over a piece, whose tensors should stay in the cache from
one pass to the next: Adam for 3.7 million elements takes 8.7 ms in pieces of 128k, 11.3 ms in pieces of 16k (more
nodes) and 16 ms in one (Zen 4, one thread)."""

CHUNK_ON_GPU = 1 << 24
"""The same on a GPU, where what counts is how many kernels are started and how much memory a pass needs (64 MB)."""

SMALL = 1 << 14
"""Elements below which a tensor is joined with others: a node takes one or two microseconds however little it does."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``stop`` of parameter number ``param``, counted in memory order."""

    param: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Piece:
    """Parts of parameters of one group, updated together."""

    parts: tuple[Part, ...]
    group: int

    def __len__(self) -> int:
        return sum(map(len, self.parts))


def pieces_of(
    sizes: Sequence[int], groups: Sequence[int], *, elementwise: bool, chunk: int | None = None
) -> list[Piece]:
    """All elements of all parameters, each in exactly one piece.

    Args:
        sizes: number of elements per parameter.
        groups: number of the group per parameter.
        elementwise: whether parameters may be cut and joined.
        chunk: elements of a piece, by default :data:`CHUNK`.
    """
    chunk = chunk or CHUNK
    whole = [Part(i, 0, n) for i, n in enumerate(sizes) if n]
    if not elementwise:
        return [Piece((part,), groups[part.param]) for part in whole]
    pieces: list[Piece] = []
    joined: dict[int, list[Part]] = {}
    for part in whole:
        group = groups[part.param]
        if len(part) < SMALL:
            bucket = joined.setdefault(group, [])
            bucket.append(part)
            if sum(map(len, bucket)) >= chunk:
                pieces.append(Piece(tuple(joined.pop(group)), group))
            continue
        # pieces of nearly the same size: a short remainder would have as many nodes as a full one
        count = -(-len(part) // chunk)
        cuts = [len(part) * k // count for k in range(count + 1)]
        pieces += [Piece((Part(part.param, a, b),), group) for a, b in itertools.pairwise(cuts)]
    return pieces + [Piece(tuple(parts), group) for group, parts in joined.items()]
