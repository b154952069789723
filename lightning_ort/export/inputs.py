"""Inputs to export a module with."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_ort.lightning_packages import pl
from lightning_ort.validation import is_whole, shown

__all__ = [
    "Axes",
    "Call",
    "DynamicAxes",
    "InferenceModule",
    "arguments_of_batch",
    "arguments_of_sample",
    "bind",
    "call_with",
    "check_axes",
    "default_axes",
    "first_batch",
    "named_axes",
    "on_device",
    "other_sizes",
    "resized",
    "sizes_of",
]


def arguments_of_sample(module: nn.Module, method: str, sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and named arguments that ``sample`` stands for, as Lightning reads ``example_input_array``.

    A tuple is all positional arguments, a mapping all named ones, anything else the only argument. For
    ``predict_step`` it is the batch, whatever its kind.

    Raises:
        ValueError: there is neither a sample nor an ``example_input_array``.
    """
    if sample is None:
        sample = getattr(module, "example_input_array", None)
        if sample is None or method != "forward":
            raise ValueError(
                f"sample: export of {type(module).__name__}.{method} needs inputs to run it with. Pass sample=, or "
                "set module.example_input_array (for forward)."
            )
    if method == "predict_step":
        return (sample, 0), {}
    if isinstance(sample, Mapping):
        return (), dict(sample)
    return (tuple(sample) if isinstance(sample, tuple) else (sample,)), {}


