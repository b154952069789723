"""Conversions between floating-point types, all made to one type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["ConversionsTo"]

_BY_NAME = (torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float)
_BY_ARGUMENT = (torch.Tensor.to, torch.Tensor.type)


class ConversionsTo(TorchFunctionMode):
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
