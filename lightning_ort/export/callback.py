"""A callback that writes the trained module as an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_ort.environment import require_onnxruntime
from lightning_ort.export.export import Dtype, ExportedModel, check_options
from lightning_ort.export.sizes import Axes
from lightning_ort.export.trained import check_checkpoint, export_trained
from lightning_ort.files.onnx_models import check_target

__all__ = ["ORTExport"]


class ORTExport(Callback):
    """Writes the module for inference when ``fit`` has ended, under any strategy.

    Nothing is written when ``fit`` fails or is interrupted, nor with ``fast_dev_run``.

    Args:
        path: of the file; by default ``model.onnx`` in the folder of the Trainer's logger, or without one in
            ``default_root_dir``.
        checkpoint: ``None`` for the weights at the end, ``"best"`` or ``"last"`` for those of the ``ModelCheckpoint``,
            or the path of a checkpoint.
        sample, method, input_names, output_names, dynamic, dtype, opset, external_data, tolerance: see
            :func:`~lightning_ort.export.export_onnx`. By default inputs are ``example_input_array`` or part of a batch.

    Raises:
        ValueError: (when the Trainer starts) an option is not as described, or ``checkpoint`` asks for what no
            ``ModelCheckpoint`` saves.
        FileNotFoundError: (then as well) the folder of ``path`` does not exist.
        ExportError: (at the end) the module cannot be written as an ONNX file.
        MismatchError: (at the end) the file gives other results than the module.

    Attributes:
        exported: what was written, or ``None``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        sample: Any = None,
        *,
        method: str = "forward",
        input_names: Sequence[str] | None = None,
        output_names: Sequence[str] | None = None,
        dynamic: Axes | None = None,
        dtype: Dtype | None = None,
        opset: int = 20,
        external_data: bool | None = None,
        tolerance: float | None = None,
    ) -> None:
        super().__init__()
        require_onnxruntime()
        self.path, self.checkpoint, self.sample = path, checkpoint, sample
        self.options: dict[str, Any] = {
            "method": method,
            "input_names": input_names,
            "output_names": output_names,
            "dynamic": dynamic,
            "dtype": dtype,
            "opset": opset,
            "external_data": external_data,
            "tolerance": tolerance,
        }
        self.exported: ExportedModel | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit" or getattr(trainer, "fast_dev_run", False):
            return
        check_options(pl_module, **self.options)
        check_checkpoint(trainer, self.checkpoint)
        if self.path is not None:
            check_target(self.path)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info("ORTExport writes nothing with fast_dev_run.")
            return
        if not trainer.is_global_zero:
            return
        path = self.path
        if path is None:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "model.onnx"
        self.exported = export_trained(trainer, path, self.sample, checkpoint=self.checkpoint, **self.options)
        sizes = ", ".join(f"{name} {list(shape)}" for name, shape in self.exported.inputs.items())
        rank_zero_info(
            f"Wrote {self.exported.path} ({sizes}); its outputs are within {self.exported.difference:.0e} of the "
            "module's."
        )