def arguments_of_batch(module: nn.Module, method: str, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those parts of a batch of a loader that ``method`` takes: the first ones of a sequence, by name of a mapping.

    Raises:
        ValueError: it is not clear which.
    """
    if method == "predict_step":
        return (batch, 0), {}
    parameters = inspect.signature(getattr(module, method)).parameters.values()
    required = [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    if isinstance(batch, Tensor) and len(required) == 1:
        return (batch,), {}
    if isinstance(batch, Mapping):
        if set(required) <= set(batch):
            named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            return (), {name: part for name, part in batch.items() if name in named}
        if len(required) == 1:
            return (batch,), {}
    elif isinstance(batch, Sequence) and not isinstance(batch, str) and 0 < len(required) <= len(batch):
        return tuple(batch[: len(required)]), {}
    raise ValueError(
        f"sample: {type(module).__name__}.{method} takes {required or 'no argument that must be given'}, and it is not "
        f"clear what of a batch of type {type(batch).__name__} that is. Pass sample=, or set "
        "module.example_input_array."
    )


def first_batch(trainer: pl.Trainer, *, training: bool = False) -> Any:
    """The first batch of one of the Trainer's loaders, of training last; generators of the loader are put back.

    Args:
        training: take it from the loader of training only.

    Raises:
        ValueError: it has none.
    """
    others = (trainer.predict_dataloaders, trainer.val_dataloaders, trainer.test_dataloaders)
    loaders = (*(() if training else others), trainer.train_dataloader)
    for given in loaders:
        loader = given[0] if isinstance(given, (list, tuple)) and given else given
        if loader is None or isinstance(loader, (Mapping, list, tuple)):
            continue
        with _generators_stay(loader):
            for batch in loader:
                return batch
    if training:
        raise ValueError("The Trainer has no loader of training yet to take a batch from. Pass inputs=.")
    raise ValueError(
        "sample: the Trainer has no loader yet to take a batch from. Pass sample=, set module.example_input_array (for "
        "forward), or export after fit, validate, test or predict."
    )


@contextlib.contextmanager
def _generators_stay(loader: Any) -> Iterator[None]:
    """An order of training that is drawn from a generator shall not change because a batch was looked at."""
    owners = (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
    found = [g for o in owners if isinstance(g := getattr(o, "generator", None), torch.Generator)]
    states = [g.get_state() for g in found]
    try:
        yield
    finally:
        for generator, state in zip(found, states, strict=True):
            generator.set_state(state)


def on_device(module: nn.Module, tree: Any) -> Any:
    """``tree`` with tensors where the module is."""
    device = next((t.device for t in [*module.parameters(), *module.buffers()]), None)
    return tree if device is None else pytree.tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, tree)


Axes = Mapping[str, Mapping[int, str]]
"""Input name to dimension to the name of its size."""

DynamicAxes = Mapping[str, Mapping[int, str] | Sequence[int]]
"""What users may give as :data:`Axes`: dimensions without names as well."""


def named_axes(argument: str, axes: DynamicAxes) -> Axes:
    """``axes`` with the names that ``torch.onnx.export`` makes up for dimensions that are only listed.

    Args:
        argument: what users call it.
        axes: input name to dimension to the name of its size, or input name to a list of dimensions.

    Raises:
        TypeError: it is of another form.
    """
    if not isinstance(axes, Mapping):
        raise TypeError(f"{argument}={shown(axes)}: expected a mapping, such as {{'x': {{0: 'batch'}}}}.")
    found: dict[str, Mapping[int, str]] = {}
    for name, given in axes.items():
        listed = isinstance(given, (list, tuple))
        if not (listed or isinstance(given, Mapping)) or not all(map(is_whole, given)):
            raise TypeError(
                f"{argument}[{name!r}]={shown(given)}: expected dimensions with the names of their sizes, such as "
                "{0: 'batch'}, or a list of dimensions, such as [0]."
            )
        stem = re.sub(r"\W", "_", str(name))
        made_up = {axis: f"{stem}_dynamic_axes_{i}" for i, axis in enumerate(given, 1)}
        found[name] = given if isinstance(given, Mapping) else made_up
    return found


def default_axes(names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """The first dimension of the first input is the batch, and of all inputs that have the same size there."""
    batch = next((t.shape[0] for t in tensors if t.ndim), None)
    return {name: {0: "batch"} for name, t in zip(names, tensors, strict=True) if t.ndim and t.shape[0] == batch}


def check_axes(axes: DynamicAxes, names: Sequence[str], tensors: Sequence[Tensor]) -> Axes:
    """``axes`` with dimensions counted from the first, and names for all.

    Raises:
        TypeError: they are of another form.
        ValueError: they name inputs or dimensions that there are not, or one size that differs in the sample.
    """
    axes = named_axes("dynamic", axes)
    unknown = [name for name in axes if name not in names]
    if unknown:
        raise ValueError(f"dynamic names the inputs {unknown}, but the inputs are {list(names)}.")
    found: dict[str, dict[int, str]] = {}
    sizes: dict[str, int] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for axis, size in axes.get(name, {}).items():
            if not -tensor.ndim <= axis < tensor.ndim:
                raise ValueError(
                    f"dynamic[{name!r}] names dimension {axis!r} of an input of shape {tuple(tensor.shape)}."
                )
            if not isinstance(size, str) or not size.isidentifier():
                raise ValueError(f"dynamic[{name!r}][{axis}] is {size!r}: expected a name, such as 'batch'.")
            there = tensor.shape[axis]
            if sizes.setdefault(size, there) != there:
                raise ValueError(
                    f"dynamic names two dimensions {size!r}, but one is {sizes[size]} long and that of {name!r} "
                    f"{there}. Give them two names."
                )
            if there == 0:
                raise ValueError(f"dimension {axis} of input {name!r} is empty. Give a sample with something in it.")
            found.setdefault(name, {})[axis % tensor.ndim] = size
    return found


def sizes_of(axes: Axes, names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, int]:
    """Name of each open size to what it is in ``tensors``."""
    return {
        size: tensor.shape[axis]
        for name, tensor in zip(names, tensors, strict=True)
        for axis, size in axes.get(name, {}).items()
    }


def resized(axes: Axes, names: Sequence[str], tensors: Sequence[Tensor], sizes: Mapping[str, int]) -> list[Tensor]:
    """``tensors`` with other ``sizes``: cut off, or repeated from the beginning."""
    found = []
    for name, tensor in zip(names, tensors, strict=True):
        for axis, size in axes.get(name, {}).items():
            there = tensor.shape[axis]
            if sizes[size] != there:
                rows = torch.arange(sizes[size], device=tensor.device) % there
                tensor = tensor.index_select(axis, rows)
        found.append(tensor)
    return found


def other_sizes(sizes: Mapping[str, int], more: Collection[int] = ()) -> Iterator[tuple[str, dict[str, int]]]:
    """Name of an open size, and all sizes with another value of it: 1, 2, 3, one more than it is, and ``more``."""
    for name, there in sizes.items():
        for value in sorted({1, 2, 3, there + 1, *more} - {there}):
            yield name, {**sizes, name: value}


# nested containers, those that other libraries have registered among them, are known to torch under this name only


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
    found, names = _named_tensors(bound)
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


def call_with(tensors: Sequence[Tensor], names: Sequence[str]) -> Call:
    """A call of ``forward`` with ``tensors`` in order, by names of the caller's."""
    leaves, spec = pytree.tree_flatten((tuple(tensors), {}))
    return Call("forward", list(names), list(tensors), spec, [None] * len(leaves), list(range(len(leaves))))


def _named_tensors(tree: Mapping[str, Any]) -> tuple[list[Tensor], list[str]]:
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
        found, self.outputs = _named_tensors({"output": result})
        if not found:
            raise TypeError(f"{name} returns no tensor, and so there is nothing to export.")
        return found
