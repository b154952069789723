"""One compiled region of a step: what Dynamo calls instead of its own graph."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from lightning_ort.compiler.autograd import LossStep, PairStep
from lightning_ort.compiler.eager_graph import EagerGraph
from lightning_ort.compiler.executors.executable import Executable
from lightning_ort.compiler.executors.onnxruntime import ORTExecutable
from lightning_ort.compiler.executors.torch import TorchExecutable
from lightning_ort.compiler.first_run import FirstRun, Incoming
from lightning_ort.compiler.global_state import Surroundings, drawing_as_traced
from lightning_ort.compiler.kept import Keeping, Kept, before_write
from lightning_ort.compiler.loss_scale import LossScaling
from lightning_ort.compiler.outputs import OutputLayout, overlap
from lightning_ort.compiler.partition import split
from lightning_ort.compiler.reference import ForkedRNG
from lightning_ort.compiler.trace import Derivative, Traced, Untraceable, fake_inputs, trace
from lightning_ort.runtime.factory import SessionFactory

__all__ = ["Pair", "Region"]


@dataclasses.dataclass
class Pair:
    """Forward and backward as two graphs, for gradients that arrive at several outputs."""

    forward: Executable
    backward: Executable
    kept: list[int | None]
    """inputs of ``backward``: number of a region input, or ``None`` for the next of ``forward.extra``"""
    copied: frozenset[int]
    """region inputs that are kept as copies, because eager keeps no reference to them"""
    own: list[tuple[int, bool]]
    """per entry of ``forward.extra``, its position and whether it is kept as a copy of an output"""
    verified: bool = False
    general: bool = False
    """gradients were seen at more than a scalar loss"""

    def saved(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the backward graph reads of the results of the forward graph."""
        return [results[p].clone() if own else results[p] for p, own in self.own]

    def inputs(
        self, args: Sequence[Any], saved: Sequence[torch.Tensor], copies: Mapping[int, torch.Tensor] | None = None
    ) -> list[Any]:
        """Inputs of the backward graph, from those of the region, ``copies`` of some, and what was computed."""
        computed, own = iter(saved), self.copied if copies else ()
        return [next(computed) if i is None else copies[i] if copies and i in own else args[i] for i in self.kept]


