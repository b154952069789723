"""Traces as text, for later processes: nodes, and the types and sizes of their values.

Read back, a trace calls nothing but operators of torch and of Python's arithmetic, which are looked up by name.
"""

from __future__ import annotations

import base64
import json
import keyword
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
import torch.utils._sympy.functions as torch_functions
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_ort.compiler.functional_graph import stands_for_float
from lightning_ort.compiler.trace import Traced

__all__ = ["NotWritable", "decoded", "encoded"]

_NAMESPACES = ("aten", "lightning_ort", "prims")
_ASSERTIONS = ("aten._assert_async.default", "aten._assert_async.msg")
_LARGEST_CONSTANT = 4096
"""bytes of a tensor in a graph, up to which it is written"""
_OPERATORS = "add and_ eq floordiv ge getitem gt le lt mod mul ne neg or_ pow sub truediv"
_OF_SIZES = (torch.sym_float, torch.sym_int, torch.sym_ite, torch.sym_max, torch.sym_min, torch.sym_not)
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()},
    **{f"torch.{function.__name__}": function for function in _OF_SIZES},
}
_NAMES = {function: name for name, function in _ARITHMETIC.items()}
_CONSTANTS: dict[type, str] = {torch.dtype: "dtype", torch.layout: "layout", torch.memory_format: "memory_format"}
_EXPRESSIONS: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in ("Add", "Mul", "Pow")},
    **{name: getattr(torch_functions, name) for name in ("CleanDiv", "FloorDiv", "Max", "Min", "Mod")},
    **{name: getattr(torch_functions, name) for name in ("ModularIndexing", "PythonMod")},
}


class NotWritable(Exception):
    """Something in a trace has no form as text, or a text says nothing of this process."""


def encoded(traced: Traced) -> dict[str, Any]:
    """What :func:`decoded` makes ``traced`` of, of what JSON knows.

    Raises:
        NotWritable: it has calls, constants or numbers of another kind.
    """
    return _Writer(traced).content()


def decoded(content: dict[str, Any], fakes: Sequence[Any], mode: FakeTensorMode) -> Traced:
    """A trace of a graph with the inputs ``fakes``, of ``mode``, whose sizes have the names that they had.

    Raises:
        NotWritable: it cannot be made in this process.
    """
    try:
        with torch.no_grad():
            return _Reader(content, fakes, mode).traced()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, SyntaxError, TypeError, ValueError) as error:
        raise NotWritable(str(error)) from error


