"""One ONNX graph that updates all parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import onnx_ir as ir
import torch
from onnx_ir.passes.common import IdentityEliminationPass
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_ort.compiler import decompositions
from lightning_ort.compiler.lowering import GraphBuilder
from lightning_ort.compiler.passes import optimize
from lightning_ort.updates.pieces import Part, Piece
from lightning_ort.updates.rule import Rule

__all__ = ["Slot", "UpdateGraph"]


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
        pieces: see :func:`~lightning_ort.updates.pieces.pieces_of`.
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
