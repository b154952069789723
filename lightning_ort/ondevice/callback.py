"""A callback that writes artifacts for training on a device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort.environment import require_onnxruntime
from lightning_ort.ondevice.flavour import Artifacts, flavour_named
from lightning_ort.ondevice.trained import trained_artifacts

__all__ = ["ORTArtifacts"]


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
        self.artifact_directory, self.options = artifact_directory, {"flavour": flavour, **options}
        self.artifacts: Artifacts | None = None

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info("ORTArtifacts writes nothing with fast_dev_run.")
            return
        if not trainer.is_global_zero:
            return
        directory = Path(self.artifact_directory or Path(trainer.log_dir or trainer.default_root_dir) / "artifacts")
        self.artifacts = trained_artifacts(trainer, directory, **self.options)
        rank_zero_info(f"Wrote artifacts for on-device training to {directory}.")
