"""How gradients computed in ONNX Runtime reach torch's autograd."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lightning_ort.compiler.global_state import drawing_as_traced
from lightning_ort.compiler.kept import Kept
from lightning_ort.compiler.loss_scale import all_finite
from lightning_ort.compiler.reference import ForkedRNG
from lightning_ort.compiler.tensor_hooks import WatchedOutput, active, attach

if TYPE_CHECKING:
    from lightning_ort.compiler.compilation import Pair
    from lightning_ort.compiler.region import Region

__all__ = ["ApartStep", "LossStep", "Node", "PairStep", "divided", "makes_nan", "multiply", "node_of"]


@dataclasses.dataclass(frozen=True)
class Node:
    """Outputs of a run that autograd visits by one node.

    Attributes:
        positions: of the outputs among the tensors of the run.
        edges: by the inputs that want a gradient, their numbers, or ``None`` for one that is not visited.
        within: the first node of the run visits all that this one does.
    """

    positions: list[int]
    edges: list[int | None]
    within: bool


def divided(
    reached: Mapping[int, frozenset[int]], wanted: Sequence[int], made: frozenset[int], loss: frozenset[int] | None
) -> list[Node]:
    """The nodes of a run: one for each set of inputs among ``made`` that lead to its outputs.

    The first is that of the loss, or else of the outputs to which most of those inputs lead.

    Args:
        reached: position of an output to the numbers of the inputs that lead to it.
        wanted: numbers of the inputs that want a gradient.
        made: numbers of the inputs that have been computed by something, which autograd would visit.
        loss: numbers of the inputs that lead to the loss, if the run computes its gradients.
    """
    sets: dict[frozenset[int], list[int]] = {}
    for position, inputs in reached.items():
        sets.setdefault(inputs & made, []).append(position)
    of_loss = None if loss is None else loss & made
    first = max(sets, key=lambda inputs: (inputs == of_loss, len(inputs)))
    nodes: list[Node] = []
    for positions in [sets.pop(first), *sets.values()]:
        ends = frozenset[int]().union(*[reached[p] for p in positions])
        edges = [i if i in ends else None for i in wanted]
        nodes.append(Node(positions, edges, within=not nodes or {None, *nodes[0].edges}.issuperset(edges)))
    return nodes


def node_of(tensors: Sequence[torch.Tensor]) -> Any:
    """The node of autograd of a run that has given ``tensors``; ``None`` where gradients are off."""
    return next((x.grad_fn for x in tensors if x.grad_fn is not None), None)


def _start(ctx: Any, region: Region, apart: Collection[int], pair: Pair | None = None) -> None:
    ctx.set_materialize_grads(False)
    ctx.region, ctx.pair, ctx.apart = region, pair, bool(apart)
    ctx.used, ctx.used_before, ctx.used_by = frozenset(), frozenset(), None
    ctx.visited_by, ctx.waiting = None, (None, {})
    ctx.watched = ()  # outputs to which hooks may come, once the run has given them
    ctx.rng = ForkedRNG.state(region.device) if region.has_draws else None


def _end(ctx: Any, outputs: Any, apart: Collection[int]) -> Any:
    """Take down what belongs to the run of the region, whose next one may be of another graph."""
    region: Region = ctx.region
    ctx.kept.seal()
    ctx.positions = region.outputs_by_position
    if region.not_differentiable or apart:
        ctx.mark_non_differentiable(*[outputs[i] for i in (*region.not_differentiable, *apart)])
    return tuple(outputs)


def _arrived(ctx: Any, incoming: Any) -> dict[int, torch.Tensor]:
    """Output number to the gradient that has arrived there.

    Raises:
        RuntimeError: eager would refuse it.
    """
    arrived = {ctx.positions[p]: g for p, g in enumerate(incoming) if g is not None}
    if arrived:
        if ctx.kept is None or (ctx.used and _is_used_up(ctx, arrived)):
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved tensors after they have "
                "already been freed). Specify retain_graph=True if you need to backward through the graph a second "
                "time."
            )
        ctx.kept.check(arrived)
    return arrived


def _with_waiting(step: Any, arrived: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """``arrived`` at ``step``, and what other nodes of its run have left for it in this backward."""
    task = step.visited_by = torch._C._current_graph_task_id()
    (waiting_for, waiting), step.waiting = step.waiting, (None, {})
    return arrived | waiting if waiting_for == task else arrived


def _by_hooks(step: Any, arrived: Mapping[int, torch.Tensor]) -> Sequence[torch.Tensor | None] | None:
    """Gradients by the inputs in :attr:`Region.wanted` where hooks wait for some on their way; else ``None``."""
    watched = active(step.watched)
    if not watched:
        return None
    kept, _ = _take_kept(step, arrived)
    create_graph = torch.is_grad_enabled()
    return _recompute(step.region, kept, step.rng, arrived, create_graph=create_graph, watched=watched)


def _recompute(
    region: Region,
    kept: Kept,
    start: Any,
    incoming: Mapping[int, torch.Tensor],
    *,
    create_graph: bool,
    watched: Sequence[WatchedOutput] = (),
    undefined: Collection[int] = (),
) -> list[torch.Tensor | None]:
    """Gradients by torch, from the inputs of a run and its random state, with the hooks of ``watched`` outputs.

    The outputs of the numbers ``undefined`` are visited without a gradient.
    """
    with torch.enable_grad():
        local = kept.inputs([*incoming, *undefined], with_graph=create_graph)
        for i, x in enumerate(local):
            if not isinstance(x, torch.Tensor):
                continue
            if i not in region.wanted:
                local[i] = x.detach().clone() if i in region.changed else x.detach()
            else:  # an alias, because hooks of x itself run when its gradient arrives, and not here as well
                local[i] = x.view_as(x) if create_graph else x.detach().requires_grad_()
    with ForkedRNG(region.device, start), torch.enable_grad():
        with region.global_state.applied(), drawing_as_traced(region.graph, region.device):
            outputs = region.graph.forward(*local)
        attach(watched, outputs, incoming)
        gradients = torch.autograd.grad(
            [*(outputs[i] for i in incoming), *(_Undefined.apply(outputs[i]) for i in undefined)],
            [local[i] for i in region.wanted],
            [*incoming.values(), *([None] * len(undefined))],
            create_graph=create_graph,
            allow_unused=True,
        )
        # of what is empty, some kernels give the input itself, which adding up would count as changed
        return [g.clone() if g is not None and not g.numel() else g for g in gradients]


class _Undefined(torch.autograd.Function):
    """A scalar whose gradient visits what made a tensor, and brings none."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_zeros(())

    @staticmethod
    def backward(ctx: Any, incoming: torch.Tensor) -> None:
        return None


