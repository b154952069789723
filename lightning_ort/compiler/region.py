"""One compiled region of a step: what Dynamo calls instead of its own graph."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from lightning_ort.compiler.autograd import ApartStep, LossStep, Node, PairStep, divided, node_of
from lightning_ort.compiler.autograd_functions import calls_function
from lightning_ort.compiler.choice import Choice
from lightning_ort.compiler.compilation import OVERLAP, Compilation, Pair
from lightning_ort.compiler.contest import MEMORY, Contest, Key, measures
from lightning_ort.compiler.dynamo_words import place_of, source_line
from lightning_ort.compiler.eager_graph import arrivals
from lightning_ort.compiler.executors.executable import Account, Eager, Executable, timed_in_torch
from lightning_ort.compiler.first_run import FirstRun, Incoming
from lightning_ort.compiler.functional_graph import Untraceable
from lightning_ort.compiler.global_state import GlobalState, has_tangents, saved_tensors_have_hooks, takes_gradients
from lightning_ort.compiler.graph_report import report_of
from lightning_ort.compiler.interrupts import Interrupts
from lightning_ort.compiler.kept import Kept, before_write, in_torch
from lightning_ort.compiler.loss_scale import LossScaling, all_finite
from lightning_ort.compiler.outputs import OutputLayout, overlap
from lightning_ort.compiler.plan import Fallback
from lightning_ort.compiler.reference import ForkedRNG, rehearsal
from lightning_ort.compiler.tensor_hooks import hooked_leaves, in_order, watch
from lightning_ort.compiler.trace import Derivative, fake_inputs
from lightning_ort.lightning_packages import rank_zero_info
from lightning_ort.report import timeline
from lightning_ort.report.announcement import Announcement
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.memory import release_free_memory

__all__ = ["Region"]


class Region:
    """Executes Dynamo's graph in ONNX Runtime, with gradients.

    Args:
        graph: Dynamo's graph.
        example_inputs: what Dynamo passed with it.
        sessions: makes them, for the device that computes; tensors live there or on the CPU.
        scaling: the scale of losses, if they are scaled.
        verify: check the first run of each graph against torch.
        on_chosen: called with what is told of each graph that is taken into use; what it raises, the region raises.

    Raises:
        Untraceable: the graph has no functional form.

    Attributes:
        wanted: numbers of the inputs that want a gradient.
        first_run: checks graphs against torch.
        loss_output: number of the output whose gradients a run computes along with the outputs.
        has_draws: whether a run advances torch's random state.
        differentiable: numbers of the outputs at which gradients may arrive.
        outputs_by_position: position among the tensors of a run to the number of the differentiable output it is.
        not_differentiable: positions among the tensors of a run that have no gradient.
        changed: numbers of the inputs that a run changes.
        global_state: what the graph was traced under.
        calls_functions: whether a ``torch.autograd.Function`` is in the graph.
        in_float16: whether anything in the graph is of that type, which gradients may be too small or too large for.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        sessions: SessionFactory,
        *,
        scaling: LossScaling | None = None,
        verify: bool,
        on_chosen: Callable[[Account], None] = lambda account: None,
    ) -> None:
        self.graph, self.device, self.scaling = graph, sessions.device, scaling
        self._sessions, self._verify, self._on_chosen = sessions, verify, on_chosen
        self._fakes = fake_inputs(graph, example_inputs)
        self.global_state = GlobalState.present()
        self._layout = OutputLayout(graph)
        self.wanted = [i for i, x in enumerate(self._fakes) if isinstance(x, torch.Tensor) and x.requires_grad]
        # autograd visits what made an input, even without a gradient for it, and eager may not
        self._reached: dict[int, frozenset[int]] = {}
        self._edges: list[int | None] = []  # of those in wanted, what leads to any output
        self._uneven: frozenset[int] = frozenset()  # of those, what leads to some outputs only
        self._partial: list[int] = []  # of those, what may have been made by something
        self._nodes: dict[frozenset[int], list[Node]] = {}
        self._arrivals: Sequence[int] | None = None  # in eager's order, once hooks of leaves have asked for it
        self._inner: frozenset[int] = frozenset()  # outputs to which hooks may come that gradients of others pass
        self.changed: list[int] = []
        self._one_graph = False
        self._loss: Executable | None = None
        self._pair: Pair | None = None
        self._plain: Executable | None = None
        self.first_run = FirstRun(graph, self.wanted, self.device, self.global_state)
        self._compilation = Compilation(
            graph,
            self._fakes,
            self._layout,
            sessions,
            self.global_state,
            name=self.first_run.input_name,
            scaled=scaling is not None,
            verify=verify,
        )
        self._contest: Contest | None = None
        self._choice: Choice | None = None
        self._eager = self._overlaps = False
        self._later: float | None = None  # by what the loss is multiplied after a run, where it is not as expected
        self._own_scaling: LossScaling | None = None
        self._in_eager = in_torch(graph)
        self._quiet = _uncounted(graph)
        self.in_float16 = _has(graph, torch.float16) or torch.float16 in self.global_state.autocast.values()
        self.calls_functions = any(map(calls_function, graph.graph.nodes))
        self.differentiable = differentiable = self._layout.differentiable
        if self._layout.leads_on and not (self.wanted and torch.is_grad_enabled()):
            raise Untraceable("it makes a tensor that requires a gradient, or switches gradients on")
        if not differentiable:
            if takes_gradients(graph):
                raise Untraceable("torch.func computes gradients in it, and it gives none")
            self._begin(Derivative.NONE, ())
            return
        scalars = [i for i in differentiable if self._layout.values[i].numel() == 1]
        if len(scalars) == 1:
            self.use_loss(scalars[0])
        else:
            self.use_pair()

    # -- compilation ----------------------------------------------------------------------------------------------

    def use_loss(self, output: int) -> None:
        """From now on, compute the gradients of the scalar ``output`` together with the outputs."""
        self.loss_output = output
        self._begin(Derivative.LOSS, [output])

    def use_pair(self) -> None:
        """From now on, compute gradients when they arrive, in a graph of their own."""
        general = self._loss is not None
        if self._pair is None:
            self._begin(Derivative.TANGENTS, self._layout.differentiable)
        else:
            self._take(self._pair)
        if self._pair is not None:
            self._pair.general |= general

    def _begin(self, derivative: Derivative, differentiated: Sequence[int]) -> None:
        """Compile for the one executor there is or the one known to be the fastest, or begin to compare."""
        make = functools.partial(self._compilation.make, derivative=derivative, differentiated=differentiated)
        self._contest = None
        if not measures(self._sessions.config):
            placement = self._sessions.placement
            self._choose(make("onnxruntime" if self._sessions.config.by_speed else placement))
            return
        kind = f"{derivative.value} {list(differentiated)} {self.scaling is not None}"
        key = Key.of(self.graph, self._fakes, kind, self.global_state, self._sessions.config)
        known = self._choice or MEMORY.get(key)  # the former holds for the region in another form as well
        if known is None:
            unit = make("onnxruntime")
            self._take(unit)
            rivals = self._compilation.rivals(unit)
            self._contest = Contest(key, {name: functools.partial(make, name) for name in rivals}, self.device)
            return
        if known.executor == "eager":
            self._stay(known, 0.0)
            return
        try:
            unit = make(known.executor)
        except Untraceable:  # what was measured was of other sizes, or another form
            if known.executor == "onnxruntime":
                raise
            unit, known = make("onnxruntime"), None
        self._choose(unit, None if known is self._choice else known)

    def _choose(self, unit: Executable | Pair, choice: Choice | None = None, seconds: float = 0.0) -> None:
        """Take into use for good."""
        self._take(unit)
        self._choice = choice or self._choice
        first, *others = unit.graphs
        first.milliseconds, first.choosing_seconds = {} if choice is None else choice.milliseconds, seconds
        for executable, part in zip((first, *others), ("forward", "backward") if others else ("",), strict=True):
            self._tell(executable, self._choice, part)

    def _tell(self, account: Account, choice: Choice | None, part: str = "") -> None:
        name, config = self.first_run.input_name, self._sessions.config
        account.report = report_of(account, part, self.graph, self._fakes, name, choice, config)
        self._on_chosen(account)

    def _stay(self, choice: Choice, seconds: float) -> None:
        """Leave Dynamo's graph to torch, for good."""
        if not self._eager:
            account = Eager()
            account.milliseconds, account.choosing_seconds = choice.milliseconds, seconds
            self._tell(account, choice)
            self._in_eager = timed_in_torch(self._in_eager, account.report)
        self._eager, self._choice, self._loss, self._pair, self._plain = True, choice, None, None, None

    def _tell_of_overlap(self) -> None:
        """Say once that Dynamo's graph runs in torch where inputs share memory."""
        if not self._overlaps:
            account = Eager()
            lines = [source_line(n) for n in self.graph.graph.nodes if n.op == "call_function"]
            account.fallbacks = [Fallback("the whole region", OVERLAP, lines[-1] if lines else "")]
            self._tell(account, None)
            self._overlaps = True

    def _take(self, unit: Executable | Pair) -> None:
        self._loss = None
        if isinstance(unit, Pair):
            self._pair, executable = unit, unit.forward
        elif self._layout.differentiable:
            self._loss = executable = unit
        else:
            self._plain = executable = unit
        if self._compilation.keeping is not None:
            self._reached = reached = self._compilation.keeping.eager.reached
            anywhere, everywhere = frozenset.union(*reached.values()), frozenset.intersection(*reached.values())
            self._edges = [i if i in anywhere else None for i in self.wanted]
            self._uneven = (anywhere - everywhere).intersection(self.wanted)
            self._partial = [i for i in sorted(self._uneven) if not isinstance(self._fakes[i], torch.nn.Parameter)]
            self._nodes, self._arrivals = {}, None
            self._inner = self._compilation.keeping.eager.inner
        self.changed = self.first_run.changed = [i for i, _ in executable.updates]
        self.has_draws = executable.has_draws
        self._layout.learn(executable)
        self.outputs_by_position = self._layout.differentiable_positions
        self.not_differentiable = self._layout.not_differentiable

    def _compare(self, contest: Contest, args: Sequence[Any]) -> None:
        """Run what there is and its rivals on real inputs, without any effect, and keep the fastest."""
        timeline.spoil()
        place = place_of(self.graph)
        telling = Announcement(
            rank_zero_info, f"Measuring where {place} runs fastest ...", f"Measured {place} in {{seconds}}."
        )
        try:
            with Interrupts(rank_zero_info).held():  # what a candidate raises is a reason to take another
                found = self._settled(contest, args)
        finally:
            seconds = telling.end()
        if found is None:
            return
        self._contest = None
        chosen, choice = found
        if chosen is None:
            self._stay(choice, seconds)
        else:
            self._choose(chosen, choice, seconds)
        release_free_memory()  # that of the others
        if self.device.type == "cuda":  # ONNX Runtime does not take it from torch
            torch.cuda.empty_cache()

    def _settled(self, contest: Contest, args: Sequence[Any]) -> tuple[Executable | Pair | None, Choice] | None:
        unit = self._loss or self._pair or self._plain
        assert unit is not None
        with ForkedRNG(self.device):
            inputs, incoming = self._inputs(args), self._ones(unit, args)
            tangents = [g for g in incoming.values() if g is not None]
            eager = rehearsal(self.graph, args, incoming, self.wanted, changed=self.changed)
            return contest.settle(
                unit,
                lambda other: other.rehearse(inputs, tangents),
                eager,
                eager_counts=self.scaling is None,
                calls=math.inf if incoming else sum(n.op.startswith("call") for n in self.graph.graph.nodes),
            )

    def _ones(self, unit: Executable | Pair, args: Sequence[Any]) -> dict[int, torch.Tensor | None]:
        """Gradients as they could arrive, by output number."""
        if unit is self._plain:
            return {}
        if not isinstance(unit, Pair):
            return {self.loss_output: None}
        results, positions = unit.forward.run(args), unit.forward.outputs
        return {i: torch.ones_like(results[p]) for i in self._layout.differentiable if (p := positions[i]) is not None}

    def learn_from(self, arrived: Mapping[int, torch.Tensor]) -> None:
        """Gradients that arrive at a single scalar make it the loss of the runs to come."""
        if self._loss is None and self._pair is not None and not self._pair.general:
            (output, *more) = arrived
            with contextlib.suppress(Untraceable):  # at sizes that are settled otherwise by now
                if not more and self._layout.values[output].numel() == 1:
                    self.use_loss(output)
                    return
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

    # -- execution ------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.changed and overlap(args, self.changed):
            self._tell_of_overlap()
            return self._in_eager(*args)
        if has_tangents():
            return self._in_eager(*args)
        if self._contest is not None:
            self._compare(self._contest, args)
        if self._eager or (self._edges and saved_tensors_have_hooks()):
            return self._in_eager(*args)
        executable = self._plain or self._loss
        if executable is None:
            assert self._pair is not None
            executable = self._pair.forward
        if executable is self._plain:
            tensors = self._layout.unique(self._execute(executable, args, {}))
        else:
            tensors = self._with_gradients(args)
        outputs = self._layout.arrange(executable, tensors, args)
        if self._inner and (step := node_of(tensors)) is not None:
            step.watched = watch(outputs, self._inner, step)
        return outputs

    def _with_gradients(self, args: Sequence[Any]) -> Sequence[torch.Tensor]:
        apart, ends = {i for i in self._partial if args[i].grad_fn is not None}, args
        if hooked := hooked_leaves(args, self.wanted):
            if self._arrivals is None:
                starts = self.differentiable if self._loss is None else [self.loss_output]
                self._arrivals = arrivals(self.graph, starts, self.differentiable)
            apart, ends = apart.union(self._uneven.intersection(hooked)), in_order(args, self._arrivals)
        if apart:
            return self._apart(args, ends, frozenset(apart))
        return self._step(args, (), [None if i is None else ends[i] for i in self._edges])

    def _step(self, args: Sequence[Any], apart: Sequence[int], differentiable: Sequence[Any]) -> Sequence[torch.Tensor]:
        if self._loss is not None:
            return LossStep.apply(self, args, apart, *differentiable)
        return PairStep.apply(self, self._pair, args, apart, *differentiable)

    def _apart(self, args: Sequence[Any], ends: Sequence[Any], made: frozenset[int]) -> Sequence[torch.Tensor]:
        """A run whose outputs have one node for each set of those inputs, among ``made``, that lead to them.

        Gradients of ``args`` go to ``ends``.
        """
        if made not in self._nodes:
            reached = {position: self._reached[output] for position, output in self.outputs_by_position.items()}
            loss = None if self._loss is None else self._reached[self.loss_output]
            self._nodes[made] = divided(reached, self.wanted, made, loss)
        first, *others = self._nodes[made]
        apart = [p for node in others for p in node.positions]
        tensors = list(self._step(args, apart, [None if i is None else ends[i] for i in first.edges]))
        if others:
            step = node_of(tensors)
        for node in others:
            given = [tensors[p] for p in node.positions] + [None if i is None else ends[i] for i in node.edges]
            again = ApartStep.apply(step, node.positions, node.within, *given)
            for position, x in zip(node.positions, again, strict=True):
                tensors[position] = x
        return tensors

    def run_loss(self, args: Sequence[Any]) -> tuple[Sequence[torch.Tensor], list[torch.Tensor | None], bool]:
        """Outputs, the gradients of the loss by the inputs in :attr:`wanted`, and whether the loss was scaled.

        Where it was, gradients of 16-bit inputs stay scaled.
        """
        assert self._loss is not None
        executable = self._loss
        results = self._execute(executable, args, {self.loss_output: None}, self._scale())
        return self._layout.unique(results), executable.gradients_of(results, self.wanted), executable.scaled

    def _scale(self) -> torch.Tensor | None:
        """The scale of the loss, the last input of a graph that computes its gradients."""
        if self.scaling is None or self._loss is None:
            return None
        if self._later is None:
            return self.scaling.tensor(self.device)
        if self._own_scaling is None:
            self._own_scaling = LossScaling(self.loss_scale)
        self._own_scaling.scale = self.loss_scale
        return self._own_scaling.tensor(self.device)

    @property
    def loss_scale(self) -> float:
        """What the next run multiplies its loss by."""
        assert self.scaling is not None
        return self.scaling.in_graphs if self._later is None else self.scaling.scale * self._later

    def learn_factor(self, factor: float) -> None:
        """The loss was multiplied by ``factor``, or minus that, after the run, and will be after those to come."""
        self._later = factor if factor > 0 and math.isfinite(factor) else None

    def _inputs(self, args: Sequence[Any]) -> Sequence[Any]:
        scale = self._scale()
        return args if scale is None else [*args, scale]

    def keep(self, args: Sequence[Any], pair: Pair | None = None) -> Kept:
        """The inputs of a run, before it, as its gradients need them."""
        keeping = self._compilation.keeping
        assert keeping is not None
        if pair is None:
            return Kept(keeping, args)
        # the first gradients of a pair are compared with those that torch computes from the same inputs
        return Kept(keeping, args, pair.copied if pair.verified else pair.copied.union(keeping.at_risk))

    def run_forward(self, pair: Pair, args: Sequence[Any]) -> tuple[Sequence[torch.Tensor], list[torch.Tensor] | None]:
        """Outputs, and what the backward graph reads besides inputs: ``None`` where the outputs are torch's."""
        results = self._execute(pair.forward, args, {})
        if self._verify and self.first_run.is_due(pair.forward):
            return self._layout.unique(results), None
        return self._layout.unique(results), pair.saved(results)

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
        keeping = self._compilation.keeping
        assert keeping is not None
        # as they were traced: an operator may read the memory of an expanded one as if all entries were there
        results = pair.backward.run([*inputs, *[g.contiguous() for g in incoming]])
        found = pair.backward.gradients_of(results, self.wanted)
        reached = frozenset[int]().union(*[keeping.eager.reached[output] for output in outputs])
        return [g if i in reached else None for i, g in zip(self.wanted, found, strict=True)]

    def finite_where_shared(self, gradients: Sequence[torch.Tensor | None], outputs: Collection[int]) -> bool:
        """Whether ``gradients``, by the inputs in :attr:`wanted`, are finite where zeros stood for missing ones.

        Zero times a value that is not finite is NaN, where eager leaves out what leads to no loss.

        Args:
            gradients: from :meth:`run_backward`.
            outputs: where gradients have arrived.
        """
        keeping = self._compilation.keeping
        assert keeping is not None
        reached = keeping.eager.reached
        shared = frozenset[int]().union(*[inputs for output, inputs in reached.items() if output not in outputs])
        pairs = zip(self.wanted, gradients, strict=True)
        return all_finite([g for i, g in pairs if i in shared and g is not None])

    def _execute(
        self, executable: Executable, args: Sequence[Any], incoming: Incoming, scale: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        if self._verify and self.first_run.is_due(executable):
            results = self.first_run.run(executable, args, incoming, scale)
        else:
            results = executable.run(args if scale is None else [*args, scale])
        if executable.updates:
            with torch.no_grad():
                written = [args[i] for i, _ in executable.updates]
                before_write(written)
                targets = [
                    x.data if i in self._quiet else x for x, (i, _) in zip(written, executable.updates, strict=True)
                ]
                torch._foreach_copy_(targets, [results[position] for _, position in executable.updates])
        return results


def _has(graph: fx.GraphModule, dtype: torch.dtype) -> bool:
    """Whether Dynamo has traced a tensor of ``dtype``."""
    values = [n.meta.get("example_value") for n in graph.graph.nodes]
    return any(isinstance(x, torch.Tensor) and x.dtype == dtype for x in pytree.tree_leaves(values))


def _uncounted(graph: fx.GraphModule) -> frozenset[int]:
    """Inputs that eager changes, if at all, without counting it: running statistics that a kernel updates."""
    examples = [n.meta.get("example_value") for n in graph.graph.nodes if n.op == "placeholder"]
    return frozenset(i for i, x in enumerate(examples) if isinstance(x, torch.Tensor) and not x._version)
