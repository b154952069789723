"""A Dynamo graph with its gradients, as one functional graph of ATen calls."""

from __future__ import annotations

import cmath
import dataclasses
import enum
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx.traceback
import torch.utils._pytree as pytree
from torch import fx

# What Dynamo knows of its inputs has no public form; nothing else makes fakes of them.
from torch._dynamo.source import FloatTensorSource
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_ort.compiler.checkpointing import CheckpointTracer, first_draws
from lightning_ort.compiler.dynamo_words import source_of
from lightning_ort.compiler.functional_graph import Untraceable, functional_graph, knowing, stands_for_float
from lightning_ort.compiler.global_state import GlobalState, without_autocast
from lightning_ort.compiler.loss_scale import scale_fake, seed_of, unscaled
from lightning_ort.compiler.random import DRAWS, layout_of
from lightning_ort.compiler.symbolic_shapes import hint, open_dims

aten = torch.ops.aten

__all__ = ["Derivative", "Traced", "fake_inputs", "trace"]


class Derivative(enum.Enum):
    """Which gradients a traced graph computes."""

    NONE = "none"
    LOSS = "loss"
    """of one scalar output; the gradient of the loss by itself is 1"""
    TANGENTS = "tangents"
    """of several outputs, whose incoming gradients are further inputs"""


@dataclasses.dataclass
class Traced:
    """A functional ATen graph and what its placeholders and results mean.

    Every entry of ``outputs``, ``gradients`` and ``updates`` is an fx node of ``graph`` (or a Python number, or
    ``None``).
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    """one per input of the region, in its order"""
    tangents: dict[int, fx.Node]
    """output number to the placeholder of its incoming gradient, or of the scale of a scaled loss"""
    draws: list[fx.Node]
    """placeholders to be filled with random numbers, in the order in which torch would draw them"""
    outputs: list[Any]
    gradients: dict[int, fx.Node | None]
    """input number to its gradient, or ``None`` when the outputs do not depend on it"""
    updates: dict[int, fx.Node]
    """input number to the value which the region leaves in that tensor"""
    scaled: bool = False
    """the loss is scaled; gradients of 16-bit inputs stay so"""

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph


def fake_inputs(region: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Fake tensors, with symbolic sizes where Dynamo chose them, for the inputs it passed to a backend.

    Raises:
        Untraceable: an integer is beyond 64 bits, or a tensor is not what its memory holds.
    """
    context = TracingContext.get()
    mode = context.fake_mode
    assert mode is not None
    fakes = []
    placeholders = [n for n in region.graph.nodes if n.op == "placeholder"]
    for x, placeholder in zip(example_inputs, placeholders, strict=True):
        if isinstance(x, FakeTensor):  # between parts of what Dynamo gave; its mode is not the backend's
            x = _in_the_form_of(x, x, mode)
        elif isinstance(x, torch.Tensor):
            symbolic = context.tensor_to_context.get(x)
            # a Python float arrives as a tensor; its source tells the mode to give it a symbolic value
            source = getattr(symbolic, "tensor_source", None) or source_of(placeholder)
            x = mode.from_tensor(x, symbolic_context=symbolic, source=source)
            noted: Any = x
            noted.stands_for_float = isinstance(source, FloatTensorSource)
            known = placeholder.meta.get("example_value")
            if isinstance(known, FakeTensor) and open_dims(known) != open_dims(x):
                # a gradient, whose open sizes Dynamo has noted with the tensor it belongs to, or one of two views
                x = _in_the_form_of(known, x, mode)
        if isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg()):
            raise Untraceable("an input is the conjugate of a tensor, or its negative part, as a view")
        if isinstance(x, torch.SymInt) and abs(hint(x)) >= 2**63:
            raise Untraceable("an integer needs more than 64 bits")
        fakes.append(x)
    return fakes


