"""How the outputs that Dynamo expects are made from the tensors of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.aliases import input_views, same_storage
from lightning_ort.compiler.executable import Executable
from lightning_ort.compiler.sizes import Sizes

__all__ = ["OutputLayout"]


class OutputLayout:
    """How the outputs that Dynamo expects are made from the tensors of a run."""

    def __init__(self, graph: fx.GraphModule) -> None:
        results = graph.graph.output_node().args[0]
        self.values = [r.meta.get("example_value") if isinstance(r, fx.Node) else r for r in results]
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        for node in placeholders:
            node.meta.setdefault("val", node.meta.get("example_value"))
        self.views = input_views(graph, Sizes(placeholders))
        self.differentiable = [
            i
            for i, v in enumerate(self.values)
            if isinstance(v, torch.Tensor) and v.requires_grad and i not in self.views
        ]

    def learn(self, executable: Executable) -> None:
        """Take over the positions of ``executable``; they are the same for every graph of a region."""
        positions = [None if i in self.views else p for i, p in enumerate(executable.outputs)]
        self.n_unique = 1 + max((p for p in executable.outputs if p is not None), default=-1)
        self.differentiable_positions = {positions[i]: i for i in self.differentiable if positions[i] is not None}
        self.not_differentiable = [p for p in range(self.n_unique) if p not in self.differentiable_positions]
        first: dict[int, int] = {}
        self._parts: list[Any] = []
        for i, position in enumerate(positions):
            if i in self.views:
                self._parts.append(self.views[i])
            elif position is None:
                self._parts.append(None)
            elif position not in first:
                first[position] = i
                as_it_is = i in self.differentiable or position in self.not_differentiable
                self._parts.append((position, None if as_it_is else torch.Tensor.detach))
            elif same_storage(self.values[i], self.values[first[position]]):
                self._parts.append((position, _alias if i in self.differentiable else torch.Tensor.detach))
            else:
                self._parts.append((position, torch.clone if i in self.differentiable else _detached_copy))
        simple = [p[0] for p in self._parts if isinstance(p, tuple) and p[1] is None]
        self._simple = simple if len(simple) == len(self._parts) else None

    def arrange(self, executable: Executable, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """Outputs in Dynamo's order."""
        if self._simple is not None:
            return [tensors[i] for i in self._simple]
        numbers = executable.numbers(args) if executable.has_numbers else ()
        outputs: list[Any] = []
        for i, part in enumerate(self._parts):
            if part is None:
                outputs.append(numbers[i] if numbers else None)
            elif isinstance(part, tuple):
                position, change = part
                outputs.append(tensors[position] if change is None else change(tensors[position]))
            else:
                outputs.append(part(args))
        return outputs


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view_as(tensor)


def _detached_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()
