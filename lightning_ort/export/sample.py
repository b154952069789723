"""Inputs to export a module with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

__all__ = ["arguments_of_batch", "arguments_of_sample", "first_batch", "on_device"]


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
