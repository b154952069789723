"""Calls of torch on fake tensors, taken down as a functional graph of ATen operators."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx.traceback
from torch import fx
from torch._C import DispatchKey, DispatchKeySet

# Tracers have no public form; nothing else traces regions.
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._higher_order_ops import effects
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx, maybe_enable_thunkify

from lightning_ort.compiler import decompositions
from lightning_ort.compiler.cheap_tracing import REMEMBERED
from lightning_ort.compiler.decompositions.registry import composites
from lightning_ort.compiler.exact_floats import EXACT_FLOATS, replaced
from lightning_ort.compiler.global_state import closing_dual_level

__all__ = [
    "TRACED_KEYS",
    "Untraceable",
    "bracket_bases",
    "functional_graph",
    "is_named_in_place",
    "knowing",
    "plain_kernels",
    "quietly",
    "stands_for_float",
]

aten = torch.ops.aten

TRACED_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)
"""Dispatch keys of what torch is not to do once more when it runs operators of a graph: casts and gradients are in it
already. Without the last one views are like other tensors, as results must be."""
for _key in (
    DispatchKey.AutocastCUDA,
    DispatchKey.AutogradCPU,
    DispatchKey.AutogradCUDA,
    DispatchKey.AutogradOther,
    DispatchKey.ADInplaceOrView,
):
    TRACED_KEYS = TRACED_KEYS.add(_key)


class Untraceable(Exception):
    """The region cannot be written as one functional graph; the message is the reason shown to users."""


def stands_for_float(fake: Any) -> bool:
    """Whether a fake tensor stands for a Python float of the user's, which Dynamo reads by ``item()``.

    Those of tensors without dimensions know their number as well; :func:`~.trace.fake_inputs` tells which is which.
    """
    return getattr(fake, "stands_for_float", False)


def knowing(copy: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """``copy`` of a fake tensor, knowing its number if that does: integers on the CPU tell Dynamo sizes."""
    if isinstance(fake, FakeTensor) and isinstance(copy, FakeTensor) and not fake.dim() and fake.item_memo is not None:
        copy.item_memo = fake.item_memo
    return copy


def functional_graph(
    joint: Callable[..., Any],
    region: fx.GraphModule,
    fakes: list[Any],
    tangents: list[Any],
    *,
    grad: bool,
    native: bool,
) -> fx.GraphModule:
    """The graph of ``joint(fakes, tangents)``, without a call that changes a tensor.

    Most regions change none, and tensors that keep account of it take long to trace. With open sizes they are used
    all the same: without them, some of torch's operators take an open size among their arguments for a number, which is
    an assumption that cannot be taken back.

    Args:
        joint: computes outputs and gradients by means of ``region``.
        region: Dynamo's graph.
        fakes: inputs of the region.
        tangents: incoming gradients, or the scale of a loss.
        grad: whether autograd is on.
        native: keep torch's own operators.

    Raises:
        Untraceable: there is no such graph.
    """
    inputs = [knowing(x.detach(), x) if isinstance(x, torch.Tensor) and not stands_for_float(x) else x for x in fakes]
    if not _seems_to_write(region):
        with contextlib.suppress(Untraceable), _without_assumptions():
            module = _graph(joint, inputs, tangents, grad=grad, native=native)
            if not any(map(_writes, module.graph.nodes)):
                return module
    functional = dispatch_functionalize(joint, FunctionalTensorMode())
    with _without_order(_ASSERTION):
        return _graph(functional, inputs, tangents, grad=grad, native=native)


@contextlib.contextmanager
def _without_assumptions() -> Iterator[None]:
    """Have tracing fail where something would be assumed of an open size."""
    mode = TracingContext.get().fake_mode
    sizes = None if mode is None else mode.shape_env
    if sizes is None:
        yield
        return
    with sizes.error_on_new_guards(), quietly():
        yield


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep torch from logging what sizes did not fit: something else is tried then, or the error says it."""
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


_ASSERTION = "aten::_linalg_check_errors"


@contextlib.contextmanager
def _without_order(operator: str) -> Iterator[None]:
    """Take ``operator`` down as it is; torch would want to know in which order it and others have effects.

    Private: torch has no public word for it. What it reads settles the order of an assertion.
    """
    # torch before 2.10 took none for such
    effect = getattr(effects, "_get_effect", lambda name: None)(operator)
    if effect is None:
        yield
        return
    effects._register_effectful_op(operator, None)
    try:
        yield
    finally:
        effects._register_effectful_op(operator, effect)


_OPERATORS = "add and floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_WRITING = {"setitem", *(f"i{name}" for name in _OPERATORS.split())}
"""names of Python's own operators that change their operand"""

