"""How the strategy reads and writes checkpoint files."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort.checkpoints.names import orttrainer_kind_of
from lightning_ort.distributed.sharding import local_part
from lightning_ort.errors import CheckpointError, DamagedFileError
from lightning_ort.files.reading import check_growth, refusing
from lightning_ort.files.writing import write_file
from lightning_ort.lightning_packages import TorchCheckpointIO, pl
from lightning_ort.validation import listed

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

__all__ = [
    "HDF5",
    "RECORD",
    "TRAINER_SCALER",
    "ORTCheckpointIO",
    "TrainerFile",
    "first_names",
    "is_lightning",
    "load",
    "make_record",
    "pack",
    "parameter_names",
    "read",
    "unpack",
    "weights_key",
]


class TrainerFile(dict[str, Any]):
    """What a file of ORTTrainer holds, for the strategy to make a Lightning checkpoint of.

    Attributes:
        path: of the file.
        state: nested dictionaries, see :mod:`lightning_ort.trainer.state`.
        prefix: what the names of the module begin with, if the user has said so.
    """

    def __init__(self, path: str, state: dict[str, Any], prefix: str | None) -> None:
        super().__init__({"pytorch-lightning_version": pl.__version__})
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
            if _starts_with(stream) == HDF5:
                return self._load_trainer_file(stream, path)
            found = load(stream, path, map_location=map_location, weights_only=weights_only)
        return self._checked(found, path)

    def _checked(self, found: Any, path: _PATH) -> dict[str, Any]:
        return _check_lightning(found, path)

    def _load_trainer_file(self, stream: IO[bytes], path: _PATH) -> TrainerFile:
        # h5py is only needed here
        from lightning_ort.checkpoints.orttrainer import read_state

        return TrainerFile(str(path), read_state(stream, path), self.prefix)


HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"


def _starts_with(stream: IO[bytes]) -> bytes:
    """The first bytes of a file; the stream stays where it is."""
    place = stream.tell()
    head = stream.read(len(HDF5))
    stream.seek(place)
    return head


def _is_torch_file(stream: IO[bytes]) -> bool:
    """Whether ``torch.save`` may have written it: a zip archive, or the bare pickle that it was until torch 1.5."""
    return _starts_with(stream).startswith((_ZIP, b"\x80"))


def load(stream: IO[bytes], name: Any, *, map_location: Any, weights_only: bool | None) -> Any:
    """What ``torch.save`` wrote.

    Args:
        stream: the open file.
        name: of the file, for messages.
        map_location: see ``torch.load``.
        weights_only: see ``torch.load``.

    Raises:
        CheckpointError: the file is cut short or damaged, or of another kind.
        UnpicklingError: it is in order, but holds objects that ``weights_only`` forbids; torch's message names them.
    """
    head = _starts_with(stream)
    if not _is_torch_file(stream):
        what = f"begins with {head!r}" if head else "is empty"
        raise CheckpointError(
            f"{name} is no checkpoint: it {what}. Expected a file of Trainer.save_checkpoint, ModelCheckpoint, or "
            "ORTTrainer.save_checkpoint."
        )
    sound = False
    with refusing(name, advice="Use another checkpoint."):
        if head.startswith(_ZIP):
            _check_archive(stream)
            stream.seek(0)
            sound = True
        try:
            return torch.load(stream, map_location=map_location, weights_only=weights_only)
        except pickle.UnpicklingError as error:
            if not sound:
                raise
            unpickling = error
    raise type(unpickling)(f"{name}: {unpickling}") from unpickling


def _check_archive(stream: IO[bytes]) -> None:
    """Refuse a zip archive whose checksums are wrong, at which torch does not look, or that unfolds to far more."""
    size = stream.seek(0, os.SEEK_END)
    with zipfile.ZipFile(stream) as archive:
        parts = archive.infolist()
        check_growth(size, sum(part.file_size for part in parts), "what it holds")
        names = [part.filename for part in parts]
        if len(set(names)) < len(names):
            raise DamagedFileError(f"it has two parts {next(n for n in names if names.count(n) > 1)!r}")
        broken = archive.testzip()
    if broken is not None:
        raise DamagedFileError(f"the checksum of its part {broken} is wrong")


def _check_lightning(checkpoint: Any, name: Any) -> dict[str, Any]:
    """``checkpoint``, if it is a dictionary as Lightning's Trainer writes it.

    Raises:
        CheckpointError: it is something else.
    """
    needed = ("state_dict", "pytorch-lightning_version")
    if isinstance(checkpoint, dict) and all(key in checkpoint for key in needed):
        return checkpoint
    holds = f"a {type(checkpoint).__name__}"
    if isinstance(checkpoint, Mapping):
        holds = f"a dictionary of {listed(map(str, checkpoint)) if checkpoint else 'nothing'}"
    raise CheckpointError(
        f"{name} was written by torch.save, but is no checkpoint of Lightning: it holds {holds}, and lacks "
        f"{' or '.join(needed)}. If these are weights, load them into the module: load_state_dict(torch.load(...))."
    )


RECORD = "lightning_ort"
TRAINER_SCALER = "lightning_ort.loss_scaler"
"""Where a checkpoint made of an ORTTrainer's file has its scaler, as of :meth:`ScaleRule.summary`."""


