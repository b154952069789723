"""Decompositions of this package, collected from the modules beside this one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from packaging.version import Version
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

# A fake of an image says how it lies as the image would, and what is computed of fakes lies as it would of tensors;
# there are no public names for these.
from torch._prims_common import compute_elementwise_output_logical_to_physical_perm, suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor

# Nodes tell what call they are written for, as those of torch's own rewritings do; there is no public name for it.
from torch.fx.experimental.proxy_tensor import get_proxy_mode, set_original_aten_op

__all__ = [
    "DECOMPOSITIONS",
    "IS_TORCH_2_14",
    "KEPT",
    "composes",
    "composites",
    "decomposes",
    "keeps",
    "keeps_if_native",
    "lies_as_computed",
    "lies_as_read",
    "lies_in_rows",
    "refuse_unless",
    "results_told",
    "tells",
]

aten = torch.ops.aten

_AUTOCAST = DispatchKeySet(DispatchKey.AutocastCPU).add(DispatchKey.AutocastCUDA)

IS_TORCH_2_14 = Version(torch.__version__).release >= (2, 14)
"""Some kernels of torch compute otherwise since then."""

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}
KEPT: set[Any] = set()


def decomposes(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the signature of the ATen overloads, written in simpler torch calls.

    It may return ``NotImplemented`` to leave a call as it is. Calls with complex numbers are left so anyway.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def of_real_numbers(*args: Any, **kwargs: Any) -> Any:
            return NotImplemented if _has_complex(args) else function(*args, **kwargs)

        for overload in overloads:
            if overload in DECOMPOSITIONS:
                raise ValueError(f"{overload} is already decomposed by {DECOMPOSITIONS[overload].__qualname__}")
            DECOMPOSITIONS[overload] = of_real_numbers
        return function

    return register


def keeps(*overloads: Any) -> None:
    """Leave these overloads whole although torch would decompose them: ONNX has an operator for them."""
    KEPT.update(overloads)


_COMPOSITES: dict[Any, Callable[..., Any]] = {}
_NATIVE: set[Any] = set()
_CASTING: set[Any] = set()


def composes(
    *overloads: Any, native: bool = False, casting: bool = False, as_read: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the signature of the ATen overloads, written in differentiable torch calls.

    It may return ``NotImplemented`` to leave a call to torch. Calls with complex numbers are left so anyway: torch runs
    them, and their gradients have conjugates.

    Args:
        overloads: what is rewritten.
        native: also in graphs that keep torch's own operators, because torch's way of tracing this one is not eager's.
        casting: autocast casts what the function calls, as it does with what torch writes out by itself. Else it casts
            none of it: torch has one kernel there.
        as_read: results lie in memory as the image does that is the first argument, whatever the function calls.
            Random numbers are drawn into memory in its order.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            if overload in _COMPOSITES:
                raise ValueError(f"{overload} is already rewritten by {_COMPOSITES[overload].__qualname__}")
            _COMPOSITES[overload] = _laid_out(function) if as_read else function
            if native:
                _NATIVE.add(overload)
            if casting:
                _CASTING.add(overload)
        return function

    return register


def _laid_out(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def laid_out(image: Tensor, *args: Any, **kwargs: Any) -> Any:
        results = function(image, *args, **kwargs)
        if results is NotImplemented:
            return results
        return _in_order(results, image, _order_of(image))

    return laid_out


_NATIVE_ONLY: dict[Any, Callable[..., Any] | None] = {}


def keeps_if_native(packet: Any, sizes: Callable[..., tuple[Any, Any]]) -> None:
    """Call the kernel of an interpolation in graphs that keep torch's own operators.

    It has a gradient, and takes a fraction of the time of what torch's way of tracing it writes out.

    Args:
        packet: its overloads.
        sizes: output sizes and scale factors, from an image and those of the ``vec`` overload.
    """

    def vec(x: Tensor, output_size: Any, *rest: Any) -> Any:
        *align, factors = rest
        out, scales = sizes(x, output_size, factors)
        return packet.default(x, out, *align, *scales)

    _NATIVE_ONLY[packet.vec], _NATIVE_ONLY[packet.default] = vec, None
    _FAKES[packet.default] = lambda x, output_size, *rest: _like([*x.shape[:2], *output_size], x)
    backward = getattr(aten, f"{packet.__name__}_backward").default
    _FAKES[backward] = lambda incoming, output_size, input_size, *rest: _like(input_size, incoming)


_FAKES: dict[Any, Callable[..., Tensor]] = {}
"""What tells the sizes of results where sizes may be open, which torch's own of some interpolations does not take."""


