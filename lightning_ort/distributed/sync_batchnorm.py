"""Batch normalization by the statistics of all processes, on any device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # private, but what all of torch's are
from typing_extensions import override

__all__ = ["SyncBatchNorm", "sync", "unsync"]


class _SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # what one process reads, all have contributed to
        (gradient,) = gradients
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


@torch.compiler.disable(reason="processes talk to each other between graphs")
def _sum_over_processes(x: Tensor, group: Any) -> Tensor:
    return _SumOverProcesses.apply(x, group)


class SyncBatchNorm(_BatchNorm):
    """torch's layer of that name, which asks for a GPU, for any device.

    Sums are all that processes exchange: of the values first, then of the squares of what is left when the mean is
    taken away, each with its gradient. In evaluation, and in a single process, it is a ``BatchNorm``.

    Args:
        num_features: C of an input of shape [N, C, *].
        eps, momentum, affine, track_running_stats, device, dtype: as for ``torch.nn.BatchNorm2d``.
        process_group: which processes; ``None`` for all.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @override
    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions (got {input.dim()}): [N, C, *].")

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Normalize.

        Args:
            input: shape [N, C, *], floating. Processes may have different N.

        Raises:
            ValueError: there are fewer than two dimensions.
        """
        self._check_input_dim(input)
        if not (self.training and dist.is_available() and dist.is_initialized() and self._world_size() > 1):
            return super().forward(input)
        dims = [d for d in range(input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        # as accurate as a BatchNorm, whose kernels sum up 16-bit values in float32
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        count = x.new_full((1,), input.numel() // input.size(1))
        totals = _sum_over_processes(torch.cat([x.sum(dims), count]), self.process_group)
        count = totals[-1:].detach()
        mean = totals[:-1] / count
        centered = x - mean.view(shape)
        variance = _sum_over_processes(centered.square().sum(dims), self.process_group) / count
        if self.track_running_stats:
            self._note(mean.detach(), variance.detach(), count)
        result = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.view(shape) + self.bias.view(shape)
        return result.to(input.dtype)

    def _world_size(self) -> int:
        return dist.get_world_size(self.process_group)

    def _note(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1.0 / self.num_batches_tracked.to(mean.dtype) if self.momentum is None else self.momentum
            unbiased = variance * count / (count - 1)
            self.running_mean.copy_(self.running_mean * (1 - share) + mean.to(self.running_mean.dtype) * share)
            self.running_var.copy_(self.running_var * (1 - share) + unbiased.to(self.running_var.dtype) * share)


def sync(module: nn.Module) -> None:
    """Make each batch normalization in ``module`` a :class:`SyncBatchNorm`, of the same tensors and hooks."""
    for layer in module.modules():
        if isinstance(layer, _BatchNorm) and type(layer) not in (SyncBatchNorm, nn.SyncBatchNorm):
            layer.__dict__.update(process_group=None, _alone_class=type(layer))
            layer.__class__ = SyncBatchNorm


def unsync(module: nn.Module) -> None:
    """Undo :func:`sync`."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm) and "_alone_class" in layer.__dict__:
            layer.__class__ = layer.__dict__.pop("_alone_class")
            del layer.__dict__["process_group"]
