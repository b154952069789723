"""Adasum: gradients of several processes combined by how far they point in the same direction.

Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020, https://arxiv.org/abs/2006.02924. Two
gradients at right angles are added, two equal ones averaged::

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b

More than two are combined in pairs, the results in pairs again. Each parameter is a vector of its own.
"""

# torch looks at the annotations of hooks, and does not take strings: no "from __future__ import annotations" here
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["adasum", "adasum_hook"]


def adasum(vectors: Sequence[Tensor]) -> Tensor:
    """Combine the gradients of one parameter.

    Args:
        vectors: one per process, of one shape and floating dtype. The result depends on their order.

    Returns:
        A tensor of that shape and dtype; products are summed up in float64.

    Raises:
        ValueError: there are none.
    """
    if not vectors:
        raise ValueError("vectors is empty: there is nothing to combine.")
    level = list(vectors)
    while len(level) > 1:
        pairs = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = [*pairs, *level[len(level) // 2 * 2 :]]
    return level[0].clone() if len(vectors) == 1 else level[0]


def _pair(a: Tensor, b: Tensor) -> Tensor:
    x, y = a.double().flatten(), b.double().flatten()
    product, of_a, of_b = x @ y, x @ x, y @ y
    # nothing is taken away from a gradient of zeros, nor for its sake from the other
    share_a = torch.where(of_a == 0, 1.0, 1 - product / (2 * of_a))
    share_b = torch.where(of_b == 0, 1.0, 1 - product / (2 * of_b))
    return (share_a * a.double() + share_b * b.double()).to(a.dtype)


def adasum_hook(process_group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for ``DistributedDataParallel``: ``ORTStrategy(ddp_comm_hook=adasum_hook)``.

    Every process gets the gradients of all others, ``world_size - 1`` times the bytes of a bucket, and computes the
    same from them, bit for bit.

    Args:
        process_group: the state of the hook: which processes; ``None`` for all.
        bucket: gradients of some parameters in one flat tensor.
    """
    group = process_group or dist.group.WORLD
    assert group is not None
    mine, sizes = bucket.buffer(), [gradient.numel() for gradient in bucket.gradients()]
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    work = dist.all_gather(everyones, mine, group=group, async_op=True)
    assert work is not None

    def combine(_: torch.futures.Future[Tensor]) -> Tensor:
        parts = zip(*[x.split(sizes) for x in everyones], strict=True)
        mine.copy_(torch.cat([adasum(part) for part in parts]))
        return mine

    return work.get_future().then(combine)