_Order: TypeAlias = torch.memory_format | tuple[int, ...]
"""A layout of images, or dimensions from the outermost in memory to the innermost."""

_LAYOUTS: dict[Any, Callable[..., _Order | None]] = {}
"""How results lie where torch's tracing says otherwise, by what is read; ``None``: as it says."""


def lies_in_rows(*overloads: Any) -> None:
    """On the CPU, results lie row by row, however what is read does, and torch's tracing says otherwise."""
    _LAYOUTS.update(dict.fromkeys(overloads, lambda *args, **kwargs: torch.contiguous_format))


def lies_as_read(overload: Any, when: Callable[..., bool] = lambda *args, **kwargs: True) -> None:
    """On the CPU, the result of ``overload`` lies as the image that it reads, and torch's tracing says otherwise.

    Random numbers are drawn into memory in its order.

    Args:
        overload: the operator.
        when: whether it does with these arguments.
    """
    _LAYOUTS[overload] = lambda image, *args, **kwargs: _order_of(image) if when(image, *args, **kwargs) else None


def lies_as_computed(*overloads: Any) -> None:
    """On the CPU, results lie as of any other operator that computes element by element from what is read."""

    def order(*args: Any, **kwargs: Any) -> _Order | None:
        read = torch.broadcast_tensors(*[x for x in args if isinstance(x, Tensor)])
        if not read:  # of two numbers
            return None
        return tuple(compute_elementwise_output_logical_to_physical_perm(*read)[0])

    _LAYOUTS.update(dict.fromkeys(overloads, order))


def _like(sizes: Sequence[Any], image: Tensor) -> Tensor:
    return torch.empty(sizes, dtype=image.dtype, device=image.device, memory_format=suggest_memory_format(image))


def _has_complex(args: Sequence[Any]) -> bool:
    flat = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else [a] for a in args)
    return any(isinstance(a, Tensor) and a.dtype.is_complex for a in flat)


@contextlib.contextmanager
def composites(*, native: bool = False) -> Iterator[None]:
    """Have the Python dispatcher call the registered functions; ``native``: those registered as such."""
    chosen: dict[Any, Callable[..., Any] | None] = {**_COMPOSITES}
    if native:
        chosen = {**{o: f for o, f in _COMPOSITES.items() if o in _NATIVE}, **_NATIVE_ONLY}
    chosen |= {overload: functools.partial(_as_it_lies, overload, order) for overload, order in _LAYOUTS.items()}
    replaced = [*chosen, *(_FAKES if native else ())]
    with _kernels_put_back(replaced) as before, _convolutions_of_any_batch():
        for overload, function in chosen.items():
            for key in _keys(overload):
                if function is None:
                    overload.py_kernels.pop(key, None)
                else:
                    overload.py_kernels[key] = _or_torch(overload, function, before[overload].get(key))
        if native:
            for overload, fake in _FAKES.items():
                overload.py_kernels[DispatchKey.Meta] = fake
        for overload in replaced:
            overload._dispatch_cache.clear()
        yield


@contextlib.contextmanager
def _kernels_put_back(overloads: Iterable[Any]) -> Iterator[dict[Any, dict[DispatchKey, Any]]]:
    """A block that may give ``overloads`` other kernels for the Python dispatcher; gives those they have, per key."""
    before = {overload: dict(overload.py_kernels) for overload in overloads}
    try:
        yield before
    finally:
        for overload, kernels in before.items():
            overload.py_kernels.clear()
            overload.py_kernels.update(kernels)
            overload._dispatch_cache.clear()


_TOLD: dict[Any, Callable[..., Any]] = {}


