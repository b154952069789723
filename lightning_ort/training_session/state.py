"""What a TrainingSession has learned: weights, running statistics and optimizer states, out and in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lightning_ort.checkpoints.names import SHARED
from lightning_ort.training_session.binding import as_tensor
from lightning_ort.training_session.optimizer import WeightUpdate

__all__ = ["SessionState"]


class SessionState:
    """Reads and replaces the tensors of a session."""

    _weights: dict[str, torch.Tensor]
    _buffers: dict[str, torch.Tensor]
    _updates: WeightUpdate | None

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights, running statistics and optimizer states, flat: ``w``, ``Moment_1_w``, ``Update_Count_w``."""
        state = dict(self.get_model_state()["full_precision"])
        for weight, values in self.get_optimizer_state().items():
            for name, array in values.items():
                state[name if weight == SHARED else f"{name}_{weight}"] = array
        return state

    def load_state(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Take over a state from :meth:`get_state`.

        Args:
            state_dict: name to array.
            strict: raise if a name is missing.

        Raises:
            ValueError: an unknown name (whether strict or not), a missing one, or a wrong shape or element type.
                Nothing has been changed then.
        """
        own = self.get_state()
        unknown, missing = sorted(set(state_dict) - set(own)), sorted(set(own) - set(state_dict))
        if unknown or (strict and missing):
            raise ValueError(
                f"The state does not fit: unknown names {unknown}, missing names {missing if strict else []}."
            )
        tensors = self._weights | self._buffers
        assignments: list[tuple[torch.Tensor, torch.Tensor]] = []
        optimizer: dict[str, dict[str, Any]] = {}
        flat = {
            (name if weight == SHARED else f"{name}_{weight}"): (weight, name)
            for weight, values in self.get_optimizer_state().items()
            for name in values
        }
        for name, value in state_dict.items():
            tensor = as_tensor(name, value)
            if name in tensors:
                target = tensors[name]
                if tensor.shape != target.shape or tensor.dtype != target.dtype:
                    raise ValueError(
                        f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected {target.dtype} of shape "
                        f"{tuple(target.shape)}."
                    )
                assignments.append((target, tensor))
            else:
                weight, state = flat[name]
                optimizer.setdefault(weight, {})[state] = tensor
        checked = self._updates.check(optimizer) if self._updates is not None else []
        for target, tensor in assignments:
            target.copy_(tensor)
        if self._updates is not None:
            self._updates.assign(checked)

    def get_model_state(self, include_mixed_precision_weights: bool = False) -> dict[str, dict[str, np.ndarray]]:
        """``{"full_precision": {name: array}}`` of weights, trained or not, and running statistics, as copies.

        Scalars that are not trained are constants of the graph and not among them.

        There are no mixed-precision weights, so ``include_mixed_precision_weights`` adds an empty mapping.
        """
        state = {"full_precision": {n: t.numpy().copy() for n, t in (self._weights | self._buffers).items()}}
        return state | ({"mixed_precision": {}} if include_mixed_precision_weights else {})

    def get_optimizer_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Per weight ``Moment_1``, ``Moment_2`` and ``Update_Count`` (for LAMB one ``Step``), as copies."""
        if self._updates is None:
            return {}
        return {w: {n: t.numpy().copy() for n, t in v.items()} for w, v in self._updates.state().items()}
