"""How gradients computed in ONNX Runtime reach torch's autograd."""

from __future__ import annotations

from typing import Any

import torch

from lightning_ort.compiler.checking import forked_rng

__all__ = ["LossStep", "PairStep"]


class _Kept:
    """Inputs of a run, kept so that torch can compute its gradients again.

    Tensors go through ``save_for_backward``, which notices when one of them was changed since.
    """

    def __init__(self, ctx: Any, region: Any, args: Any, also: Any = ()) -> None:
        self._positions = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        self._rest = [None if isinstance(x, torch.Tensor) else x for x in args]
        ctx.save_for_backward(*[args[i] for i in self._positions], *also)

    def args(self, ctx: Any) -> list[Any]:
        result = list(self._rest)
        for i, tensor in zip(self._positions, ctx.saved_tensors, strict=False):
            result[i] = tensor
        return result

    def also(self, ctx: Any) -> Any:
        return ctx.saved_tensors[len(self._positions) :]


class LossStep(torch.autograd.Function):
    """Outputs and gradients in one run; backward hands the gradients out, times the loss's own gradient."""

    @staticmethod
    def forward(ctx: Any, region: Any, args: Any, *differentiable: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.loss = region, region.loss_output
        ctx.rng = forked_rng.state(region.device) if region.has_draws else None
        ctx.kept = _Kept(ctx, region, args)
        outputs, ctx.gradients = region.run_loss(args)
        ctx.positions = region.outputs_by_position
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
            found = ctx.region.recompute(ctx.kept.args(ctx), ctx.rng, arrived, create_graph=again)
            return (None, None, *found)
        # a comparison would wait for the device; on the CPU it saves a pass over all gradients
        factor: Any = arrived[ctx.loss]
        if factor.device.type == "cpu":
            factor = factor.item()
        if not (isinstance(factor, float) and factor == 1.0):
            torch._foreach_mul_([g for g in gradients if g is not None], factor)
        return (None, None, *gradients)


class PairStep(torch.autograd.Function):
    """Forward in one graph; backward in another, for gradients that arrive at any of the outputs."""

    @staticmethod
    def forward(ctx: Any, region: Any, pair: Any, args: Any, *differentiable: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.pair = region, pair
        ctx.rng = forked_rng.state(region.device) if region.has_draws else None
        outputs, kept = region.run_forward(pair, args)
        ctx.numbers = [None if isinstance(x, torch.Tensor) else x for x in kept]
        ctx.kept = _Kept(ctx, region, args, [x for x in kept if isinstance(x, torch.Tensor)])
        ctx.shapes = [(o.shape, o.dtype) for o in outputs]
        ctx.positions = region.outputs_by_position
        ctx.mark_non_differentiable(*[outputs[i] for i in region.not_differentiable])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        region = ctx.region
        arrived = {ctx.positions[p]: g for p, g in enumerate(incoming) if g is not None}
        if not arrived:
            return (None, None, None, *([None] * len(region.wanted)))
        if torch.is_grad_enabled():
            found = region.recompute(ctx.kept.args(ctx), ctx.rng, arrived, create_graph=True)
            return (None, None, None, *found)
        tensors = iter(ctx.kept.also(ctx))
        kept = [next(tensors) if number is None else number for number in ctx.numbers]
        by_output = {ctx.positions[p]: p for p in ctx.positions}
        tangents = []
        for output in sorted(by_output):
            gradient = arrived.get(output)
            if gradient is None:
                shape, dtype = ctx.shapes[by_output[output]]
                gradient = torch.zeros(shape, dtype=dtype, device=region.device)
            tangents.append(gradient)
        found = region.run_backward(ctx.pair, kept, tangents)
        if not ctx.pair.verified:
            region.check_backward(ctx.kept.args(ctx), ctx.rng, arrived, found)
            ctx.pair.verified = True
        region.learn_from(arrived)
        return (None, None, None, *found)
