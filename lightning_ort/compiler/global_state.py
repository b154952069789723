"""The settings of torch that surround a region: autocast, the default element type, whether gradients are on.

And what an error in the middle of one leaves of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = [
    "GlobalState",
    "closing_dual_level",
    "drawing_as_traced",
    "forget_frames",
    "has_tangents",
    "leaving_grad_mode",
    "saved_tensors_have_hooks",
    "takes_gradients",
    "without_autocast",
]


def has_tangents() -> bool:
    """Whether tensors may have tangents, within ``torch.autograd.forward_ad.dual_level()``: a graph would drop them.

    Private: torch has no public way to ask, and a tensor with a tangent is like another one to Dynamo.
    """
    return forward_ad._current_level >= 0


@contextlib.contextmanager
def closing_dual_level() -> Iterator[None]:
    """Close the level of forward-mode differentiation that an error in the middle of one has left open.

    Private: there is one level at a time, and no public way to ask for it; until it is closed, no other can be opened.
    """
    try:
        yield
    except BaseException:
        if not has_tangents():  # no level is the user's
            with contextlib.suppress(RuntimeError):  # it is open
                torch._C._enter_dual_level()
            torch._C._exit_dual_level(level=0)
        raise


def saved_tensors_have_hooks() -> bool:
    """Whether this is within ``torch.autograd.graph.saved_tensors_hooks``, which has no public name to ask by."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


@dataclasses.dataclass(frozen=True)
class GlobalState:
    """Settings at one moment, to compute a region under them at another.

    A region is traced, checked and computed again when its caller's ``torch.autocast`` may long be over.

    Attributes:
        autocast: per type of device, such as ``cpu``, the type that autocast computes in, or ``None`` where it is off.
        dtype: of tensors that are made without one.
    """

    autocast: dict[str, torch.dtype | None]
    dtype: torch.dtype

    @classmethod
    def present(cls) -> GlobalState:
        """What is in force now."""
        return cls(
            {kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _kinds()},
            torch.get_default_dtype(),
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Compute under these settings."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with contextlib.ExitStack() as stack:
                for kind, dtype in self.autocast.items():
                    # kept casts would outlive the trace that made them; without, a weight used twice is cast twice
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=False)
                    )
                yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Compute gradients as torch does when ``backward`` is called after the autocast has ended."""
    with contextlib.ExitStack() as stack:
        for kind in _kinds():
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def leaving_grad_mode(region: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, which leaves gradients switched on or off as Dynamo's graph does: what follows it counts on that."""
    switches = [n for n in region.graph.nodes if n.target is torch._C._set_grad_enabled]
    if not switches or switches[-1].args[0] == torch.is_grad_enabled():
        return run
    enabled = switches[-1].args[0]

    def call(*args: Any) -> Any:
        results = run(*args)
        torch._C._set_grad_enabled(enabled)
        return results

    return call


def takes_gradients(region: fx.GraphModule) -> bool:
    """Whether transforms of ``torch.func`` compute gradients inside of Dynamo's graph."""
    return any(getattr(n.target, "__name__", "") == "_grad_increment_nesting" for n in region.graph.nodes)


_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}


@contextlib.contextmanager
def drawing_as_traced(region: fx.GraphModule, device: torch.device) -> Iterator[None]:
    """Have torch draw for ``region`` what its traced graph draws.

    On a GPU, torch has kernels for attention and for recurrent networks that draw the dropout in them in ways of their
    own, which no graph can follow; those that draw as on the CPU take their place.
    """
    if device.type != "cuda":
        yield
        return
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.enabled
    recurrent = any(getattr(n.target, "__name__", "") in _RECURRENT for n in region.graph.nodes)
    try:
        if recurrent:  # else it is left alone: torch.backends.disable_global_flags() lets nobody set it
            cudnn.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if recurrent:
            cudnn.enabled = before


def _kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def forget_frames(error: BaseException | None) -> None:
    """Let go of the variables of all functions that ``error``, which is dealt with, and its causes came through.

    Where it ended a transform of ``torch.func``, some of those set the dispatch keys of the thread when they go. That
    would be at any garbage collection, and switch autograd off.
    """
    # Private: there is no public name for the dispatch keys.
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    done: list[BaseException] = []
    with torch._C._ForceDispatchKeyGuard(*keys):
        while error is not None and error not in done:
            traceback.clear_frames(error.__traceback__)
            done.append(error)
            error = error.__cause__ or error.__context__
