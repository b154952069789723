"""Writes an ONNX graph as an fx graph whose calls are the functions of the operator table."""

from __future__ import annotations

import keyword
import math
import operator as python_operator
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import onnx
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ort.errors import UnsupportedError
from lightning_ort.files.onnx_files import MOST_NODES
from lightning_ort.onnx_reader import shape_arithmetic
from lightning_ort.onnx_reader.initializers import weight_initializers
from lightning_ort.onnx_reader.registry import OPERATORS, Operator
from lightning_ort.onnx_reader.shape_arithmetic import dtype_of, length_of, number_type
from lightning_ort.onnx_reader.values import (
    Computed,
    Constant,
    Number,
    Value,
    attributes_of,
    bodies,
    label_of,
    tensor_from,
)

__all__ = ["CONTROL_FLOW", "Reader", "identifier", "is_plain", "names_read", "names_read_by"]

_SMALL = 1 << 12
"""Elements of constants from which nothing is computed that is large."""

_FOLDED = 1 << 25
"""Elements that are computed of constants, besides sixteen times those of the file: a mask of 4096 by 4096 twice."""


_SEEN_BY_FORWARD = ("self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree")
"""names that the code of ``forward`` may use, and which no input can have"""


def is_plain(part: str) -> bool:
    """Whether Python takes ``part`` for a name, or torch for the number of a module, as it is."""
    if part.isdigit() and part.isascii():
        return True
    # Python reads equivalent characters as one of them
    return part.isidentifier() and not keyword.iskeyword(part) and unicodedata.normalize("NFKC", part) == part


def identifier(name: str) -> str:
    """``name`` with everything that Python does not allow in a name replaced by ``_``."""
    cleaned = re.sub(r"\W", "_", name) or "_"
    if not is_plain(f"_{cleaned}"):
        cleaned = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{cleaned}" if cleaned[0].isdigit() or not is_plain(cleaned) else cleaned


