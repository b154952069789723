"""A module as an ONNX graph, by torch's exporter."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass, ShapeInferencePass
from onnxscript.optimizer import fold_constants
from torch import Tensor

from lightning_ort.compiler.passes import optimize
from lightning_ort.errors import ExportError
from lightning_ort.export.inputs import Axes, InferenceModule, resized, sizes_of
from lightning_ort.export.older_opsets import NEWEST, convert

__all__ = ["make_graph"]

# what ONNX Runtime 1.19 reads
_IR_VERSION = 10
_ADVICE = 'For more information, run with TORCH_LOGS="+dynamic".'
# they warn of a library that nobody asked for, and of what then becomes an error
_CHATTY = ("torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes", "onnx_ir")


def make_graph(
    module: InferenceModule,
    names: Sequence[str],
    outputs: Sequence[str],
    tensors: Sequence[Tensor],
    axes: Axes,
    opset: int,
    *,
    clean: bool = True,
    contrib: bool = False,
    trainable: bool = False,
    what: str = "",
    advice: str = "left out of dynamic=",
) -> ir.Model:
    """The graph of ``module``, in the mode and with the weights it has now.

    Args:
        module: function of ``tensors``.
        names: of the inputs; those that no output depends on are left out.
        outputs: names of the outputs.
        tensors: a sample.
        axes: sizes that stay open.
        opset: version of the ONNX operators; below 18, what torch writes is converted.
        clean: leave out what is unused, and what is computed twice.
        contrib: ONNX Runtime's own operators may stand for those that an opset lacks.
        trainable: each parameter and buffer stays an initializer of its own, and nothing else is one. Else weights may
            be transposed, merged with others, or left out where they are equal.
        what: the module in errors; by default its class.
        advice: how a size is closed, for errors.

    Raises:
        ExportError: torch cannot trace the module, or has no ONNX form of an operator in this opset.
    """
    # torch.export takes a size of 1 for a constant
    least = {name: max(size, 2) for name, size in sizes_of(axes, names, tensors).items()}
    example = tuple(resized(axes, names, tensors, least))
    # names of sizes may be any text to ORTTrainer
    dims = {n: torch.export.Dim(n if n.isidentifier() else f"size_{i}") for i, n in enumerate(least)}
    shapes = tuple({axis: dims[size] for axis, size in axes.get(name, {}).items()} for name in names)
    what = what or type(module.module).__name__
    with _quiet() as printed:
        try:
            program = _traced(module, example, shapes)
        except TypeError:  # of InferenceModule
            raise
        except Exception as error:
            raise ExportError(
                f"torch.export cannot trace {what} with the open sizes {dict(axes)}: {_reason(error)}"
                f"{_users_line(printed.getvalue())} A size that cannot change must be {advice}; Python "
                "that depends on the values of tensors cannot be exported."
            ) from error
        try:
            exported = torch.onnx.export(
                program, (), input_names=list(names), output_names=list(outputs), opset_version=max(opset, NEWEST),
                dynamo=True, verbose=False, optimize=not trainable,
            )  # fmt: skip
        except Exception as error:
            raise ExportError(f"torch.onnx.export cannot write {what}: {_reason(error)}") from error
    assert exported is not None
    model = exported.model
    _name_sizes(model, names, axes)
    model.ir_version = min(model.ir_version or _IR_VERSION, _IR_VERSION)
    if trainable:
        _fold_all_but(model, {n for n, _ in [*module.named_parameters(), *module.named_buffers()]})
    if opset < NEWEST:
        convert(model, opset, contrib=contrib)
    if clean:
        model = optimize(model)
    _name_weights(model)
    return model


def _traced(
    module: InferenceModule, example: tuple[Tensor, ...], shapes: tuple[Any, ...]
) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(module, example, dynamic_shapes=(shapes,), strict=False)
    except Exception as error:
        # plain Python makes a number of len(x); Dynamo, which refuses more, leaves it open
        try:
            return torch.export.export(module, example, dynamic_shapes=(shapes,), strict=True)
        except Exception:
            raise error from error.__cause__


def _reason(error: BaseException) -> str:
    """What the innermost error says, without its advice, which is about other programs."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).partition("Suggested fixes")[0].replace(_ADVICE, "")
    lines = [line.partition(" If you're using ")[0].strip() for line in text.splitlines() if line.strip()]
    text = " ".join(lines[:3]) or type(error).__name__
    return text if text.endswith(".") else f"{text}."


def _users_line(printed: str) -> str:
    """The last line of the module that torch names when it prints what it has traced so far."""
    found = re.findall(r"# File: (.+?), code: (.+)", printed)
    return " At {}: {}.".format(*found[-1]) if found else ""


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Keep torch's warnings and prints away; what it prints to the error stream is in the result."""
    loggers = [logging.getLogger(name) for name in _CHATTY]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as printed:
            warnings.simplefilter("ignore")  # about torch's own use of what it has deprecated
            yield printed
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _fold_all_but(model: ir.Model, weights: Collection[str]) -> None:
    """Compute what is constant, but for what depends on ``weights``, and leave no other initializers."""
    InlinePass()(model)
    graph = model.graph
    fold_constants(model, should_fold=lambda node: False if any(v and v.name in weights for v in node.inputs) else None)
    ShapeInferencePass()(model)  # values within functions had no types
    for name, value in list(graph.initializers.items()):
        if name not in weights and value.const_value is not None:
            node = ir.node("Constant", [], {"value": ir.AttrTensor("value", value.const_value)}, name=f"{name}/value")
            new = node.outputs[0]
            new.type, new.shape = value.type, value.shape
            graph.insert_before(graph[0], node)
            value.replace_all_uses_with(new)
            del graph.initializers[name]
            new.name = name


def _name_sizes(model: ir.Model, names: Sequence[str], axes: Axes) -> None:
    """Call open sizes by the user's names instead of torch's, such as ``s77``."""
    inputs = {value.name: value for value in model.graph.inputs}
    known: dict[str, str] = {}
    for name in names:
        for axis, size in axes.get(name, {}).items():
            shape = inputs[name].shape
            if shape is not None and isinstance(shape[axis], ir.SymbolicDim):
                known[str(shape[axis].value)] = size  # type: ignore[union-attr]
    if not known:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, known)) + r")\b")
    values = [*model.graph.inputs, *(v for node in model.graph.all_nodes() for v in node.outputs)]
    for value in values:
        if value.shape is None:
            continue
        value.shape = ir.Shape(
            [
                ir.SymbolicDim(pattern.sub(lambda m: known[m.group()], d.value))
                if isinstance(d, ir.SymbolicDim) and d.value
                else d
                for d in value.shape
            ]
        )


def _name_weights(model: ir.Model) -> None:
    """Call weights as the module does, where nothing else has that name."""
    graph = model.graph
    taken = {v.name for v in graph.inputs} | {v.name for node in graph.all_nodes() for v in node.outputs}
    for name, value in list(graph.initializers.items()):
        short = name.removeprefix("module.")
        if short != name and short not in taken and short not in graph.initializers:
            value.name = short