_STATISTICS = {aten.native_batch_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
"""change their running statistics, which their schemas do not say"""


def _seems_to_write(region: fx.GraphModule) -> bool:
    """Whether calls are named as if they changed a tensor: a graph without account of that would be in vain."""
    graphs = [module.graph for module in region.modules() if isinstance(module, fx.GraphModule)]
    return any(
        is_named_in_place(node) or "batch_norm" in _name(node) or isinstance(node.target, HigherOrderOperator)
        for node in itertools.chain.from_iterable(graph.nodes for graph in graphs)
        if node.op in ("call_method", "call_function")
    )


def is_named_in_place(node: fx.Node) -> bool:
    """Whether a call of Dynamo's graph is named as one that changes its first argument, or what is given as ``out``."""
    name = _name(node)
    named = (name.endswith("_") and not name.endswith("__")) or name in _WRITING
    return named or "out" in node.kwargs or bool(node.kwargs.get("inplace"))


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _writes(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, HigherOrderOperator)
    if node.target is aten.detach_.default:  # changes no value
        return False
    return node.target._schema.is_mutable or node.target.overloadpacket in _STATISTICS


def _graph(
    joint: Callable[..., Any], inputs: list[Any], tangents: list[Any], *, grad: bool, native: bool
) -> fx.GraphModule:
    mode = TracingContext.get().fake_mode
    assert mode is not None
    # torch's own attention on a GPU draws in ways that no graph can follow
    plain_attention = not native or any(isinstance(x, torch.Tensor) and x.device.type == "cuda" for x in inputs)

    def called(inputs: list[Any], tangents: list[Any]) -> Any:
        with maybe_enable_thunkify():  # only those symbolic sizes become nodes that a call has among its arguments
            return joint(inputs, tangents)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(composites(native=native))
        stack.enter_context(replaced([*EXACT_FLOATS, *REMEMBERED]))
        if plain_attention:
            stack.enter_context(plain_kernels())
        stack.enter_context(fx.traceback.preserve_node_meta())
        # it would look for NaNs in tensors that have no values yet
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(closing_dual_level())
        try:
            module = make_fx(
                called,
                decomposition_table=decompositions.draws() if native else decompositions.table(),
                tracing_mode="real",
                _allow_non_fake_inputs=True,
            )(inputs, tangents)
        except Untraceable:
            raise
        except DataDependentOutputException as error:
            raise Untraceable(
                "a number is read from a tensor on the way, as by torch.arange(lengths.max()), and no graph holds what "
                "depends on one; with .item() there, the graph ends before it and goes on after it"
            ) from error
        except Exception as error:
            raise Untraceable(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            ) from error
    # make_fx keeps the nested signature in its code generator; the graph is used flat from here on
    module.graph.set_codegen(fx.graph.CodeGen())
    _write_out_numbers(module.graph)
    bracket_bases(module)
    return module


def _write_out_numbers(graph: fx.Graph) -> None:
    """Have ``_to_copy(3)``, which cannot be called, make its tensor: numbers meet scalars so under ``torch.vmap``."""
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default):
        if not isinstance(node.args[0], fx.Node):
            val = node.meta["val"]
            node.target, node.args = aten.full.default, ([], node.args[0])
            node.kwargs = {"dtype": val.dtype, "device": val.device}


def bracket_bases(module: fx.GraphModule) -> None:
    """Have negative bases of powers computed on a line of their own.

    torch.fx writes ``pow(-1, k)`` as ``-1 ** k``, which Python reads as ``-(1 ** k)``.
    """
    for part in [p for p in module.modules() if isinstance(p, fx.GraphModule)]:
        powers = [n for n in part.graph.find_nodes(op="call_function", target=operator.pow) if _is_negative(n.args[0])]
        for power in powers:
            value, exponent = power.args
            with part.graph.inserting_before(power):
                base = part.graph.call_function(operator.neg, (-value,))
            base.meta = {name: value for name in ("example_value", "val") if name in power.meta}
            power.args = (base, exponent)
        if powers:
            part.recompile()


def _is_negative(base: Any) -> bool:
    return isinstance(base, (int, float)) and math.copysign(1.0, base) < 0


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Keep torch from choosing fused kernels that have no decomposition (attention, oneDNN, transformer fast path)."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            warnings.simplefilter("ignore")  # setting the oneDNN flags warns of Intel GPUs
            # NNPACK, without oneDNN, is chosen from 16 images on, which would be assumed of an open number
            with torch.backends.mkldnn.flags(enabled=False), torch.backends.nnpack.flags(enabled=False):
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
