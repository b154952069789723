"""The state of an optimizer of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ort.checkpoints.state import OptimizerState, TrainingState
from lightning_ort.optim.kinds import TORCH_STATES, kind_of, odd_setting

__all__ = ["optimizer_of_torch", "torch_state"]

_STATES = {
    "Adam": ("moment_1", "moment_2"),
    "AdamW": ("moment_1", "moment_2"),
    "Lamb": ("moment_1", "moment_2"),
    "SGD": ("momentum",),
}
"""kind of an optimizer to the states that it may have"""


def _kind(optimizer: Optimizer) -> str:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; expected one of torch.optim.")
    kind = kind_of(optimizer)
    if kind is None:
        raise ValueError(
            f"The optimizer is a {type(optimizer).__name__}; expected torch's AdamW, Adam or SGD, or lightning_ort's "
            "AdamW or Lamb."
        )
    if odd := odd_setting(optimizer):
        raise ValueError(f"The {kind} has {odd.name}={odd.value!r}, which has no counterpart on a device.")
    return kind


def _numbers(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], trained: tuple[str, ...]) -> dict[str, int]:
    """Name of each trained parameter to its number in the optimizer's state.

    The optimizer may have others, as long as it remembers nothing of them: what leads to no loss gets no gradient.
    """
    numbers = {id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
    missing = [n for n in trained if id(parameters[n]) not in numbers]
    if missing:
        raise ValueError(f"The checkpoint trains {', '.join(missing)}, of which the optimizer has nothing.")
    ours = {id(parameters[n]) for n in trained}
    names = {id(p): n for n, p in parameters.items()}
    more = [p for p in optimizer.state if id(p) not in ours and optimizer.state[p]]
    if more:
        raise ValueError(
            f"The optimizer has trained {', '.join(names.get(id(p), 'a parameter of another module') for p in more)}, "
            "which the checkpoint does not train: its state would be lost."
        )
    return {n: numbers[id(parameters[n])] for n in trained}


def torch_state(state: TrainingState, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """For ``load_state_dict`` of ``optimizer``: what ``state`` holds of it.

    Args:
        parameters: of the module, by name.

    Raises:
        ValueError: it holds nothing, or something of another optimizer.
    """
    kind, own = _kind(optimizer), state.optimizer
    if own is None or (own.step and own.kind != "SGD" and not own.moments):
        raise ValueError(
            "The checkpoint holds no optimizer state. Save it with include_optimizer_state=True, or leave out the "
            "optimizer."
        )
    if _STATES.get(own.kind) != _STATES[kind] or (kind == "Lamb") != (own.kind == "Lamb"):
        raise ValueError(f"The checkpoint holds the state of {own.kind}, but the optimizer is {kind}.")
    found = optimizer.state_dict()
    heavy = any(group.get("momentum") for group in optimizer.param_groups)
    found["state"] = {}
    for name, number in _numbers(optimizer, parameters, state.trained).items():
        moments = own.moments.get(name, {})
        if heavy and own.step and not moments:
            raise ValueError("The checkpoint holds no momentum, but the optimizer has one.")
        if own.step and (moments or kind != "SGD"):
            entry: dict[str, Any] = {TORCH_STATES[m]: t.clone() for m, t in moments.items()}
            found["state"][number] = entry if kind == "SGD" else entry | {"step": torch.tensor(float(own.step))}
    for group in found["param_groups"]:
        rate = group["lr"]
        group["lr"] = torch.full_like(rate, own.learning_rate) if isinstance(rate, Tensor) else own.learning_rate
    return found


def optimizer_of_torch(
    state: TrainingState, optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]
) -> OptimizerState:
    """What ``optimizer`` remembers of the trained parameters of ``state``.

    Raises:
        ValueError: its parameters differ in learning rate or number of updates, which one state cannot hold.
    """
    kind = _kind(optimizer)
    numbers = _numbers(optimizer, parameters, state.trained)
    rates = {float(g["lr"]) for g in optimizer.param_groups}
    if len(rates) > 1:
        raise ValueError(f"The groups of the optimizer have the learning rates {sorted(rates)}; a device has one.")
    entries = optimizer.state_dict()["state"]
    per_name = {n: entries.get(i, {}) for n, i in numbers.items()}
    steps = {int(e.get("step", 0)) for e in per_name.values()}
    # plain descent does not count; its number of updates matters to nothing
    if len(steps) > 1:
        raise ValueError(f"The parameters were updated {sorted(steps)} times; a device counts all of them as one.")
    heavy = kind == "SGD" and any(group["momentum"] for group in optimizer.param_groups)
    states = _STATES[kind] if kind != "SGD" or heavy else ()
    moments = {}
    for name, entry in per_name.items():
        like = state.parameters[name]
        values = {m: entry.get(TORCH_STATES[m]) for m in states}
        moments[name] = {
            m: (torch.zeros_like(like) if t is None else t.detach().cpu().clone()) for m, t in values.items()
        }
    step = max(steps) or int(any(e.get("momentum_buffer") is not None for e in per_name.values()))
    return OptimizerState(kind, rates.pop(), step, moments)
