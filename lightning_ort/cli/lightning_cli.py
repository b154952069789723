"""LightningCLI with this package's strategy, callbacks and plug-ins, and with ``examine`` and ``bench``."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import traceback
import warnings
from typing import Any, Literal, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

import lightning_ort
from lightning_ort.bench.child import Child
from lightning_ort.bench.contestants import STRATEGIES
from lightning_ort.bench.measure import Settings
from lightning_ort.cli.bench import bench, bench_flags, train_in_turns
from lightning_ort.cli.mistakes import Mistake, missing_checkpoint, of_parser, of_trainer, shows_tracebacks
from lightning_ort.export import ORTExport  # noqa: F401 - a configuration can name it without its module
from lightning_ort.lightning import register
from lightning_ort.lightning.examine import examination_flags, examine_in, load_weights
from lightning_ort.lightning.strategy import ORTStrategy

__all__ = ["ORTCLI"]

ORTStrategy.made()  # a configuration finds subclasses of Lightning's own by their names alone
_EPILOG = "lightning-ort --help lists the commands that need no configuration."


class _Parser(LightningArgumentParser):
    """Whose errors are three lines; the usage of all options is what ``--help`` prints.

    Options have their full names: an abbreviation might be another one's in a later version.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or shows_tracebacks():
            super().error(message, ex)
        # an option that a configuration names for a command is refused by the parser of all commands
        _refuse(of_parser(getattr(ex, "subcommand_parser", None) or self, message))


def _refuse(mistake: Mistake) -> NoReturn:
    print(mistake, file=sys.stderr)
    raise SystemExit(2)


def _is_about_options(error: BaseException) -> bool:
    """Whether no code of the user has raised it, or what it was raised for: that needs a traceback."""
    packages: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        frames = (frame for frame, _ in traceback.walk_tb(cause.__traceback__))
        packages |= {frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames}
        cause = cause.__cause__ or cause.__context__
    return packages <= {"contextlib", "jsonargparse", "lightning", "lightning_ort"}


class _Subcommands:
    """A base class of Trainers with what ``examine`` and ``bench`` call; files for ``fit`` are files for them."""

    def examine(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        measure: bool = False,
    ) -> bool:
        """Run one batch of each step, and say what would run in ONNX Runtime, what not and why; writes nothing.

        Args:
            model: examined.
            train_dataloaders: not from a command line.
            val_dataloaders: not from a command line.
            datamodule: where batches come from, if not from the model.
            ckpt_path: Path of a checkpoint, whose weights the model gets before.
            weights_only: Load nothing from the checkpoint but tensors and plain Python.
            measure: Train until it is known who is fastest, a minute at most, and say how long steps take.
        """
        if ckpt_path is not None:
            load_weights(model, ckpt_path, weights_only)
        loaders = {"train": train_dataloaders, "validate": val_dataloaders}
        assert isinstance(self, Trainer)
        examination = examine_in(self, model, datamodule, loaders, measure=measure)
        print(examination)
        return examination.all_supported

    def bench(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | None = None,
        weights_only: bool | None = None,
        rounds: int = 6,
        seconds: float = 0.5,
        steps: int = 4,
        warmup_steps: int = 12,
        threads: int | None = None,
        strategies: list[Literal["auto", "compile", "ort", "ort+inductor"]] | None = None,
    ) -> None:
        """Train with each strategy in turns, and say which one to use and from which step on it pays; writes nothing.

        Args:
            model: trained.
            train_dataloaders: not from a command line.
            val_dataloaders: not from a command line.
            datamodule: where batches come from, if not from the model.
            ckpt_path: Path of a checkpoint, whose weights the model gets before.
            weights_only: Load nothing from the checkpoint but tensors and plain Python.
            rounds: Turns of each strategy that count.
            seconds: Least duration of a turn.
            steps: Least number of steps in a turn, 2 or more.
            warmup_steps: Steps of the first turn, in which graphs are compiled.
            threads: Of torch and ONNX Runtime (default: torch's choice).
            strategies: Which are compared with auto (default: all; compile and ort+inductor need a C++ compiler).
        """
        raise NotImplementedError("a command of several processes: ORTCLI.bench")