class Reader:
    """Reads one graph; parameters and buffers are put on ``root`` as they are needed.

    Args:
        model: functions written out, every operator known.
        root: becomes the root of the fx graph; already holds the trainable and changing initializers.
        paths: initializer name to its attribute path on ``root``.

    Attributes:
        graph: the fx graph: placeholders are the graph inputs that are no initializers, the result a tuple.
        values: name to what it stands for.
        tensors: names that stand for no tensor, as the tensors made from them.
    """

    def __init__(self, model: onnx.ModelProto, root: nn.Module, paths: dict[str, str]) -> None:
        self._root, self._paths = root, paths
        self._opsets = {("" if i.domain == "ai.onnx" else i.domain): i.version for i in model.opset_import}
        self.graph = fx.Graph(root)
        self.values: dict[str, Value] = {}
        self.tensors: dict[str, fx.Node] = {}
        self._anchor: fx.Node | None = None
        self._constants = 0
        self._nodes = 0
        self._folded = 0
        self._names_read = set(names_read(model.graph))
        self._weights = {paths[name] for name in weight_initializers(model) if name in paths}
        stored = sum(math.prod(i.dims) for i in model.graph.initializer)
        self._most_folded = _FOLDED + 16 * stored
        initializers = {i.name: i for i in model.graph.initializer}
        taken = set(_SEEN_BY_FORWARD)
        for info in model.graph.input:
            if info.name not in initializers:
                name = identifier(info.name)
                while name in taken:
                    name += "_"
                taken.add(name)
                placeholder = self.graph.placeholder(name)
                self._anchor = self._anchor or placeholder
                self.values[info.name] = Computed(placeholder)
        for name, proto in initializers.items():
            if name in paths:
                self.values[name] = Computed(self.graph.get_attr(paths[name]))
            else:
                self.values[name] = Constant(tensor_from(proto), name)
        if model.graph.sparse_initializer:
            raise UnsupportedError("Sparse initializers cannot be read as torch tensors; store them dense.")
        self.read(model.graph)
        results = [self.tensor(self.values[o.name], o.name) for o in model.graph.output]
        self.graph.output(tuple(results))

    def read(self, graph: onnx.GraphProto) -> None:
        """Read all nodes of the graph, or of a subgraph."""
        self._nodes += 1 + len(graph.node)
        if self._nodes > MOST_NODES:
            raise UnsupportedError(
                f"The model has more than {MOST_NODES} nodes when its loops are written out, once for each iteration."
            )
        for node in graph.node:
            try:
                own = node.domain in ("", "ai.onnx")
                if node.op_type == "Constant" and own:
                    self.values[node.output[0]] = Constant(_constant(node))
                elif node.op_type == "Identity" and own:
                    self.values[node.output[0]] = self.values[node.input[0]]
                elif node.op_type in CONTROL_FLOW and own:
                    CONTROL_FLOW[node.op_type](self, node)
                else:
                    self._node(node)
            except UnsupportedError:
                raise
            except Exception as error:
                raise UnsupportedError(f"{label_of(node)} cannot be read: {error}") from error

    def _node(self, node: onnx.NodeProto) -> None:
        domain = "" if node.domain == "ai.onnx" else node.domain
        row = OPERATORS[domain, node.op_type]
        inputs = [self.values[name] if name else None for name in node.input]
        attributes = attributes_of(node)
        unknown = set(attributes) - row.attributes
        if unknown:
            raise UnsupportedError(f"{label_of(node)}: attribute {', '.join(sorted(unknown))} cannot be read.")
        if not row.variadic and len(inputs) > len(row.inputs):
            raise UnsupportedError(f"{label_of(node)}: {len(inputs)} inputs, at most {len(row.inputs)} are known.")
        if "opset" in row.extras:
            attributes["opset"] = self._opsets[domain]
        outputs = len(node.output)
        while outputs > 1 and not node.output[outputs - 1]:
            outputs -= 1
        if "n_outputs" in row.extras:
            attributes["n_outputs"] = outputs
        if "n_read" in row.extras:
            attributes["n_read"] = max((i for i, n in enumerate(node.output, 1) if n in self._names_read), default=0)
        if "label" in row.extras:
            attributes["label"] = label_of(node)
        if "input_dtype" in row.extras and not isinstance(inputs[0], Computed):
            attributes["input_dtype"] = dtype_of(inputs[0])
        if not domain and node.op_type in ("Shape", "Size"):
            inputs = [self._geometry(inputs[0])]
        number = number_type(node.op_type, inputs, attributes) if not domain else None
        if number is not None:
            self._as_numbers(node, inputs, attributes, *number)
            return
        if inputs and not row.random and not row.module and all(v is None or isinstance(v, Constant) for v in inputs):
            self._fold(node, row, inputs, attributes, outputs)
            return
        arguments = [self._argument(node, row, i, inputs) for i in range(len(inputs))]
        if "moved" in row.extras:
            names = [row.input_name(i) for i in range(len(inputs))]
            attributes["moved"] = [
                n for n, v, a in zip(names, inputs, arguments, strict=True) if n in row.state and self._is_kept(v, a)
            ]
        self._call(node, row, arguments, attributes, outputs)

    def _geometry(self, value: Value | None) -> Value | None:
        """A tensor without values where the shape of ``value`` is the same for all batches: of weights, of lists."""
        if isinstance(value, Number) and value.length is not None:
            return Constant(torch.empty(value.length, device="meta"))
        if isinstance(value, Computed) and value.node.op == "get_attr":
            return Constant(python_operator.attrgetter(str(value.node.target))(self._root).detach().to("meta"))
        return value

    def _as_numbers(
        self,
        node: onnx.NodeProto,
        inputs: Sequence[Value | None],
        attributes: dict[str, Any],
        name: str,
        dtype: torch.dtype,
        rank: int,
    ) -> None:
        if name in ("Shape", "Size"):
            target: Callable[..., Any] = OPERATORS["", name].function
            arguments = [self.tensor(inputs[0], node.input[0])]
        else:
            target = shape_arithmetic.NUMBER_OPERATORS[name]
            arguments = [None if v is None else self._number(v) for v in inputs]
        call = self._named(self.graph.call_function(target, tuple(arguments), attributes), node)
        if name == "Split":
            for i, part in enumerate(node.output):
                self.values[part] = Number(self.graph.call_function(python_operator.getitem, (call, i)), dtype, rank)
            return
        of_sizes = name == "Shape" and isinstance(inputs[0], Number)
        length = length_of(name, inputs, attributes) if rank else None
        self.values[node.output[0]] = Number(call, dtype, rank, of_sizes, length)

    def _number(self, value: Value) -> Any:
        return shape_arithmetic.as_number(value.tensor) if isinstance(value, Constant) else value.node

    def _fold(
        self,
        node: onnx.NodeProto,
        row: Operator,
        inputs: Sequence[Value | None],
        attributes: dict[str, Any],
        outputs: int,
    ) -> None:
        arguments = []
        for i, value in enumerate(inputs):
            tensor = value.tensor if isinstance(value, Constant) else None
            as_size = tensor is not None and row.input_name(i) in row.sizes
            arguments.append(shape_arithmetic.as_number(tensor) if as_size and tensor is not None else tensor)
        self._check_fold(node, row, arguments, attributes)
        with torch.no_grad():
            results = row.function(*arguments, **attributes)
        if isinstance(results, (int, list)) and node.op_type in ("Shape", "Size"):
            results = torch.tensor(results, dtype=torch.int64)
        for name, result in zip(node.output, results if outputs > 1 else [results], strict=False):
            self.values[name] = Constant(result)

    def _check_fold(
        self, node: onnx.NodeProto, row: Operator, arguments: list[Any], attributes: dict[str, Any]
    ) -> None:
        """Refuse constants that grow beyond what the file holds, before they fill the memory."""
        if not row.sizes and sum(a.numel() for a in arguments if isinstance(a, torch.Tensor)) < _SMALL:
            return
        mode = FakeTensorMode()
        try:
            with mode:
                fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
                results = row.function(*fakes, **attributes)
        except Exception:  # its shape depends on values; then it has at most as many as these
            return
        results = results if isinstance(results, (tuple, list)) else [results]
        self._folded += sum(r.numel() for r in results if isinstance(r, torch.Tensor))
        if self._folded > self._most_folded:
            raise UnsupportedError(
                f"{label_of(node)}: its constants make a tensor of {self._folded} elements, far more than the file has."
            )

    def _argument(self, node: onnx.NodeProto, row: Operator, position: int, inputs: Sequence[Value | None]) -> Any:
        value = inputs[position]
        if value is None:
            return None
        if row.input_name(position) in row.sizes:
            if isinstance(value, Computed):
                raise UnsupportedError(
                    f"{label_of(node)}: its input {row.input_name(position)!r} ({node.input[position]!r}) is computed "
                    "from data; only constants and what is computed from shapes can be read."
                )
            return self._number(value)
        if row.input_name(position) in row.state:
            return self._state(value, node.input[position])
        first = 1 if node.op_type == "Where" else 0  # the condition is no operand
        typed = node.op_type == "Pow" and position == 0  # a power is of the type of its base
        # torch takes the element type from the tensors, so one operand has to be one
        if row.numbers and not typed and position >= first and any(isinstance(v, Computed) for v in inputs[first:]):
            if isinstance(value, Constant) and value.tensor.dim() == 0:
                return value.tensor.item()
            if isinstance(value, Number) and value.rank == 0:
                return value.node
        return self.tensor(value, node.input[position])

    def _call(
        self, node: onnx.NodeProto, row: Operator, arguments: list[Any], attributes: dict[str, Any], outputs: int
    ) -> None:
        if row.module:
            path = f"node_{len(list(self._root.children()))}_{identifier(node.op_type)}"
            self._root.add_module(path, row.function())
            call = self.graph.call_module(path, tuple(arguments), attributes)
        else:
            call = self.graph.call_function(row.function, tuple(arguments), attributes)
        self._named(call, node)
        if outputs == 1:
            self.values[node.output[0]] = Computed(call)
            return
        for i, name in enumerate(node.output[:outputs]):
            if name in self._names_read:
                self.values[name] = Computed(self.graph.call_function(python_operator.getitem, (call, i)))

    def _named(self, call: fx.Node, node: onnx.NodeProto) -> fx.Node:
        call.meta["onnx_node"] = node.name or node.output[0]
        return call

    def _state(self, value: Value, name: str) -> fx.Node:
        """A tensor that training changes by itself; a parameter only where that is no weight as well."""
        node = self.tensor(value, name)
        if node.op != "get_attr" or node.target not in self._weights:
            return node
        tensor = python_operator.attrgetter(str(node.target))(self._root)
        if not isinstance(tensor, nn.Parameter):
            return node
        # torch's exporter merges statistics with weights that happen to be equal
        return self.graph.get_attr(self._buffer(Constant(tensor.detach().clone())))

    def _is_kept(self, value: Value | None, argument: fx.Node) -> bool:
        """Whether ``argument``, a tensor that training changes, is kept by the module and not trained."""
        if argument.op != "get_attr" or (isinstance(value, Constant) and value.initializer is None):
            return False
        return not isinstance(python_operator.attrgetter(str(argument.target))(self._root), nn.Parameter)

    def tensor(self, value: Value | None, name: str) -> fx.Node:
        """An fx node that is a tensor at run time."""
        assert value is not None
        if isinstance(value, Computed):
            return value.node
        if name not in self.tensors:
            if isinstance(value, Number):
                arguments = (value.node, value.dtype, self._anchor)
                self.tensors[name] = self.graph.call_function(shape_arithmetic.as_tensor, arguments)
            else:
                self.tensors[name] = self.graph.get_attr(self._buffer(value))
        return self.tensors[name]

    def _buffer(self, value: Constant) -> str:
        path = f"constant_{self._constants}"
        self._constants += 1
        self._root.register_buffer(path, value.tensor, persistent=False)
        if value.initializer is not None:
            self._paths[value.initializer] = path
        return path


