"""The module of a Trainer as an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_ort.environment import require_onnxruntime
from lightning_ort.export.export import Dtype, ExportedModel, check_options, export_call, undisturbed, weights_from
from lightning_ort.export.inputs import (
    DynamicAxes,
    arguments_of_batch,
    arguments_of_sample,
    first_batch,
    on_device,
)
from lightning_ort.files.onnx_models import check_target
from lightning_ort.lightning_packages import Callback, everywhere, overrides, pl, rank_zero_info

__all__ = ["ORTExport", "export_trained"]


def export_trained(
    trainer: pl.Trainer,
    path: str | os.PathLike[str],
    sample: Any = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ExportedModel:
    """:func:`~lightning_ort.export_onnx` for the module that ``trainer`` trains or has trained.

    Args:
        trainer: any Trainer, whatever its strategy.
        path: of the file.
        sample: inputs; by default ``module.example_input_array`` (for ``forward``), else what the method takes of the
            first batch of a loader of prediction, validation, test or training.
        checkpoint: weights to export: ``None`` for those the module has, ``"best"`` and ``"last"`` for those of the
            Trainer's ``ModelCheckpoint``, or the path of a checkpoint. The module has its own again afterwards.
        **options: of :func:`~lightning_ort.export_onnx`.

    Returns:
        What was written, and how it was checked.

    Raises:
        ValueError: there is no module, no sample or no such checkpoint yet.
        FileNotFoundError: the checkpoint does not exist.
        RuntimeError: the checkpoint is another module's.
    """
    require_onnxruntime()
    module = trainer.lightning_module
    if module is None:
        raise ValueError("The Trainer has no module yet. Export after fit, validate, test or predict.")
    target = check_target(path)
    check_options(module, **options)
    load = _loader_of(trainer, module, checkpoint)
    method = options.get("method", "forward")
    if sample is not None or (method == "forward" and module.example_input_array is not None):
        args, kwargs = arguments_of_sample(module, method, sample)
        args, kwargs = trainer.precision_plugin.convert_input((args, kwargs))
    else:
        with undisturbed(module):
            # as steps get it: with the hooks of the module and the datamodule, and in the precision of the Trainer
            batch = trainer.precision_plugin.convert_input(first_batch(trainer))
            batch = trainer.strategy.batch_to_device(batch, module.device)
        args, kwargs = arguments_of_batch(module, method, batch)
    args, kwargs = on_device(module, (args, kwargs))
    settings: dict[str, Any] = dict.fromkeys(
        ("input_names", "output_names", "dynamic", "dtype", "external_data", "tolerance")
    )
    settings |= {"method": method, "opset": 20, **options}
    with weights_from(module, load):
        return export_call(module, target, args, kwargs, **settings)


def _check_checkpoint(trainer: pl.Trainer, checkpoint: str | os.PathLike[str] | None) -> None:
    """Refuse ``"best"`` and ``"last"`` where nothing saves checkpoints, or none knows which is the best.

    Raises:
        ValueError: there is no ModelCheckpoint, or it has no ``monitor``.
    """
    if checkpoint not in ("best", "last"):
        return
    found = trainer.checkpoint_callback
    if not isinstance(found, everywhere("callbacks:ModelCheckpoint")):
        raise ValueError(
            f"checkpoint={checkpoint!r}: the Trainer has no ModelCheckpoint that saves one. Add it to callbacks, or "
            "leave checkpoint out to export the weights that the module has at the end."
        )
    if checkpoint == "best" and found.monitor is None:
        raise ValueError(
            "checkpoint='best': the ModelCheckpoint has no monitor, and so does not know the best. Name a logged "
            "metric: ModelCheckpoint(monitor='val_loss')."
        )


def _loader_of(
    trainer: pl.Trainer, module: pl.LightningModule, checkpoint: str | os.PathLike[str] | None
) -> Callable[[], None] | None:
    """A function that puts the weights of ``checkpoint`` into ``module``."""
    if checkpoint is None:
        return None
    _check_checkpoint(trainer, checkpoint)
    path: str | os.PathLike[str] = checkpoint
    if checkpoint in ("best", "last"):
        callback = trainer.checkpoint_callback
        assert isinstance(callback, everywhere("callbacks:ModelCheckpoint"))
        # without save_last, the latest of those that are kept
        path = (
            callback.best_model_path if checkpoint == "best" else callback.last_model_path or callback.best_model_path
        )
        if not path:
            raise ValueError(f"checkpoint={checkpoint!r}: nothing has been saved yet.")
    if not Path(path).exists():
        raise FileNotFoundError(f"checkpoint={os.fspath(checkpoint)!r}: there is no {os.fspath(path)!r}.")

    def load() -> None:
        content = trainer.strategy.load_checkpoint(Path(path))
        if overrides("on_load_checkpoint", module):
            module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"], strict=module.strict_loading)

    return load


class ORTExport(Callback):
    """Writes the module for inference when ``fit`` has ended, under any strategy.

    Nothing is written when ``fit`` fails or is interrupted, nor with ``fast_dev_run``.

    Args:
        path: of the file; by default ``model.onnx`` in the folder of the Trainer's logger, or without one in
            ``default_root_dir``.
        checkpoint: ``None`` for the weights at the end, ``"best"`` or ``"last"`` for those of the ``ModelCheckpoint``,
            or the path of a checkpoint.
        sample, method, input_names, output_names, dynamic, dtype, opset, external_data, tolerance: see
            :func:`~lightning_ort.export_onnx`. By default inputs are ``example_input_array`` or part of a batch.

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
        dynamic: DynamicAxes | None = None,
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
        _check_checkpoint(trainer, self.checkpoint)
        if self.path is not None:
            check_target(self.path)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if getattr(trainer, "fast_dev_run", False):
            rank_zero_info("ORTExport writes nothing with fast_dev_run.")
            return
        # all processes: where there are several, they ask the first one
        log_dir = trainer.log_dir if self.path is None else None
        if not trainer.is_global_zero:
            return
        path = self.path
        if path is None:
            folder = Path(log_dir or trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "model.onnx"
        self.exported = export_trained(trainer, path, self.sample, checkpoint=self.checkpoint, **self.options)
        sizes = ", ".join(f"{name} {list(shape)}" for name, shape in self.exported.inputs.items())
        rank_zero_info(
            f"Wrote {self.exported.path} ({sizes}); its outputs are within {self.exported.difference:.0e} of the "
            "module's."
        )
