"""One compiled region of a step: what Dynamo calls instead of its own graph."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from lightning_ort.compiler.autograd import LossStep, PairStep
from lightning_ort.compiler.checking import ForkedRNG
from lightning_ort.compiler.executable import Executable
from lightning_ort.compiler.first_run import FirstRun, Incoming
from lightning_ort.compiler.layout import OutputLayout
from lightning_ort.compiler.partition import split
from lightning_ort.compiler.scaling import LossScaling
from lightning_ort.compiler.surroundings import Surroundings, drawing_as_traced
from lightning_ort.compiler.trace import Derivative, Traced, Untraceable, fake_inputs, trace
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["Pair", "Region"]


@dataclasses.dataclass
class Pair:
    """Forward and backward as two graphs, for gradients that arrive at several outputs."""

    forward: Executable
    backward: Executable
    kept: list[int | None]
    """inputs of ``backward``: number of a region input, or ``None`` for the next of ``forward.extra``"""
    verified: bool = False
    general: bool = False
    """gradients were seen at more than a scalar loss"""


class Region:
    """Executes Dynamo's graph in ONNX Runtime, with gradients.

    Args:
        graph: Dynamo's graph.
        example_inputs: what Dynamo passed with it.
        config: how sessions are made.
        device: what computes; tensors live there or on the CPU.
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
        config: RuntimeConfig,
        device: torch.device,
        *,
        scaling: LossScaling | None = None,
        verify: bool,
        on_compiled: Callable[[Executable], None],
    ) -> None:
        self.graph, self.device, self.scaling = graph, device, scaling
        self._config, self._verify, self._on_compiled = config, verify, on_compiled
        self._fakes = fake_inputs(graph, example_inputs)
        self._surroundings = Surroundings.present()
        self._context = TracingContext.get()
        self._layout = OutputLayout(graph)
        self.wanted = [i for i, x in enumerate(self._fakes) if isinstance(x, torch.Tensor) and x.requires_grad]
        self._loss: Executable | None = None
        self._pair: Pair | None = None
        self._plain: Executable | None = None
        self.first_run = FirstRun(graph, self.wanted, device, self._surroundings)
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
            executable = Executable(self._trace(derivative, differentiated), self._config, self.device)
        self._on_compiled(executable)
        return executable

    def use_loss(self, output: int) -> None:
        """From now on, compute the gradients of the scalar ``output`` together with the outputs."""
        self.loss_output = output
        self._loss = self._compile(Derivative.LOSS, [output])
        self._arranged_as(self._loss)

    def use_pair(self) -> None:
        """From now on, compute gradients when they arrive, in a graph of their own."""
        was_loss, self._loss = self._loss is not None, None
        if self._pair is None:
            with self._tracing():
                partition = split(self._trace(Derivative.TANGENTS, self._layout.differentiable))
                forward = Executable(partition.forward, self._config, self.device, partition.saved)
                backward = Executable(partition.backward, self._config, self.device)
            self._on_compiled(forward)
            self._on_compiled(backward)
            self._pair = Pair(forward, backward, partition.kept, verified=not self._verify)
        self._pair.general |= was_loss
        self._arranged_as(self._pair.forward)

    def _trace(self, derivative: Derivative, differentiated: Sequence[int]) -> Traced:
        scaled = self.scaling is not None and derivative is Derivative.LOSS
        traced = trace(self.graph, self._fakes, derivative, differentiated, self._surroundings, scaled=scaled)
        traced.outputs = [None if i in self._layout.views else o for i, o in enumerate(traced.outputs)]
        self.has_draws = bool(traced.draws)
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

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Dynamo's context of this region, which is no longer the present one when a graph is compiled late."""
        if TracingContext.try_get() is self._context:
            yield
        else:
            with tracing(self._context), torch.inference_mode(False):
                yield

    # -- execution ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> list[Any]:
        if self._plain is not None:
            tensors = self._unique(self._execute(self._plain, args, {}))
            return self._layout.arrange(self._plain, tensors, args)
        differentiable = [args[i] for i in self.wanted]
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

    def run_forward(self, pair: Pair, args: Sequence[Any]) -> tuple[Sequence[torch.Tensor], list[Any]]:
        """Outputs, and what the backward graph keeps."""
        results = self._execute(pair.forward, args, {})
        saved = iter([results[i] for i in pair.forward.extra])
        return self._unique(results), [next(saved) if i is None else args[i] for i in pair.kept]

    def run_backward(
        self, pair: Pair, kept: Sequence[Any], incoming: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Gradients by the inputs in :attr:`wanted`; ``incoming`` has one per differentiable output."""
        results = pair.backward.run([*kept, *incoming])
        return gradients_of(pair.backward, results, self.wanted)

    def _execute(
        self, executable: Executable, args: Sequence[Any], incoming: Incoming, scale: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        if self._verify and self.first_run.is_due(executable):
            results = self.first_run.run(executable, args, incoming, scale)
        else:
            results = executable.run(args if scale is None else [*args, scale])
        if executable.updates:
            with torch.no_grad():
                for i, position in executable.updates:
                    args[i].copy_(results[position])
        return results

    # -- recomputation ---------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def recompute(
        self, args: Sequence[Any], start: Any, incoming: Mapping[int, torch.Tensor], *, create_graph: bool
    ) -> list[torch.Tensor | None]:
        """Gradients by torch, from the inputs of a run and its random state."""
        local = list(args)
        for i, x in enumerate(local):
            if not isinstance(x, torch.Tensor):
                continue
            if i not in self.wanted:
                local[i] = x.detach().clone()
            else:  # an alias, because hooks of x itself run when its gradient arrives, and not here as well
                with torch.enable_grad():
                    local[i] = x.view_as(x) if create_graph else x.detach().requires_grad_()
        with ForkedRNG(self.device, start), torch.enable_grad():
            with self._surroundings.applied(), drawing_as_traced(self.graph, self.device):
                outputs = self.graph(*local)
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