class _Writer:
    def __init__(self, traced: Traced) -> None:
        self._traced = traced
        self._texts: dict[str, int] = {}
        self._vals: dict[str, int] = {}
        self._numbers = {node: i for i, node in enumerate(traced.graph.nodes)}
        # what a draw was called with may be in no graph any more
        self._gone: dict[fx.Node, int] = {}

    def content(self) -> dict[str, Any]:
        traced = self._traced
        nodes = [self._node(node) for node in traced.graph.nodes]
        results = {
            "inputs": self._value(traced.inputs),
            "tangents": self._value(traced.tangents),
            "draws": self._value(traced.draws),
            "outputs": self._value(traced.outputs),
            "gradients": self._value(traced.gradients),
            "updates": self._value(traced.updates),
        }
        gone = [self._val(node.meta.get("val")) for node in self._gone]
        return {
            "nodes": nodes, "gone": gone, "results": results, "scaled": traced.scaled, "texts": list(self._texts),
            "tensors": list(self._vals),
        }  # fmt: skip

    def _node(self, node: fx.Node) -> list[Any]:
        meta: dict[str, Any] = {}
        if "val" in node.meta:
            meta["val"] = self._val(node.meta["val"])
        if node.meta.get("stack_trace"):
            meta["stack_trace"] = self._text(node.meta["stack_trace"])
        if node.meta.get("original_aten") is not None:
            meta["original_aten"] = self._text(_name_of(node.meta["original_aten"]))
        if "weight" in node.meta:
            meta["weight"] = True
        if "draw" in node.meta:
            target, layout, args, kwargs = node.meta["draw"]
            meta["draw"] = [_name_of(target), self._val(layout), self._value(args), self._value(kwargs)]
        if "divisor" in node.meta:
            meta["divisor"] = node.meta["divisor"]
        if node.op == "call_function":
            target = _name_of(node.target)
        elif node.op in ("placeholder", "output"):
            target = str(node.target)
        elif node.op == "get_attr":
            target = [str(node.target), *self._constant(getattr(self._traced.module, str(node.target)))]
        else:
            raise NotWritable(node.op)
        return [node.op, node.name, target, self._value(node.args), self._value(node.kwargs), meta]

    def _text(self, text: str) -> int:
        return self._texts.setdefault(text, len(self._texts))

    def _constant(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or not value.is_contiguous():
            raise NotWritable("a constant")
        if value.nbytes > _LARGEST_CONSTANT or value.is_complex() or value.requires_grad:
            raise NotWritable("a constant")
        data = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
        return [base64.b64encode(data).decode(), list(value.shape), _plain_name(value.dtype)]

    def _value(self, value: Any) -> Any:
        """Arguments, and what means something among the nodes."""
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, fx.Node):
            if value in self._numbers:
                return {"node": self._numbers[value]}
            return {"gone": self._gone.setdefault(value, len(self._gone))}
        if isinstance(value, list):
            return [self._value(v) for v in value]
        if type(value) is tuple:
            return {"tuple": [self._value(v) for v in value]}
        if isinstance(value, dict):
            return {"dict": [[self._value(k), self._value(v)] for k, v in value.items()]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if type(value) in _CONSTANTS:
            return {_CONSTANTS[type(value)]: _plain_name(value)}
        raise NotWritable(type(value).__name__)

    def _val(self, value: Any) -> Any:
        """What a node stands for."""
        if isinstance(value, (tuple, list)):
            return {type(value).__name__: [self._val(v) for v in value]}
        if value is None or type(value) in (bool, int, float):
            return {"plain": value}
        if isinstance(value, torch.SymInt):
            return {"size": _expression(value)}
        if type(value) is not FakeTensor or value.layout != torch.strided or value.is_conj() or value.is_neg():
            raise NotWritable(type(value).__name__)
        sizes, strides = [_expression(s) for s in value.shape], [_expression(s) for s in value.stride()]
        offset = _expression(value.storage_offset())
        row = json.dumps([sizes, strides, offset, _plain_name(value.dtype), str(value.device)])
        return {"tensor": self._vals.setdefault(row, len(self._vals))}


def _plain_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _name_of(target: Any) -> str:
    if isinstance(target, OpOverload) and target.namespace in _NAMESPACES and _is_functional(target):
        return str(target)
    name = _NAMES.get(target)
    if name is None:
        raise NotWritable(str(target))
    return name


def _named(name: str) -> Any:
    if name in _ARITHMETIC:
        return _ARITHMETIC[name]
    namespace, packet, overload = name.split(".")
    if namespace not in _NAMESPACES:
        raise NotWritable(name)
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, OpOverload) or not _is_functional(found):
        raise NotWritable(name)
    return found


def _is_functional(operator: OpOverload) -> bool:
    """Whether an operator computes results from its arguments, or asserts something of them, and does nothing else.

    There are some that print, or that read and write files.
    """
    schema = operator._schema
    useful = bool(schema.returns) or str(operator) in _ASSERTIONS
    return useful and not schema.is_mutable and all(a.name != "filename" for a in schema.arguments)


def _expression(number: Any) -> Any:
    """An integer, or the tree of a symbolic one with its text, by which it is known to be the same when it is read."""
    if type(number) is int:
        return number
    if not isinstance(number, torch.SymInt):
        raise NotWritable(type(number).__name__)
    expression = number.node.expr
    return [str(expression), _tree(expression)]


def _tree(expression: Any) -> Any:
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    name = type(expression).__name__
    if _EXPRESSIONS.get(name) is not type(expression):
        raise NotWritable(name)
    return [name, *map(_tree, expression.args)]


