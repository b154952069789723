"""The random tensors of a run, drawn by torch before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from lightning_ort.compiler.allocation import place_of
from lightning_ort.compiler.draws import DRAWS
from lightning_ort.compiler.numbers import is_number
from lightning_ort.compiler.sizes import Sizes

__all__ = ["drawer"]


def drawer(
    draws: Sequence[fx.Node], sizes: Sizes, device: torch.device
) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
    """Function from the inputs of a run to the random tensors of the placeholders ``draws``, drawn in that order."""
    steps = []
    for node in draws:
        target, layout, args, kwargs = node.meta["draw"]
        flat, spec = pytree.tree_flatten((args, kwargs))
        values = [_argument(a) for a in flat]
        numbers = [v for v in values if not isinstance(v, _Constant)]
        geometry = sizes.evaluator([*layout.shape, *layout.stride(), *numbers])
        place = place_of(layout, device)
        steps.append((DRAWS[target], node.meta["divisor"], layout.dim(), layout.dtype, place, geometry, values, spec))

    def draw(inputs: Sequence[Any]) -> list[torch.Tensor]:
        drawn = []
        for function, divisor, rank, dtype, place, geometry, values, spec in steps:
            found = geometry(inputs)
            rest = iter(found[2 * rank :])
            flat = [v.value if isinstance(v, _Constant) else next(rest) for v in values]
            args, kwargs = pytree.tree_unflatten(flat, spec)
            tensor = function(found[:rank], found[rank : 2 * rank], dtype, place, *args, **kwargs)
            drawn.append(tensor if divisor is None else tensor.div_(divisor))
        return drawn

    return draw


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An argument of a draw that is the same in every run."""

    value: Any


def _argument(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        # a tensor is there for its shape only
        return argument.meta["val"] if is_number(argument) else _Constant(None)
    return _Constant(argument)
