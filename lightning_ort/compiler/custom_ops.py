"""Operators for the steps of a recurrent layer: all time steps are one node of the traced graph.

Each takes the input's share of the gates, computed for all steps by one matrix product, and returns what its gradient
needs. The implementations here are for torch; ONNX Runtime gets a ``Scan``. Shapes: ``T`` steps, ``B`` sequences,
``H`` hidden units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "gru_steps",
    "gru_steps_backward",
    "lstm_steps",
    "lstm_steps_backward",
    "max_pool_backward",
    "rnn_steps",
    "rnn_steps_backward",
]


def _order(steps: int, reverse: bool) -> range:
    return range(steps - 1, -1, -1) if reverse else range(steps)


def _before(values: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    """For each step of ``values`` (T, B, H) the value of the step before."""
    first = initial.unsqueeze(0)
    return torch.cat([values[1:], first]) if reverse else torch.cat([first, values[:-1]])


@torch.library.custom_op("lightning_ort::lstm_steps", mutates_args=())
def lstm_steps(
    projected: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and cells (T, B, H) and activated gates (T, B, 4, H) in torch's order i, f, g, o.

    Args:
        projected: input times input weights plus both biases, (T, B, 4 * H).
        hidden: initial hidden state, (B, H).
        cell: initial cell, (B, H).
        weight: hidden weights, (4 * H, H).
        reverse: from the last step to the first.
    """
    steps, batch, width = projected.shape[0], *hidden.shape
    outputs = projected.new_empty(steps, batch, width)
    cells, gates = torch.empty_like(outputs), projected.new_empty(steps, batch, 4, width)
    for t in _order(steps, reverse):
        i, f, g, o = (projected[t] + hidden @ weight.T).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        cell = f * cell + i * g
        hidden = o * cell.tanh()
        outputs[t], cells[t], gates[t] = hidden, cell, torch.stack([i, f, g, o], 1)
    return outputs, cells, gates


