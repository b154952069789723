"""What of a LightningModule would run in ONNX Runtime, before it is trained."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_ort.lightning.strategy import ORTStrategy
from lightning_ort.lightning_packages import Callback, overrides, package_of, pl
from lightning_ort.report import Report

__all__ = ["EndlessFit", "Examination", "examination_flags", "examine", "examine_in", "load_weights"]

_STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_LOADERS = {"train": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader",
            "predict": "predict_dataloader"}  # fmt: skip

_ENOUGH_TIMED, _PATIENCE = 8, 60.0
"""timed calls of a step that is measured, and seconds after which it is left without them"""
_EPOCHS = 1000
"""what Lightning takes where neither epochs nor steps were given, which it warns of"""
_EVALUATED = 32
"""batches of an evaluation that is measured: their loops cannot be ended"""


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

    @property
    def all_supported(self) -> bool:
        """Whether ONNX Runtime can run every step that was run, and torch has only what it was chosen for."""
        return bool(self.report) and all(step.graphs and not step.in_torch for step in self.report.values())

    def __str__(self) -> str:
        lines = [str(self.report), ""]
        for step in self.report.values():
            if not step.graphs:
                verdict = "none of it runs in ONNX Runtime"
            elif step.in_torch:
                verdict = "a part of it runs in torch, see above"
            elif step.as_it_is:
                again = "since it was compiled again and again"
                why = again if step.recompiled_calls else "which was measured to be faster"
                verdict = f"all of it can run in ONNX Runtime; it is called as it is, {why}"
            elif step.graphs_in_torch:
                chosen = f"{step.graphs_in_torch} of {step.graphs} graphs"
                verdict = f"all of it can run in ONNX Runtime; {chosen} run in torch by choice, see above"
            else:
                verdict = "all of it runs in ONNX Runtime"
            lines.append(f"{step.name}: {verdict}")
        lines += [f"{name}: not examined, {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)


class EndlessFit(Callback):
    """Has a fit go on until ``trainer.should_stop``, whatever it was given as its end.

    Learning rates stay as they are: a schedule may have an end, or wait for a validation.
    """

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Lift the limits, which ``configure_optimizers`` may have read."""
        trainer.fit_loop.max_epochs = trainer.fit_loop.epoch_loop.max_steps = -1
        if pl_module.automatic_optimization:
            trainer.strategy.lr_scheduler_configs = []


class _UntilMeasured(EndlessFit):
    """Ends the fit when later steps are like the latest ones, and enough of these were timed; or no batch comes."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._has_batches = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._has_batches = False

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        self._has_batches = True
        strategy = trainer.strategy
        assert isinstance(strategy, ORTStrategy) and strategy._steps is not None
        if self._began is None:
            self._began = time.monotonic()  # behind the first step, which is compiled
        timing = strategy.report()["training_step"].timing
        timed = bool(timing.not_timed) or len(timing.calls) >= _ENOUGH_TIMED
        enough = timed and strategy._steps.is_decided("training_step")
        ends = trainer.should_stop or enough or time.monotonic() - self._began > _PATIENCE
        trainer.should_stop = strategy.reduce_boolean_decision(ends, all=False)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or not self._has_batches


def examine(
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None = None,
    *,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    test_dataloaders: Any = None,
    predict_dataloaders: Any = None,
    strategy: ORTStrategy | None = None,
    measure: bool = False,
    **flags: Any,
) -> Examination:
    """Run one batch of each step of a copy of ``module`` through the compiler; nothing is written.

    With ``measure``, as many batches as it takes to find out who runs which graph fastest, and to time steps: of
    training until both is known, for a minute at most behind the first step, of the others 32. What was found is kept
    for later runs, as that of a training is.

    Args:
        module: examined, and left as it is.
        datamodule: where batches come from, if not from the module or from the loaders given here.
        train_dataloaders, val_dataloaders, test_dataloaders, predict_dataloaders: loaders.
        strategy: with the settings to examine, by default those of ``strategy="ort"``.
        measure: train a little, and say how long steps take, who has that time, and how it compares with torch.
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
        make_trainer = package_of(module).get("trainer.trainer:Trainer")
        given = {**flags, "strategy": strategy}
        trainer = make_trainer(**{**given, **examination_flags(given, folder, measure=measure)})
        return examine_in(trainer, copy.deepcopy(module), datamodule, loaders, measure=measure)


def examination_flags(given: Mapping[str, Any], folder: str, *, measure: bool) -> dict[str, Any]:
    """Flags of a Trainer that runs one batch per step, or as many as measuring takes, and writes nothing.

    Args:
        given: flags of the user. Its strategy is left as it is; one that is no :class:`ORTStrategy` is replaced by one.
        folder: where anything that is written all the same would go.
        measure: see :func:`examine`.
    """
    strategy = given.get("strategy")
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
    examined._print_report = False
    # as a training has it: who refuses torch for what is missing gets none for its speed either
    compares = measure and config.measure and strategy._on_unsupported == "torch"
    examined._config = dataclasses.replace(examined._config, measure=compares)
    evaluated = dict.fromkeys(("limit_val_batches", "limit_test_batches", "limit_predict_batches"), _EVALUATED)
    has_end = given.get("max_epochs") is not None or given.get("max_steps", -1) != -1
    length: dict[str, Any] = {
        "fast_dev_run": False,
        "max_epochs": given.get("max_epochs") if has_end else _EPOCHS,
        "min_epochs": None,
        "min_steps": None,
        "max_time": None,
        "num_sanity_val_steps": 0,
        "val_check_interval": None,
        "check_val_every_n_epoch": sys.maxsize,  # behind the fit
        **evaluated,
    }
    return {
        "strategy": examined,
        **(length if measure else {"fast_dev_run": 1}),
        "callbacks": [_UntilMeasured()] if measure else [],
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
    *,
    measure: bool,
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

    def calls(step: str) -> int:
        report = strategy.report()
        return report[step].calls if step in report else 0

    def evaluate(kind: str, run: Callable[..., Any], **options: Any) -> None:
        began, step, runs_again = time.monotonic(), _STEPS[kind], True
        while runs_again:
            before = calls(step)
            run(module, **given(dataloaders=loaders.get(kind)), **options)
            # several processes may have other numbers of batches, and wait for one another
            runs_again = measure and trainer.world_size == 1 and before < calls(step) < _EVALUATED
            runs_again = runs_again and time.monotonic() - began < _PATIENCE

    if measure:
        module.configure_callbacks = list  # type: ignore[method-assign]  # they would end the fit, or write
    trains, validates = there("train"), there("validate")
    if trains:
        trainer.fit(module, **given(train_dataloaders=loaders.get("train"), val_dataloaders=loaders.get("validate")))
    if validates and (measure or not trains):
        evaluate("validate", trainer.validate, verbose=False)
    if there("test"):
        evaluate("test", trainer.test, verbose=False)
    if there("predict"):
        evaluate("predict", trainer.predict, return_predictions=False)
    report = strategy.report()
    for kind, step in _STEPS.items():
        if step not in left_out and not calls(step):
            left_out[step] = f"{_LOADERS[kind]} has no batches"
    return Examination(report, left_out)


def load_weights(module: pl.LightningModule, path: str | os.PathLike[str], weights_only: bool | None) -> None:
    """Put the weights of a Lightning checkpoint into ``module``."""
    content = torch.load(path, map_location="cpu", weights_only=weights_only is not False)
    module.load_state_dict(content["state_dict"], strict=module.strict_loading)
