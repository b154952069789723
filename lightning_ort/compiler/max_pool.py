"""The gradient of max pooling over windows that do not overlap, without the indices of the maxima."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["max_pool_backward"]

aten = torch.ops.aten


@torch.library.custom_op("lightning_ort::max_pool_backward", mutates_args=())
def max_pool_backward(grad: Tensor, x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Each entry of ``grad`` at the first largest element of its window.

    Args:
        grad: (batch, channels, *positions).
        x: what was pooled, (batch, channels, *sizes).
        kernel: sizes of the window, which moves by as much.
    """
    rank, kernel = len(kernel), list(kernel)
    forward = aten.max_pool2d_with_indices if rank == 2 else aten.max_pool3d_with_indices
    backward = aten.max_pool2d_with_indices_backward if rank == 2 else aten.max_pool3d_with_indices_backward
    indices = forward(x, kernel, kernel)[1]
    return backward(grad, x, kernel, kernel, [0] * rank, [1] * rank, False, indices)


@max_pool_backward.register_fake
def _(grad: Tensor, x: Tensor, kernel: Sequence[int]) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
