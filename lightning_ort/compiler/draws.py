"""Random operators: torch draws their values before each run, in the order and memory layout of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["DRAWS", "layout_of"]

aten = torch.ops.aten

_IN_PLACE = {
    aten.bernoulli.p: "bernoulli_",
    aten.uniform.default: "uniform_",
    aten.normal_functional.default: "normal_",
    aten.exponential.default: "exponential_",
    aten.cauchy.default: "cauchy_",
    aten.geometric.default: "geometric_",
    aten.log_normal.default: "log_normal_",
    aten.random.default: "random_",
    aten.random.to: "random_",
    getattr(aten.random, "from"): "random_",
}
"""Overloads that are the functional form of an in-place draw into their first argument."""


def layout_of(node: fx.Node) -> torch.Tensor:
    """Fake tensor whose shape, strides and dtype the buffer of the draw ``node`` must have to equal eager's draw.

    An in-place draw fills its argument along its strides, but the functional ``bernoulli.p`` declares a contiguous
    result, so the argument tells the layout.
    """
    source = node.args[0] if node.target in _IN_PLACE else node
    assert isinstance(source, fx.Node)
    return source.meta["val"]


def _in_place(name: str) -> Callable[..., torch.Tensor]:
    method = getattr(torch.Tensor, name)

    def fill(out: torch.Tensor, like: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return method(out, *args, **kwargs)

    return fill


def _uniform(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return out.uniform_()


def _standard_normal(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return out.normal_()


def _normal(out: torch.Tensor, mean: float, std: float, *args: Any, **kwargs: Any) -> torch.Tensor:
    return out.normal_(mean, std)


def _integers_below(out: torch.Tensor, high: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    return out.random_(0, high)


def _integers_between(out: torch.Tensor, low: int, high: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    return out.random_(low, high)


def _integers_below_like(out: torch.Tensor, like: Any, high: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    return out.random_(0, high)


def _integers_between_like(
    out: torch.Tensor, like: Any, low: int, high: int, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return out.random_(low, high)


def _permutation(out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.randperm(out.shape[0], out=out)


DRAWS: dict[Any, Callable[..., torch.Tensor]] = {
    **{overload: _in_place(name) for overload, name in _IN_PLACE.items()},
    aten.rand.default: _uniform,
    aten.rand_like.default: _uniform,
    aten.randn.default: _standard_normal,
    aten.randn_like.default: _standard_normal,
    aten.normal.float_float: _normal,
    aten.randint.default: _integers_below,
    aten.randint.low: _integers_between,
    aten.randint_like.default: _integers_below_like,
    aten.randint_like.low_dtype: _integers_between_like,
    aten.randperm.default: _permutation,
}
"""Overload to ``draw(out, *args, **kwargs)``, which fills ``out`` from torch's generator exactly as eager does.

``out`` has the layout of :func:`layout_of`; ``args`` and ``kwargs`` are the node's own with symbolic numbers resolved;
tensors among them are ignored and may be ``None``.
"""