class Region:
    """Executes Dynamo's graph in ONNX Runtime, with gradients.

    Args:
        graph: Dynamo's graph.
        example_inputs: what Dynamo passed with it.
        sessions: makes them, for the device that computes; tensors live there or on the CPU.
        scaling: the scale of losses, if they are scaled.
        verify: check the first run of each graph against torch.
        on_compiled: called with each :class:`Executable` after it was compiled.

    Raises:
        Untraceable: the graph has no functional form.

    Attributes:
        wanted: numbers of the inputs that want a gradient.
        first_run: checks graphs against torch.
        loss_output: number of the output whose gradients a run computes along with the outputs.
        has_draws: whether a run advances torch's random state.
        outputs_by_position: position among the tensors of a run to the number of the differentiable output it is.
        not_differentiable: positions among the tensors of a run that have no gradient.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        sessions: SessionFactory,
        *,
        scaling: LossScaling | None = None,
        verify: bool,
        on_compiled: Callable[[Executable], None],
    ) -> None:
        self.graph, self.device, self.scaling = graph, sessions.device, scaling
        self._sessions, self._verify, self._on_compiled = sessions, verify, on_compiled
        self._in_torch = sessions.placement == "torch"
        self._fakes = fake_inputs(graph, example_inputs)
        self._surroundings = Surroundings.present()
        self._context = TracingContext.get()
        self._layout = OutputLayout(graph)
        self.wanted = [i for i, x in enumerate(self._fakes) if isinstance(x, torch.Tensor) and x.requires_grad]
        self._keeping: Keeping | None = None
        # of those in wanted: autograd visits what made an input, even without a gradient for it, and eager may not
        self._edges: list[int | None] = []
        self._changed: list[int] = []
        self._one_graph = False
        self._loss: Executable | None = None
        self._pair: Pair | None = None
        self._plain: Executable | None = None
        self.first_run = FirstRun(graph, self.wanted, self.device, self._surroundings)
        self._quiet = _uncounted(graph)
        differentiable = self._layout.differentiable
        if differentiable and not (self.wanted and torch.is_grad_enabled()):
            raise Untraceable("it makes a tensor that requires a gradient, or switches gradients on")
        if not differentiable:
            self._plain = self._compile(Derivative.NONE, ())
            self._arranged_as(self._plain)
            return
        scalars = [i for i in differentiable if self._layout.values[i].numel() == 1]
        if len(scalars) == 1:
            self.use_loss(scalars[0])
        else:
            self.use_pair()

    # -- compilation ----------------------------------------------------------------------------------------------

    def _compile(self, derivative: Derivative, differentiated: Sequence[int]) -> Executable:
        with self._tracing():
            executable = self._executable(self._trace(derivative, differentiated))
        self._on_compiled(executable)
        return executable

    def _executable(self, traced: Traced, extra: Sequence[fx.Node] = ()) -> Executable:
        if self._in_torch:
            return TorchExecutable(traced, self.device, extra)
        return ORTExecutable(traced, self._sessions, extra)

    def use_loss(self, output: int) -> None:
        """From now on, compute the gradients of the scalar ``output`` together with the outputs."""
        self.loss_output = output
        self._loss = self._compile(Derivative.LOSS, [output])
        self._arranged_as(self._loss)

    def use_pair(self) -> None:
        """From now on, compute gradients when they arrive, in a graph of their own."""
        if self._pair is None:
            with self._tracing():
                joint = self._trace(Derivative.TANGENTS, self._layout.differentiable)
                assert self._keeping is not None
                partition = split(joint, self._keeping.eager)
                forward = self._executable(partition.forward, partition.saved)
                backward = self._executable(partition.backward)
            self._on_compiled(forward)
            self._on_compiled(backward)
            own = [(p, n in partition.own) for p, n in zip(forward.extra, partition.saved, strict=True)]
            self._pair = Pair(forward, backward, partition.kept, partition.copied, own, verified=not self._verify)
        self._pair.general |= self._loss is not None
        self._loss = None
        self._arranged_as(self._pair.forward)

    def _trace(self, derivative: Derivative, differentiated: Sequence[int]) -> Traced:
        scaled = self.scaling is not None and derivative is Derivative.LOSS
        request = (self.graph, self._fakes, derivative, differentiated, self._surroundings)
        try:
            traced = trace(*request, scaled=scaled, native=self._in_torch)
        except Untraceable:
            if not self._in_torch:
                raise
            # some of torch's own operators are known to autograd, and not to a trace
            traced = trace(*request, scaled=scaled)
        traced.outputs = [None if i in self._layout.views else o for i, o in enumerate(traced.outputs)]
        self.has_draws = bool(traced.draws)
        self._changed = list(traced.updates)
        if overlap(self._fakes, self._changed):
            raise Untraceable("it changes a tensor that shares memory with another one it reads")
        if derivative is not Derivative.NONE and self._keeping is None:
            eager = EagerGraph.of(self.graph, self._layout.differentiable)
            self._keeping = Keeping.of(traced, eager, self.first_run.input_name)
            reached = frozenset[int]().union(*eager.reached.values())
            self._edges = [i if i in reached else None for i in self.wanted]
        return traced

    def _arranged_as(self, executable: Executable) -> None:
        self._layout.learn(executable)
        self.outputs_by_position = self._layout.differentiable_positions
        self.not_differentiable = self._layout.not_differentiable

    def learn_from(self, arrived: Mapping[int, torch.Tensor]) -> None:
        """Gradients that arrive at a single scalar make it the loss of the runs to come."""
        if self._loss is None and self._pair is not None and not self._pair.general:
            (output, *more) = arrived
            if not more and self._layout.values[output].numel() == 1:
                self.use_loss(output)
            else:
                self._pair.general = True

    def leave_loss(self) -> None:
        """Gradients that arrive elsewhere than at the loss are computed by a pair of graphs from now on.

        Where eager would refuse the gradients of an output, there is no such pair, and torch goes on computing those
        that arrive there.
        """
        if not self._one_graph:
            try:
                self.use_pair()
            except Untraceable:
                self._one_graph = True

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Dynamo's context of this region, which is no longer the present one when a graph is compiled late."""
        if TracingContext.try_get() is self._context:
            yield
        else:
            with tracing(self._context), torch.inference_mode(False):
                yield

    # -- execution ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self._changed and overlap(args, self._changed):
            return self.graph(*args)
        if self._plain is not None:
            tensors = self._unique(self._execute(self._plain, args, {}))
            return self._layout.arrange(self._plain, tensors, args)
        differentiable = [None if i is None else args[i] for i in self._edges]
        if self._loss is not None:
            executable = self._loss
            tensors = LossStep.apply(self, args, *differentiable)
        else:
            assert self._pair is not None
            executable = self._pair.forward
            tensors = PairStep.apply(self, self._pair, args, *differentiable)
        return self._layout.arrange(executable, tensors, args)

    def _unique(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return results[: self._layout.n_unique]

    def run_loss(
        self, args: Sequence[Any]
    ) -> tuple[Sequence[torch.Tensor], list[torch.Tensor | None], torch.Tensor | None]:
        """Outputs, the gradients of the loss by the inputs in :attr:`wanted`, and whether all of those are finite.

        Where losses are not scaled, the latter is ``None``; where they are, gradients of 16-bit inputs stay scaled.
        """
        assert self._loss is not None
        executable = self._loss
        scale = None if self.scaling is None else self.scaling.tensor(self.device)
        results = self._execute(executable, args, {self.loss_output: None}, scale)
        finite = None if executable.finite is None else results[executable.finite]
        return self._unique(results), gradients_of(executable, results, self.wanted), finite

    def keep(self, args: Sequence[Any], pair: Pair | None = None) -> Kept:
        """The inputs of a run, before it, as its gradients need them."""
        assert self._keeping is not None
        if pair is None:
            return Kept(self._keeping, args)
        # the first gradients of a pair are compared with those that torch computes from the same inputs
        return Kept(self._keeping, args, pair.copied if pair.verified else pair.copied.union(self._keeping.at_risk))

    def run_forward(self, pair: Pair, args: Sequence[Any]) -> tuple[Sequence[torch.Tensor], list[torch.Tensor] | None]:
        """Outputs, and what the backward graph reads besides inputs: ``None`` where the outputs are torch's."""
        results = self._execute(pair.forward, args, {})
        if self._verify and self.first_run.is_due(pair.forward):
            return self._unique(results), None
        return self._unique(results), pair.saved(results)

    def run_pair(
        self, pair: Pair, args: Sequence[Any], incoming: Sequence[torch.Tensor], outputs: Collection[int]
    ) -> list[torch.Tensor | None]:
        """Gradients by the inputs in :attr:`wanted`, of other inputs and without any effect on them."""
        inputs = pair.inputs(args, pair.saved(pair.forward.run(args)))
        return self.run_backward(pair, inputs, incoming, outputs)

    def run_backward(
        self, pair: Pair, inputs: Sequence[Any], incoming: Sequence[torch.Tensor], outputs: Collection[int]
    ) -> list[torch.Tensor | None]:
        """Gradients by the inputs in :attr:`wanted`.

        Args:
            pair: the graphs.
            inputs: of the backward graph.
            incoming: gradients, one per differentiable output.
            outputs: where gradients have arrived; what does not lead there has none.
        """
        assert self._keeping is not None
        results = pair.backward.run([*inputs, *incoming])
        found = gradients_of(pair.backward, results, self.wanted)
        reached = frozenset[int]().union(*[self._keeping.eager.reached[output] for output in outputs])
        return [g if i in reached else None for i, g in zip(self.wanted, found, strict=True)]

    def finite_where_shared(self, gradients: Sequence[torch.Tensor | None], outputs: Collection[int]) -> bool:
        """Whether ``gradients``, by the inputs in :attr:`wanted`, are finite where zeros stood for missing ones.

        Zero times a value that is not finite is NaN, where eager leaves out what leads to no loss.

        Args:
            gradients: from :meth:`run_backward`.
            outputs: where gradients have arrived.
        """
        assert self._keeping is not None
        reached = self._keeping.eager.reached
        shared = frozenset[int]().union(*[inputs for output, inputs in reached.items() if output not in outputs])
        pairs = zip(self.wanted, gradients, strict=True)
        doubtful = [g for i, g in pairs if i in shared and g is not None and g.numel()]
        largest = torch._foreach_norm(doubtful, math.inf) if doubtful else ()
        return all(bool(x.isfinite()) for x in largest)

    def _execute(
        self, executable: Executable, args: Sequence[Any], incoming: Incoming, scale: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        if self._verify and self.first_run.is_due(executable):
            results = self.first_run.run(executable, args, incoming, scale)
        else:
            results = executable.run(args if scale is None else [*args, scale])
        if executable.updates:
            with torch.no_grad():
                before_write([args[i] for i, _ in executable.updates])
                for i, position in executable.updates:
                    (args[i].data if i in self._quiet else args[i]).copy_(results[position])
        return results

    # -- recomputation ---------------------------------------------------------------------------------------------

    def recompute(
        self, kept: Kept, start: Any, incoming: Mapping[int, torch.Tensor], *, create_graph: bool
    ) -> list[torch.Tensor | None]:
        """Gradients by torch, from the inputs of a run and its random state."""
        with torch.enable_grad():
            local = kept.inputs(incoming, with_graph=create_graph)
            for i, x in enumerate(local):
                if not isinstance(x, torch.Tensor):
                    continue
                if i not in self.wanted:
                    local[i] = x.detach().clone() if i in self._changed else x.detach()
                else:  # an alias, because hooks of x itself run when its gradient arrives, and not here as well
                    local[i] = x.view_as(x) if create_graph else x.detach().requires_grad_()
        with ForkedRNG(self.device, start), torch.enable_grad():
            with self._surroundings.applied(), drawing_as_traced(self.graph, self.device):
                outputs = self.graph.forward(*local)
            return list(
                torch.autograd.grad(
                    [outputs[i] for i in incoming],
                    [local[i] for i in self.wanted],
                    list(incoming.values()),
                    create_graph=create_graph,
                    allow_unused=True,
                )
            )


def gradients_of(
    executable: Executable, results: Sequence[torch.Tensor], wanted: Sequence[int]
) -> list[torch.Tensor | None]:
    """Gradients in the order of ``wanted``, each in memory of its own."""
    if len(executable.gradients) == len(wanted) and not executable.shared:
        return [results[p] for _, p in executable.gradients]
    found = {i: results[p].clone() if i in executable.shared else results[p] for i, p in executable.gradients}
    return [found.get(i) for i in wanted]


def _uncounted(graph: fx.GraphModule) -> frozenset[int]:
    """Inputs that eager changes, if at all, without counting it: running statistics that a kernel updates."""
    examples = [n.meta.get("example_value") for n in graph.graph.nodes if n.op == "placeholder"]
    return frozenset(i for i, x in enumerate(examples) if isinstance(x, torch.Tensor) and not x._version)