class _Reader:
    def __init__(self, content: dict[str, Any], fakes: Sequence[Any], mode: FakeTensorMode) -> None:
        self._content, self._fakes, self._mode = content, fakes, mode
        self._sizes = mode.shape_env
        self._symbols: dict[str, sympy.Symbol] = {}
        self._hints: dict[sympy.Symbol, sympy.Integer] = {}
        for fake in fakes:
            for size in (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,):
                if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                    self._symbols[str(size.node.expr)] = size.node.expr
                    self._hints[size.node.expr] = sympy.Integer(size.node.hint)
        self._texts: list[str] = content["texts"]
        self._tensors = [self._tensor(*json.loads(row)) for row in content["tensors"]]
        self._module = torch.nn.Module()
        self._graph = fx.Graph()
        self._nodes: list[fx.Node] = []
        gone = fx.Graph()
        self._gone = [gone.placeholder(f"gone_{i}") for i in range(len(content["gone"]))]
        for node, val in zip(self._gone, content["gone"], strict=True):
            node.meta["val"] = self._val(val)

    def traced(self) -> Traced:
        for row in self._content["nodes"]:
            self._nodes.append(self._node(*row))
        for node, (*_, meta) in zip(self._nodes, self._content["nodes"], strict=True):
            if "draw" in meta:  # of arguments that come after it
                function, layout, args, kwargs = meta["draw"]
                node.meta["draw"] = _named(function), self._val(layout), self._value(args), self._value(kwargs)
        inputs = self._value(self._content["results"]["inputs"])
        if len(inputs) != len(self._fakes):
            raise NotWritable("of another number of inputs")
        for node, fake in zip(inputs, self._fakes, strict=True):
            is_tensor = isinstance(fake, torch.Tensor) and not stands_for_float(fake)
            node.meta["val"] = fake.detach() if is_tensor else fake
        self._graph.lint()
        results = {name: self._value(value) for name, value in self._content["results"].items()}
        return Traced(
            module=fx.GraphModule(self._module, self._graph), scaled=self._content["scaled"] is True, **results
        )

    def _node(self, op: str, name: str, target: Any, args: Any, kwargs: Any, meta: dict[str, Any]) -> fx.Node:
        found: Any = target
        if op == "call_function":
            found = _named(target)
        elif op == "get_attr":
            found, *constant = target
            if not found.isidentifier() or hasattr(torch.nn.Module, found):
                raise NotWritable(found)
            setattr(self._module, found, _constant(*constant))
        elif op not in ("placeholder", "output") or not found.isidentifier():
            raise NotWritable(op)
        named = self._value(kwargs)
        if not all(key.isidentifier() and not keyword.iskeyword(key) for key in named):  # these become code as they are
            raise NotWritable("names of arguments")
        node = self._graph.create_node(op, found, self._value(args), named, name=name)
        if "val" in meta:
            node.meta["val"] = self._val(meta["val"])
        for key in ("stack_trace", "original_aten"):
            if key in meta:
                text = self._texts[meta[key]]
                node.meta[key] = text if key == "stack_trace" else _named(text)
        if "weight" in meta:
            node.meta["weight"] = True
        if "divisor" in meta:
            node.meta["divisor"] = None if meta["divisor"] is None else float(meta["divisor"])
        return node

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(v) for v in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "node":
            return self._nodes[content]
        if kind == "gone":
            return self._gone[content]
        if kind == "tuple":
            return tuple(self._value(v) for v in content)
        if kind == "dict":
            return {self._value(k): self._value(v) for k, v in content}
        if kind == "device":
            return torch.device(content)
        return _constant_of_torch(kind, content)

    def _val(self, value: dict[str, Any]) -> Any:
        ((kind, content),) = value.items()
        if kind == "plain":
            return content
        if kind == "size":
            return self._number(content)
        if kind == "tensor":
            return self._tensors[content]
        found = [self._val(v) for v in content]
        return tuple(found) if kind == "tuple" else found

    def _tensor(self, sizes: list[Any], strides: list[Any], offset: Any, dtype: str, device: str) -> torch.Tensor:
        shape, steps, start = [self._number(s) for s in sizes], [self._number(s) for s in strides], self._number(offset)
        kind = _constant_of_torch("dtype", dtype)
        with self._mode:
            if type(start) is int and start == 0:
                return torch.empty_strided(shape, steps, dtype=kind, device=device)
            entries = 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
            return torch.empty((start + entries,), dtype=kind, device=device).as_strided(shape, steps, start)

    def _number(self, number: Any) -> Any:
        if type(number) is int:
            return number
        text, tree = number
        expression = self._expression(tree)
        if str(expression) != text or self._sizes is None:
            raise NotWritable(text)
        return self._sizes.create_symintnode(expression, hint=int(expression.xreplace(self._hints)))

    def _expression(self, tree: Any) -> Any:
        if type(tree) is int:
            return sympy.Integer(tree)
        if isinstance(tree, str):
            return self._symbols[tree]
        return _EXPRESSIONS[tree[0]](*map(self._expression, tree[1:]))


def _constant(data: str, shape: list[int], dtype: str) -> torch.Tensor:
    kind = _constant_of_torch("dtype", dtype)
    raw = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(kind) if raw else torch.empty(0, dtype=kind)
    return flat.clone().reshape(shape)


def _constant_of_torch(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if _CONSTANTS.get(type(found)) != kind:
        raise NotWritable(name)
    return found
