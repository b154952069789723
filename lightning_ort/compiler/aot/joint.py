"""A forward ONNX graph and its gradients, traced as one functional graph."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import sympy
import torch
from torch import fx
from torch._guards import TracingContext, tracing

from lightning_ort.compiler.aot.agreement import holds_for, other_sizes, satisfied
from lightning_ort.compiler.aot.forward import Forward, region_of, run_fake
from lightning_ort.compiler.aot.inputs import Fakes, InputInfo, is_small, usual_hints
from lightning_ort.compiler.aot.requirements import required_sizes
from lightning_ort.compiler.aot.sizes import bound, independent, varying
from lightning_ort.compiler.functional_graph import Untraceable, quietly
from lightning_ort.compiler.trace import Derivative, Traced, trace
from lightning_ort.errors import UnsupportedError
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
        infos: the inputs of the file. Sizes that the operators fix are numbers, sizes that must be equal have one name.
        names: of the sizes that vary, by torch's symbols.
        unused: what was wanted a gradient of and does not lead to what is differentiated; its gradient is zeros.
        updates: running statistic to the name of its new value among ``results``.
        conditions: on torch's symbols, under which the graph holds, besides that none of the sizes that vary is 0 or
            1; ``None`` where it holds for all sizes.
    """

    traced: Traced
    tensors: dict[str, torch.Tensor]
    inputs: dict[str, fx.Node]
    results: dict[str, fx.Node]
    infos: list[InputInfo]
    names: dict[str, str]
    unused: frozenset[str]
    updates: dict[str, str] = dataclasses.field(default_factory=dict)
    conditions: tuple[sympy.Basic, ...] | None = None

    def holds_at(self, sizes: Mapping[str, int]) -> bool:
        """Whether the graph computes what the file does at ``sizes``, which are by name."""
        if self.conditions is None:
            return True
        return all(sizes[n] > 1 for n in self.names.values()) and satisfied(self.conditions, self.names, sizes)


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
    conditional: bool = False,
) -> Joint:
    """Trace ``module`` and the gradients of its outputs by the initializers and inputs ``wanted``.

    Args:
        infos: the graph inputs. What operators require of sizes that vary there is found out where it is needed.
        differentiated: outputs whose gradients are taken.
        incoming: those of them whose own gradient is an input; that of the others is 1.
        statistics: give out new running statistics.
        what: what errors call ``module``.
        hints: sizes to trace with, by name; by default :func:`~lightning_ort.compiler.aot.inputs.usual_hints`.
        conditional: a graph that does not hold for all sizes is no error: its ``conditions`` say for which it does.

    Raises:
        ValueError: ``wanted`` names a tensor of whole numbers.
        UnsupportedError: the graph has no functional form, or holds for some sizes only where the file says they vary;
            or a value of the file has the name of a gradient or of a new running statistic.
    """
    if isinstance(module, OnnxModule):
        made = {f"{name}{GRAD}": f"the gradient of {name!r}" for name in (*incoming, *wanted)}
        _check_names(module, made, module.buffer_names.values() if statistics else ())
        _check_incoming(incoming, wanted)
    examples = usual_hints(varying(infos)) if hints is None else hints
    with quietly():
        joint = _joint(module, infos, differentiated, incoming, wanted, statistics, what, examples, conditional)
    if isinstance(module, OnnxModule):
        made = {new: f"the new value of {name!r}" for name, new in joint.updates.items()}
        _check_names(module, made, module.buffer_names.values())
    return joint


def _check_names(module: OnnxModule, made: Mapping[str, str], buffers: Iterable[str]) -> None:
    """Refuse a file in which a value has the name of one that is ``made``, which is mapped to what it is."""
    known = dict.fromkeys([*module.input_names, *module.parameter_names.values(), *buffers, *module.output_names])
    clash = [name for name in known if name in made]
    if clash:
        raise UnsupportedError(
            f"{clash[0]!r} is a name in the ONNX file, and that of {made[clash[0]]}; expected another "
            "one. Rename that value of the file."
        )


