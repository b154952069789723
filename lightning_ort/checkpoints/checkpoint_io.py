"""How the strategy reads and writes checkpoint files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch import __version__ as lightning_version
from typing_extensions import override

from lightning_ort.checkpoints.torch_files import HDF5, check_lightning, load, starts_with
from lightning_ort.errors import CheckpointError
from lightning_ort.files.writing import write_file

__all__ = ["ORTCheckpointIO", "TrainerFile"]


class TrainerFile(dict[str, Any]):
    """What a file of ORTTrainer holds, for the strategy to make a Lightning checkpoint of.

    Attributes:
        path: of the file.
        state: nested dictionaries, see :mod:`lightning_ort.trainer.state`.
        prefix: what the names of the module begin with, if the user has said so.
    """

    def __init__(self, path: str, state: dict[str, Any], prefix: str | None) -> None:
        super().__init__({"pytorch-lightning_version": lightning_version})
        self.path, self.state, self.prefix = path, state, prefix

    def __missing__(self, key: str) -> Any:
        # another strategy asks for "state_dict" before it changes anything
        raise CheckpointError(
            f"{self.path} is a checkpoint of ORTTrainer, whose names and optimizer states only strategy='ort' "
            "translates. Use Trainer(strategy='ort'), or load it into an ORTTrainer."
        )


class ORTCheckpointIO(TorchCheckpointIO):
    """Reads checkpoints of Lightning and of ORTTrainer, whichever a file is; writes those of Lightning.

    A local file appears under its name when it is complete and on the disk. Other file systems are left to Lightning.
    ``strategy="ort"`` uses one by default; ``plugins=[ORTCheckpointIO()]`` gives other strategies its way of writing,
    and its errors.

    Args:
        prefix: what the names of the module begin with where a file of ORTTrainer has none: ``"net."`` if the
            LightningModule's attribute ``net`` is what ORTTrainer trained. Needed only where more than one would fit.
    """

    def __init__(self, prefix: str | None = None) -> None:
        super().__init__()
        self.prefix = prefix

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any | None = None) -> None:
        """Write ``checkpoint``; a file of that name stays as it is until the new one is complete.

        Raises:
            TypeError: ``storage_options`` are given, which nothing here has a use for.
        """
        system, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(system, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        with write_file(target, replace=True) as stream:
            torch.save(checkpoint, stream)

    @override
    def load_checkpoint(
        self,
        path: _PATH,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a file of either kind.

        Args:
            path: of the file.
            map_location: see ``torch.load``.
            weights_only: see ``torch.load``; files of ORTTrainer never hold anything that needs unpickling.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it is cut short, damaged, or something else.
        """
        system, local = url_to_fs(str(path))
        if str(path).startswith("http") or not isinstance(system, LocalFileSystem):
            return super().load_checkpoint(path, map_location, weights_only)
        if not Path(local).is_file():
            raise FileNotFoundError(f"Checkpoint file not found: {path}")
        with open(local, "rb") as stream:
            if starts_with(stream) == HDF5:
                return self._load_trainer_file(stream, path)
            found = load(stream, path, map_location=map_location, weights_only=weights_only)
        return check_lightning(found, path)

    def _load_trainer_file(self, stream: IO[bytes], path: _PATH) -> TrainerFile:
        # h5py is only needed here
        from lightning_ort.trainer.checkpoint import read_state

        try:
            return TrainerFile(str(path), read_state(stream), self.prefix)
        except (KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is no checkpoint of ORTTrainer, or cut short or damaged: "
                f"{error.args[0] if error.args else error}"
            ) from error
