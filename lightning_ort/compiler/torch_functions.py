"""Torch's own functions: names that last, and whether they are those that torch has made.

What a function of torch computes follows from its name and the version, unless somebody has put another one in its
place, or in that of one that it calls.
"""

from __future__ import annotations

import functools
import inspect
import os
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

__all__ = ["are_replaced", "lasting_name"]

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_NAMESPACES = ("aten", "prims")
_PYTHON = ("_operator", "builtins", "math")
_BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, type)
_MODULES = (
    torch, torch.nn.functional, torch.functional, torch.special, torch.linalg, torch.fft, torch._VF, torch._C._nn,
)  # fmt: skip
_KEYS = frozenset({"CPU", "AutogradCPU", "Autograd", "CompositeImplicitAutograd", "CompositeExplicitAutograd"})
"""dispatch keys of what traces and computes; for others, of vmap say, torch has kernels in Python itself"""
_PLAIN = ("torch", "builtins", "types", "typing", "typing_extensions")


def lasting_name(function: Any) -> str:
    """By which a function of torch or Python is known in another process with the same versions, or an empty text."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        name = str(function)
        return name if name.partition(".")[0] in _NAMESPACES else ""
    if isinstance(function, HigherOrderOperator):
        module = type(function).__module__
        return f"{module}.{function.name()}" if module.startswith("torch.") else ""
    if not isinstance(function, (types.FunctionType, *_BUILT_IN)) or not _is_torchs(function):
        return ""
    owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
    module = getattr(function, "__module__", None) or (owner.__module__ if isinstance(owner, type) else "")
    name = getattr(function, "__qualname__", "")
    known = module in _PYTHON or module.partition(".")[0] == "torch"
    if not known or not name:
        return ""
    return f"{module}.{name}" if "<" not in name else _functional().get(id(function), "")


@functools.cache
def _functional() -> dict[int, str]:
    """Names of torch's functions of layers, of which those with two forms, such as poolings, are made by another."""
    return {id(x): f"torch.nn.functional.{name}" for name, x in vars(torch.nn.functional).items() if callable(x)}


def _is_torchs(function: Any) -> bool:
    """Whether the lines of a function, and of the one that it wraps, are torch's; those in C have none."""
    while True:
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(_TORCH):
            return False
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None:
            return True
        function = wrapped


def are_replaced() -> bool:
    """Whether a function of torch's, or a kernel of one of its operators, is somebody else's.

    Functions of layers call others by their names when they are traced, and autograd calls kernels. None seeds: the
    training build of ONNX Runtime puts its own function in the place of ``torch.manual_seed``, which seeds both.
    """
    return any(map(_is_foreign, _callables())) or any(map(_overrides, torch.library._impls))


def _callables() -> Iterator[Any]:
    for module in _MODULES:
        yield from (value for name, value in vars(module).items() if name != "manual_seed")
    for kind in torch.Tensor.__mro__[:-1]:
        yield from vars(kind).values()


def _is_foreign(value: Any) -> bool:
    """Whether what torch offers by some name is a function, or an object that can be called, of others than torch."""
    if not callable(value) or isinstance(value, type):
        return False
    function = inspect.unwrap(value)
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        return not _is_torchs(function) and function.__module__ != "typing"
    return type(function).__module__.partition(".")[0] not in _PLAIN


def _overrides(registration: str) -> bool:
    """Of ``namespace/operator/dispatch key``, as ``torch.library`` notes what is implemented in Python, not by whom."""
    namespace, _, rest = registration.partition("/")
    return namespace == "aten" and rest.rpartition("/")[2] in _KEYS