def make_record(trainer: pl.Trainer, module: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Plain numbers and strings.

    Returns:
        ``version``; ``shared``, names of weights to the first name of the same tensor; ``optimizers``, each with
        ``kind`` and ``problem`` (see :func:`orttrainer_kind_of`), ``class`` and ``names`` (of its parameters, in the
        order of torch's numbers); ``train_step_info``, the counters of an ORTTrainer; ``batches_per_epoch``, ``None``
        if unknown; ``loss_scaler`` (see :meth:`ScaleRule.summary`), ``None`` without loss scaling.
    """
    precision = trainer.precision_plugin
    skipped = int(getattr(precision, "skipped_steps", 0))
    batches = trainer.num_training_batches
    progress = trainer.fit_loop.state_dict()["epoch_loop.batch_progress"]
    return {
        "version": 1,
        "shared": first_names(module),
        "optimizers": [_optimizer(optimizer, module) for optimizer in optimizers],
        "train_step_info": {
            "step": progress["total"]["processed"],
            "optimization_step": trainer.global_step - skipped,
        },
        "batches_per_epoch": int(batches) if isinstance(batches, int) else None,
        "loss_scaler": precision.scaler_summary() if hasattr(precision, "scaler_summary") else None,
    }


def _optimizer(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    names = parameter_names(optimizer, module)
    optimizer = local_part(optimizer)
    kind, problem = orttrainer_kind_of(optimizer)
    return {
        "class": f"{type(optimizer).__module__}.{type(optimizer).__name__}",
        "kind": kind,
        "problem": problem,
        "names": names,
    }


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Of its parameters in the order of torch's numbers; that of a parameter which is not the module's is empty."""
    name_of = {id(p): name for name, p in module.named_parameters()}
    # torch numbers them in this order, each once
    params = dict.fromkeys(id(p) for group in optimizer.param_groups for p in group["params"])
    return [name_of.get(i, "") for i in params]


def first_names(module: nn.Module) -> dict[str, str]:
    """Of tensors with several names: each further one to the first."""
    first: dict[int, str] = {}
    found = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and first.setdefault(id(tensor), name) != name:
            found[name] = first[id(tensor)]
    return found


def weights_key(checkpoint: Mapping[str, Any]) -> str:
    """Under which key the weights are that training goes on with; ``WeightAveraging`` puts its averages first."""
    return "current_model_state" if "current_model_state" in checkpoint else "state_dict"


def is_lightning(path: str | os.PathLike[str] | IO[bytes]) -> bool:
    """Whether this is a file of ``torch.save``, rather than HDF5 or nothing at all."""
    if isinstance(path, (str, os.PathLike)) and not os.path.isfile(path):
        return False
    with _opened(path) as stream:
        return _is_torch_file(stream)


def read(path: str | os.PathLike[str] | IO[bytes], *, allow_pickle: bool) -> dict[str, Any]:
    """A checkpoint of Lightning, its tensors on the CPU.

    Args:
        path: the file, or an open binary file.
        allow_pickle: accept objects besides tensors, numbers and strings, such as hyper-parameters may be. Unpickling
            executes whatever the author of a file put into it.

    Raises:
        CheckpointError: the file is cut short, damaged, or of another kind.
        ValueError: there are such objects and ``allow_pickle`` is not set.
    """
    with _opened(path) as stream:
        try:
            found = load(stream, path, map_location="cpu", weights_only=not allow_pickle)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"{path} holds pickled objects besides tensors, numbers and strings, and unpickling "
                "executes whatever the author of the file put into it. If you trust the file, load it with "
                "allow_pickle=True."
            ) from error
    return _check_lightning(found, path)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str] | IO[bytes]) -> Iterator[IO[bytes]]:
    if isinstance(path, (str, os.PathLike)):
        with open(path, "rb") as stream:
            yield stream
    else:
        yield path


def pack(rest: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`~lightning_ort.checkpoints.conversion.to_trainer` left over, as an entry of an HDF5 file."""
    stream = io.BytesIO()
    torch.save(dict(rest), stream)
    return {"checkpoint": np.frombuffer(stream.getvalue(), np.uint8)}


def unpack(group: Mapping[str, Any], path: Any, weights_only: bool | None) -> dict[str, Any]:
    """What :func:`pack` was given.

    Raises:
        CheckpointError: it is damaged.
        UnpicklingError: it holds objects that ``weights_only`` forbids.
    """
    with refusing(path, "damaged"):
        stream = io.BytesIO(np.asarray(group["checkpoint"]).tobytes())
    return load(stream, path, map_location="cpu", weights_only=weights_only)
