"""Gradients of a forward ONNX graph, as an ONNX graph for any ONNX Runtime."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx_ir as ir

from lightning_ort import validation
from lightning_ort.compiler.aot.emit import written
from lightning_ort.compiler.aot.inputs import input_infos
from lightning_ort.compiler.aot.joint import Joint, trace_joint
from lightning_ort.compiler.aot.reference import StepReference
from lightning_ort.compiler.passes import standardize
from lightning_ort.errors import UnsupportedError
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.onnx_reader import to_torch
from lightning_ort.onnx_reader.load import Model, load, name_of, using
from lightning_ort.training_session.generated_run import compare_once
from lightning_ort.validation import flag, shown

__all__ = ["GradientGraphBuilder", "passed_last"]


class GradientGraphBuilder:
    """Makes the gradient graph of a forward graph, as the class of this name in ONNX Runtime's training API does.

    Args:
        model: the forward graph: serialized, a path, or an ``onnx.ModelProto``; opset 13 to 26.
        y_names: outputs that are differentiated.
        x_names: float initializers and graph inputs by which they are differentiated.
        loss_name: the one of ``y_names`` whose own gradient is 1. The gradients of the others are inputs
            ``<name>_grad`` of the result. An empty string makes all of them inputs.

    The result has the inputs, outputs and (used) initializers of ``model`` under their names, and an output
    ``<name>_grad`` for each of ``x_names``, shaped like it and zero where nothing depends on it. Its operators are
    standard ones of opset 20. Dropout with a true ``training_mode`` and random operators draw other numbers at each
    run of a session, the same for an output and its gradient; ``onnxruntime.set_seed`` sets where new sessions start.
    New running statistics of a BatchNormalization in training mode are results only where they are outputs of
    ``model``.

    Raises:
        FileNotFoundError, ValueError, TypeError: no such file, not an ONNX model, or a name that it does not have.
        UnsupportedError: an operator that cannot be read, named with its node.
    """

    def __init__(self, model: Model, y_names: Iterable[str], x_names: Iterable[str], loss_name: str) -> None:
        self._proto, self._name = load(model), name_of(model)
        self._y_names, self._x_names = _names("y_names", y_names), _names("x_names", x_names)
        if not isinstance(loss_name, str):
            raise TypeError(f"loss_name={shown(loss_name)}: expected the name of an output, or ''.")
        self._loss_name = loss_name
        _require("y_names", self._y_names, [o.name for o in self._proto.graph.output], "output")
        sources = dict.fromkeys(i.name for i in [*self._proto.graph.initializer, *self._proto.graph.input])
        _require("x_names", self._x_names, list(sources), "initializer or input")
        if loss_name and loss_name not in self._y_names:
            raise ValueError(f"loss_name {loss_name!r} is not one of y_names: {', '.join(self._y_names)}.")
        self._model: ir.Model | None = None
        self._not_compared: str | None = "build() has not been called"

    def build(self, *, verify: bool | None = None) -> None:
        """Make the gradient graph.

        Args:
            verify: run it once on generated inputs, on the CPU, and compare outputs and gradients with the same
                computation in torch. ``None``, the default, does so where that takes at most about a second and is
                possible; :attr:`not_compared` says whether it has been. ``True`` does so however long it takes.

        Raises:
            ValueError: one of ``x_names`` is no float tensor.
            UnsupportedError: a node whose value or gradient has no ONNX form, or a graph that holds for some sizes
                only where the file says they vary; with ``verify=True`` a graph that cannot be compared.
            MismatchError: an output or a gradient is not torch's.
        """
        if verify is not None:
            flag("verify", verify)
        incoming = [name for name in self._y_names if name != self._loss_name]
        with using(self._name):
            module = to_torch(self._proto, [i.name for i in self._proto.graph.initializer if i.name in self._x_names])
            joint = trace_joint(module, input_infos(self._proto), self._y_names, incoming, self._x_names)
            model = standardize(written(passed_last(joint), self._proto))
            outputs = {str(v.name): v for v in model.graph.outputs}
            model.graph.outputs.clear()
            model.graph.outputs.extend(outputs[name] for name in joint.results)
        if verify is False:
            self._not_compared = "verify=False"
        else:
            reference = StepReference(module, joint, self._y_names, incoming, self._x_names)
            self._not_compared = compare_once(reference, joint, model, limited=verify is None)
            if verify and self._not_compared is not None:
                raise UnsupportedError(f"verify=True: the gradient graph was not compared: {self._not_compared}.")
        self._model = model

    @property
    def not_compared(self) -> str | None:
        """Why the gradient graph has not been compared with torch; ``None`` if it has."""
        return self._not_compared

    def get_model(self) -> bytes:
        """The gradient graph, serialized.

        Raises:
            RuntimeError: :meth:`build` has not been called.
            ValueError: it is larger than 2 GB; :meth:`save` writes such a graph.
        """
        return ir.to_proto(self._built()).SerializeToString()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the gradient graph to ``path``; weights of more than 2 GB go to ``<stem>.<number>.data`` beside it.

        Raises:
            RuntimeError: :meth:`build` has not been called.
        """
        save_onnx(self._built(), Path(path))

    def _built(self) -> ir.Model:
        if self._model is None:
            raise RuntimeError("The gradient graph does not exist yet; call build() first.")
        return self._model


def passed_last(joint: Joint) -> Joint:
    """``joint`` with results that are an input or initializer behind all others.

    What else is the same value would be written as a copy of such a result, which is no value of its own.
    """
    results = sorted(joint.results.items(), key=lambda result: joint.inputs.get(result[0]) is result[1])
    return dataclasses.replace(joint, results=dict(results))


def _names(argument: str, names: Iterable[str]) -> list[str]:
    """Sorted, so that sets of the same names give the same graph."""
    if isinstance(names, str):
        raise TypeError(f"{argument} is the string {names!r}; expected a set of names, as in {{{names!r}}}.")
    found = sorted(set(validation.names(argument, names)))
    if not found:
        raise ValueError(f"{argument} is empty; expected at least one name.")
    return found


def _require(argument: str, names: Sequence[str], known: Sequence[str], kind: str) -> None:
    missing = [n for n in names if n not in known]
    if missing:
        raise ValueError(
            f"{argument}: the model has no {kind} {', '.join(map(repr, missing))}. It has: {', '.join(known)}."
        )