def _in_the_form_of(form: torch.Tensor, x: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake of ``mode`` for ``x``, with the sizes and strides of ``form``."""
    with mode:
        return torch.empty_strided(
            form.shape, form.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
        )


def trace(
    region: fx.GraphModule,
    fakes: Sequence[Any],
    derivative: Derivative = Derivative.NONE,
    differentiated: Sequence[int] = (),
    global_state: GlobalState | None = None,
    *,
    scaled: bool = False,
    native: bool = False,
) -> Traced:
    """Trace ``region`` and the gradients of the outputs numbered ``differentiated`` by all inputs that want one.

    Args:
        region: Dynamo's graph.
        fakes: its inputs, from :func:`fake_inputs`.
        derivative: ``LOSS`` takes the single output in ``differentiated`` as a scalar loss.
        differentiated: output numbers.
        global_state: what ``region`` is computed under; by default the present ones.
        scaled: multiply the loss by a further input, a float32 scalar, and divide its gradients by it; those of 16-bit
            inputs, which could vanish, stay multiplied.
        native: keep torch's own operators, fused ones among them, instead of what is written for ONNX. Only random
            ones are written as draws either way.

    Raises:
        Untraceable: a reason why this region is not a functional graph.
    """
    wanted = [i for i, x in enumerate(fakes) if isinstance(x, torch.Tensor) and x.requires_grad]
    # also of no interest, gradients may be passed on by what the region changes
    grad = derivative is not Derivative.NONE or (bool(wanted) and torch.is_grad_enabled())
    tracked = wanted if grad else []
    if derivative is Derivative.NONE:
        wanted = []
    if any(_sets_data(node) for node in region.graph.nodes):
        raise Untraceable(_CHANGED)
    if any(_is_static(node, region) for node in region.graph.nodes):
        raise Untraceable("it reads tensors at fixed addresses, as what compiles an optimizer's step does")
    tangent_fakes = _tangents(region, differentiated) if derivative is Derivative.TANGENTS else []

    if scaled:
        tangent_fakes = [scale_fake(fakes)]
    settings = global_state or GlobalState.present()

    def joint(inputs: list[Any], tangents: list[torch.Tensor]) -> Any:
        local: list[Any] = []
        for i, x in enumerate(inputs):
            if not isinstance(x, torch.Tensor):
                local.append(x)
            elif i in wanted:
                local.append(x.detach().requires_grad_())
            elif stands_for_float(fakes[i]):  # a copy would not know the number
                local.append(x)
            else:
                local.append(knowing(x.detach().clone(), fakes[i]).requires_grad_(i in tracked))
        leaves = [local[i] for i in wanted]
        versions = [leaf._version for leaf in leaves]
        with settings.applied():
            try:
                outputs = CheckpointTracer(region).run(*local)
            except RuntimeError as error:  # what is a leaf here is a result of the user's
                raise Untraceable(_CHANGED) if "leaf Variable that requires grad" in str(error) else error from None
        if [leaf._version for leaf in leaves] != versions:
            raise Untraceable(_CHANGED)
        if any(isinstance(x, torch.Tensor) and x.requires_grad and i not in tracked for i, x in enumerate(local)):
            raise Untraceable("a tensor gets values in place that require a gradient")
        gradients: Sequence[Any] = ()
        changes = [x._version for x in local if isinstance(x, torch.Tensor)]
        if wanted:
            roots = [outputs[i] for i in differentiated]
            seeds = [seed_of(roots[0], tangents[0])] if scaled else tangents
            with without_autocast():
                gradients = torch.autograd.grad(roots, leaves, seeds or None, allow_unused=True)
            if any(g is not None and g.layout != torch.strided for g in gradients):
                raise Untraceable("a gradient is sparse")
            if [x._version for x in local if isinstance(x, torch.Tensor)] != changes:
                raise Untraceable(
                    "layers under torch.utils.checkpoint change a buffer again when gradients are computed"
                )
            if scaled:
                gradients = unscaled(gradients, tangents[0])
        flat = [*outputs, *gradients, *local]
        return [x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in flat]

    module = functional_graph(joint, region, list(fakes), tangent_fakes, grad=grad, native=native)
    return _signature(module, fakes, wanted, differentiated if tangent_fakes else (), native, scaled)


_CHANGED = "a tensor that requires a gradient is changed in place"


def _is_static(node: fx.Node, region: fx.GraphModule) -> bool:
    """Whether this is a tensor that others change as well, which is no input: Dynamo keeps it with its graph."""
    tensor = getattr(region, str(node.target), None) if node.op == "get_attr" else None
    # what torch._dynamo.mark_static_address has marked; torch has no other name for it
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "_dynamo_static_input_type")


def _sets_data(node: fx.Node) -> bool:
    """Whether this is ``x.data = y``, of an ``x`` that wants a gradient."""
    if node.target is not torch.Tensor.set_:
        return False
    x = node.args[0]
    return isinstance(x, fx.Node) and bool(getattr(x.meta.get("example_value"), "requires_grad", False))


def _tangents(region: fx.GraphModule, outputs: Sequence[int]) -> list[torch.Tensor]:
    """Fake incoming gradients for the outputs of those numbers, contiguous as ONNX Runtime reads them."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    results = region.graph.output_node().args[0]
    tangents = []
    with mode:
        for i in outputs:
            like = results[i].meta["example_value"]
            tangents.append(torch.empty(like.shape, dtype=like.dtype, device=like.device))
    return tangents


def _signature(
    module: fx.GraphModule,
    fakes: Sequence[Any],
    wanted: Sequence[int],
    differentiated: Sequence[int],
    native: bool,
    scaled: bool,
) -> Traced:
    graph = module.graph
    _refuse_complex(graph)
    _forget_aliases(graph, native)
    _keep_statistics(graph)
    draws = _draws_as_inputs(graph)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs, tangents = placeholders[: len(fakes)], placeholders[len(fakes) : len(placeholders) - len(draws)]
    for placeholder, fake in zip(inputs, fakes, strict=True):
        if isinstance(fake, torch.nn.Parameter):
            placeholder.meta["weight"] = True
    flat = graph.output_node().args[0]
    start = len(flat) - len(fakes) - len(wanted)
    outputs, gradients, left = flat[:start], flat[start : start + len(wanted)], flat[start + len(wanted) :]
    # by way of .data or of an operator that autograd's count of changes leaves out
    if any(left[i] is not inputs[i] for i in wanted):
        raise Untraceable(_CHANGED)
    updates = {
        i: value
        for i, (placeholder, value) in enumerate(zip(inputs, left, strict=True))
        if isinstance(value, fx.Node) and value is not placeholder and isinstance(fakes[i], torch.Tensor)
    }
    graph.output_node().args = ((list(outputs), list(gradients), list(updates.values())),)
    graph.eliminate_dead_code()
    return Traced(
        module=module,
        inputs=inputs,
        tangents=dict(zip(differentiated, tangents, strict=True)),
        draws=draws,
        outputs=list(outputs),
        gradients=dict(zip(wanted, gradients, strict=True)),
        updates=updates,
        scaled=scaled,
    )


def _refuse_complex(graph: fx.Graph) -> None:
    """Refuse what torch cannot trace, or write down, of complex numbers; most graphs have none."""
    vals = [v for n in graph.nodes if (v := n.meta.get("val")) is not None]
    flat = itertools.chain.from_iterable(v if isinstance(v, (tuple, list)) else (v,) for v in vals)
    dtypes = {x.dtype for x in flat if isinstance(x, torch.Tensor) and x.dtype.is_complex}
    if torch.complex32 in dtypes:
        raise Untraceable("it has complex numbers of 16-bit parts, which torch computes otherwise when it traces them")
    constants = pytree.tree_leaves([(n.args, n.kwargs) for n in graph.nodes]) if dtypes else ()
    if any(isinstance(x, complex) and not cmath.isfinite(x) for x in constants):
        raise Untraceable("it has a complex constant that is not finite, which torch cannot write down in a graph")


_COMPUTED = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}
"""Views that only note what is to be done when a tensor is read, which no memory shows, to what does it."""