class ORTCLI(LightningCLI):
    """``LightningCLI`` whose default strategy is ``"ort"``, with the subcommands ``examine`` and ``bench``.

    Arguments are those of ``lightning.pytorch.cli.LightningCLI``; ``trainer_class`` must be a class.

    Attributes:
        status: exit status of the subcommand: 1 where ``examine`` found something that does not run in ONNX Runtime, or
            a strategy failed in ``bench``; 2 where a step failed in ``examine``, or ``auto`` in ``bench``; else 0.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises TypeError where ``trainer_class`` is a function, otherwise what ``LightningCLI`` raises."""
        self.status = 0
        # before anything is printed
        self._child = Child.of_this_process()
        self._folder = contextlib.ExitStack()
        self._args = kwargs.get("args")
        register()
        kwargs.setdefault("parser_class", _Parser)
        trainer_class = kwargs.get("trainer_class") or Trainer
        if not isinstance(trainer_class, type):
            raise TypeError(
                f"trainer_class={trainer_class!r} is no class, to which ORTCLI could add its subcommands examine and "
                "bench; use lightning.pytorch.cli.LightningCLI with trainer_defaults={'strategy': 'ort'}"
            )
        kwargs["trainer_class"] = type(trainer_class.__name__, (_Subcommands, trainer_class), {})
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
        return {**found, "examine": found["fit"], "bench": found["fit"]}

    @override
    def before_instantiate_classes(self) -> None:
        missing = missing_checkpoint(self._get(self.config, "ckpt_path"))
        if missing is not None:
            _refuse(missing)
        evaluates = self.subcommand in ("validate", "test", "predict")
        if evaluates and self._get(self.config, "trainer", default={}).get("logger") is False:
            # there is no run that it belongs to, and the next command would find the file in its way
            self.save_config_callback = None
            # nor a checkpoint of its own, whose folder would be another than that of the fit
            warnings.filterwarnings("ignore", "The dirpath has changed")
        if self.subcommand in ("examine", "bench"):
            # some loggers open a connection as soon as they are made
            for name, value in (("logger", False), ("callbacks", None), ("profiler", None)):
                self.config[self.subcommand]["trainer"][name] = value

    @override
    def instantiate_classes(self) -> None:
        if self.subcommand == "bench" and self._child is None:
            # whose children train; none of the memory and threads of this process are to be theirs
            self.config_init, self.model, self.datamodule = self.config, None, None
            # LightningCLI looks up there what it calls in vain of this class
            self.trainer = self.trainer_class  # type: ignore[assignment]
        else:
            try:
                super().instantiate_classes()
            except (MisconfigurationException, TypeError, ValueError) as error:
                if shows_tracebacks() or not _is_about_options(error):
                    raise
                _refuse(of_trainer(error, self._get(self.config, "trainer", default={})))

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.subcommand not in ("examine", "bench"):
            return super().instantiate_trainer(**kwargs)
        given = self._get(self.config_init, "trainer", default={})
        # a folder that stays empty: nothing is to be written
        folder = self._folder.enter_context(tempfile.TemporaryDirectory())
        if self._child is None:
            measure = self._get(self.config_init, "measure", default=False)
            flags = examination_flags(given, folder, measure=measure)
        else:
            flags = bench_flags(given, self._child, folder)
        # not by way of LightningCLI, which adds callbacks
        return self.trainer_class(**{**given, **kwargs, **flags})

    def examine(self, **kwargs: Any) -> None:
        """Call ``examine`` of the Trainer, and keep the exit status."""
        with self._folder:
            try:
                assert isinstance(self.trainer, _Subcommands)
                self.status = 0 if self.trainer.examine(**kwargs) else 1
            except Exception:
                traceback.print_exc()
                self.status = 2

    def bench(self, model: LightningModule | None, **kwargs: Any) -> None:
        """Start a process per strategy, or train in one of these; keep the exit status."""
        if self._child is not None:
            assert model is not None
            with self._folder:
                if kwargs["ckpt_path"] is not None:
                    load_weights(model, kwargs["ckpt_path"], kwargs["weights_only"])
                train_in_turns(self.trainer, model, kwargs.get("datamodule"), self._child)
            return
        try:
            settings = Settings(**{f.name: kwargs[f.name] for f in dataclasses.fields(Settings)})
        except ValueError as error:
            print(f"lightning-ort bench: {error}", file=sys.stderr)
            self.status = 2
            return
        own = self.model_class.__name__ if isinstance(self.model_class, type) else "model"
        name = self._get(self.config, "model").get("class_path", own).rpartition(".")[2]
        precision = self._get(self.config, "trainer")["precision"]
        self.status = bench(name, self._command(), precision, kwargs["strategies"] or list(STRATEGIES), settings)

    def _command(self) -> list[str]:
        """Starts a process with this command line."""
        if self._args is None:
            return [sys.executable, *sys.orig_argv[1:]]
        if self.model_class is None and self.datamodule_class is None and isinstance(self._args, list):
            return [sys.executable, "-m", "lightning_ort", *self._args]
        raise MisconfigurationException(
            "bench starts processes with the same command line, and this one was given by ORTCLI(args=...): run bench "
            "from a shell, in a program that calls ORTCLI without args."
        )
