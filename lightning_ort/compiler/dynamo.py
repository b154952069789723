"""What TorchDynamo needs to compile whole steps."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["DYNAMO_SETTINGS", "no_fast_path", "with_own_code"]

DYNAMO_SETTINGS = {
    # a counter attribute would otherwise be compiled for each of its values
    "allow_unspec_int_on_nn_module": True,
    # by default Dynamo leaves recurrent networks to torch, because it unrolls them
    "allow_rnn": True,
}
"""Settings of ``torch._dynamo.config`` while steps run."""


@contextlib.contextmanager
def no_fast_path() -> Iterator[None]:
    """Keep ``nn.TransformerEncoder`` from its fast path, one operator that ONNX lacks."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def with_own_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a function or bound method with a code object of its own.

    Dynamo keeps what it compiled with the code object: functions that share it, of other modules or for other
    strategies, would add to one list, whose length is limited.
    """
    original = getattr(function, "__func__", function)
    if not isinstance(original, types.FunctionType):
        return function
    code = original.__code__.replace()
    copy = types.FunctionType(
        code, original.__globals__, original.__name__, original.__defaults__, original.__closure__
    )
    copy.__kwdefaults__ = original.__kwdefaults__
    copy.__dict__.update(original.__dict__)
    owner = getattr(function, "__self__", None)
    return copy if owner is None else types.MethodType(copy, owner)
