"""The state of a training as users see it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from lightning_ort.checkpoints.state import Property, TrainingState
from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.compiler.aot.sizes import mismatch
from lightning_ort.ondevice.formats import flavour_named, flavour_of_checkpoint
from lightning_ort.ondevice.memory import TrainingMemory
from lightning_ort.runtime.tensors import cpu_tensor, owning

__all__ = ["CheckpointState", "Parameter", "Parameters", "Properties", "checked", "given_back"]


class Parameter:
    """One parameter of a :class:`CheckpointState`."""

    def __init__(self, name: str, state: CheckpointState) -> None:
        self._name, self._state = name, state

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def data(self) -> np.ndarray:
        """A copy of its values; assigning changes them.

        Raises:
            ValueError: an assigned array has another shape or element type.
            RuntimeError: it has no values yet (a nominal checkpoint).
        """
        return self._values().numpy().copy()

    @data.setter
    def data(self, value: Any) -> None:
        target = self._values()
        tensor = cpu_tensor(value, self._name)
        if tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise ValueError(
                f"Parameter {self._name!r} is {target.dtype} of shape {tuple(target.shape)}; got {tensor.dtype} of "
                f"shape {tuple(tensor.shape)}."
            )
        target.copy_(tensor)

    def _values(self) -> Tensor:
        _require_values(self._state, self._name, "Please load the parameter states first")
        return self._state.training_state.parameters[self._name]

    @property
    def grad(self) -> np.ndarray | None:
        """A copy of its gradient, the sum over all training steps since ``lazy_reset_grad``; zeros before the first.

        ``None`` for what is not trained, and after a training step that failed while it replaced the gradients.
        """
        gradients = self._state.gradients
        if gradients is None or not self.requires_grad:
            return None
        if self._name in gradients:
            return gradients[self._name].numpy().copy()
        return torch.zeros_like(self._values()).numpy()

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._name in self._state.training_state.trained

    def __repr__(self) -> str:
        return f"Parameter(name={self._name}, requires_grad={self.requires_grad})"


def _require_values(state: CheckpointState, name: str, advice: str) -> None:
    if state.training_state.nominal:
        raise RuntimeError(
            f"Parameter {name!r} has no values yet: the checkpoint is a nominal one. {advice}, by "
            "copy_buffer_to_parameters(buffer, trainable_only=False) of its Module."
        )


class Parameters:
    """The parameters of a :class:`CheckpointState`, by name."""

    def __init__(self, state: CheckpointState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        """The parameter of that name.

        Raises:
            KeyError: there is none.
            RuntimeError: it has no values yet (a nominal checkpoint).
        """
        self._require(name)
        _require_values(self._state, name, "Please load the parameter states first")
        return Parameter(name, self._state)

    def __setitem__(self, name: str, value: Any) -> None:
        """Replace the values of a parameter by a numpy array, an OrtValue or a tensor; see :attr:`Parameter.data`."""
        self._require(name)
        _require_values(self._state, name, "Please load all the parameter states first")
        Parameter(name, self._state).data = value

    def _require(self, name: str) -> None:
        if name not in self:
            known = ", ".join(self._state.training_state.parameters)
            raise KeyError(f"There is no parameter {name!r}. There are: {known}.")

    def __contains__(self, name: object) -> bool:
        return name in self._state.training_state.parameters

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        """Names with their parameters, in the order of the model."""
        for name in self._state.training_state.parameters:
            yield name, Parameter(name, self._state)

    def __len__(self) -> int:
        return len(self._state.training_state.parameters)

    def __repr__(self) -> str:
        return f"Parameters({', '.join(self._state.training_state.parameters)})"


class Properties:
    """Numbers and texts that users keep with a checkpoint."""

    def __init__(self, state: CheckpointState) -> None:
        self._values, self._check = state.training_state.properties, state.flavour.check_property

    def __getitem__(self, name: str) -> Property:
        """The value of a property.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self._values:
            raise KeyError(f"There is no property {name!r}. There are: {', '.join(self._values) or 'none'}.")
        return self._values[name]

    def __setitem__(self, name: str, value: Property) -> None:
        """Add or replace a property.

        Raises:
            TypeError: the name is no text, or the value no int, float or str.
            ValueError: the format of the checkpoint cannot hold the value.
        """
        if not isinstance(name, str):
            raise TypeError(f"The name of a property is {name!r}; expected a text.")
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError(f"Property {name!r} is a {type(value).__name__}; expected an int, a float or a str.")
        self._check(name, value)
        self._values[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        """Names with their values."""
        yield from self._values.items()

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Properties({self._values})"


class CheckpointState:
    """Parameters, properties, changing buffers and optimizer state of a training; made by :meth:`load_checkpoint`.

    Args:
        state: what it holds; becomes its own.
        flavour: the format in which it is saved.

    Attributes:
        training_state: what it holds.
        gradients: name of each trained parameter to its gradient, once a :class:`Module` has computed them; empty
            before that, and ``None`` when they are lost.
        memory: of its modules; ``None`` before the first.
    """

    def __init__(self, state: TrainingState, flavour: str = "portable") -> None:
        if not isinstance(state, TrainingState):
            raise TypeError(f"state is a {type(state).__name__}; use CheckpointState.load_checkpoint.")
        self.training_state = state
        self.flavour = flavour_named(flavour)
        self.gradients: Mapping[str, Tensor] | None = {}
        self.memory: TrainingMemory | None = None
        self._parameters, self._properties = Parameters(self), Properties(self)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Read a checkpoint of any known format.

        Raises:
            FileNotFoundError, ValueError: there is none, or not one that can be read.
        """
        path = Path(checkpoint_uri)
        flavour = flavour_of_checkpoint(path)
        return cls(flavour.load_checkpoint(path), flavour.name)

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Write ``state`` in the format it was loaded from; a file of that name is replaced.

        The learning rate is always written; ``include_optimizer_state`` adds moments and the number of updates.

        Raises:
            FileNotFoundError: the folder does not exist.
            ValueError: something that the format cannot hold.
        """
        if not isinstance(state, CheckpointState):
            raise TypeError(f"state is a {type(state).__name__}; expected a CheckpointState.")
        state.flavour.save_checkpoint(
            state.training_state, Path(checkpoint_uri), include_optimizer_state=include_optimizer_state
        )

    @property
    def parameters(self) -> Parameters:
        """The parameters of the model."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The properties."""
        return self._properties


def checked(inputs: Sequence[Any], infos: Sequence[InputInfo]) -> list[Tensor]:
    """``inputs`` (numpy arrays, OrtValues or torch tensors) as contiguous tensors of the declared form.

    Raises:
        ValueError: another number of inputs, another element type or another size than declared, sizes of one name
            that differ.
        TypeError: something else.
    """
    if len(inputs) != len(infos):
        raise ValueError(
            f"The step takes {len(infos)} inputs ({', '.join(i.name for i in infos)}), but got {len(inputs)}."
        )
    found = []
    for value, info in zip(inputs, infos, strict=True):
        tensor = cpu_tensor(value, info.name)
        if tensor.dtype != info.dtype:
            raise ValueError(f"Input {info.name!r} is {tensor.dtype}; expected {info.dtype}.")
        found.append(tensor)
    wrong = mismatch(infos, [t.shape for t in found])
    if wrong is not None:
        raise ValueError(wrong)
    return found


def given_back(results: Sequence[Tensor], inputs: Sequence[Any]) -> Any:
    """One result, or a tuple: OrtValues if all inputs are OrtValues, tensors if all are tensors, else numpy arrays."""
    found: list[Any]
    if inputs and all(isinstance(x, onnxruntime.OrtValue) for x in inputs):
        found = [owning(r.numpy()) for r in results]
    elif inputs and all(isinstance(x, Tensor) for x in inputs):
        found = list(results)
    else:
        found = [r.numpy() for r in results]
    return found[0] if len(found) == 1 else tuple(found)
