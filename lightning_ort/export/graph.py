"""A module as an ONNX graph, by torch's exporter."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import InlinePass, ShapeInferencePass
from onnxscript import opset18
from onnxscript.optimizer import fold_constants
from torch import Tensor

from lightning_ort.compiler.passes import optimize
from lightning_ort.errors import ExportError
from lightning_ort.export.inputs import Axes, InferenceModule, resized, sizes_of
from lightning_ort.export.older_opsets import NEWEST, convert

__all__ = ["make_graph", "name_weights"]

# what ONNX Runtime 1.19 reads
_IR_VERSION = 10
_ADVICE = 'For more information, run with TORCH_LOGS="+dynamic".'
# they warn of a library that nobody asked for, and of what then becomes an error
_CHATTY = (
    "torch.onnx._internal.exporter._registration", "torch.fx.experimental.symbolic_shapes", "torch._guards", "onnx_ir",
)  # fmt: skip


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
    doubts: list[ExportError] | None = None,
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
        doubts: where torch can say of no range of sizes that the graph holds for all of it, but has a graph, it gets
            the error that is raised otherwise: the caller looks at other sizes.

    Raises:
        ExportError: torch cannot trace the module, or has no ONNX form of an operator in this opset.
    """
    # torch.export takes a size of 1 for a constant
    least = {name: max(size, 2) for name, size in sizes_of(axes, names, tensors).items()}
    example = tuple(resized(axes, names, tensors, least))
    # names of sizes may be any text to ORTTrainer
    labels = {size: size if size.isidentifier() else f"size_{i}" for i, size in enumerate(least)}
    open_axes = [{axis: labels[size] for axis, size in axes.get(name, {}).items()} for name in names]
    what = what or type(module.module).__name__
    with _quiet() as printed:
        try:
            program, reason = _traced(module, example, open_axes)
        except TypeError:  # of InferenceModule
            raise
        except Exception as error:
            program, reason = None, error
        if program is None or reason is not None:
            assert reason is not None
            doubt = ExportError(
                f"torch.export cannot trace {what} with the open sizes {dict(axes)}: {_reason(reason)}"
                f"{_users_line(printed.getvalue())} A size that cannot change must be {advice}; Python "
                "that depends on the values of tensors cannot be exported."
            )
            if program is None or doubts is None:
                raise doubt from reason
            doubts.append(doubt)
        try:
            program = _in_smaller_operators(program)
            exported = torch.onnx.export(
                program, (), opset_version=max(opset, NEWEST), dynamo=True, verbose=False, optimize=not trainable,
                custom_translation_table=_BETTER,
            )  # fmt: skip
        except Exception as error:
            raise ExportError(f"torch.onnx.export cannot write {what}: {_reason(error)}") from error
    assert exported is not None
    model = exported.model
    _rename(model.graph, list(zip([*model.graph.inputs, *model.graph.outputs], [*names, *outputs], strict=True)))
    _name_sizes(model, names, axes)
    model.ir_version = min(model.ir_version or _IR_VERSION, _IR_VERSION)
    if trainable:
        first_names = _first_names(module)
        _merge_tied(model.graph, first_names)
        _fold_all_but(model, set(first_names.values()))
    if opset < NEWEST:
        convert(model, opset, contrib=contrib)
    if clean:
        model = optimize(model)
    name_weights(model, "module.")
    return model


def _traced(
    module: InferenceModule, example: tuple[Tensor, ...], axes: Sequence[Mapping[int, str]]
) -> tuple[torch.export.ExportedProgram, Exception | None]:
    """The program, and why it may not hold for all sizes."""
    dims = {name: torch.export.Dim(name) for open_axes in axes for name in open_axes.values()}
    first: Exception | None = None
    # sizes of any number, as the user says; else those the module takes: a convolution needs some, a table has so many
    for limited, dim in ((False, dims.get), (True, lambda name: torch.export.Dim.DYNAMIC)):
        shapes = (tuple({axis: dim(name) for axis, name in open_axes.items()} for open_axes in axes),)
        # plain Python makes a number of len(x); Dynamo, which refuses more, leaves it open
        for strict in (False, True):
            try:
                program = torch.export.export(module, example, dynamic_shapes=shapes, strict=strict)
            except Exception as error:
                first = first or error
            else:
                if not limited:
                    return program, None
                if _are_different(program, axes):
                    return program, first
    assert first is not None
    raise first from first.__cause__


op: Any = opset18  # its annotations tie arguments to single element types


def _log_sigmoid(x: Any) -> Any:
    return op.Neg(op.Softplus(op.Neg(x)))


