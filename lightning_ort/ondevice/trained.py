"""Artifacts of what a Trainer trains."""

from __future__ import annotations

import os
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_ort.environment import require_onnxruntime
from lightning_ort.export.inputs import first_batch
from lightning_ort.lightning_packages import Callback, pl, rank_zero_info
from lightning_ort.ondevice.artifacts import generate_artifacts
from lightning_ort.ondevice.formats import Artifacts, flavour_named
from lightning_ort.validation import path

__all__ = ["ORTArtifacts", "trained_artifacts"]


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


class ORTArtifacts(Callback):
    """Writes artifacts of the module and its optimizer when ``fit`` has ended, under any strategy.

    Nothing is written when ``fit`` fails or is interrupted, nor with ``fast_dev_run``.

    Args:
        artifact_directory: where the files go; by default ``artifacts`` in the folder of the Trainer's logger, or
            without one in ``default_root_dir``.
        flavour: the format of the files: ``"portable"`` or ``"ort-training"``.
        **options: of :func:`~lightning_ort.ondevice.generate_artifacts`; ``inputs`` is by default the first batch of
            the training loader, ``optimizer`` that of the Trainer with its state.

    Raises:
        ValueError: an unknown flavour; or, at the end of ``fit``, what ``generate_artifacts`` refuses.

    Attributes:
        artifacts: what was written, or ``None``.
    """

    def __init__(
        self, artifact_directory: str | os.PathLike[str] | None = None, flavour: str = "portable", **options: Any
    ) -> None:
        super().__init__()
        require_onnxruntime()
        flavour_named(flavour)
        if artifact_directory is not None:
            path("artifact_directory", artifact_directory)
        known = {**signature(generate_artifacts).parameters, **signature(trained_artifacts).parameters}
        unknown = [name for name in options if name not in known or name in ("model", "trainer")]
        if unknown:
            raise TypeError(
                f"ORTArtifacts got {', '.join(map(repr, unknown))}; expected options of generate_artifacts: "
                f"{', '.join(name for name in known if name not in ('model', 'trainer', 'options'))}."
            )
        self.artifact_directory, self.options = artifact_directory, {"flavour": flavour, **options}
        self.artifacts: Artifacts | None = None

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info("ORTArtifacts writes nothing with fast_dev_run.")
            return
        # all processes: where there are several, they ask the first one
        log_dir = None if self.artifact_directory else trainer.log_dir
        if not trainer.is_global_zero:
            return
        directory = Path(self.artifact_directory or Path(log_dir or trainer.default_root_dir) / "artifacts")
        self.artifacts = trained_artifacts(trainer, directory, **self.options)
        rank_zero_info(f"Wrote artifacts for on-device training to {directory}.")
