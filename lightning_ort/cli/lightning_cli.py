"""LightningCLI with this package's strategy, callbacks and plug-ins, and with ``examine``."""

from __future__ import annotations

import contextlib
import tempfile
import traceback
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from typing_extensions import override

# classes that a configuration can name without their modules
import lightning_ort
from lightning_ort.export import ORTExport  # noqa: F401
from lightning_ort.lightning.examine import examination_flags, examine_in, load_weights

__all__ = ["ORTCLI"]

_EPILOG = (
    "lightning-ort doctor: says what of the installation is missing, too old or in conflict, and how to mend it. "
    "lightning-ort --version: prints the version."
)


class _Trainer(Trainer):
    """A Trainer with what ``lightning-ort examine`` calls; files for ``fit`` are files for ``examine``."""

    def examine(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
    ) -> bool:
        """Run one batch of each step, and say what would run in ONNX Runtime, what not and why; writes nothing.

        Args:
            model: examined.
            train_dataloaders: not from a command line.
            val_dataloaders: not from a command line.
            datamodule: where batches come from, if not from the model.
            ckpt_path: Path of a checkpoint, whose weights the model gets before.
            weights_only: Load nothing from the checkpoint but tensors and plain Python.
        """
        if ckpt_path is not None:
            load_weights(model, ckpt_path, weights_only)
        loaders = {"train": train_dataloaders, "validate": val_dataloaders}
        examination = examine_in(self, model, datamodule, loaders)
        print(examination)
        return examination.all_in_ort


class ORTCLI(LightningCLI):
    """``LightningCLI`` whose default strategy is ``"ort"``, with the subcommand ``examine``.

    Arguments are those of ``lightning.pytorch.cli.LightningCLI``.

    Attributes:
        status: exit status of the subcommand: 1 where ``examine`` found something that does not run in ONNX Runtime, 2
            where a step failed in it, else 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.status = 0
        kwargs.setdefault("trainer_class", _Trainer)
        kwargs["trainer_defaults"] = {"strategy": "ort", **(kwargs.get("trainer_defaults") or {})}
        kwargs["parser_kwargs"] = {
            "prog": "lightning-ort", "description": lightning_ort.__doc__, "epilog": _EPILOG,
            **(kwargs.get("parser_kwargs") or {}),
        }  # fmt: skip
        super().__init__(*args, **kwargs)

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        found = LightningCLI.subcommands()
        return {**found, "examine": found["fit"]}

    @override
    def before_instantiate_classes(self) -> None:
        if self.subcommand == "examine":
            # some loggers open a connection as soon as they are made
            for name, value in (("logger", False), ("callbacks", None), ("profiler", None)):
                self.config["examine"]["trainer"][name] = value

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand == "examine":
            given = self._get(self.config_init, "trainer", default={})
            # a folder that stays empty: nothing is to be written
            self._folder = contextlib.ExitStack()
            folder = self._folder.enter_context(tempfile.TemporaryDirectory())
            kwargs |= examination_flags(given.get("strategy"), folder)
        return super().instantiate_trainer(**kwargs)

    def examine(self, **kwargs: Any) -> None:
        """Call ``examine`` of the Trainer, and keep the exit status."""
        with self._folder:
            try:
                assert isinstance(self.trainer, _Trainer)
                self.status = 0 if self.trainer.examine(**kwargs) else 1
            except Exception:
                traceback.print_exc()
                self.status = 2