@lstm_steps.register_fake
def _(projected: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, width = projected.shape[0], *hidden.shape
    outputs = projected.new_empty(steps, batch, width)
    return outputs, torch.empty_like(outputs), projected.new_empty(steps, batch, 4, width)


@torch.library.custom_op("lightning_ort::lstm_steps_backward", mutates_args=())
def lstm_steps_backward(
    grad: Tensor, grad_cells: Tensor | None, cells: Tensor, gates: Tensor, cell: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``projected``, ``hidden`` and ``cell`` of :func:`lstm_steps`."""
    steps, batch, width = grad.shape
    before = _before(cells, cell, reverse)
    result = grad.new_empty(steps, batch, 4 * width)
    dh, dc = torch.zeros_like(cell), torch.zeros_like(cell)
    for t in _order(steps, not reverse):
        i, f, g, o = gates[t].unbind(1)
        tanh, dh = cells[t].tanh(), grad[t] + dh
        dc = dc + dh * o * (1 - tanh * tanh)
        if grad_cells is not None:
            dc = dc + grad_cells[t]
        result[t] = torch.cat(
            [dc * g * i * (1 - i), dc * before[t] * f * (1 - f), dc * i * (1 - g * g), dh * tanh * o * (1 - o)], 1
        )
        dh, dc = result[t] @ weight, dc * f
    return result, dh, dc


@lstm_steps_backward.register_fake
def _(
    grad: Tensor, grad_cells: Tensor | None, cells: Tensor, gates: Tensor, cell: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, width = grad.shape
    return grad.new_empty(steps, batch, 4 * width), torch.empty_like(cell), torch.empty_like(cell)


@torch.library.custom_op("lightning_ort::gru_steps", mutates_args=())
def gru_steps(
    projected: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Hidden states (T, B, H) and (T, B, 4, H) of the gates r, z, n and the hidden state's share of n.

    Args:
        projected: input times input weights plus their bias, (T, B, 3 * H).
        hidden: initial hidden state, (B, H).
        weight: hidden weights, (3 * H, H).
        bias: hidden bias, (3 * H,).
        reverse: from the last step to the first.
    """
    steps, batch, width = projected.shape[0], *hidden.shape
    outputs, gates = projected.new_empty(steps, batch, width), projected.new_empty(steps, batch, 4, width)
    for t in _order(steps, reverse):
        xr, xz, xn = projected[t].chunk(3, 1)
        hr, hz, hn = torch.nn.functional.linear(hidden, weight, bias).chunk(3, 1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        hidden = n + z * (hidden - n)
        outputs[t], gates[t] = hidden, torch.stack([r, z, n, hn], 1)
    return outputs, gates


@gru_steps.register_fake
def _(projected: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor]:
    steps, batch, width = projected.shape[0], *hidden.shape
    return projected.new_empty(steps, batch, width), projected.new_empty(steps, batch, 4, width)


@torch.library.custom_op("lightning_ort::gru_steps_backward", mutates_args=())
def gru_steps_backward(
    grad: Tensor, outputs: Tensor, gates: Tensor, hidden: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``projected``, of the hidden state's share of the gates (T, B, 3 * H), and of ``hidden``."""
    steps, batch, width = grad.shape
    before = _before(outputs, hidden, reverse)
    result, inner = grad.new_empty(steps, batch, 3 * width), grad.new_empty(steps, batch, 3 * width)
    dh = torch.zeros_like(hidden)
    for t in _order(steps, not reverse):
        r, z, n, hn = gates[t].unbind(1)
        dh = grad[t] + dh
        dn = dh * (1 - z) * (1 - n * n)
        dz = dh * (before[t] - n) * z * (1 - z)
        dr = dn * hn * r * (1 - r)
        result[t], inner[t] = torch.cat([dr, dz, dn], 1), torch.cat([dr, dz, dn * r], 1)
        dh = dh * z + inner[t] @ weight
    return result, inner, dh


@gru_steps_backward.register_fake
def _(
    grad: Tensor, outputs: Tensor, gates: Tensor, hidden: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    steps, batch, width = grad.shape
    result = grad.new_empty(steps, batch, 3 * width)
    return result, torch.empty_like(result), torch.empty_like(hidden)


@torch.library.custom_op("lightning_ort::rnn_steps", mutates_args=())
def rnn_steps(projected: Tensor, hidden: Tensor, weight: Tensor, relu: bool, reverse: bool) -> Tensor:
    """Hidden states (T, B, H) of a plain recurrent layer with tanh or relu.

    Args:
        projected: input times input weights plus both biases, (T, B, H).
        hidden: initial hidden state, (B, H).
        weight: hidden weights, (H, H).
        relu: relu, not tanh.
        reverse: from the last step to the first.
    """
    outputs = torch.empty_like(projected)
    for t in _order(projected.shape[0], reverse):
        total = projected[t] + hidden @ weight.T
        outputs[t] = hidden = total.relu() if relu else total.tanh()
    return outputs


@rnn_steps.register_fake
def _(projected: Tensor, hidden: Tensor, weight: Tensor, relu: bool, reverse: bool) -> Tensor:
    return projected.new_empty(projected.shape)


@torch.library.custom_op("lightning_ort::rnn_steps_backward", mutates_args=())
def rnn_steps_backward(
    grad: Tensor, outputs: Tensor, weight: Tensor, relu: bool, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of ``projected`` and ``hidden`` of :func:`rnn_steps`."""
    result = torch.empty_like(grad)
    slope = (outputs > 0).to(grad.dtype) if relu else 1 - outputs * outputs
    dh = torch.zeros_like(grad[0])
    for t in _order(grad.shape[0], not reverse):
        result[t] = (grad[t] + dh) * slope[t]
        dh = result[t] @ weight
    return result, dh


@rnn_steps_backward.register_fake
def _(grad: Tensor, outputs: Tensor, weight: Tensor, relu: bool, reverse: bool) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape[1:])


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
