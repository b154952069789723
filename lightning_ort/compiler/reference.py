"""torch's own execution of a region, as the reference of its compiled graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from lightning_ort.compiler.global_state import GlobalState, takes_gradients, without_autocast
from lightning_ort.verification import Results

__all__ = ["Buffers", "ForkedRNG", "evaluate", "rehearsal"]


class ForkedRNG:
    """Start from the random state ``start`` (default: the present one) and restore the present state at the end."""

    def __init__(self, device: torch.device, start: Sequence[torch.Tensor] | None = None) -> None:
        self._device, self._start = device, start

    @staticmethod
    def state(device: torch.device) -> list[torch.Tensor]:
        """The random state that torch's draws on ``device`` (and the CPU) go on from."""
        states = [torch.get_rng_state()]
        if device.type == "cuda":
            states.append(torch.cuda.get_rng_state(device))
        return states

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Make ``states`` the present ones."""
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)

    def __enter__(self) -> None:
        self._present = self.state(self._device)
        if self._start is not None:
            self.restore(self._start)

    def __exit__(self, *exc: object) -> None:
        self.restore(self._present)


class Buffers:
    """The buffers of ``module`` and of all in it, those that are ``None`` too, which a forward may make."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._places = [(m, name) for m in module.modules() for name in m._buffers]

    def note(self) -> Callable[[], None]:
        """Return what puts them back as they are now, whether a forward writes to them or replaces them."""
        noted = [(m, name, m._buffers[name]) for m, name in self._places]
        values = [None if b is None else b.detach().clone() for *_, b in noted]

        def put_back() -> None:
            with torch.no_grad():
                for (module, name, buffer), before in zip(noted, values, strict=True):
                    if module._buffers.get(name) is not buffer:
                        setattr(module, name, buffer)
                    if buffer is not None and before is not None and not torch.equal(buffer, before):
                        buffer.copy_(before)

        return put_back


def evaluate(
    region: fx.GraphModule,
    args: Sequence[Any],
    incoming: Mapping[int, torch.Tensor | None],
    wanted: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    changed: Collection[int] = (),
    global_state: GlobalState | None = None,
    noise: contextlib.AbstractContextManager[Any] | None = None,
) -> Results:
    """Execute ``region`` in torch, without any effect on ``args``.

    Args:
        region: Dynamo's graph.
        args: its inputs.
        incoming: output number to incoming gradient; ``None`` stands for 1 (the loss).
        wanted: input numbers whose gradients are taken.
        dtype: compute in this type instead of the inputs' own floating-point types, and instead of those that the
            region converts to.
        changed: those among ``wanted`` that ``region`` changes, without autograd.
        global_state: what ``region`` is computed under, by default the present ones. (Autocast leaves float64 alone.)
        noise: a :class:`~lightning_ort.compiler.rounding.RoundingNoise` to compute under.
    """
    # within autograd's own forward they are off; Dynamo's graph of torch.func.grad counts on what was in force
    grad = bool(incoming) or torch.is_grad_enabled() or takes_gradients(region)
    # tensors made in inference mode have no version, by which changes in place are found
    with torch.inference_mode(False), torch.set_grad_enabled(grad), noise or contextlib.nullcontext():
        return _evaluate(region, args, incoming, wanted, dtype, changed, global_state or GlobalState.present())


def _evaluate(
    region: fx.GraphModule,
    args: Sequence[Any],
    incoming: Mapping[int, torch.Tensor | None],
    wanted: Sequence[int],
    dtype: torch.dtype | None,
    changed: Collection[int],
    global_state: GlobalState,
) -> Results:
    local: list[Any] = []
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            x = x.detach()
            if dtype and x.is_floating_point():
                x = x.to(dtype)
            # one that was made in inference mode, such as a copied weight, can require no gradient
            x = x.clone() if i not in wanted or i in changed or x.is_inference() else x
            x.requires_grad_(i in wanted)
        local.append(x)
    converted = contextlib.nullcontext() if dtype is None else _ConversionsTo(dtype)
    with global_state.applied(), converted:
        outputs = region.forward(*local)  # a call of the module would print its code on errors
    gradients: dict[int, torch.Tensor] = {}
    if incoming:
        roots = [outputs[i] for i in incoming]
        seeds = [None if g is None else g.to(r.dtype) for g, r in zip(incoming.values(), roots, strict=True)]
        leaves = [local[i] for i in wanted]
        with without_autocast():
            found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
        gradients = {i: g.detach() for i, g in zip(wanted, found, strict=True) if g is not None}
    return Results(
        {i: o.detach() for i, o in enumerate(outputs) if isinstance(o, torch.Tensor)},
        gradients,
        {
            i: x.detach()
            for i, x in enumerate(local)
            if isinstance(x, torch.Tensor) and (i not in wanted or i in changed) and not _is_same(x, args[i])
        },
    )


def rehearsal(
    region: fx.GraphModule,
    args: Sequence[Any],
    incoming: Mapping[int, torch.Tensor | None],
    wanted: Sequence[int],
    *,
    changed: Collection[int],
) -> Callable[[], None]:
    """Execute ``region`` and its gradients in torch for the time it takes: nothing is compared or copied at each run.

    Arguments are those of :func:`evaluate`; ``changed`` are all inputs that ``region`` changes. It changes copies,
    the same ones at each run.
    """
    local = list(args)
    for i, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            local[i] = x.detach().clone() if i in changed else x.detach()
            if incoming and i in wanted:
                local[i].requires_grad_()
    leaves = [local[i] for i in wanted]

    def run() -> None:
        outputs = region.forward(*local)
        if incoming:
            roots = [outputs[i] for i in incoming]
            with without_autocast():
                torch.autograd.grad(roots, leaves, list(incoming.values()), allow_unused=True)

    return run


def _is_same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether a tensor has kept its values; some operators (``native_batch_norm``) change one without a new version."""
    before = before.detach().to(now.dtype)
    return torch.equal(now, before) or bool(((now == before) | (now.isnan() & before.isnan())).all())


_BY_NAME = (torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float)
_BY_ARGUMENT = (torch.Tensor.to, torch.Tensor.type)


class _ConversionsTo(TorchFunctionMode):
    """While entered, ``x.half()``, ``x.to(torch.float16)``, ``softmax(x, dtype=torch.float32)`` ... give ``dtype``.

    A region that converts by itself would otherwise round to 16 bits also where it is to be computed exactly, or
    multiply matrices of two types. Tensors that are made anew keep their type: random ones hold other numbers in
    another.

    Args:
        dtype: the type to convert to.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        if func in _BY_NAME:
            return args[0].to(self._dtype)
        if args and isinstance(args[0], torch.Tensor):
            if func in _BY_ARGUMENT:
                args = tuple(self._replaced(a) for a in args)
            keywords = {k: self._replaced(v) for k, v in keywords.items()}
        return func(*args, **keywords)

    def _replaced(self, argument: Any) -> Any:
        if isinstance(argument, torch.dtype) and argument.is_floating_point:
            return self._dtype
        return argument
