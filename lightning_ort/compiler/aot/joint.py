"""A forward ONNX graph and its gradients, traced as one functional graph."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from lightning_ort.compiler.aot.forward import Forward, region_of, run_fake
from lightning_ort.compiler.aot.inputs import Fakes, InputInfo, usual_hints
from lightning_ort.compiler.aot.requirements import required_sizes
from lightning_ort.compiler.aot.sizes import bound, independent, varying
from lightning_ort.compiler.functional_graph import Untraceable
from lightning_ort.compiler.trace import Derivative, Traced, trace
from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader import OnnxModule
from lightning_ort.verification import is_same_function

__all__ = ["GRAD", "NEW", "Joint", "holds_for", "trace_joint"]

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
        infos: the inputs of the file. Sizes that the operators fix are numbers, sizes that must be equal have one name.
        names: of the sizes that vary, by torch's symbols.
        unused: what was wanted a gradient of and does not lead to what is differentiated; its gradient is zeros.
    """

    traced: Traced
    tensors: dict[str, torch.Tensor]
    inputs: dict[str, fx.Node]
    results: dict[str, fx.Node]
    infos: list[InputInfo]
    names: dict[str, str]
    unused: frozenset[str]


def trace_joint(
    module: OnnxModule | Forward,
    infos: Sequence[InputInfo],
    differentiated: Sequence[str],
    incoming: Sequence[str],
    wanted: Sequence[str],
    *,
    statistics: bool = False,
    what: str = "ONNX graph",
    hints: Sequence[Mapping[str, int]] | None = None,
) -> Joint:
    """Trace ``module`` and the gradients of its outputs by the initializers and inputs ``wanted``.

    Args:
        infos: the graph inputs. What operators require of sizes that vary there is found out where it is needed.
        differentiated: outputs whose gradients are taken.
        incoming: those of them whose own gradient is an input; that of the others is 1.
        statistics: give out new running statistics.
        what: what errors call ``module``.
        hints: sizes to trace with, by name; by default :func:`~lightning_ort.compiler.aot.inputs.usual_hints`.

    Raises:
        ValueError: ``wanted`` names a tensor of whole numbers.
        UnsupportedError: the graph has no functional form, or holds for some sizes only where the file says they vary;
            or a value of the file has the name of a gradient.
    """
    if isinstance(module, OnnxModule):
        _check_names(module, incoming, wanted, statistics)
    examples = usual_hints(varying(infos)) if hints is None else hints
    with _without_tracebacks():
        return _joint(module, infos, differentiated, incoming, wanted, statistics, what, examples)


def _check_names(module: OnnxModule, incoming: Sequence[str], wanted: Sequence[str], statistics: bool) -> None:
    """Refuse a file in which a value has the name of a gradient or of a new running statistic."""
    buffers = module.buffer_names.values() if statistics else ()
    made = {f"{name}{GRAD}": f"the gradient of {name!r}" for name in (*incoming, *wanted)}
    made |= {f"{name}{NEW}": f"the new value of {name!r}" for name in buffers}
    known = dict.fromkeys([*module.input_names, *module.parameter_names.values(), *buffers, *module.output_names])
    clash = [name for name in known if name in made]
    if clash:
        raise UnsupportedError(
            f"{clash[0]!r} is a name in the ONNX file, and that of {made[clash[0]]}; expected another "
            "one. Rename that value of the file."
        )
    both = [name for name in incoming if name in wanted]
    if both:
        raise UnsupportedError(
            f"{both[0]!r} is an output whose gradient comes in, and an input or initializer whose gradient is wanted: "
            f"{both[0]}{GRAD} cannot be both. Let the file give an Identity of it."
        )


def _joint(
    module: OnnxModule | Forward,
    infos: Sequence[InputInfo],
    differentiated: Sequence[str],
    incoming: Sequence[str],
    wanted: Sequence[str],
    statistics: bool,
    what: str,
    examples: Sequence[Mapping[str, int]],
) -> Joint:
    found: list[Joint] = []
    reason: Exception | None = None
    for sizes in examples:
        fakes = None
        try:
            fakes = Fakes(infos, sizes)
            found.append(_trace(module, infos, fakes, differentiated, incoming, wanted, statistics))
        except (Untraceable, UnsupportedError) as error:
            if reason is None and varying(infos):
                required = required_sizes(region_of(module, differentiated, []), infos)
                required = {name: size for name, size in required.items() if name != size}
                if required:
                    fitting = bound(infos, required)
                    return _joint(module, fitting, differentiated, incoming, wanted, statistics, what, examples)
            reason = reason or _in_names(error, fakes)
        else:
            if fakes is not None and not fakes.env.guards:
                return found[-1]
        if not varying(infos) or len(found) == 2:
            break
    if not found:
        named = [name for name in independent(infos) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(reason))]
        advice = f" Of {', '.join(named)}, declare as numbers the ones that are always the same." if named else ""
        raise UnsupportedError(f"The {what} cannot be differentiated: {reason}{advice}") from reason
    # something was decided by a size; two traces tell whether it matters
    if len(found) != 2 or not holds_for(found[0].traced, found[1].traced):
        raise UnsupportedError(
            f"The {what} cannot be differentiated for all sizes that are left open: what it computes depends "
            f"on {', '.join(independent(infos))}. Declare these sizes of its inputs as numbers."
        )
    return found[0]


