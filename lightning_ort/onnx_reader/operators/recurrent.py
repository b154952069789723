"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader.registry import operator

__all__: list[str] = []

# position of torch's gates among ONNX's: LSTM i o f c -> i f g o, GRU z r h -> r z n
_LSTM_GATES, _GRU_GATES = [0, 2, 3, 1], [1, 0, 2]


def _weights(w: Tensor, r: Tensor, b: Tensor | None, order: list[int]) -> list[Tensor]:
    """Parameters in the order torch wants them, direction after direction."""
    gates = len(order)

    def arranged(weight: Tensor) -> Tensor:
        parts = weight.chunk(gates)
        return torch.cat([parts[i] for i in order]) if gates > 1 else weight

    found = []
    for d in range(w.shape[0]):
        found += [arranged(w[d]), arranged(r[d])]
        if b is not None:
            half = b.shape[1] // 2
            found += [arranged(b[d][:half]), arranged(b[d][half:])]
    return found


def _check(kind: str, direction: str, lengths: Any, x: Tensor, activations: Any, expected: list[str], clip: Any) -> int:
    directions = 2 if direction == "bidirectional" else 1
    if activations and [a.lower() for a in activations] != expected * directions:
        raise UnsupportedError(f"{kind}: activations {activations} cannot be read, only {expected}")
    if clip is not None:
        raise UnsupportedError(f"{kind}: clip cannot be read")
    if lengths is not None and any(n != x.shape[0] for n in lengths):
        raise UnsupportedError(f"{kind}: sequences shorter than the data cannot be read")
    return directions


def _initial(state: Tensor | None, x: Tensor, directions: int, hidden: int) -> Tensor:
    if state is not None:
        return state
    return torch.zeros([directions, x.shape[1], hidden], dtype=x.dtype, device=x.device)


def _outputs(y: Tensor, states: tuple[Tensor, ...], directions: int, layout: int, reverse: bool, count: int) -> Any:
    y = y.flip(0) if reverse else y
    y = y.reshape(y.shape[0], y.shape[1], directions, -1)
    y = y.permute(1, 0, 2, 3) if layout else y.permute(0, 2, 1, 3)
    results = (y, *[s.transpose(0, 1) if layout else s for s in states])
    return results[:count] if count > 1 else y


def _arranged(x: Tensor, states: list[Tensor | None], layout: int, reverse: bool) -> tuple[Tensor, list[Any]]:
    if layout:
        x = x.transpose(0, 1)
        states = [None if s is None else s.transpose(0, 1) for s in states]
    return (x.flip(0) if reverse else x), states


@operator("LSTM", sizes=["sequence_lens"])
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Any = None,
    initial_h: Tensor | None = None,
    initial_c: Tensor | None = None,
    p: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int,
    input_forget: int = 0,
    layout: int = 0,
    n_outputs: int,
) -> Any:
    if p is not None or input_forget:
        raise UnsupportedError("LSTM: peepholes and coupled forget gates cannot be read")
    reverse = direction == "reverse"
    x, (h, c) = _arranged(x, [initial_h, initial_c], layout, reverse)
    n = _check("LSTM", direction, sequence_lens, x, activations, ["sigmoid", "tanh", "tanh"], clip)
    state = [_initial(h, x, n, hidden_size), _initial(c, x, n, hidden_size)]
    weights = _weights(w, r, b, _LSTM_GATES)
    y, h, c = torch.lstm(x, state, weights, b is not None, 1, 0.0, False, n == 2, False)
    return _outputs(y, (h, c), n, layout, reverse, n_outputs)


@operator("GRU", sizes=["sequence_lens"])
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Any = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int,
    layout: int = 0,
    linear_before_reset: int = 0,
    n_outputs: int,
) -> Any:
    reverse = direction == "reverse"
    x, (h,) = _arranged(x, [initial_h], layout, reverse)
    n = _check("GRU", direction, sequence_lens, x, activations, ["sigmoid", "tanh"], clip)
    h = _initial(h, x, n, hidden_size)
    weights = _weights(w, r, b, _GRU_GATES)
    if linear_before_reset:
        y, h = torch.gru(x, h, weights, b is not None, 1, 0.0, False, n == 2, False)
    else:
        y, h = _gru_reset_first(x, h, weights, b is not None, n)
    return _outputs(y, (h,), n, layout, reverse, n_outputs)


def _gru_reset_first(
    x: Tensor, initial: Tensor, weights: list[Tensor], biased: bool, directions: int
) -> tuple[Tensor, Tensor]:
    """The form of the original paper, which torch lacks: the state is reset before its product with the weights."""
    if isinstance(x.shape[0], torch.SymInt):
        raise UnsupportedError(
            "GRU: with linear_before_reset=0 the number of steps must be fixed in the file (the first size of its "
            "input), as they are taken one after the other; with linear_before_reset=1 (reset_after=True in Keras, and "
            "what torch exports) it may vary"
        )
    each = len(weights) // directions
    outputs, finals = [], []
    for d in range(directions):
        w, r, *biases = weights[d * each : (d + 1) * each]
        projected = torch.nn.functional.linear(x, w, biases[0] if biased else None)
        hidden = r.shape[1]
        r_gates, r_new = r[: 2 * hidden], r[2 * hidden :]
        b_gates, b_new = (biases[1][: 2 * hidden], biases[1][2 * hidden :]) if biased else (None, None)
        h, steps = initial[d], []
        for p in reversed(projected.unbind(0)) if d else projected.unbind(0):
            gates = torch.sigmoid(p[:, : 2 * hidden] + torch.nn.functional.linear(h, r_gates, b_gates))
            reset, update = gates.chunk(2, 1)
            new = torch.tanh(p[:, 2 * hidden :] + torch.nn.functional.linear(reset * h, r_new, b_new))
            h = (1 - update) * new + update * h
            steps.append(h)
        outputs.append(torch.stack(steps[::-1] if d else steps))
        finals.append(h)
    return torch.cat(outputs, -1), torch.stack(finals)


@operator("RNN", sizes=["sequence_lens"])
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    b: Tensor | None = None,
    sequence_lens: Any = None,
    initial_h: Tensor | None = None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int,
    layout: int = 0,
    n_outputs: int,
) -> Any:
    reverse = direction == "reverse"
    x, (h,) = _arranged(x, [initial_h], layout, reverse)
    is_relu = bool(activations) and all(a.lower() == "relu" for a in activations or [])
    n = _check("RNN", direction, sequence_lens, x, activations, ["relu" if is_relu else "tanh"], clip)
    run = torch.rnn_relu if is_relu else torch.rnn_tanh
    weights = _weights(w, r, b, [0])
    y, h = run(x, _initial(h, x, n, hidden_size), weights, b is not None, 1, 0.0, False, n == 2, False)
    return _outputs(y, (h,), n, layout, reverse, n_outputs)