def _of_nothing(step: Any, visited: Collection[int]) -> Sequence[torch.Tensor | None]:
    """Gradients by the inputs in :attr:`Region.wanted` where autograd comes by and has none.

    It has none for an operator either, but zeros for a ``torch.autograd.Function``, which may make a gradient of them.

    Args:
        step: the node of the run.
        visited: the outputs of the node that autograd visits. Which ones it would visit in eager can be told if it is
            one.
    """
    region: Region = step.region
    if len(visited) != 1 or step.kept is None or not region.calls_functions:
        return [None] * len(region.wanted)
    again = torch.is_grad_enabled()
    return _recompute(region, step.kept, step.rng, {}, create_graph=again, undefined=visited)


def _is_used_up(ctx: Any, arrived: Collection[int]) -> bool:
    """Whether an earlier backward has used what gradients at these outputs need."""
    # two nodes of one run may be reached by one backward, whose number torch tells here alone
    used = ctx.used_before if ctx.used_by == torch._C._current_graph_task_id() else ctx.used
    return not used.isdisjoint(ctx.kept.used_for(arrived))


def _take_kept(ctx: Any, arrived: Collection[int]) -> tuple[Kept, bool]:
    """Give what the run has kept, and whether the same gradients may be asked for again.

    Unless they may (``retain_graph=True``, or ``create_graph=True``), it is let go of, but for outputs of which eager
    would still have the graph.
    """
    kept: Kept = ctx.kept
    keeps: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    if not keeps:
        used = kept.used_for(arrived)
        if used and len(ctx.positions) == 1 and not ctx.apart:
            ctx.kept = None
            return kept, keeps
        task = torch._C._current_graph_task_id()
        if ctx.used_by != task:
            ctx.used_before, ctx.used_by = ctx.used, task
        ctx.used |= used
        if not ctx.apart and all(not ctx.used.isdisjoint(kept.used_for([output])) for output in ctx.positions.values()):
            ctx.kept = None
    return kept, keeps


