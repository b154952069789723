"""A forward ONNX graph and its gradients, traced as one functional graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from lightning_ort.compiler.trace import Derivative, Traced, Untraceable, trace
from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_gradients.guards import holds_for
from lightning_ort.onnx_gradients.inputs import HINTS, Fakes, InputInfo
from lightning_ort.onnx_gradients.region import Forward, region_of
from lightning_ort.onnx_reader import OnnxModule

__all__ = ["GRAD", "NEW", "Joint", "trace_joint"]

GRAD = "_grad"
"""suffix of the name of a gradient"""

NEW = "_new"
"""suffix of the name of a new running statistic"""


@dataclasses.dataclass
class Joint:
    """The traced graph, and the ONNX names of what goes in and comes out.

    Attributes:
        tensors: ONNX name to value, of the inputs that are initializers in the file.
        inputs: ONNX name to placeholder; incoming gradients are called ``<output>_grad``.
        results: ONNX name to node: the outputs of the file, then ``<name>_grad`` for each wanted gradient, then
            ``<name>_new`` for each running statistic that changes, if these were asked for.
    """

    traced: Traced
    tensors: dict[str, torch.Tensor]
    inputs: dict[str, fx.Node]
    results: dict[str, fx.Node]


def trace_joint(
    module: OnnxModule | Forward,
    infos: Sequence[InputInfo],
    differentiated: Sequence[str],
    incoming: Sequence[str],
    wanted: Sequence[str],
    *,
    statistics: bool = False,
    what: str = "ONNX graph",
    hints: Sequence[Sequence[int]] = HINTS,
) -> Joint:
    """Trace ``module`` and the gradients of its outputs by the initializers and inputs ``wanted``.

    Args:
        infos: the graph inputs.
        differentiated: outputs whose gradients are taken.
        incoming: those of them whose own gradient is an input; that of the others is 1.
        statistics: give out new running statistics.
        what: what errors call ``module``.
        hints: sizes to trace with, see :data:`~lightning_ort.onnx_gradients.inputs.HINTS`.

    Raises:
        ValueError: ``wanted`` names a tensor of whole numbers.
        UnsupportedError: the graph has no functional form, or holds for some sizes only where the file says they vary.
    """
    found: list[Joint] = []
    reason: Exception | None = None
    for sizes in hints:
        fakes = Fakes(infos, sizes)
        try:
            found.append(_trace(module, fakes, differentiated, incoming, wanted, statistics))
        except (Untraceable, UnsupportedError) as error:
            reason = reason or error
        else:
            if not fakes.env.guards:
                return found[-1]
        if not fakes.hints or len(found) == 2:
            break
    if not found:
        raise UnsupportedError(f"The {what} cannot be differentiated: {reason}") from reason
    # something was decided by a size; two traces tell whether it matters
    if len(found) != 2 or not holds_for(found[0].traced, found[1].traced):
        raise UnsupportedError(
            f"The {what} cannot be differentiated for all sizes that are left open: what it computes depends "
            f"on {', '.join(fakes.hints)}. Declare these sizes of its inputs as numbers."
        )
    return found[0]


def _trace(
    module: OnnxModule | Forward,
    fakes: Fakes,
    differentiated: Sequence[str],
    incoming: Sequence[str],
    wanted: Sequence[str],
    statistics: bool,
) -> Joint:
    region = region_of(module, differentiated, incoming)
    inputs = [fakes.fake(t.shape, t.dtype, [False] * t.dim()) for t in region.tensors.values()]
    inputs += fakes.inputs
    inputs += _incoming(module, fakes, inputs, incoming)
    names = [*region.tensors, *module.input_names, *(f"{name}{GRAD}" for name in incoming)]
    for name, tensor in zip(names, inputs, strict=True):
        if name in wanted:
            if not tensor.is_floating_point():
                raise ValueError(f"{name!r} is {tensor.dtype}; only floating-point tensors have gradients.")
            tensor.requires_grad_()
    with tracing(TracingContext(fakes.mode)):
        traced = trace(region.module, inputs, Derivative.LOSS, [0])
    fixed = fakes.fixed()
    if fixed:
        listed = ", ".join(f"{name} = {size}" for name, size in fixed.items())
        raise UnsupportedError(f"these sizes are said to vary, but its operators fix them ({listed})")
    results = dict(zip(module.output_names, traced.outputs[1:], strict=True))
    gradients = {names[i]: g or _zeros(traced, i) for i, g in traced.gradients.items()}
    results |= {f"{name}{GRAD}": gradients[name] for name in wanted}
    if statistics:
        results |= {f"{names[i]}{NEW}": value for i, value in traced.updates.items()}
    traced.graph.output_node().args = (list(results.values()),)
    traced.graph.eliminate_dead_code()
    return Joint(traced, region.tensors, dict(zip(names, traced.inputs, strict=False)), results)


def _incoming(
    module: OnnxModule | Forward, fakes: Fakes, inputs: Sequence[torch.Tensor], incoming: Sequence[str]
) -> list[torch.Tensor]:
    """Fake tensors for the gradients that come in, shaped like the outputs."""
    if not incoming:
        return []
    plain = region_of(module, module.output_names[:1], [])
    with fakes.mode, torch.no_grad():
        _, *results = fx.Interpreter(plain.module).run(*[x.detach().clone() for x in inputs])
    outputs = dict(zip(module.output_names, results, strict=True))
    return [fakes.fake_like(outputs[name]) for name in incoming]


def _zeros(traced: Traced, number: int) -> fx.Node:
    """The gradient of an input on which nothing depends."""
    with traced.graph.inserting_before(traced.graph.output_node()):
        zeros = traced.graph.call_function(torch.ops.aten.full_like.default, (traced.inputs[number], 0))
    zeros.meta["val"] = traced.inputs[number].meta["val"]
    return zeros
