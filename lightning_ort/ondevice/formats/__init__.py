"""A file format of artifacts: what the classes of the on-device API ask of it."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Protocol

from lightning_ort.checkpoints.state import Property, TrainingState
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.validation import choice

__all__ = ["Artifacts", "Flavour", "flavour_named", "flavour_of_checkpoint", "flavour_of_model", "flavours"]


@dataclasses.dataclass(frozen=True)
class Artifacts:
    """All that ``generate_artifacts`` has found out, before it is written.

    Attributes:
        state: parameters as they are, without moments.
        train: outputs, gradients and new buffers; Dropout on.
        evaluation: outputs; Dropout off, running statistics used.
        inference: from the model's inputs to its results, without a loss; ``None`` where a model has only a loss.
        optimizer: ``None`` where no update is wanted.
    """

    state: TrainingState
    train: StepGraph
    evaluation: StepGraph
    inference: StepGraph | None
    optimizer: OptimizerConfig | None

    def __repr__(self) -> str:
        numbers = sum(self.state.parameters[name].numel() for name in self.state.trained)
        trained = f"{len(self.state.trained)} trained parameters ({numbers:,} numbers)"
        update = "without an optimizer" if self.optimizer is None else f"with {self.optimizer.kind}"
        return f"<{type(self).__name__}: {trained} {update}, from {', '.join(i.name for i in self.train.inputs)}>"


class Flavour(Protocol):
    """Reads and writes the files of one format. All methods raise one ``ValueError`` (or ``FileNotFoundError``) that
    names the file and says what is wrong, and then have changed nothing."""

    name: str

    def owns_checkpoint(self, path: Path) -> bool:
        """Whether an existing file (or folder) looks like a checkpoint of this format."""

    def owns_model(self, path: Path) -> bool:
        """Whether an existing ONNX file (or folder) belongs to artifacts of this format."""

    def load_checkpoint(self, path: Path) -> TrainingState:
        """Read a checkpoint."""

    def save_checkpoint(self, state: TrainingState, path: Path, *, include_optimizer_state: bool) -> None:
        """Write a checkpoint that is complete when it appears."""

    def check_property(self, name: str, value: Property) -> None:
        """Raise a ``ValueError`` unless a checkpoint can hold that property."""

    def load_train_step(self, path: Path, state: TrainingState) -> StepGraph:
        """The training graph that a user named, as a graph of outputs, gradients and new buffers."""

    def load_eval_step(self, path: Path, state: TrainingState) -> StepGraph:
        """The evaluation graph that a user named."""

    def load_optimizer(self, path: Path, state: TrainingState) -> OptimizerConfig:
        """What the optimizer artifact that a user named computes."""

    def write(
        self, artifacts: Artifacts, directory: Path, prefix: str, *, nominal_checkpoint: bool = False
    ) -> list[Path]:
        """Write all files, with ``nominal_checkpoint`` also a checkpoint without values; the paths."""


_CLASSES: dict[str, str] = {
    "portable": "lightning_ort.ondevice.formats.portable.Portable",
    "ort-training": "lightning_ort.ondevice.formats.ort_training.OrtTraining",
}
"""Name of each format to its class, imported when it is needed. The last one takes any ONNX file for its own."""


def flavours() -> dict[str, Flavour]:
    """All formats, by name."""
    found = {}
    for name, path in _CLASSES.items():
        module, attribute = path.rsplit(".", 1)
        found[name] = getattr(importlib.import_module(module), attribute)()
    return found


def flavour_named(name: str) -> Flavour:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    known = flavours()
    return known[choice("flavour", name, list(known))]


def flavour_of_checkpoint(path: Path) -> Flavour:
    """The format of an existing checkpoint."""
    if not path.exists():
        raise FileNotFoundError(f"There is no checkpoint {str(path)!r}.")
    for flavour in flavours().values():
        if flavour.owns_checkpoint(path):
            return flavour
    raise ValueError(f"{str(path)!r} is not a checkpoint of on-device training ({', '.join(flavours())}).")


def flavour_of_model(path: Path) -> Flavour:
    """The format that an existing artifact belongs to."""
    if not path.exists():
        raise FileNotFoundError(f"There is no artifact {str(path)!r}.")
    for flavour in flavours().values():
        if flavour.owns_model(path):
            return flavour
    raise ValueError(f"{str(path)!r} does not belong to artifacts of on-device training ({', '.join(flavours())}).")
