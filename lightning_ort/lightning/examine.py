"""What of a LightningModule would run in ONNX Runtime, before it is trained."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch

from lightning_ort.lightning.strategy import ORTStrategy
from lightning_ort.lightning_packages import overrides, package_of, pl
from lightning_ort.report import Report

__all__ = ["Examination", "examination_flags", "examine", "examine_in", "load_weights"]

_STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_LOADERS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader",
            "predict": "predict_dataloader"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Examination:
    """Result of :func:`examine`; ``str`` of it is a text for people.

    Attributes:
        report: account of the steps that were run.
        left_out: name of each other step, and why it was not run.
    """

    report: Report
    left_out: dict[str, str]

    @property
    def all_in_ort(self) -> bool:
        """Whether every step that was run has run in ONNX Runtime, with nothing left to torch."""
        return bool(self.report) and all(step.all_in_ort for step in self.report.values())

    def __str__(self) -> str:
        lines = [str(self.report), ""]
        for step in self.report.values():
            if step.all_in_ort:
                verdict = "all of it runs in ONNX Runtime"
            elif step.graphs:
                verdict = "a part of it runs in torch, see above"
            else:
                verdict = "none of it runs in ONNX Runtime"
            lines.append(f"{step.name}: {verdict}")
        lines += [f"{name}: not examined, {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


def examine(
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    test_dataloaders: Any = None,
    predict_dataloaders: Any = None,
    strategy: ORTStrategy | None = None,
    **flags: Any,
) -> Examination:
    """Run one batch of each step of a copy of ``module`` through the compiler; nothing is written.

    Args:
        module: examined, and left as it is.
        datamodule: where batches come from, if not from the module or from the loaders given here.
        train_dataloaders, val_dataloaders, test_dataloaders, predict_dataloaders: loaders.
        strategy: with the settings to examine, by default those of ``strategy="ort"``.
        **flags: of the Trainer, such as ``precision`` and ``accelerator``; callbacks and loggers are left out.

    Returns:
        What runs in ONNX Runtime, what not and why.

    Raises:
        OnnxRuntimeImportError: there is no usable ONNX Runtime.
        Exception: what the steps themselves raise.
    """
    loaders = {
        "train": train_dataloaders,
        "validate": val_dataloaders,
        "test": test_dataloaders,
        "predict": predict_dataloaders,
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = package_of(module).get("trainer.trainer:Trainer")(**{**flags, **examination_flags(strategy, folder)})
        return examine_in(trainer, copy.deepcopy(module), datamodule, loaders)


def examination_flags(strategy: Any, folder: str) -> dict[str, Any]:
    """Flags of a Trainer that runs one batch per step and writes nothing.

    Args:
        strategy: as the Trainer was given it, which is left as it is; one that is no :class:`ORTStrategy` is replaced
            by one.
        folder: where anything that is written all the same would go.
    """
    if not isinstance(strategy, ORTStrategy):
        strategy = ORTStrategy()
    config, mode = strategy._config, strategy._hooked_optimizers.mode
    examined = copy.copy(strategy)
    examined._precision_plugin = copy.deepcopy(strategy._precision_plugin)  # it may scale losses, and learn by how much
    # all that torch would do is listed, instead of the first thing being refused, and not what it would do faster
    examined._take_options(
        config.providers, config.provider_options, config.session_options, config.placement,
        "torch", strategy._verify, mode,
    )  # fmt: skip
    examined._print_report, examined._config = False, dataclasses.replace(examined._config, measure=False)
    return {
        "strategy": examined,
        "fast_dev_run": 1,
        "callbacks": [],
        "logger": False,
        "profiler": None,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }


def examine_in(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    loaders: Mapping[str, Any],
) -> Examination:
    """:func:`examine` in a Trainer that has :func:`examination_flags`, and without a copy of ``module``."""
    strategy = trainer.strategy
    assert isinstance(strategy, ORTStrategy)
    left_out: dict[str, str] = {}

    def there(kind: str) -> bool:
        step, loader = _STEPS[kind], _LOADERS[kind]
        # any module can predict: its forward is the step
        if kind != "predict" and not overrides(step, module):
            left_out[step] = "the module has none"
        elif not (
            loaders.get(kind) is not None
            or overrides(loader, module)
            or (datamodule is not None and overrides(loader, datamodule))
        ):
            left_out[step] = f"there is no {loader}"
        return step not in left_out

    def given(**arguments: Any) -> dict[str, Any]:
        """Loaders win over the datamodule: the Trainer takes one or the other."""
        found = {name: loader for name, loader in arguments.items() if loader is not None}
        return found or {"datamodule": datamodule}

    trains, validates = there("train"), there("validate")
    if trains:
        trainer.fit(module, **given(train_dataloaders=loaders.get("train"), val_dataloaders=loaders.get("validate")))
    elif validates:
        trainer.validate(module, **given(dataloaders=loaders.get("validate")), verbose=False)
    if there("test"):
        trainer.test(module, **given(dataloaders=loaders.get("test")), verbose=False)
    if there("predict"):
        trainer.predict(module, **given(dataloaders=loaders.get("predict")), return_predictions=False)
    report = strategy.report()
    for kind, step in _STEPS.items():
        if step not in left_out and not (step in report and report[step].calls):
            left_out[step] = f"{_LOADERS[kind]} has no batches"
    return Examination(report, left_out)


def load_weights(module: pl.LightningModule, path: str | os.PathLike[str], weights_only: bool | None) -> None:
    """Put the weights of a Lightning checkpoint into ``module``."""
    content = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
    module.load_state_dict(content["state_dict"], strict=module.strict_loading)