class LossStep(torch.autograd.Function):
    """Outputs and gradients in one run; backward hands the gradients out, times the loss's own gradient.

    The outputs at the positions ``apart`` have no gradient from here, but from an :class:`ApartStep`.
    """

    @staticmethod
    def forward(
        ctx: Any, region: Region, args: Sequence[Any], apart: Sequence[int], *differentiable: torch.Tensor
    ) -> Any:
        _start(ctx, region, apart)
        ctx.loss = region.loss_output
        ctx.kept = region.keep(args)
        outputs, ctx.gradients, ctx.scaled = region.run_loss(args)
        if ctx.scaled:
            ctx.scale = region.loss_scale
        return _end(ctx, outputs, apart)

    # a gradient asked for between two regions arrives while Dynamo watches, which must not compile this
    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        arrived = _with_waiting(ctx, _arrived(ctx, incoming))
        region: Region = ctx.region
        if not arrived:
            return (None, None, None, *_of_nothing(ctx, ctx.positions.values()))
        hooked = _by_hooks(ctx, arrived)
        if hooked is not None:
            return (None, None, None, *hooked)
        (kept, keeps), gradients, again = _take_kept(ctx, arrived), ctx.gradients, torch.is_grad_enabled()
        if not keeps and ctx.loss in arrived:
            ctx.gradients = None
        if again or gradients is None or set(arrived) != {ctx.loss} or _are_batched(arrived):
            if not again and set(arrived) != {ctx.loss}:
                region.leave_loss()
            return (None, None, None, *_recompute(region, kept, ctx.rng, arrived, create_graph=again))
        if region.in_float16:
            scaled_anew = _scaled_anew(ctx, kept, arrived)
            if scaled_anew is not None:
                return (None, None, None, *scaled_anew)
        # a comparison would wait for the device; on the CPU it saves a pass over all gradients
        factor: Any = arrived[ctx.loss]
        if factor.device.type == "cpu":
            factor = factor.item()
            if not ctx.scaled and makes_nan(factor, gradients):
                return (None, None, None, *_recompute(region, kept, ctx.rng, arrived, create_graph=False))
        if keeps:
            gradients = [None if g is None else g.clone() for g in gradients]
        if not ctx.scaled:
            multiply([g for g in gradients if g is not None], factor)
        else:
            multiply([g for g in gradients if g is not None and g.dtype.itemsize >= 4], factor)
            # those are still scaled
            multiply([g for g in gradients if g is not None and g.dtype.itemsize < 4], factor / ctx.scale)
        return (None, None, None, *gradients)


def _scaled_anew(ctx: Any, kept: Kept, arrived: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None] | None:
    """Gradients of a run that has scaled its loss by more or less than eager would, which float16 may show.

    It has small numbers to 6e-8, and large ones to 65504. Eager scales what gradients are asked for, whatever the loss
    was multiplied by on the way there, by a scaler of the user's for one. torch computes them then; the next run scales
    as much, or leaves gradients to a graph of their own.

    Returns:
        ``None`` where the run has scaled as eager would.
    """
    scaling = ctx.region.scaling if ctx.scaled else None
    scale = 1.0 if scaling is None or scaling.by_hand else scaling.scale
    asked = arrived[ctx.loss] if scale == 1.0 else arrived[ctx.loss] * scale
    size, used = abs(asked.item()), ctx.scale if ctx.scaled else 1.0
    if abs(size - used) <= 1e-3 * used:  # a factor in 16 bits is rounded
        return None
    if scaling is None:
        ctx.region.leave_loss()
    else:
        ctx.region.learn_factor(size / scaling.scale)
    found = _recompute(ctx.region, kept, ctx.rng, {ctx.loss: asked}, create_graph=False)
    multiply([g for g in found if g is not None], 1.0 / scale)
    return found


