"""A traced graph compiled, with the layout of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.allocation import allocator, kept_buffers, pooled_allocator
from lightning_ort.compiler.drawing import drawer
from lightning_ort.compiler.numbers import is_number
from lightning_ort.compiler.plan import Fallback, Plan
from lightning_ort.compiler.sizes import Sizes, UnknownSize
from lightning_ort.compiler.trace import Traced, Untraceable
from lightning_ort.compiler.widen import CONVOLUTIONS, PRODUCTS, Widening, half_types
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["Executable"]


class Executable:
    """Runs a :class:`Traced` graph: draws its random numbers, allocates its results, executes its plan.

    Args:
        traced: the graph; its 16-bit operators are rewritten.
        config: how sessions are made.
        device: what computes; tensors live there or on the CPU.
        extra: further nodes to give out (values that a backward graph needs).

    Raises:
        Untraceable: a result's size depends on data.

    Attributes:
        has_draws: whether a run advances torch's random state.
        outputs: per output of the region, its position among the results of :meth:`run`; ``None`` for a number.
        extra: positions of the extra nodes.
        updates: (input number, position) of the new values of changed inputs.
        gradients: (input number, position) of the gradients that exist; a position that occurs again, or that is an
            output as well, is marked by ``shared``.
        shared: input numbers whose gradient must be copied before it is handed out.
        widened: how many 16-bit operators compute in float32, because no execution provider has 16-bit kernels.
        finite: position of the bool scalar that says whether all gradients are finite, where the loss is scaled.
        half: the 16-bit types that the graph rounds to.
    """

    def __init__(
        self, traced: Traced, config: RuntimeConfig, device: torch.device, extra: Sequence[fx.Node] = ()
    ) -> None:
        self.half = half_types(traced.graph)
        native = config.in_bfloat16() if self.half == {torch.bfloat16} else None
        on_gpu = device.type == "cuda"
        kept = _in_16_bits(config) if on_gpu else frozenset()
        widening = Widening(traced, rounded=native is None, kept=kept)
        # what a GPU computes in float32 besides products costs it the memory it reads, and no more
        self.widened, config = (0 if on_gpu else widening.count, config) if native is None else (0, native)
        extra = [widening.result(n) for n in extra]
        inputs = [*traced.inputs, *traced.tangents.values(), *traced.draws]
        tensors = [o for o in traced.outputs if isinstance(o, fx.Node) and not is_number(o)]
        gradients = {i: g for i, g in traced.gradients.items() if isinstance(g, fx.Node)}
        flags = [traced.finite] if traced.finite is not None else []
        others = list(dict.fromkeys([*tensors, *extra, *traced.updates.values(), *flags]))
        own = [g for g in dict.fromkeys(gradients.values()) if g not in others]
        results = [*others, *own]
        position = {n: i for i, n in enumerate(results)}
        try:
            sizes = Sizes(inputs)
            # who watches the sessions tells results by their addresses
            self._kept = {} if config.on_session is not None else kept_buffers(others, device)
            self._allocate = allocator([n for i, n in enumerate(others) if i not in self._kept], sizes, device)
            self._allocate_gradients = pooled_allocator(own, device) or allocator(own, sizes, device)
            numbers = [o.meta["val"] if isinstance(o, fx.Node) and is_number(o) else o for o in traced.outputs]
            self._numbers = sizes.evaluator([0 if isinstance(n, fx.Node) or n is None else n for n in numbers])
            self.plan = Plan(traced.module, inputs, results, config, device)
            self._draw = drawer(traced.draws, sizes, device)
        except UnknownSize as error:
            raise Untraceable(str(error)) from error
        self.has_draws = bool(traced.draws)
        self.has_numbers = any(is_number(o) if isinstance(o, fx.Node) else o is not None for o in traced.outputs)
        self.outputs = [position[o] if isinstance(o, fx.Node) and not is_number(o) else None for o in traced.outputs]
        self.extra = [position[n] for n in extra]
        self.finite = position[traced.finite] if traced.finite is not None else None
        self.updates = [(i, position[n]) for i, n in traced.updates.items()]
        self.gradients = [(i, position[g]) for i, g in gradients.items()]
        seen: set[int] = set(range(len(others)))
        self.shared: set[int] = set()
        for i, p in self.gradients:
            if p in seen:
                self.shared.add(i)
            seen.add(p)

    @property
    def fallbacks(self) -> list[Fallback]:
        """Operators that run in torch, and why."""
        return self.plan.fallbacks

    @property
    def preferred(self) -> list[str]:
        """Operators that run in torch for speed, one entry per call."""
        return self.plan.preferred

    @property
    def on_cpu(self) -> list[str]:
        """Types of the ONNX operators that the CPU executes in a graph for a GPU, one entry per node."""
        return self.plan.on_cpu

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """All results for the inputs (and tangents) of one run."""
        draws = self._draw(inputs) if self.has_draws else ()
        results = self._allocate(inputs)
        for i, buffer in self._kept.items():
            results.insert(i, buffer)
        results += self._allocate_gradients(inputs)
        self.plan.run([*inputs, *draws], results)
        for i, buffer in self._kept.items():
            results[i] = buffer.clone()
        return results

    def numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Outputs that are Python numbers; 0 in the place of tensors."""
        return self._numbers(inputs)


def _in_16_bits(config: RuntimeConfig) -> frozenset[Any]:
    """What is computed in 16 bits on a GPU, by ONNX Runtime or (convolutions that it has no kernels for) by torch."""
    return PRODUCTS | CONVOLUTIONS if config.placement == "fastest" else PRODUCTS