def _check_incoming(incoming: Sequence[str], wanted: Sequence[str]) -> None:
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
    conditional: bool,
) -> Joint:
    found: list[Joint] = []
    traced_with: list[Fakes] = []
    reason: Exception | None = None
    for sizes in examples:
        fakes = None
        try:
            fakes = Fakes(infos, sizes)
            found.append(_trace(module, infos, fakes, differentiated, incoming, wanted, statistics))
            traced_with.append(fakes)
        except (Untraceable, UnsupportedError) as error:
            if reason is None and varying(infos):
                required = required_sizes(region_of(module, differentiated, []), infos)
                required = {name: size for name, size in required.items() if name != size}
                if required:
                    fitting = bound(infos, required)
                    return _joint(
                        module, fitting, differentiated, incoming, wanted, statistics, what, examples, conditional
                    )
            reason = reason or _in_names(error, fakes)
        else:
            if fakes is not None and not fakes.env.guards:
                return found[-1]
        if not varying(infos) or len(found) == 2:
            break
    if not found or (reason is not None and len(found) == 1 and is_small(traced_with[0].hints)):
        named = [name for name in independent(infos) if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(reason))]
        advice = f" Of {', '.join(named)}, declare as numbers the ones that are always the same." if named else ""
        raise UnsupportedError(f"The {what} cannot be differentiated: {reason}{advice}") from reason
    names, sizes = found[0].names, traced_with[0].hints
    assumed = tuple(dict.fromkeys(guard.expr for guard in traced_with[0].env.guards))

    def other(sizes: Mapping[str, int]) -> Joint | None:
        single = {name: size for name, size in sizes.items() if size == 1}
        if single and len(independent(infos)) != len(varying(infos)):
            return None
        try:
            fixed = bound(infos, single)
            return _trace(module, fixed, Fakes(fixed, sizes), differentiated, incoming, wanted, statistics)
        except (Untraceable, UnsupportedError):
            return None  # sizes that the operators do not take

    # something was decided by a size; traces at others tell whether it matters
    if len(found) == 2 and holds_for(found[0].traced, found[1].traced):
        untried = [condition for condition in assumed if satisfied([condition], names, traced_with[1].hints)]
        others = (other(excluded) for excluded in other_sizes(untried, names, sizes))
        if all(holds_for(found[0].traced, joint.traced) is not False for joint in others if joint is not None):
            return found[0]
    if conditional:
        return dataclasses.replace(found[0], conditions=assumed)
    raise UnsupportedError(
        f"The {what} cannot be differentiated for all sizes that are left open: what it computes depends "
        f"on {', '.join(independent(infos))}. Declare these sizes of its inputs as numbers."
    )


def _in_names(error: Exception, fakes: Fakes | None) -> Exception:
    """``error`` with the names of sizes in the place of torch's symbols."""
    text = str(error)
    for symbol, name in (fakes.names() if fakes is not None else {}).items():
        if symbol.isdigit():  # what the operators fix
            continue
        text = re.sub(rf"\b{symbol}\b", lambda _, name=name: name, text)  # type: ignore[misc]
    renamed = type(error)(text)
    renamed.__cause__ = error.__cause__
    return renamed


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
    changed = traced.updates if statistics else {}
    updates = {names[i]: f"{names[i]}{NEW}" for i in changed}
    results |= {updates[names[i]]: value for i, value in changed.items()}
    traced.graph.output_node().args = (list(results.values()),)
    traced.graph.eliminate_dead_code()
    inputs_by_name = dict(zip(names, traced.inputs, strict=False))
    unused = frozenset(names[i] for i, g in traced.gradients.items() if g is None)
    return Joint(traced, region.tensors, inputs_by_name, results, list(infos), fakes.names(), unused, updates)


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