def _are_batched(arrived: Mapping[int, torch.Tensor]) -> bool:
    """Whether these are many gradients at once: ``torch.autograd.grad(..., is_grads_batched=True)``, by ``vmap``."""
    # private: a tensor within vmap has no public sign of it, and torch.autograd has a vmap of its own
    kinds = torch._C._functorch
    return any(kinds.is_legacy_batchedtensor(g) or kinds.is_batchedtensor(g) for g in arrived.values())


def makes_nan(factor: float, gradients: Sequence[torch.Tensor | None]) -> bool:
    """Whether a zero may meet what is not finite, in a product at the end where eager need not have one."""
    if math.isfinite(factor):
        return factor == 0.0 and not all_finite([g for g in gradients if g is not None])
    return True


def multiply(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all in place.

    Args:
        gradients: of any shapes.
        factor: a number, or a tensor with one element, on any device.
    """
    if not gradients or (isinstance(factor, float) and factor == 1.0):
        return
    if not isinstance(factor, torch.Tensor):
        torch._foreach_mul_(gradients, factor)
        return
    for device in {g.device for g in gradients}:
        # a loss may have dimensions, and lie on the CPU where its gradients do not
        torch._foreach_mul_([g for g in gradients if g.device == device], factor.to(device).reshape(()))


class PairStep(torch.autograd.Function):
    """Forward in one graph; backward in another, for gradients that arrive at any of the outputs.

    The outputs at the positions ``apart`` have no gradient from here, but from an :class:`ApartStep`.
    """

    @staticmethod
    def forward(
        ctx: Any, region: Region, pair: Pair, args: Sequence[Any], apart: Sequence[int], *differentiable: torch.Tensor
    ) -> Any:
        _start(ctx, region, apart, pair)
        ctx.kept = region.keep(args, pair)
        outputs, saved = region.run_forward(pair, args)
        ctx.in_torch = saved is None  # gradients as well, of what torch has computed
        ctx.save_for_backward(*saved or ())
        # by output number, with the count of changes in place: an alias shares it, and refers to no graph
        positions = region.outputs_by_position
        kept_results = [p for p, own in pair.own if not own and p in positions] if saved is not None else []
        ctx.read_again = {positions[p]: (outputs[p].detach(), outputs[p]._version) for p in kept_results}
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs]
        return _end(ctx, outputs, apart)

    # a gradient asked for between two regions arrives while Dynamo watches, which must not compile this
    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        arrived = _with_waiting(ctx, _arrived(ctx, incoming))
        return (None, None, None, None, *_gradients_of_pair(ctx, ctx, arrived, ctx.positions.values()))


def _gradients_of_pair(
    step: Any, node: Any, arrived: Mapping[int, torch.Tensor], visited: Collection[int]
) -> Sequence[torch.Tensor | None]:
    """Gradients by the inputs in :attr:`Region.wanted`.

    Args:
        step: the node of the run, of a :class:`PairStep`.
        node: the one that autograd visits: ``step``, or of an :class:`ApartStep`.
        arrived: gradients by output number.
        visited: numbers of the outputs of ``node``.
    """
    region: Region = step.region
    pair: Pair = step.pair
    if not arrived:
        # autograd, on its way to others, lets go of saved tensors here as well
        node.in_torch |= not torch._C._autograd._get_current_graph_task_keep_graph()
        return _of_nothing(step, visited)
    hooked = _by_hooks(step, arrived)
    if hooked is not None:
        return hooked
    kept, keeps = _take_kept(step, arrived)
    in_torch, read_again = node.in_torch, node.read_again
    if not keeps:  # autograd lets go of saved tensors
        node.in_torch, node.read_again = True, {}
    if torch.is_grad_enabled() or in_torch or _are_batched(arrived):
        return _recompute(region, kept, step.rng, arrived, create_graph=torch.is_grad_enabled())
    tangents = []
    for output in region.differentiable:
        gradient = arrived.get(output)
        if gradient is None:  # or it is among those that have arrived at an output that is the same tensor
            shape, dtype, device = step.shapes[pair.forward.outputs[output]]
            gradient = torch.zeros(shape, dtype=dtype, device=device)
        tangents.append(gradient)
    changed = {output for output, (alias, version) in read_again.items() if alias._version != version}
    if changed and not kept.reads_outputs(arrived, changed):
        return _recompute(region, kept, step.rng, arrived, create_graph=False)
    found = region.run_backward(pair, pair.inputs(kept.args, node.saved_tensors, kept.copies), tangents, arrived)
    if len(arrived) < len(tangents) and not region.finite_where_shared(found, arrived):
        return _recompute(region, kept, step.rng, arrived, create_graph=False)
    if not pair.verified:
        found, pair.verified = region.first_run.check_backward(
            pair.backward,
            kept.inputs(arrived),
            step.rng,
            arrived,
            found,
            lambda args: region.run_pair(pair, args, tangents, arrived),
        )
    if not step.apart:
        region.learn_from(arrived)
    return found


class ApartStep(torch.autograd.Function):
    """Some outputs of a run, in a node of their own: autograd visits what made their inputs only if they are used.

    What it would visit otherwise may have been changed in place since, which torch refuses and eager does not notice.

    Args of :meth:`forward`:
        step: the node that computed the outputs, of a :class:`LossStep` or a :class:`PairStep`.
        positions: of the outputs among those of ``step``.
        within: ``step`` visits all that these outputs visit.
        tensors: the outputs, then the inputs in :attr:`Region.wanted`.
    """

    @staticmethod
    def forward(ctx: Any, step: Any, positions: Sequence[int], within: bool, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.step, ctx.positions, ctx.within = step, positions, within
        if step.pair is not None:
            ctx.in_torch, ctx.read_again = step.in_torch, step.read_again
            ctx.save_for_backward(*[x.detach() for x in step.saved_tensors])
        return tuple(x.detach() for x in tensors[: len(positions)])

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        step = ctx.step
        at_positions = dict(zip(ctx.positions, incoming, strict=True))
        arrived = _arrived(step, [at_positions.get(p) for p in range(1 + max(ctx.positions))])
        visited = [step.positions[p] for p in ctx.positions]
        found: Sequence[torch.Tensor | None]
        if ctx.within and (step.pair is not None or active(step.watched)) and _is_ahead(step):
            step.waiting[1].update(arrived)  # one run of the backward graph for all, and one call of each hook
            found = [None] * len(step.region.wanted)
        elif step.pair is None:
            found = _gradients_beside_loss(step, arrived, visited)
        else:
            found = _gradients_of_pair(step, ctx, arrived, visited)
        return (None, None, None, *([None] * len(ctx.positions)), *found)


def _is_ahead(step: Any) -> bool:
    """Whether the backward that is running will visit ``step``, which then waits for more."""
    task = torch._C._current_graph_task_id()
    if step.visited_by == task or not torch._C._will_engine_execute_node(step):
        return False
    if step.waiting[0] != task:
        step.waiting = (task, {})
    return True


def _gradients_beside_loss(
    step: Any, arrived: Mapping[int, torch.Tensor], visited: Collection[int]
) -> Sequence[torch.Tensor | None]:
    """Gradients by the inputs in :attr:`Region.wanted`, of outputs beside the loss of a :class:`LossStep`."""
    region: Region = step.region
    if not arrived:
        return _of_nothing(step, visited)
    hooked = _by_hooks(step, arrived)
    if hooked is not None:
        return hooked
    kept, _ = _take_kept(step, arrived)
    again = torch.is_grad_enabled()
    if not again:
        region.leave_loss()
    return _recompute(region, kept, step.rng, arrived, create_graph=again)