def names_read(graph: onnx.GraphProto) -> Iterator[str]:
    """The names of all values that nodes, branches and bodies read, or that are results of these or of ``graph``."""
    for node in graph.node:
        yield from names_read_by(node)
    yield from (output.name for output in graph.output)


def names_read_by(node: onnx.NodeProto) -> Iterator[str]:
    """The names of all values that ``node`` reads, or that its branches and bodies read or give."""
    yield from filter(None, node.input)
    for body in bodies(node):
        yield from names_read(body)


def _constant(node: onnx.NodeProto) -> torch.Tensor:
    (attribute,) = node.attribute
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return tensor_from(value)
    if attribute.name in ("value_float", "value_floats"):
        return torch.tensor(value, dtype=torch.float32)
    if attribute.name in ("value_int", "value_ints"):
        return torch.tensor(value, dtype=torch.int64)
    raise UnsupportedError(f"{label_of(node)}: a constant in the form of {attribute.name!r} cannot be read.")


_LONGEST = 1000
"""Iterations that are written out; each is a copy of the loop's body."""


def _read_if(reader: Reader, node: onnx.NodeProto) -> None:
    """Read the branch that is taken.

    Raises:
        UnsupportedError: its condition is not constant.
    """
    condition = reader.values[node.input[0]]
    if not isinstance(condition, Constant):
        raise UnsupportedError(
            f"{label_of(node)}: its condition is computed when the graph runs; only a constant condition can be read."
        )
    branch = attributes_of(node)["then_branch" if condition.tensor.item() else "else_branch"]
    for outer, value in zip(node.output, _read(reader, branch), strict=True):
        reader.values[outer] = value


