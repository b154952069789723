"""Tensors of nested inputs and outputs, and their names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

# nested containers, those that other libraries have registered among them, are known to torch under this name only
import torch.utils._pytree as pytree
from torch import Tensor, nn

__all__ = ["Call", "InferenceModule", "bind", "named_tensors"]


@dataclasses.dataclass
class Call:
    """A call of a module's method, with its tensors taken out.

    Attributes:
        method: its name.
        names: of the tensors, in order.
        tensors: of the sample.
        spec: how arguments are made of ``leaves``.
        leaves: all that the arguments consist of, with ``None`` where a tensor belongs.
        places: numbers of the leaves that are tensors.
    """

    method: str
    names: list[str]
    tensors: list[Tensor]
    spec: Any
    leaves: list[Any]
    places: list[int]

    def arguments(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with ``tensors`` in the places of the sample's."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.spec)


def bind(module: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The call ``module.method(*args, **kwargs)``.

    Raises:
        TypeError: the method does not take these arguments.
        ValueError: there is no tensor among them.
    """
    signature = inspect.signature(getattr(module, method))
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise TypeError(
            f"sample: {type(module).__name__}.{method}{signature} cannot be called with {len(args)} positional "
            f"arguments and {sorted(kwargs)} by name: {error}. Give a tuple of positional arguments, or a dict."
        ) from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and name in bound:
            bound |= bound.pop(name)
    found, names = named_tensors(bound)
    if not found:
        raise ValueError(f"sample: no tensor is among the arguments of {type(module).__name__}.{method}.")
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    # arguments in the order of the call, names in that of the signature
    order = {id(t): name for t, name in zip(found, names, strict=True)}
    if len(order) != len(names):
        raise ValueError(f"sample: {type(module).__name__}.{method} is given one tensor twice. Clone it.")
    kept = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Call(method, [order[id(t)] for t in tensors], tensors, spec, kept, places)


def named_tensors(tree: Mapping[str, Any]) -> tuple[list[Tensor], list[str]]:
    """All tensors in ``tree`` and their names: the last key where that is unique, else the whole path."""
    tensors, paths = [], []
    for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            paths.append([_key(step) for step in path])
    short = [_short(path) for path in paths]
    return tensors, [
        name if short.count(name) == 1 else "_".join(map(str, path)) for name, path in zip(short, paths, strict=True)
    ]


def _short(path: Sequence[str | int]) -> str:
    named = max(i for i, step in enumerate(path) if isinstance(step, str))
    return "_".join(map(str, path[named:]))


def _key(step: Any) -> str | int:
    if isinstance(step, pytree.SequenceKey):
        return step.idx
    return str(step.key if isinstance(step, pytree.MappingKey) else getattr(step, "name", step))


class InferenceModule(nn.Module):
    """A module as a function of the tensors of a :class:`Call`.

    Attributes:
        outputs: names of what the last call returned.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.module, self._call = module, call
        self.outputs: list[str] = []

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        args, kwargs = self._call.arguments(tensors)
        # hooks, such as those of weight normalization, belong to a call of the module
        function = self.module if self._call.method == "forward" else getattr(self.module, self._call.method)
        result = function(*args, **kwargs)
        name = f"{type(self.module).__name__}.{self._call.method}"
        others = {type(x).__name__ for x in pytree.tree_leaves(result) if x is not None and not isinstance(x, Tensor)}
        if others:
            raise TypeError(
                f"{name} returns {', '.join(sorted(others))}, which an ONNX graph cannot give. Return tensors, or "
                "tuples, lists and dicts of tensors."
            )
        found, self.outputs = named_tensors({"output": result})
        if not found:
            raise TypeError(f"{name} returns no tensor, and so there is nothing to export.")
        return found