def _in_names(error: Exception, fakes: Fakes | None) -> Exception:
    """``error`` with the names of sizes in the place of torch's symbols."""
    text = str(error)
    for symbol, name in (fakes.names() if fakes is not None else {}).items():
        text = re.sub(rf"\b{symbol}\b", lambda _, name=name: name, text)  # type: ignore[misc]
    renamed = type(error)(text)
    renamed.__cause__ = error.__cause__
    return renamed


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging what sizes did not fit: other sizes are tried then, or the error says it."""
    places = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes", "fx.experimental.sym_node")
    loggers = [logging.getLogger(f"torch.{place}") for place in places]

    def quiet(record: logging.LogRecord) -> bool:
        return False

    for logger in loggers:
        logger.addFilter(quiet)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(quiet)


def _trace(
    module: OnnxModule | Forward,
    infos: Sequence[InputInfo],
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
        listed = ", ".join(name if str(size) == name else f"{name} = {size}" for name, size in fixed.items())
        raise UnsupportedError(f"these sizes are said to vary, but its operators fix them ({listed})")
    results = dict(zip(module.output_names, traced.outputs[1:], strict=True))
    gradients = {names[i]: g or _zeros(traced, i) for i, g in traced.gradients.items()}
    results |= {f"{name}{GRAD}": gradients[name] for name in wanted}
    if statistics:
        results |= {f"{names[i]}{NEW}": value for i, value in traced.updates.items()}
    traced.graph.output_node().args = (list(results.values()),)
    traced.graph.eliminate_dead_code()
    inputs_by_name = dict(zip(names, traced.inputs, strict=False))
    unused = frozenset(names[i] for i, g in traced.gradients.items() if g is None)
    return Joint(traced, region.tensors, inputs_by_name, results, list(infos), fakes.names(), unused)


def _incoming(
    module: OnnxModule | Forward, fakes: Fakes, inputs: Sequence[torch.Tensor], incoming: Sequence[str]
) -> list[torch.Tensor]:
    """Fake tensors for the gradients that come in, shaped like the outputs."""
    if not incoming:
        return []
    plain = region_of(module, module.output_names[:1], [])
    with fakes.mode:
        copies = [x.detach().clone() for x in inputs]
    try:
        _, *results = run_fake(plain, fakes.mode, copies)
    except Exception as error:
        raise Untraceable(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}") from error
    outputs = dict(zip(module.output_names, results, strict=True))
    return [fakes.fake_like(outputs[name]) for name in incoming]


def _zeros(traced: Traced, number: int) -> fx.Node:
    """The gradient of an input on which nothing depends."""
    with traced.graph.inserting_before(traced.graph.output_node()):
        zeros = traced.graph.call_function(torch.ops.aten.full_like.default, (traced.inputs[number], 0))
    zeros.meta["val"] = traced.inputs[number].meta["val"]
    return zeros


aten = torch.ops.aten


def holds_for(traced: Traced, other: Traced) -> bool:
    """Whether ``traced`` computes the same as ``other`` at the sizes with which ``other`` was traced.

    Both are graphs of one function; torch decides by sizes mostly which way to compute the same.
    """
    if _text(traced.graph) == _text(other.graph):
        return True
    generator = torch.Generator().manual_seed(0)
    inputs = [_example(n.meta["val"], generator) for n in other.graph.nodes if n.op == "placeholder"]
    with torch.no_grad():
        try:
            results = zip(_run(traced, inputs), _run(other, inputs), strict=True)
        except RuntimeError:
            return False
    return all(is_same_function(a, b) for a, b in results)


def _text(graph: fx.Graph) -> str:
    return "\n".join(f"{n.name} {n.target} {n.args} {n.kwargs}" for n in graph.nodes)


def _example(fake: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random floats, and zeros, which are valid indices and classes."""
    shape = [s if isinstance(s, int) else s.node.hint for s in fake.shape]
    if fake.is_floating_point():
        return torch.rand(shape, dtype=fake.dtype, generator=generator)
    return torch.zeros(shape, dtype=fake.dtype)


def _run(traced: Traced, inputs: list[torch.Tensor]) -> list[Any]:
    return _Replay(traced.module).run(*inputs)


class _Replay(fx.Interpreter):
    """Runs a functional graph, whose tensors have lost the strides that views rely on."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        target = aten.reshape.default if target == aten.view.default else target
        return super().call_function(target, args, kwargs)