def _forget_aliases(graph: fx.Graph, native: bool) -> None:
    """Replace copies and aliases by what they copy: in a functional graph they are the same value.

    Copies that lie otherwise in memory mean something to native operators.
    """
    copies = {aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default}
    copies |= {aten.detach_.default, aten.lift_fresh.default}  # of constants that decompositions make
    copies |= {aten.resolve_conj.default, aten.resolve_neg.default}
    for node in graph.nodes:
        if node.target in _COMPUTED and isinstance(node.args[0], fx.Node):
            node.target = _COMPUTED[node.target]
        if node.op == "call_function" and node.target in copies:
            # those of inputs are the trace's own
            means = native and node.target is aten.clone.default and node.args[0].op != "placeholder"
            if means and _strides(node) != _strides(node.args[0]):
                continue
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


_OF_CHANNELS = slice(1, 5)
_NORMS = {
    aten._native_batch_norm_legit: _OF_CHANNELS, aten._native_batch_norm_legit_functional: _OF_CHANNELS,
    aten._native_batch_norm_legit_no_training: _OF_CHANNELS, aten.native_batch_norm: _OF_CHANNELS,
    aten._batch_norm_with_update_functional: _OF_CHANNELS,
    aten.native_layer_norm: slice(2, 4), aten.native_group_norm: slice(1, 3),
}  # fmt: skip
"""Normalizations, and which of their arguments are weights and statistics."""


