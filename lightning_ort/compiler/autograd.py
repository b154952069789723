"""How gradients computed in ONNX Runtime reach torch's autograd."""

from __future__ import annotations

from typing import Any

import torch

from lightning_ort.compiler.checking import ForkedRNG

__all__ = ["LossStep", "PairStep"]


def _keep(ctx: Any, args: Any, also: Any = ()) -> None:
    """Keep the inputs of a run, so that torch can compute its gradients again.

    Tensors go through ``save_for_backward``, which notices when one of them was changed since.
    """
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*tensors, *also)
    ctx.n_tensors = len(tensors)
    ctx.numbers = None if len(tensors) == len(args) else [None if isinstance(x, torch.Tensor) else x for x in args]


def _kept(ctx: Any) -> list[Any]:
    """The inputs of the run."""
    tensors = ctx.saved_tensors[: ctx.n_tensors]
    if ctx.numbers is None:
        return list(tensors)
    remaining = iter(tensors)
    return [next(remaining) if number is None else number for number in ctx.numbers]


class LossStep(torch.autograd.Function):
    """Outputs and gradients in one run; backward hands the gradients out, times the loss's own gradient."""

    @staticmethod
    def forward(ctx: Any, region: Any, args: Any, *differentiable: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.loss = region, region.loss_output
        ctx.rng = ForkedRNG.state(region.device) if region.has_draws else None
        _keep(ctx, args)
        outputs, ctx.gradients, ctx.finite = region.run_loss(args)
        if ctx.finite is not None:
            ctx.scale = region.scaling.scale
        ctx.positions = region.outputs_by_position
        if region.not_differentiable:
            ctx.mark_non_differentiable(*[outputs[i] for i in region.not_differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        arrived = {ctx.positions[p]: g for p, g in enumerate(incoming) if g is not None}
        if not arrived:
            return (None, None, *([None] * len(ctx.region.wanted)))
        again = torch.is_grad_enabled()
        gradients, ctx.gradients = ctx.gradients, None
        if again or gradients is None or set(arrived) != {ctx.loss}:
            if set(arrived) != {ctx.loss} and not again:
                ctx.region.use_pair()
            found = ctx.region.recompute(_kept(ctx), ctx.rng, arrived, create_graph=again)
            return (None, None, *found)
        # a comparison would wait for the device; on the CPU it saves a pass over all gradients
        factor: Any = arrived[ctx.loss]
        if factor.device.type == "cpu":
            factor = factor.item()
        if ctx.finite is None:
            _multiply([g for g in gradients if g is not None], factor)
        else:
            _multiply([g for g in gradients if g is not None and g.dtype.itemsize >= 4], factor)
            # those are still scaled
            _multiply([g for g in gradients if g is not None and g.dtype.itemsize < 4], factor / ctx.scale)
            ctx.region.scaling.note(ctx.finite, _parameters(ctx))
        return (None, None, *gradients)


def _multiply(gradients: list[torch.Tensor], factor: Any) -> None:
    if gradients and not (isinstance(factor, float) and factor == 1.0):
        torch._foreach_mul_(gradients, factor)


def _parameters(ctx: Any) -> list[torch.Tensor]:
    """Those whose gradients the region computes."""
    inputs = _kept(ctx)
    return [inputs[i] for i in ctx.region.wanted if isinstance(inputs[i], torch.nn.Parameter)]


class PairStep(torch.autograd.Function):
    """Forward in one graph; backward in another, for gradients that arrive at any of the outputs."""

    @staticmethod
    def forward(ctx: Any, region: Any, pair: Any, args: Any, *differentiable: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.pair = region, pair
        ctx.rng = ForkedRNG.state(region.device) if region.has_draws else None
        outputs, kept = region.run_forward(pair, args)
        ctx.kept_numbers = [None if isinstance(x, torch.Tensor) else x for x in kept]
        _keep(ctx, args, [x for x in kept if isinstance(x, torch.Tensor)])
        ctx.shapes = [(o.shape, o.dtype, o.device) for o in outputs]
        ctx.positions = region.outputs_by_position
        if region.not_differentiable:
            ctx.mark_non_differentiable(*[outputs[i] for i in region.not_differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        region = ctx.region
        arrived = {ctx.positions[p]: g for p, g in enumerate(incoming) if g is not None}
        if not arrived:
            return (None, None, None, *([None] * len(region.wanted)))
        if torch.is_grad_enabled():
            found = region.recompute(_kept(ctx), ctx.rng, arrived, create_graph=True)
            return (None, None, None, *found)
        tensors = iter(ctx.saved_tensors[ctx.n_tensors :])
        kept = [next(tensors) if number is None else number for number in ctx.kept_numbers]
        by_output = {ctx.positions[p]: p for p in ctx.positions}
        tangents = []
        for output in sorted(by_output):
            gradient = arrived.get(output)
            if gradient is None:
                shape, dtype, device = ctx.shapes[by_output[output]]
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            tangents.append(gradient)
        found = region.run_backward(ctx.pair, kept, tangents)
        if not ctx.pair.verified:
            region.first_run.check_backward(_kept(ctx), ctx.rng, arrived, found, ctx.pair.backward.half)
            ctx.pair.verified = True
        region.learn_from(arrived)
        return (None, None, None, *found)
