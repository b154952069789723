"""What ``TrainingSession.io_binding`` returns."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch

from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.compiler.aot.sizes import mismatch
from lightning_ort.runtime.tensors import cpu_tensor, owning
from lightning_ort.validation import shown

__all__ = ["TrainingBinding", "as_feed", "as_scalar"]


class TrainingBinding(onnxruntime.IOBinding):
    """An ``onnxruntime.IOBinding`` on CPU memory for a session whose weights live in torch.

    Inputs are read, and bound outputs written, when ``run_with_iobinding`` is called.

    Args:
        input_names: of the session.
        outputs: of the session, as ``NodeArg`` objects.

    Raises:
        TypeError: what is bound by ``bind_ortvalue_output`` is no OrtValue.
        ValueError: a name that the session does not have, or memory for an output of another element type or of
            another shape than declared. What was bound before stays so.
    """

    def __init__(self, input_names: Sequence[str], outputs: Sequence[Any]) -> None:
        self._input_names, self._outputs = list(input_names), {o.name: o for o in outputs}
        self.inputs: dict[str, np.ndarray] = {}
        self.targets: dict[str, onnxruntime.OrtValue | None] = {}
        self.results: list[onnxruntime.OrtValue] = []

    def _known(self, name: str, names: Sequence[str], kind: str) -> None:
        if name not in names:
            raise ValueError(f"The session has no {kind} {name!r}. It has: {', '.join(names)}.")

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray) -> None:
        self._known(name, self._input_names, "input")
        self.inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        self._known(name, self._input_names, "input")
        self.inputs[name] = _view(device_type, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: onnxruntime.OrtValue) -> None:
        self._known(name, self._input_names, "input")
        self.inputs[name] = ortvalue.numpy()

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        self._known(name, [*self._outputs], "output")
        if buffer_ptr is None:
            self.targets[name] = None
        else:
            memory = _view(device_type, element_type, shape or (), buffer_ptr)
            self.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(memory))

    def bind_ortvalue_output(self, name: str, ortvalue: onnxruntime.OrtValue) -> None:
        self._known(name, [*self._outputs], "output")
        if not isinstance(ortvalue, onnxruntime.OrtValue):
            raise TypeError(f"Output {name!r}: ortvalue={shown(ortvalue)}: expected an onnxruntime.OrtValue.")
        declared, shape = self._outputs[name], list(ortvalue.shape())
        # an output without a declared shape looks like a scalar
        sizes = declared.shape or shape
        fits = len(sizes) == len(shape) and all(d == s for d, s in zip(sizes, shape, strict=True) if isinstance(d, int))
        if ortvalue.data_type() != declared.type or not fits:
            raise _unfit(name, f"{declared.type} of shape {declared.shape or 'its own'}", ortvalue)
        self.targets[name] = ortvalue

    def check(self, found: Mapping[str, np.ndarray]) -> None:
        """
        Raises:
            ValueError: the memory that is bound for one of the results ``found`` is of another shape.
        """
        for name, target in self.targets.items():
            if target is not None and list(target.shape()) != list(found[name].shape):
                raise _unfit(name, f"of shape {list(found[name].shape)}", target)

    def store(self, results: Sequence[np.ndarray]) -> None:
        """Hand the results of a run, in the order of ``targets``, to their targets."""
        self.results = []
        for target, array in zip(self.targets.values(), results, strict=True):
            if target is not None:
                target.update_inplace(np.ascontiguousarray(array))
            self.results.append(owning(array) if target is None else target)

    def synchronize_inputs(self) -> None:
        """Nothing to wait for on the CPU."""

    def synchronize_outputs(self) -> None:
        """Nothing to wait for on the CPU."""

    def get_outputs(self) -> list[onnxruntime.OrtValue]:
        """Results of the last run, in the order in which they were bound."""
        return list(self.results)

    def copy_outputs_to_cpu(self) -> list[np.ndarray]:
        """Results of the last run as arrays of their own."""
        return [v.numpy() for v in self.results]

    def clear_binding_inputs(self) -> None:
        self.inputs.clear()

    def clear_binding_outputs(self) -> None:
        self.targets.clear()
        self.results = []


def _unfit(name: str, expected: str, value: onnxruntime.OrtValue) -> ValueError:
    return ValueError(
        f"Output {name!r} is {expected}; the memory bound for it is {value.data_type()} of shape "
        f"{list(value.shape())}. Nothing was changed; bind memory of that kind, or by bind_output({name!r}) none."
    )


def _view(device_type: str, element_type: Any, shape: Sequence[int], address: int) -> np.ndarray:
    if device_type != "cpu":
        raise ValueError(f"Memory on {device_type!r} cannot be bound to a TrainingSession; expected 'cpu'.")
    dtype = np.dtype(element_type)
    count = int(np.prod(shape, dtype=np.int64)) if len(shape) else 1
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype=dtype, count=count).reshape(tuple(shape))


def as_feed(infos: Sequence[InputInfo], given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One contiguous CPU tensor per input.

    Raises:
        ValueError: an input is missing or unknown, or has another element type or size than declared and required.
    """
    names = [i.name for i in infos]
    missing, unknown = [n for n in names if n not in given], [n for n in given if n not in names]
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
        raise ValueError(f"The feed does not fit the inputs ({'; '.join(parts)}). Inputs: {', '.join(names)}.")
    found = {i.name: as_tensor(i.name, given[i.name]) for i in infos}
    for info in infos:
        if found[info.name].dtype != info.dtype:
            raise ValueError(f"Input {info.name!r} is {found[info.name].dtype}; expected {info.dtype}.")
    wrong = mismatch(infos, [found[i.name].shape for i in infos])
    if wrong is not None:
        raise ValueError(wrong)
    return found


def as_tensor(name: str, value: Any) -> torch.Tensor:
    """An OrtValue, a torch tensor, or what numpy makes an array of, as a CPU tensor."""
    known = isinstance(value, (torch.Tensor, onnxruntime.OrtValue))
    return cpu_tensor(value if known else np.asarray(value), name)


def as_scalar(name: str, value: Any) -> float:
    """A number from whatever holds exactly one.

    Raises:
        ValueError: it holds none or several, or one that is negative or not finite.
    """
    tensor = as_tensor(name, value)
    if tensor.numel() != 1:
        raise ValueError(f"Input {name!r} has shape {tuple(tensor.shape)}; expected one number.")
    number = float(tensor)
    if not np.isfinite(number) or number < 0:
        raise ValueError(f"Input {name!r} is {number}; expected a finite number from 0.")
    return number