def _logaddexp(x: Any, y: Any) -> Any:
    apart = op.Abs(op.Sub(x, y))  # NaN of two infinities
    sum_of_others = op.Add(op.Max(x, y), op.Softplus(op.Neg(apart)))
    return op.Where(op.Equal(x, y), op.Add(x, op.CastLike(op.Constant(value_float=math.log(2)), x)), sum_of_others)


_BETTER: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.log_sigmoid.default: _log_sigmoid,
    torch.ops.aten.logaddexp.default: _logaddexp,
}
"""The exporter's own overflow: of the first, also in binary cross entropy, the sigmoid is 0 at -20 in ONNX Runtime."""


def _in_smaller_operators(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """``program`` without calls that the exporter writes wrongly.

    It takes cross entropy for that of class numbers, row by row: label smoothing is left out without a word, and
    probabilities for labels, or a single row, make a file that does not load.
    """
    calls = program.graph.find_nodes(op="call_function", target=_CROSS_ENTROPY)
    if not any(_is_more_than_classes(call) for call in calls):
        return program
    return program.run_decompositions({_CROSS_ENTROPY: torch.export.default_decompositions()[_CROSS_ENTROPY]})


_CROSS_ENTROPY = torch.ops.aten.cross_entropy_loss.default


def _is_more_than_classes(call: torch.fx.Node) -> bool:
    logits, target = (call.args[i].meta["val"] for i in (0, 1))
    smoothing = call.args[5] if len(call.args) > 5 else call.kwargs.get("label_smoothing", 0.0)
    return bool(smoothing) or target.is_floating_point() or logits.dim() < 2


def _are_different(program: torch.export.ExportedProgram, axes: Sequence[Mapping[int, str]]) -> bool:
    """Whether sizes of different names are not one and the same to the module."""
    user = set(program.graph_signature.user_inputs)
    fakes = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in user]
    found = {(str(x.shape[axis]), name) for x, names in zip(fakes, axes, strict=True) for axis, name in names.items()}
    return len({symbol for symbol, _ in found}) == len(found)


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
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()) as printed:
            warnings.simplefilter("ignore")  # about torch's own use of what it has deprecated
            yield printed
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _first_names(module: torch.nn.Module) -> dict[str, str]:
    """All names of parameters and buffers, to the one by which ``named_parameters`` has what may have several."""
    both = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    first: dict[int, str] = {}
    return {name: first.setdefault(id(x), name) for name, x in itertools.chain(*both)}


def _merge_tied(graph: ir.Graph, first_names: Mapping[str, str]) -> None:
    """Call weights by their first names; the exporter chooses among those of a tied one."""
    for name, value in list(graph.initializers.items()):
        first = first_names.get(name, name)
        if first == name:
            continue
        if first in graph.initializers:
            value.replace_all_uses_with(graph.initializers[first])
            del graph.initializers[name]
        else:
            value.name = first


def _fold_all_but(model: ir.Model, weights: Collection[str]) -> None:
    """Compute what is constant, but for what depends on ``weights``, and leave no other initializers."""
    InlinePass()(model)
    graph = model.graph
    fold_constants(model, should_fold=lambda node: False if any(v and v.name in weights for v in node.inputs) else None)
    ShapeInferencePass(strict_mode=False)(model)  # values within functions had no types
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


def name_weights(model: ir.Model, prefix: str) -> None:
    """Take ``prefix`` off the names of weights, but where an input or an output has the name that is left."""
    graph = model.graph
    kept = {v.name for v in [*graph.inputs, *graph.outputs]}
    weights = [v for name, v in graph.initializers.items() if name.startswith(prefix)]
    names = [str(v.name).removeprefix(prefix) for v in weights]
    _rename(graph, [(v, name) for v, name in zip(weights, names, strict=True) if name not in kept])


def _rename(graph: ir.Graph, names: Sequence[tuple[ir.Value, str]]) -> None:
    """Give values these names. Other values that have them, which the exporter has called so, get new ones."""
    chosen = {id(value) for value, _ in names}
    values = [*graph.inputs, *graph.initializers.values(), *(v for node in graph.all_nodes() for v in node.outputs)]
    taken = {v.name for v in values} | {name for _, name in names}
    wanted = {name for _, name in names}
    for value in values:
        if id(value) in chosen or value.name in wanted:
            count = 1
            while f"{value.name}_{count}" in taken:
                count += 1
            value.name = f"{value.name}_{count}"
            taken.add(value.name)
    for value, name in names:
        value.name = name
