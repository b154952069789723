"""Artifacts of what a Trainer trains."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_ort.environment import require_onnxruntime
from lightning_ort.export.sample import first_batch
from lightning_ort.ondevice.flavour import Artifacts
from lightning_ort.ondevice.generate import generate_artifacts

__all__ = ["trained_artifacts"]


def trained_artifacts(
    trainer: pl.Trainer,
    artifact_directory: str | os.PathLike[str],
    *,
    inputs: Any = None,
    optimizer: Any = None,
    clip_grad_norm: float | None = None,
    **options: Any,
) -> Artifacts:
    """:func:`~lightning_ort.ondevice.generate_artifacts` for the module that ``trainer`` trains or has trained.

    Args:
        trainer: any Trainer, whatever its strategy.
        artifact_directory: where the files go.
        inputs: an example batch; by default the first of the training loader.
        optimizer: by default the Trainer's one optimizer, with its moments and the number of its updates.
        clip_grad_norm: by default ``gradient_clip_val`` of the Trainer.
        **options: of ``generate_artifacts``.

    Raises:
        ValueError: there is no module, no batch or not one optimizer yet, or one that artifacts cannot hold.
    """
    require_onnxruntime()
    module = trainer.lightning_module
    if module is None:
        raise ValueError("The Trainer has no module yet. Export artifacts during or after fit.")
    if inputs is None:
        inputs = first_batch(trainer, training=True)
    if clip_grad_norm is None and trainer.gradient_clip_val is not None:
        if trainer.gradient_clip_algorithm not in (None, "norm"):
            raise ValueError("The Trainer clips gradients by value; artifacts clip by norm. Pass clip_grad_norm.")
        clip_grad_norm = float(trainer.gradient_clip_val) or None
    if optimizer is None:
        found = trainer.optimizers
        if len(found) != 1:
            raise ValueError(f"The Trainer has {len(found)} optimizers; artifacts have one. Pass optimizer.")
        optimizer = found[0]
    with torch.inference_mode(False):
        return generate_artifacts(
            module, artifact_directory, inputs=inputs, optimizer=optimizer, clip_grad_norm=clip_grad_norm, **options
        )
