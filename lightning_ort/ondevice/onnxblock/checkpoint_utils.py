"""Parameters of blocks as checkpoints, and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import onnx

from lightning_ort.checkpoints.ort_training import write_checkpoint
from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.ondevice.formats import flavour_of_checkpoint
from lightning_ort.onnx_reader.values import tensor_from
from lightning_ort.runtime.tensors import ONNX

__all__ = ["load_checkpoint_to_model", "save_checkpoint"]


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | os.PathLike[str],
    nominal_checkpoint: bool = False,
) -> None:
    """Write a checkpoint of ONNX Runtime's on-device training.

    Args:
        parameters: what is trained, and what is not.
        path_to_checkpoint: the file.
        nominal_checkpoint: write names, without values.

    Raises:
        RuntimeError: ``parameters`` is ``None``.
    """
    if parameters is None:
        raise RuntimeError("No checkpoint parameters provided.")
    trained, frozen = parameters
    state = TrainingState({t.name: tensor_from(t) for t in (*trained, *frozen)}, tuple(t.name for t in trained))
    write_checkpoint(state, Path(path_to_checkpoint), include_optimizer_state=False, nominal=nominal_checkpoint)


def load_checkpoint_to_model(path_to_checkpoint: str | os.PathLike[str], model: onnx.ModelProto) -> None:
    """Put the parameters of a checkpoint, of either flavour, in the place of the initializers of ``model``.

    Raises:
        FileNotFoundError, ValueError: no checkpoint, one without values, or one that does not fit the model; nothing
            has been changed then.
    """
    path = Path(path_to_checkpoint)
    state = flavour_of_checkpoint(path).load_checkpoint(path)
    if state.nominal:
        raise ValueError(f"{str(path)!r} is a nominal checkpoint: it has no values.")
    initializers = {i.name: i for i in model.graph.initializer}
    wrong = []
    for name, tensor in state.parameters.items():
        old = initializers.get(name)
        if old is None:
            wrong.append(f"the model has no initializer {name!r}")
        elif list(old.dims) != list(tensor.shape) or old.data_type != int(ONNX[tensor.dtype]):
            wrong.append(f"{name!r} is {tensor.dtype} of shape {list(tensor.shape)}, in the model {list(old.dims)}")
    if wrong:
        raise ValueError(f"{str(path)!r} does not fit the model: {'; '.join(wrong)}.")
    for name, tensor in state.parameters.items():
        old = initializers[name]
        old.Clear()
        old.name, old.data_type = name, int(ONNX[tensor.dtype])
        old.dims.extend(tensor.shape)
        old.raw_data = tensor.contiguous().numpy().tobytes()
