"""The module of a Trainer as an ONNX file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_ort.environment import require_onnxruntime
from lightning_ort.export.export import ExportedModel, check_options, export_call
from lightning_ort.export.sample import arguments_of_batch, arguments_of_sample, first_batch, on_device
from lightning_ort.export.undisturbed import undisturbed
from lightning_ort.export.weights import weights_from
from lightning_ort.files.onnx_models import check_target

__all__ = ["check_checkpoint", "export_trained"]


def export_trained(
    trainer: pl.Trainer,
    path: str | os.PathLike[str],
    sample: Any = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    **options: Any,
) -> ExportedModel:
    """:func:`~lightning_ort.export.export_onnx` for the module that ``trainer`` trains or has trained.

    Args:
        trainer: any Trainer, whatever its strategy.
        path: of the file.
        sample: inputs; by default ``module.example_input_array`` (for ``forward``), else what the method takes of the
            first batch of a loader of prediction, validation, test or training.
        checkpoint: weights to export: ``None`` for those the module has, ``"best"`` and ``"last"`` for those of the
            Trainer's ``ModelCheckpoint``, or the path of a checkpoint. The module has its own again afterwards.
        **options: of :func:`~lightning_ort.export.export_onnx`.

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


def check_checkpoint(trainer: pl.Trainer, checkpoint: str | os.PathLike[str] | None) -> None:
    """Refuse ``"best"`` and ``"last"`` where nothing saves checkpoints, or none knows which is the best.

    Raises:
        ValueError: there is no ModelCheckpoint, or it has no ``monitor``.
    """
    if checkpoint not in ("best", "last"):
        return
    found = trainer.checkpoint_callback
    if not isinstance(found, ModelCheckpoint):
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
    check_checkpoint(trainer, checkpoint)
    path: str | os.PathLike[str] = checkpoint
    if checkpoint in ("best", "last"):
        callback = trainer.checkpoint_callback
        assert isinstance(callback, ModelCheckpoint)
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
        if is_overridden("on_load_checkpoint", module):
            module.on_load_checkpoint(content)
        module.load_state_dict(content["state_dict"], strict=module.strict_loading)

    return load
