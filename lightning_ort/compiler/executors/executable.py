"""What a region needs of a compiled graph, whoever runs it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.functional_graph import Untraceable
from lightning_ort.compiler.plan import Fallback
from lightning_ort.compiler.symbolic_shapes import Sizes, UnknownSize, is_number
from lightning_ort.compiler.trace import Traced
from lightning_ort.report import GraphReport, timeline

__all__ = ["Account", "Eager", "Executable", "Results", "timed_in_torch"]


@dataclasses.dataclass(frozen=True)
class Results:
    """The nodes of a graph that a run has to compute, without repetition.

    Attributes:
        inputs: placeholders, in the order in which a run gets their values; the last ones are random draws.
        sizes: evaluates symbolic sizes from those values.
        others: outputs, extra nodes, new values of changed inputs and the flag of a scaled loss.
        own: gradients that are none of these.
    """

    inputs: list[fx.Node]
    sizes: Sizes
    others: list[fx.Node]
    own: list[fx.Node]

    @property
    def all(self) -> list[fx.Node]:
        """In the order of what :meth:`Executable.run` gives."""
        return [*self.others, *self.own]

    def replaced(self, nodes: Mapping[fx.Node, fx.Node]) -> Results:
        """The same with others in the place of those ``nodes``."""
        others, own = ([nodes.get(n, n) for n in part] for part in (self.others, self.own))
        return dataclasses.replace(self, others=others, own=own)


class Account:
    """What is told of a graph, whoever runs it.

    Attributes:
        executor: who runs it, by the name that users know it by.
        half: the 16-bit types that the graph rounds to.
        widened: how many 16-bit operators compute in float32, because no execution provider has 16-bit kernels.
        fallbacks: operators that run in torch because they have to, and why.
        preferred: operators that run in torch for speed, one entry per call.
        milliseconds: if it was chosen by measuring, what a run took by candidate.
        choosing_seconds: how long that choice has taken.
        on_cpu: types of the ONNX operators that the CPU executes in a graph for a GPU, one entry per node.
        report: the same for users, once it is taken into use.
    """

    executor: str
    half: Collection[torch.dtype] = ()
    widened: int = 0
    fallbacks: Sequence[Fallback] = ()
    preferred: Sequence[str] = ()
    on_cpu: Sequence[str] = ()
    milliseconds: Mapping[str, float] = MappingProxyType({})
    choosing_seconds: float = 0.0
    report: GraphReport | None = None

    @property
    def in_onnxruntime(self) -> bool:
        """Whether ONNX Runtime runs it, on however many threads."""
        return self.executor.startswith("onnxruntime")


class Eager(Account):
    """A graph that stays Dynamo's, run by torch with its own autograd: nothing is compiled."""

    executor = "eager"


class Executable(Account, ABC):
    """A compiled :class:`Traced` graph, with the layout of its results.

    Each result of a run lies in memory of its own, which no later run writes; only what is nothing but the new value of
    a changed input, to be copied there, may lie where the next run's does.

    Args:
        traced: the graph.
        extra: further nodes to give out (values that a backward graph needs).

    Raises:
        Untraceable: a result's size depends on data.

    Attributes:
        has_draws: whether a run advances torch's random state.
        has_numbers: whether an output of the region is a Python number.
        outputs: per output of the region, its position among the results of :meth:`run`; ``None`` for a number.
        extra: positions of the extra nodes.
        updates: (input number, position) of the new values of changed inputs.
        gradients: (input number, position) of the gradients that exist; a position that occurs again, or that is an
            output as well, is marked by ``shared``.
        shared: input numbers whose gradient must be copied before it is handed out.
        scaled: the loss is scaled, and so are gradients of 16-bit inputs.
    """

    def __init__(self, traced: Traced, extra: Sequence[fx.Node] = ()) -> None:
        inputs = [*traced.inputs, *traced.tangents.values(), *traced.draws]
        tensors = [o for o in traced.outputs if isinstance(o, fx.Node) and not is_number(o)]
        gradients = {i: g for i, g in traced.gradients.items() if isinstance(g, fx.Node)}
        others = list(dict.fromkeys([*tensors, *extra, *traced.updates.values()]))
        own = [g for g in dict.fromkeys(gradients.values()) if g not in others]
        position = {n: i for i, n in enumerate([*others, *own])}
        self.has_draws = bool(traced.draws)
        self.has_numbers = any(is_number(o) if isinstance(o, fx.Node) else o is not None for o in traced.outputs)
        self.outputs = [position[o] if isinstance(o, fx.Node) and not is_number(o) else None for o in traced.outputs]
        self.extra = [position[n] for n in extra]
        self.scaled = traced.scaled
        self.updates = [(i, position[n]) for i, n in traced.updates.items()]
        self.gradients = [(i, position[g]) for i, g in gradients.items()]
        seen: set[int] = set(range(len(others)))
        self.shared: set[int] = set()
        for i, p in self.gradients:
            if p in seen:
                self.shared.add(i)
            seen.add(p)
        sizes = Sizes(inputs)
        numbers = [o.meta["val"] if isinstance(o, fx.Node) and is_number(o) else o for o in traced.outputs]
        try:
            self._numbers = sizes.evaluator([0 if isinstance(n, fx.Node) or n is None else n for n in numbers])
            self._compile(traced, Results(inputs, sizes, others, own))
        except UnknownSize as error:
            raise Untraceable(str(error)) from error

    @abstractmethod
    def _compile(self, traced: Traced, results: Results) -> None:
        """Prepare :meth:`run` to compute ``results``; called once, by the constructor.

        Raises:
            Untraceable: this executor cannot run the graph.
            UnknownSize: a size that is needed ahead depends on data.
        """

    @abstractmethod
    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """All results for the inputs (and tangents) of one run."""

    @property
    def is_threaded(self) -> bool:
        """Whether ONNX Runtime runs a part of it on several threads."""
        return False

    def numbers(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Outputs that are Python numbers; 0 in the place of tensors."""
        return self._numbers(inputs)

    def gradients_of(self, results: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor | None]:
        """Gradients among the ``results`` of a run by the inputs ``wanted``, each in memory of its own."""
        if len(self.gradients) == len(wanted) and not self.shared:
            return [results[p] for _, p in self.gradients]
        found = {i: results[p].clone() if i in self.shared else results[p] for i, p in self.gradients}
        return [found.get(i) for i in wanted]

    @property
    def graphs(self) -> Sequence[Executable]:
        """This one; see :attr:`Pair.graphs <lightning_ort.compiler.compilation.Pair.graphs>`."""
        return (self,)

    def rehearse(self, inputs: Sequence[Any], incoming: Sequence[torch.Tensor]) -> None:
        """Run for the time it takes."""
        self.run(inputs)


def timed_in_torch(forward: Callable[..., Any], report: GraphReport | None = None) -> Callable[..., Any]:
    """``forward``, whose time is torch's in calls that are timed."""

    def run(*args: Any) -> Any:
        recording = timeline.present
        if recording is None:
            return forward(*args)
        began = perf_counter()
        results = forward(*args)
        recording.add("torch", "operators" if report is None else "graph", began, report)
        return results

    return run
