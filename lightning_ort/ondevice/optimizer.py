"""Updates of a training on a device."""

from __future__ import annotations

import os
from pathlib import Path

from lightning_ort.checkpoints.state import OptimizerState
from lightning_ort.errors import CheckpointError
from lightning_ort.files.reading import refusing
from lightning_ort.ondevice.formats import flavour_of_model
from lightning_ort.ondevice.module import Module
from lightning_ort.optim.updater import Updater
from lightning_ort.runtime.memory import Packed
from lightning_ort.validation import is_whole, number, path, shown, single

__all__ = ["LinearLRScheduler", "Optimizer"]


class Optimizer:
    """Updates the parameters of ``module`` by their gradients.

    The update is made in place, on the memory of the module: by ONNX Runtime, but Adam and AdamW without clipping by
    torch's fused kernel, which is faster.

    Args:
        optimizer_uri: the artifact that says which optimizer it is.
        module: whose parameters are updated. Moments, number of updates and learning rate go on from its checkpoint,
            where that holds them. Several optimizers of one state share all three.

    Raises:
        FileNotFoundError, ValueError: no such artifact, or the checkpoint holds the state of another optimizer.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        if not isinstance(module, Module):
            raise TypeError(f"module is a {type(module).__name__}; expected lightning_ort.ondevice.Module.")
        uri = Path(path("optimizer_uri", optimizer_uri))
        values = module.state.training_state
        with refusing(uri, "not to be used", kind=CheckpointError):
            self._config = config = flavour_of_model(uri).load_optimizer(uri, values)
        old, memory = values.optimizer, module.memory
        state = OptimizerState(config.kind, config.lr)
        if old is not None:
            _check(old, config.kind, config.states, values.trained)
            state.learning_rate, state.step = old.learning_rate, old.step
        trained = {n: values.parameters[n] for n in values.trained}
        packed = memory.moments
        if packed is None:
            held = {} if old is None else old.moments
            packed = {s: Packed(trained) for s in config.states}
            for s, flat in packed.items() if held else ():
                flat.fill({n: held[n][s] for n in trained})
        state.moments = {n: {s: flat.views[n] for s, flat in packed.items()} for n in trained}
        params, gradients = trained, {n: memory.gradients.views[n] for n in trained}
        moments = state.moments
        if config.rule.elementwise:
            # all parameters of one type as one
            params = {str(t.dtype): t for t in memory.parameters.flat.values()}
            moments = {name: {s: packed[s].flat[p.dtype] for s in config.states} for name, p in params.items()}
            gradients = {str(t.dtype): t for t in memory.gradients.flat.values()}
        updater = Updater(dict.fromkeys(params, config), params, module.sessions, moments=moments)
        self._update = updater.bound_to(gradients)
        self._module, values.optimizer, memory.moments = module, state, packed

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
            RuntimeError: there are none yet, or the parameters have no values yet (a nominal checkpoint).
        """
        held = self._module.state
        if not held.gradients:
            self._module.require_values()
            raise RuntimeError("There are no gradients yet: call the module in training mode before optimizer.step().")
        state = held.training_state.optimizer
        assert state is not None
        self._update(state.learning_rate, state.step + 1)
        state.step += 1

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next updates.

        Raises:
            TypeError: it is no number.
            ValueError: it is below 0, NaN or infinite.
        """
        self._state.learning_rate = number("learning_rate", single(learning_rate), low=0)

    def get_learning_rate(self) -> float:
        """The learning rate of the next update."""
        return self._state.learning_rate


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


class LinearLRScheduler:
    """Raises the learning rate from 0 to ``initial_lr`` in ``warmup_step_count`` steps, then lowers it to 0.

    Update number ``k`` (from 0) is made with ``initial_lr * k / warmup_step_count`` in the warm-up, and after it with
    ``initial_lr * (total_step_count - k) / (total_step_count - warmup_step_count)``. (ONNX Runtime's own class takes
    each of the two counts for the other.) What has been done is read from the optimizer, so that a training that goes
    on from a checkpoint goes on with its schedule.

    Args:
        optimizer: whose learning rate is set, now and by :meth:`step`.
        warmup_step_count: number of steps of the warm-up.
        total_step_count: number of steps in all.
        initial_lr: learning rate at the end of the warm-up.

    Raises:
        TypeError: an argument of another kind.
        ValueError: negative or inverted counts, or a rate that cannot be.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer={shown(optimizer)}: expected a lightning_ort.ondevice.Optimizer.")
        if not (is_whole(warmup_step_count) and is_whole(total_step_count)):
            raise TypeError(
                f"warmup_step_count={shown(warmup_step_count)}, total_step_count={shown(total_step_count)}: expected "
                "integers."
            )
        if not 0 <= warmup_step_count <= total_step_count:
            raise ValueError(
                f"warmup_step_count={warmup_step_count!r}, total_step_count={total_step_count!r}: expected 0 <= "
                "warmup_step_count <= total_step_count."
            )
        self._optimizer, self._initial = optimizer, number("initial_lr", initial_lr, low=0)
        self._warmup, self._total = warmup_step_count, total_step_count
        self.step()

    def step(self) -> None:
        """Set the learning rate of the next update; to be called after each ``optimizer.step()``."""
        done = self._optimizer.step_count
        if done < self._warmup:
            factor = done / self._warmup
        else:
            factor = max(self._total - done, 0) / max(self._total - self._warmup, 1)
        self._optimizer.set_learning_rate(self._initial * factor)
