"""Updates of a training on a device."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from lightning_ort.ondevice.flavour import flavour_of_model
from lightning_ort.ondevice.memory import Packed
from lightning_ort.ondevice.module import Module
from lightning_ort.ondevice.state import OptimizerState
from lightning_ort.updates import FusedAdam, Update

__all__ = ["Optimizer"]


class Optimizer:
    """Updates the parameters of ``module`` by their gradients.

    The update is made in place, on the memory of the module: by ONNX Runtime, but Adam and AdamW without clipping by
    torch's fused kernel, which is faster.

    Args:
        optimizer_uri: the artifact that says which optimizer it is.
        module: whose parameters are updated. Moments, number of updates and learning rate go on from its checkpoint,
            where that holds them.

    Raises:
        FileNotFoundError, ValueError: no such artifact, or the checkpoint holds the state of another optimizer.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"module is a {type(module).__name__}; expected lightning_ort.ondevice.Module.")
        path = Path(optimizer_uri)
        values = module.state.training_state
        self._config = config = flavour_of_model(path).load_optimizer(path, values)
        old = values.optimizer
        state = OptimizerState(config.kind, config.lr)
        if old is not None:
            _check(old, config.kind, config.states, values.trained)
            state.learning_rate, state.step = old.learning_rate, old.step
        trained = {n: values.parameters[n] for n in values.trained}
        packed = {s: Packed(trained) for s in config.states}
        if old is not None and old.moments:
            for s, memory in packed.items():
                memory.fill({n: old.moments[n][s] for n in trained})
        state.moments = {n: {s: memory.views[n] for s, memory in packed.items()} for n in trained}
        params: list[Tensor]
        if config.rule.elementwise:
            # all parameters of one type as one
            params = list(module.memory.flat.values())
            states = [[packed[s].flat[p.dtype] for s in config.states] for p in params]
            gradients = list(module.gradients.flat.values())
        else:
            params = list(trained.values())
            states = [list(state.moments[n].values()) for n in trained]
            gradients = [module.gradients.views[n] for n in trained]
        types = list(dict.fromkeys(p.dtype for p in params))
        groups = [types.index(p.dtype) for p in params]
        limit = config.clip_grad_norm
        # the fused kernel would leave clipped gradients behind, which may be added to
        self._numbers: Callable[[float, int], Sequence[float]]
        self._update: Callable[[Sequence[float]], None]
        if limit is None and FusedAdam.can_do(config.rule, params, module.config):
            self._numbers = config.fused_numbers
            self._update = FusedAdam(params, states, groups).bound_to(gradients)
        else:
            self._numbers = config.numbers
            update = Update(config.rule, params, states, groups, module.config, clip=limit is not None)
            self._update = _InGraph(update, gradients, limit, len(types))
        self._module, values.optimizer = module, state

    @property
    def _state(self) -> OptimizerState:
        state = self._module.state.training_state.optimizer
        assert state is not None
        return state

    @property
    def step_count(self) -> int:
        """Number of updates that were made, those before the checkpoint included."""
        return self._state.step

    def step(self) -> None:
        """Update the parameters once by the gradients as they are.

        Raises:
            RuntimeError: there are none yet.
        """
        held = self._module.state
        if not held.gradients:
            raise RuntimeError("There are no gradients yet: call the module in training mode before optimizer.step().")
        state = held.training_state.optimizer
        assert state is not None
        self._update(self._numbers(state.learning_rate, state.step + 1))
        state.step += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next updates.

        Raises:
            ValueError: a number below 0, or none at all.
        """
        rate = float(learning_rate)
        if not math.isfinite(rate) or rate < 0:
            raise ValueError(f"learning_rate={learning_rate!r}: expected a number from 0.")
        self._state.learning_rate = rate

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self._state.learning_rate


class _InGraph:
    """An update by ONNX Runtime, of gradients that stay where they are."""

    def __init__(self, update: Update, gradients: list[Tensor], limit: float | None, groups: int) -> None:
        self._graph, self._gradients, self._groups = update, gradients, groups
        self._limits = None if limit is None else [limit] * groups
        self._has_run = False

    def __call__(self, numbers: Sequence[float]) -> None:
        for group in range(self._groups):
            self._graph.set_coefficients(group, numbers)
        if self._has_run:
            self._graph.run_again()
        else:
            self._graph.run(self._gradients, limits=self._limits)
            self._has_run = True


def _check(old: OptimizerState, kind: str, states: tuple[str, ...], trained: tuple[str, ...]) -> None:
    if not old.moments and not old.step:
        return
    if old.kind != kind:
        raise ValueError(f"The checkpoint holds the state of {old.kind}, but the optimizer artifact is {kind}.")
    wanted = set(states)
    for name in trained if states else ():
        found = set(old.moments.get(name, {}))
        if found != wanted:
            raise ValueError(
                f"The checkpoint holds the states {sorted(found)} for {name!r}; {kind} needs {sorted(wanted)}."
            )
