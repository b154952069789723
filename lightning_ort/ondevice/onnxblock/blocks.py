"""Blocks that add nodes to the base model."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper

from lightning_ort.ondevice.onnxblock.model_accessor import (
    add_initializer,
    add_input_like,
    add_node,
    current,
    number,
    without_values,
)

__all__ = [
    "Abs",
    "Add",
    "Block",
    "Cast",
    "Clip",
    "Constant",
    "Div",
    "InputLike",
    "LabelEncoder",
    "Linear",
    "Log",
    "Mul",
    "Neg",
    "PassThrough",
    "Pow",
    "ReduceAllL2",
    "ReduceMean",
    "ReduceSum",
    "SequenceConstruct",
    "Sigmoid",
    "Sub",
]


class Block(abc.ABC):
    """Something that adds to a model. A subclass does so in :meth:`build`, itself or by calling other blocks.

    Attributes:
        base: the model that is changed, while the block is called.
    """

    base: onnx.ModelProto

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add to ``self.base``; the name or names of the results."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What :meth:`build` returns, once the model has been checked.

        Raises:
            RuntimeError: there is no base model.
            onnx.checker.ValidationError: the model is not valid any more.
        """
        accessor = current()
        self.base = accessor.model
        accessor.depth += 1
        try:
            output = self.build(*args, **kwargs)
        finally:
            accessor.depth -= 1
        if not accessor.depth:
            onnx.checker.check_model(without_values(self.base), full_check=True)
        return output

    def infer_shapes_on_base(self) -> onnx.ModelProto:
        """A copy of the base model with the types and shapes of the values inside."""
        inferred = onnx.shape_inference.infer_shapes(without_values(self.base))
        model = onnx.ModelProto()
        model.CopyFrom(self.base)
        del model.graph.value_info[:]
        model.graph.value_info.extend(inferred.graph.value_info)
        return model


class _Operator(Block):
    """One node.

    Args:
        attributes: of the node.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self._attributes = attributes

    def build(self, *input_names: str) -> str:
        """The name of the result."""
        return add_node(type(self).__name__, input_names, **self._attributes)


class _Binary(_Operator):
    def __init__(self) -> None:
        super().__init__()

    def build(self, input_name1: str, input_name2: str) -> str:  # type: ignore[override]
        """The name of the result, of two inputs of shapes that broadcast."""
        return super().build(input_name1, input_name2)


class Add(_Binary):
    """Adds an Add node."""


class Sub(_Binary):
    """Adds a Sub node."""


class Mul(_Binary):
    """Adds a Mul node."""


class Div(_Binary):
    """Adds a Div node."""


class _Unary(_Operator):
    def __init__(self) -> None:
        super().__init__()

    def build(self, input_name: str) -> str:  # type: ignore[override]
        """The name of the result."""
        return super().build(input_name)


class Sigmoid(_Unary):
    """Adds a Sigmoid node."""


class Log(_Unary):
    """Adds a Log node."""


class Neg(_Unary):
    """Adds a Neg node."""


class Abs(_Unary):
    """Adds an Abs node."""


class _Reduction(_Unary):
    def __init__(self, keepdims: bool = True) -> None:
        super().__init__()
        self._attributes = {"keepdims": int(keepdims)}


class ReduceMean(_Reduction):
    """Adds a ReduceMean node over all axes."""


class ReduceSum(_Reduction):
    """Adds a ReduceSum node over all axes."""


class Pow(Block):
    """Adds a Pow node with a constant exponent."""

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, pow_input_name: str) -> str:
        """The name of the result."""
        return add_node("Pow", [pow_input_name, number("pow_exponent", self._exponent)])


class Clip(Block):
    """Adds a Clip node.

    Args:
        clip_min: lower bound, or ``None``.
        clip_max: upper bound, or ``None``.
    """

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = {"clip_min": clip_min, "clip_max": clip_max}

    def build(self, clip_input_name: str) -> str:
        """The name of the result."""
        bounds = [
            "" if bound is None else add_initializer(token, np.array(bound, np.float32))
            for token, bound in self._bounds.items()
        ]
        return add_node("Clip", [clip_input_name, *bounds])


class Constant(Block):
    """Adds a float32 initializer of shape [1], which is not trained unless it is named so."""

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        """The name of the initializer."""
        return number("initializer", self._value)


class SequenceConstruct(Block):
    """Adds a SequenceConstruct node."""

    def build(self, *sequence_input_names: str) -> str:
        """The name of the sequence."""
        return add_node("SequenceConstruct", sequence_input_names)


class ReduceAllL2(Block):
    """Adds a ReduceAllL2 node, of the domain ``com.microsoft``: the norm of all its inputs together."""

    def build(self, *reduce_node_input_names: str) -> str:
        """The name of the norm."""
        result = add_node("ReduceAllL2", reduce_node_input_names, domain="com.microsoft")
        # nothing else knows the type of what that operator gives
        self.base.graph.value_info.append(helper.make_tensor_value_info(result, onnx.TensorProto.FLOAT, []))
        return result


class PassThrough(Block):
    """Adds nothing, and returns the names that it is given."""

    def build(self, *input_names: str) -> tuple[str, ...]:
        """The names."""
        return input_names


class InputLike(Block):
    """Adds an input of the type and shape of an input or output.

    Args:
        like: name of that input or output.
    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """The name of the input, by default a new one."""
        return add_input_like(self._like, input_name or current().new_name("input")).name


class LabelEncoder(Block):
    """Adds a LabelEncoder node, of the domain ``ai.onnx.ml``: keys to values, other ones to a default.

    Args: those of the operator. Without strings, of which there are no torch tensors, such a model can be trained.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self._attributes: dict[str, Any] = {
            "default_float": default_float, "default_int64": default_int64, "default_string": default_string,
            "keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings,
            "values_floats": values_floats, "values_int64s": values_int64s, "values_strings": values_strings,
        }  # fmt: skip

    def build(self, label_encoder_input_name: str) -> str:
        """The name of the result."""
        return add_node(
            "LabelEncoder",
            [label_encoder_input_name],
            "label_encoder.output",
            domain="ai.onnx.ml",
            **self._attributes,
        )


class Cast(Block):
    """Adds a Cast node.

    Args:
        to: an ``onnx.TensorProto.DataType``.
    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, cast_input_name: str) -> str:
        """The name of the result."""
        return add_node("Cast", [cast_input_name], "cast.output", to=int(self._to))


class Linear(Block):
    """Adds a Gemm node, whose weights of shape (in, out) and bias are drawn by numpy from the normal distribution.

    Args:
        in_features: columns of the input.
        out_features: columns of the result.
        bias: whether there is one.
        alpha: factor of the product.
        beta: factor of the bias.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, alpha: float = 1.0, beta: float = 1.0
    ) -> None:
        super().__init__()
        self._in_features, self._out_features, self._bias = in_features, out_features, bias
        self._factors: dict[str, Any] = {"alpha": float(alpha), "beta": float(beta)}

    def build(self, linear_input_name: str) -> str:
        """The name of the result."""
        shapes = {"linear.weight": (self._in_features, self._out_features)}
        if self._bias:
            shapes["linear.bias"] = (self._out_features,)  # type: ignore[assignment]
        made = [add_initializer(n, np.random.randn(*s).astype(np.float32)) for n, s in shapes.items()]
        current().made.extend(made)
        return add_node("Gemm", [linear_input_name, *made], "linear.output", name="linear", **self._factors)