def tells(*overloads: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what tells Dynamo what the results of the overloads are like, where torch's way settles an open size.

    It is called with torch's way, and then as they are. What autograd notes, and in which order, should be as in eager:
    that is what is read of it.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _TOLD.update(dict.fromkeys(overloads, function))
        return function

    return register


@contextlib.contextmanager
def results_told() -> Iterator[None]:
    """Have Dynamo ask the functions that are registered; traces, and calls with values, are left to torch."""
    with _kernels_put_back(_TOLD) as before, _convolutions_of_any_batch():
        for overload, kernels in before.items():
            for key in _keys(overload):
                torch_kernel = kernels.get(key) or functools.partial(_as_torch_has_it, overload)
                overload.py_kernels[key] = functools.partial(_told, _TOLD[overload], torch_kernel)
            overload._dispatch_cache.clear()
        yield


@contextlib.contextmanager
def _convolutions_of_any_batch() -> Iterator[None]:
    """Have torch choose the kernel of a convolution, by which it tells how the result lies, for any number of images.

    Its choice is another below 16 images, in float32 on the CPU, and that would be assumed of an open number: the last
    batch of an epoch is often smaller. There is no public way to make it.
    """
    choose = torch._C._select_conv_backend

    def for_any(image: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes = image.fake_mode.shape_env if isinstance(image, FakeTensor) else None
        if sizes is None or not _lies_the_same_in_any_batch(image, weight):
            return choose(image, weight, *args, **kwargs)
        with sizes.suppress_guards():
            return choose(image, weight, *args, **kwargs)

    torch._C._select_conv_backend = for_any
    try:
        yield
    finally:
        torch._C._select_conv_backend = choose


def _lies_the_same_in_any_batch(image: Tensor, weight: Tensor) -> bool:
    if image.device.type != "cpu":
        return False
    if all(suggest_memory_format(x) is torch.contiguous_format for x in (image, weight)):
        return True
    return bool(torch.backends.mkldnn.enabled) and torch.get_num_threads() > 1  # all batches are oneDNN's


def _told(function: Callable[..., Any], torch_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if isinstance(args[0], FakeTensor) and get_proxy_mode() is None:
        return function(torch_kernel, *args, **kwargs)
    return torch_kernel(*args, **kwargs)


def _as_torch_has_it(overload: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._DisablePythonDispatcher():
        return overload(*args, **kwargs)


def _as_it_lies(overload: Any, order_of: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    on_cpu = all(x.device.type == "cpu" for x in args if isinstance(x, Tensor))
    order = order_of(*args, **kwargs) if on_cpu else None
    if order is None:
        return NotImplemented
    return _in_order(_as_torch_has_it(overload, *args, **kwargs), args[0], order)


def _order_of(image: Tensor) -> torch.memory_format:
    """The order that torch's kernels take for that of ``image``; they do not look at strides of sizes of 1."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(image.dim())
    if last is not None and not image.is_contiguous() and image.is_contiguous(memory_format=last):
        return last
    return suggest_memory_format(image)


def _in_order(results: Any, image: Tensor, order: _Order) -> Any:
    """``results`` with those that are images laid out in ``order``."""
    if isinstance(order, tuple):
        return results.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
    if isinstance(results, Tensor):
        return results.contiguous(memory_format=order) if results.dim() == image.dim() else results
    return tuple(_in_order(result, image, order) for result in results)


def _keys(overload: Any) -> list[DispatchKey]:
    """Where calls of ``overload`` are caught: above autograd, which operators that torch itself composes never meet."""
    implicit = DispatchKey.CompositeImplicitAutograd
    composed = implicit in overload.py_kernels or overload.has_kernel_for_dispatch_key(implicit)
    if overload in _LAYOUTS and implicit in overload.py_kernels:  # torch's own, which what is called here ends in
        return [DispatchKey.Autograd]
    return [DispatchKey.Autograd, implicit] if composed else [DispatchKey.Autograd]


def _or_torch(overload: Any, function: Callable[..., Any], torch_kernel: Callable[..., Any] | None) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not _has_complex(args):
            as_one = contextlib.nullcontext() if overload in _CASTING else torch._C._ExcludeDispatchKeyGuard(_AUTOCAST)
            with set_original_aten_op(overload), as_one:
                result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if torch_kernel is not None:
            return torch_kernel(*args, **kwargs)
        return _as_torch_has_it(overload, *args, **kwargs)

    return kernel


def refuse_unless(condition: Tensor, message: str) -> None:
    """Make a run fail with ``message`` where an element of the bool tensor ``condition`` is false."""
    torch._assert_async(condition.all(), message)


@composes(aten._assert_async.default, native=True)
def assert_async(condition: Tensor) -> Any:
    """Without a message it would be taken for dead code."""
    torch._assert_async(condition, "Expected Tensor with single nonzero value, but got zero")
