"""How results lie in memory on the CPU, of operators whose kernels do that otherwise than torch's tracing says.

Where a mask is drawn for such a result, the order of its numbers follows from that.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from lightning_ort.compiler.decompositions.registry import aten, composes, lies_as_computed, lies_as_read, lies_in_rows

__all__: list[str] = []


lies_as_read(aten.roll.default, when=lambda x, shifts, dims=(): bool(dims))
lies_as_read(aten.max_unpool2d.default)
lies_as_read(aten.native_batch_norm.default)
lies_in_rows(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default, aten.baddbmm.default,
    aten._pad_circular.default,
)  # fmt: skip
lies_as_computed(
    aten.copysign.Tensor, aten.floor_divide.default, aten.div.Tensor_mode, aten.logaddexp.default,
    aten.heaviside.default,
)  # fmt: skip


@composes(aten.channel_shuffle.default, native=True)
def channel_shuffle(x: Tensor, groups: int) -> Any:
    if x.dim() < 3 or not isinstance(x.shape[1], int) or x.shape[1] % groups or groups < 1:
        return NotImplemented  # torch says what is wrong
    shuffled = x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    return shuffled.contiguous(memory_format=suggest_memory_format(x))


@composes(aten.log_sigmoid.default, native=True)
def log_sigmoid(x: Tensor) -> Any:
    return aten.log_sigmoid_forward.default(x.contiguous() if x.device.type == "cpu" else x)[0]


@composes(aten.rrelu.default, native=True)
def rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None) -> Any:
    if training or x.device.type != "cpu":
        return NotImplemented
    return F.leaky_relu(x.contiguous(), (lower + upper) / 2)