def _read_loop(reader: Reader, node: onnx.NodeProto) -> None:
    """Read the body once for each iteration.

    Raises:
        UnsupportedError: how often it runs depends on data, on sizes that are not constant, or is more than a
            thousand times.
    """
    body: onnx.GraphProto = attributes_of(node)["body"]
    limit, condition = (reader.values[name] if name else None for name in node.input[:2])
    carried = [reader.values[name] for name in node.input[2:]]
    most = _constant_number(node, limit, "its number of iterations", node.input[0])
    goes_on = _constant_number(node, condition, "its condition", node.input[1])
    names = [i.name for i in body.input]
    scanned: list[list[Value]] = [[] for _ in body.output[1 + len(carried) :]]
    count = 0
    while (most is None or count < most) and goes_on != 0:
        if count == _LONGEST:
            raise UnsupportedError(f"{label_of(node)}: it runs more than {_LONGEST} times.")
        going = Constant(torch.tensor(True)) if condition is None else condition
        reader.values.update(zip(names, [Constant(torch.tensor(count)), going, *carried], strict=True))
        condition, *results = _read(reader, body)
        goes_on = _constant_number(node, condition, "its condition", body.output[0].name)
        carried, steps = results[: len(carried)], results[len(carried) :]
        for all_of_it, value in zip(scanned, steps, strict=True):
            all_of_it.append(value)
        count += 1
    if scanned and not count:
        raise UnsupportedError(f"{label_of(node)}: it never runs, so that the shape of its results is unknown.")
    stacked = [_stacked(reader, values, node.output[len(carried) + i]) for i, values in enumerate(scanned)]
    for outer, result in zip(node.output, [*carried, *stacked], strict=True):
        if outer:
            reader.values[outer] = result


def _read(reader: Reader, graph: onnx.GraphProto) -> list[Value]:
    """Values of the outputs; the names of a subgraph mean something else each time it is read."""
    before = set(reader.tensors)
    for proto in graph.initializer:
        reader.values[proto.name] = Constant(tensor_from(proto))
    reader.read(graph)
    for name in reader.tensors.keys() - before:
        del reader.tensors[name]
    return [reader.values[output.name] for output in graph.output]


def _constant_number(node: onnx.NodeProto, value: Value | None, what: str, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, Constant):
        raise UnsupportedError(
            f"{label_of(node)}: {what} ({name!r}) is computed when the graph runs; only constants can be read."
        )
    return int(value.tensor)


def _stacked(reader: Reader, values: Sequence[Value], name: str) -> Value:
    constants = [v.tensor for v in values if isinstance(v, Constant)]
    if len(constants) == len(values):
        return Constant(torch.stack(constants))
    tensors = [reader.tensor(value, f"{name} of iteration {i}") for i, value in enumerate(values)]
    return Computed(reader.graph.call_function(torch.stack, (tensors,)))


CONTROL_FLOW = {"If": _read_if, "Loop": _read_loop}
"""Operator to the function that reads a node of it."""
