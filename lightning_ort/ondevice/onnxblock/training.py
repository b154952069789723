"""Blocks that make a whole model: a forward one, or one with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper

from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.ondevice.formats.ort_training.write_step import derived, training_model
from lightning_ort.ondevice.onnxblock.blocks import Block
from lightning_ort.ondevice.onnxblock.model_accessor import current
from lightning_ort.onnx_reader.initializers import state_initializers
from lightning_ort.onnx_reader.values import tensor_from

__all__ = ["ForwardBlock", "TrainingBlock", "as_names", "with_outputs"]


def as_names(output: Any) -> list[str]:
    """The names that a block has returned, as a list."""
    return [output] if isinstance(output, str) else list(output)


def with_outputs(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """``model``, whose values inside are described, with the outputs ``names``; it is changed.

    Raises:
        LookupError: it has no such value, or the type of one is not known.
    """
    graph = model.graph
    known = {v.name: v for v in (*graph.input, *graph.value_info, *graph.output)}
    missing = [n for n in names if n not in known]
    if missing:
        raise LookupError(
            f"The model has no value {', '.join(map(repr, missing))} whose type is known. A block returns the names of "
            "values; add the type of what an operator of a foreign domain gives to base.graph.value_info."
        )
    outputs = [onnx.ValueInfoProto.FromString(known[n].SerializeToString()) for n in dict.fromkeys(names)]
    del graph.output[:]
    graph.output.extend(outputs)
    return model


class ForwardBlock(Block):
    """Makes a model whose outputs are what ``build`` returns."""

    _model: onnx.ModelProto | None = None

    def to_model_proto(self) -> onnx.ModelProto:
        """The model.

        Raises:
            RuntimeError: the block has not been called.
        """
        if self._model is None:
            raise RuntimeError("The forward model does not exist yet; call the block first.")
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``build`` returns; the base model has these outputs then."""
        output = super().__call__(*args, **kwargs)
        self._model = with_outputs(self.infer_shapes_on_base(), as_names(output))
        current().model.CopyFrom(self._model)
        return output


class TrainingBlock(Block):
    """Makes a model with the gradients of the first name that ``build`` returns, and one for evaluation.

    Both are files of ONNX Runtime's on-device training (the flavour "ort-training"), which the classes of
    :mod:`lightning_ort.ondevice` load on any build.
    """

    _parameters: tuple[list[onnx.TensorProto], list[onnx.TensorProto]] | None = None
    _models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Say whether the gradient by an initializer or a float input is wanted; by default none is."""
        wanted, frozen = self._chosen()
        (wanted if value else frozen)[argument_name] = None
        (frozen if value else wanted).pop(argument_name, None)

    def _chosen(self) -> tuple[dict[str, None], dict[str, None]]:
        # a subclass may leave __init__ of this class out
        return self.__dict__.setdefault("_requires_grad", ({}, {}))

    def parameters(self) -> tuple[list[onnx.TensorProto], list[onnx.TensorProto]]:
        """Initializers that are trained, and those that are frozen.

        Raises:
            RuntimeError: the block has not been called.
        """
        if self._parameters is None:
            raise RuntimeError("Please build the training model first before trying to retrieve the parameters.")
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """The training model and the evaluation model.

        Raises:
            RuntimeError: the block has not been called.
        """
        if self._models is None:
            raise RuntimeError("Please build the training and eval models first before trying to retrieve them.")
        return self._models

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What ``build`` returns; the base model is the training model then.

        Raises:
            UnsupportedError: an operator without a gradient, named.
            ValueError: :meth:`requires_grad` names nothing of the model.
        """
        output = super().__call__(*args, **kwargs)
        model = with_outputs(self.infer_shapes_on_base(), as_names(output))
        wanted, frozen = (list(names) for names in self._chosen())
        graph = model.graph
        known = [i.name for i in (*graph.initializer, *graph.input)]
        unknown = [n for n in (*wanted, *frozen) if n not in known]
        if unknown:
            raise ValueError(
                f"requires_grad: the model has no initializer or input {', '.join(map(repr, unknown))}. It has: "
                f"{', '.join(known)}."
            )
        self._parameters = (
            [i for i in graph.initializer if i.name in wanted],
            [i for i in graph.initializer if i.name in frozen],
        )
        self._models = _training_model(model, wanted, frozen), _evaluation_model(model, wanted, frozen)
        current().model.CopyFrom(self._models[0])
        return output


def _fed(model: onnx.ModelProto, wanted: Sequence[str], frozen: Sequence[str]) -> list[onnx.TensorProto]:
    """Initializers that become inputs: those that are named, or all if none is."""
    named = {*wanted, *frozen}
    return [i for i in model.graph.initializer if not named or i.name in named]


def _training_model(model: onnx.ModelProto, wanted: Sequence[str], frozen: Sequence[str]) -> onnx.ModelProto:
    fed = {i.name: tensor_from(i) for i in _fed(model, wanted, frozen)}
    changing = state_initializers(model)
    state = TrainingState(
        {n: t for n, t in fed.items() if n not in changing},
        tuple(n for n in fed if n in wanted),
        {n: t for n, t in fed.items() if n in changing},
    )
    rest = onnx.ModelProto()
    rest.CopyFrom(model)
    kept = [i for i in model.graph.initializer if i.name not in fed]
    given = [i for i in model.graph.input if i.name not in fed]
    for field, values in ((rest.graph.initializer, kept), (rest.graph.input, given)):
        del field[:]
        field.extend(values)
    step = derived(rest, state, [n for n in wanted if n not in fed])
    return ir.to_proto(training_model(step, state))


def _evaluation_model(model: onnx.ModelProto, wanted: Sequence[str], frozen: Sequence[str]) -> onnx.ModelProto:
    """The forward model, whose Dropout and BatchNormalization do not train, with parameters as inputs."""
    found = onnx.ModelProto()
    found.CopyFrom(model)
    fed = _fed(model, wanted, frozen)
    names = {i.name for i in fed}
    given = {i.name for i in found.graph.input}
    kept = [i for i in model.graph.initializer if i.name not in names]
    del found.graph.initializer[:]
    found.graph.initializer.extend(kept)
    found.graph.input.extend(
        helper.make_tensor_value_info(i.name, i.data_type, list(i.dims)) for i in fed if i.name not in given
    )
    for node in found.graph.node:
        if node.op_type == "Dropout" and len(node.input) > 2:
            node.input[2] = ""
        if node.op_type == "BatchNormalization":
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            del node.output[1:]
    return found
