"""``onnxruntime.training.artifacts``: its function, with its arguments and the files that it writes, on any build."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from lightning_ort import ondevice
from lightning_ort.ondevice.generation.objectives import LossType
from lightning_ort.ondevice.optimizer_config import OptimType

__all__ = ["LossType", "OptimType", "generate_artifacts"]


def generate_artifacts(
    model: Any,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Any = None,
    optimizer: Any = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
) -> None:
    """Write ``training_model.onnx``, ``eval_model.onnx``, ``checkpoint`` and, with an optimizer, its model.

    :func:`lightning_ort.ondevice.generate_artifacts` has further arguments, checks the files against an example, and
    writes portable ones as well. The arguments here are the same, in the order and with the defaults of the original:

    Args:
        model: a forward ONNX model: ``onnx.ModelProto``, or a path.
        requires_grad: names of the parameters that are trained; ``None`` trains none.
        frozen_params: names of parameters that are not trained.
        loss: a :class:`~lightning_ort.ondevice.LossType` or an ``onnxblock``; ``None``: the first result of the model
            is the loss.
        optimizer: an :class:`~lightning_ort.ondevice.OptimType` or an ``onnxblock``; ``None`` for no update. An
            ``OptimType`` has the original's settings: AdamW adds 1e-6 and takes the decay after the update.
        artifact_directory: where the files go; by default the current folder.
        prefix: put before the names of all files.
        ort_format: refused if set.
        custom_op_library: refused if set.
        additional_output_names: results that the training and evaluation models give besides the loss.
        nominal_checkpoint: write ``nominal_checkpoint`` as well, with names and without values.
        loss_input_names: results that the loss gets, by default all.

    Raises:
        ValueError, TypeError, FileNotFoundError: something does not fit together, named.
        UnsupportedError: an operation that has no form here, or ``ort_format`` or ``custom_op_library``.
    """
    ondevice.generate_artifacts(
        model,
        artifact_directory,
        requires_grad=[] if requires_grad is None else requires_grad,
        frozen_params=frozen_params,
        loss=loss,
        optimizer=optimizer,
        flavour="ort-training",
        prefix=prefix,
        ort_format=ort_format,
        custom_op_library=custom_op_library,
        additional_output_names=additional_output_names,
        nominal_checkpoint=nominal_checkpoint,
        loss_input_names=loss_input_names,
    )