def _keep_statistics(graph: fx.Graph) -> None:
    """Say of the means and deviations of 16-bit tensors that they are float32, as they are by torch's kernels for the
    CPU where weights are; its tracing says 16 bits, to which what gradients are computed of would be rounded."""
    for node in graph.nodes:
        packet = getattr(node.target, "overloadpacket", None)
        if packet not in _NORMS:
            continue
        x = node.args[0].meta["val"]
        others = [a.meta["val"] for a in node.args[_NORMS[packet]] if isinstance(a, fx.Node)]
        is_mixed = any(isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in others)
        if x.dtype.itemsize != 2 or x.device.type != "cpu" or not is_mixed:
            continue
        result, *statistics = node.meta["val"][:3]
        wide = [a.to(torch.float32) for a in statistics]
        node.meta["val"] = (result, *wide, *node.meta["val"][3:])
        for user in node.users:
            if user.target is operator.getitem and user.args[1] in (1, 2):
                user.meta["val"] = wide[user.args[1] - 1]


def _strides(node: fx.Node) -> tuple[str, ...]:
    # by name: a comparison of symbolic ones would be an assumption
    return tuple(map(str, node.meta["val"].stride()))


# tagged as random, but chosen only where nothing is dropped
_UNDROPPED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _draws_as_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Turn each random call into a placeholder that keeps the call in ``meta["draw"]``.

    ``meta["divisor"]`` is a number by which the drawn tensor is divided, or ``None``.
    """
    draws: list[fx.Node] = []
    last: fx.Node | None = None
    for node in graph.find_nodes(op="placeholder"):
        last = node
    calls = [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and isinstance(n.target, OpOverload)
        and torch.Tag.nondeterministic_seeded in n.target.tags
        and n.target is not _UNDROPPED
    ]
    repeated = first_draws(calls)
    for node, first in repeated.items():
        node.replace_all_uses_with(first)
        graph.erase_node(node)
    for node in calls:
        if node in repeated:
            continue
        if node.target not in DRAWS:
            raise Untraceable(f"random operator {node.target} cannot be drawn ahead of the step")
        # a region may have no inputs
        with graph.inserting_after(last) if last is not None else graph.inserting_before(next(iter(graph.nodes))):
            placeholder = graph.placeholder(f"draw_{len(draws)}")
        placeholder.meta["val"] = node.meta["val"]
        placeholder.meta["draw"] = (node.target, layout_of(node), node.args, node.kwargs)
        node.replace_all_uses_with(placeholder)
        graph.erase_node(node)
        _divide_when_drawn(placeholder)
        draws.append(placeholder)
        last = placeholder
    stranger = next((n.target for n in graph.nodes if _may_draw(n)), None) if draws else None
    if stranger is not None:
        raise Untraceable(f"it draws random numbers beside {stranger}, which may draw some too, in between")
    return draws


_SETTLED = {"aten", "prims", "lightning_ort", "c10d", "_c10d_functional", "torchvision"}
"""Namespaces whose operators have a tag if they draw random numbers."""


def _may_draw(node: fx.Node) -> bool:
    """Whether it is an operator of the user's, of which nothing is known."""
    return isinstance(node.target, OpOverload) and node.target.namespace not in _SETTLED


def _divide_when_drawn(draw: fx.Node) -> None:
    """Let torch do what dropout does first, dividing its mask: otherwise the mask would lie in memory twice."""
    draw.meta["divisor"] = None
    users = list(draw.users)
    if not users or len({(user.target, user.args) for user in users}) != 1:
        return
    user = users[0]
    division = user.target in (torch.ops.aten.div.Tensor, torch.ops.aten.div.Scalar)
    if division and user.args[0] is draw and isinstance(user.args[1], float):
        if user.meta["val"].dtype != draw.meta["val"].dtype:
            return
        draw.meta["divisor"] = user.args[1]
        for user in users:  # several where activations are computed again
            user.replace_all_uses_with(draw)
            draw.graph.erase_node(user)
