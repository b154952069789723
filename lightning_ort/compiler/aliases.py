"""Outputs of a region that share memory with its inputs or with each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.sizes import Sizes

__all__ = ["InputView", "input_views", "same_storage"]


@dataclasses.dataclass(frozen=True)
class InputView:
    """An output that torch would give as a view of input number ``source``."""

    source: int
    geometry: Callable[[Sequence[Any]], tuple[Any, ...]]
    rank: int

    def __call__(self, args: Sequence[Any]) -> torch.Tensor:
        numbers = self.geometry(args)
        size, stride, offset = numbers[: self.rank], numbers[self.rank : 2 * self.rank], numbers[-1]
        return args[self.source].as_strided(size, stride, offset)


def same_storage(a: Any, b: Any) -> bool:
    """Whether two tensors, fake ones too, lie in the same memory."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def input_views(graph: fx.GraphModule, sizes: Sizes) -> dict[int, InputView]:
    """Output number to the view it is, for Dynamo's ``graph``."""
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    examples = [n.meta.get("example_value") for n in placeholders]
    views = {}
    for i, result in enumerate(graph.graph.output_node().args[0]):
        val = result.meta.get("example_value") if isinstance(result, fx.Node) else None
        if not isinstance(val, torch.Tensor):
            continue
        for j, example in enumerate(examples):
            if same_storage(val, example) and val.dtype == example.dtype:
                geometry = sizes.evaluator([*val.shape, *val.stride(), val.storage_offset()])
                views[i] = InputView(j, geometry, val.dim())
                break
    return views
