"""LSTM, GRU and plain recurrent networks: layers and directions around the operators of one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_ort.compiler import custom_ops
from lightning_ort.compiler.decompositions.registry import composes, tells

__all__: list[str] = []

aten = torch.ops.aten

Layer = Callable[[Tensor, tuple[Tensor, ...], Sequence[Tensor], bool, bool], tuple[Tensor, tuple[Tensor, ...]]]
"""(input, initial states, parameters, has biases, reverse) to (outputs, final states)"""


def _previous(values: Tensor, initial: Tensor, reverse: bool) -> Tensor:
    first, steps = initial.unsqueeze(0), values.shape[0]
    if reverse:
        return torch.cat([values.narrow(0, 1, steps - 1), first])
    return torch.cat([first, values.narrow(0, 0, steps - 1)])


def _weight_gradient(grad: Tensor, states: Tensor) -> Tensor:
    """Sum over all steps of the products of (T, B, gates) with (T, B, H)."""
    return grad.flatten(0, 1).T @ states.flatten(0, 1)


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, hidden: Tensor, cell: Tensor, weight: Tensor, reverse: bool) -> Any:
        outputs, cells, gates = custom_ops.lstm_steps(projected, hidden, cell, weight, reverse)
        ctx.save_for_backward(outputs, cells, gates, hidden, cell, weight)
        ctx.reverse = reverse
        ctx.set_materialize_grads(False)
        return outputs, cells

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_cells: Tensor | None) -> Any:
        outputs, cells, gates, hidden, cell, weight = ctx.saved_tensors
        grad = torch.zeros_like(outputs) if grad is None else grad
        result, dh, dc = custom_ops.lstm_steps_backward(grad, grad_cells, cells, gates, cell, weight, ctx.reverse)
        return result, dh, dc, _weight_gradient(result, _previous(outputs, hidden, ctx.reverse)), None


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, reverse: bool
    ) -> Tensor:
        outputs, gates = custom_ops.gru_steps(projected, hidden, weight, bias, reverse)
        ctx.save_for_backward(outputs, gates, hidden, weight)
        ctx.reverse, ctx.biased = reverse, bias is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        outputs, gates, hidden, weight = ctx.saved_tensors
        result, inner, dh = custom_ops.gru_steps_backward(grad, outputs, gates, hidden, weight, ctx.reverse)
        dw = _weight_gradient(inner, _previous(outputs, hidden, ctx.reverse))
        return result, dh, dw, inner.sum((0, 1)) if ctx.biased else None, None


class _RNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: Tensor, hidden: Tensor, weight: Tensor, relu: bool, reverse: bool) -> Tensor:
        outputs = custom_ops.rnn_steps(projected, hidden, weight, relu, reverse)
        ctx.save_for_backward(outputs, hidden, weight)
        ctx.relu, ctx.reverse = relu, reverse
        return outputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        outputs, hidden, weight = ctx.saved_tensors
        result, dh = custom_ops.rnn_steps_backward(grad, outputs, weight, ctx.relu, ctx.reverse)
        return result, dh, _weight_gradient(result, _previous(outputs, hidden, ctx.reverse)), None, None


def _last(outputs: Tensor, reverse: bool) -> Tensor:
    return outputs[0] if reverse else outputs[-1]


def _lstm_layer(
    x: Tensor, states: tuple[Tensor, ...], parameters: Sequence[Tensor], biased: bool, reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    bias = parameters[2] + parameters[3] if biased else None
    projected = F.linear(x, parameters[0], bias)
    # under autocast all of a layer is of 16 bits, as torch's own has it
    hidden, cell, weight = (t.to(projected.dtype) for t in (*states, parameters[1]))
    outputs, cells = _LSTM.apply(projected, hidden, cell, weight, reverse)
    return outputs, (_last(outputs, reverse), _last(cells, reverse))


def _projected_lstm_layer(
    x: Tensor, states: tuple[Tensor, ...], parameters: Sequence[Tensor], biased: bool, reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A layer whose hidden state is projected, step by step."""
    hidden, cell = states
    bias = parameters[2] + parameters[3] if biased else None
    steps = F.linear(x, parameters[0], bias).unbind(0)
    outputs = []
    for step in reversed(steps) if reverse else steps:
        i, f, g, o = (step + F.linear(hidden, parameters[1])).chunk(4, 1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = F.linear(o.sigmoid() * cell.tanh(), parameters[-1])
        outputs.append(hidden)
    return torch.stack(outputs[::-1] if reverse else outputs), (hidden, cell)


def _gru_layer(
    x: Tensor, states: tuple[Tensor, ...], parameters: Sequence[Tensor], biased: bool, reverse: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Under autocast products are of 16 bits, and states as wide as they are passed, as torch's own layer has them."""
    projected = F.linear(x, parameters[0], parameters[2] if biased else None)
    inner = parameters[1::2]  # the weights of the states, and their biases
    wide = torch.promote_types(projected.dtype, states[0].dtype)
    if wide != projected.dtype:
        inner = [p.to(projected.dtype).to(wide) for p in inner]
        projected = projected.to(wide)
    outputs = _GRU.apply(projected, states[0], inner[0], inner[1] if biased else None, reverse)
    return outputs, (_last(outputs, reverse),)


def _rnn_layer(relu: bool) -> Layer:
    def layer(
        x: Tensor, states: tuple[Tensor, ...], parameters: Sequence[Tensor], biased: bool, reverse: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        bias = parameters[2] + parameters[3] if biased else None
        projected = F.linear(x, parameters[0], bias)
        hidden, weight = states[0].to(projected.dtype), parameters[1].to(projected.dtype)
        outputs = _RNN.apply(projected, hidden, weight, relu, reverse)
        return outputs, (_last(outputs, reverse),)

    return layer


def _network(
    layer: Layer,
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    per_layer: int,
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """All layers and directions; ``states`` are (layers * directions, B, H) each."""
    if batch_first:
        x = x.transpose(0, 1)
    finals: list[tuple[Tensor, ...]] = []
    directions = (False, True) if bidirectional else (False,)
    for i in range(layers):
        outputs = []
        for reverse in directions:
            number = len(finals)
            own = parameters[number * per_layer : (number + 1) * per_layer]
            out, final = layer(x, tuple(s[number] for s in states), own, biased, reverse)
            outputs.append(out)
            finals.append(final)
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if dropout > 0 and train and i < layers - 1:
            x = F.dropout(x, dropout)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(s) for s in zip(*finals, strict=True)))


# torch's own trace of recurrent layers leaves out the dropout between them
@composes(aten.lstm.input, native=True, casting=True)
def lstm(
    x: Tensor,
    states: Sequence[Tensor],
    parameters: Sequence[Tensor],
    biased: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    projected = states[0].shape[2] != states[1].shape[2]
    if projected and not isinstance(x.shape[1 if batch_first else 0], int):
        return NotImplemented
    layer = _projected_lstm_layer if projected else _lstm_layer
    per_layer = 2 + 2 * biased + projected
    return _network(layer, x, states, parameters, per_layer, biased, layers, dropout, train, bidirectional, batch_first)


def _register_single_state(overload: Any, layer: Layer) -> None:
    @composes(overload, native=True, casting=True)
    def network(x: Tensor, hidden: Tensor, parameters: Sequence[Tensor], biased: bool, *options: Any) -> Any:
        return _network(layer, x, [hidden], parameters, 2 + 2 * biased, biased, *options)


_register_single_state(aten.gru.input, _gru_layer)
_register_single_state(aten.rnn_tanh.input, _rnn_layer(relu=False))
_register_single_state(aten.rnn_relu.input, _rnn_layer(relu=True))


_FEW = 2
"""steps after which what autograd notes of a layer no longer changes but in length"""


@tells(aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
def by_few_steps(network: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    """All steps, which torch makes to tell what results are like, take long, and settle how many there are."""
    *others, batch_first = rest
    steps = x.shape[1 if batch_first else 0]
    if isinstance(steps, int) and steps <= _FEW:
        return network(x, *rest)
    rows = x.transpose(0, 1) if batch_first else x
    outputs, *finals = network(rows.narrow(0, 0, _FEW), *others, False)
    outputs = torch.cat([outputs, outputs[-1:].expand(steps - _FEW, *outputs.shape[1:])])
    return (outputs.transpose(0, 1) if batch_first else outputs, *finals)


@composes(aten.lstm_cell.default, casting=True)
def lstm_cell(
    x: Tensor,
    states: Sequence[Tensor],
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """New hidden state and cell, as ``torch.nn.LSTMCell``; the gates are i, f, g, o."""
    hidden, cell = states
    gates = F.linear(x, weight, bias) + F.linear(hidden, hidden_weight, hidden_bias)
    i, f, g, o = gates.chunk(4, -1)
    cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


@composes(aten.gru_cell.default, casting=True)
def gru_cell(
    x: Tensor,
    hidden: Tensor,
    weight: Tensor,
    hidden_weight: Tensor,
    bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> Tensor:
    """New hidden state, as ``torch.nn.GRUCell``; the gates are r, z, n."""
    xr, xz, xn = F.linear(x, weight, bias).chunk(3, -1)
    hr, hz, hn = F.linear(hidden, hidden_weight, hidden_bias).chunk(3, -1)
    n = (xn + (xr + hr).sigmoid() * hn).tanh()
    return n + (xz + hz).sigmoid() * (hidden - n)
