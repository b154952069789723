"""What a training on a device consists of, independent of any file format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_ort.optim.settings import KINDS, OptimizerSettings

__all__ = ["OptimizerState", "Property", "TrainingState"]

Property = int | float | str
"""What a property of a checkpoint may be."""


@dataclasses.dataclass
class OptimizerState:
    """What an optimizer remembers from update to update.

    Attributes:
        kind: ``"AdamW"``, ``"Adam"``, ``"SGD"`` or ``"Lamb"``.
        learning_rate: of the next update.
        step: number of updates that were made.
        moments: name of each trained parameter to its tensors, shaped like it, by the names that
            :attr:`~lightning_ort.optim.settings.OptimizerSettings.states` lists.
    """

    kind: str
    learning_rate: float
    step: int = 0
    moments: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"the optimizer is {self.kind[:100]!r}; expected one of {', '.join(KINDS)}")

    @classmethod
    def fresh(cls, settings: OptimizerSettings, trained: Mapping[str, Tensor]) -> OptimizerState:
        """Make the state before the first update of the parameters ``trained``."""
        moments = {n: {s: torch.zeros_like(p) for s in settings.states} for n, p in trained.items()}
        return cls(settings.kind, settings.lr, 0, moments)


@dataclasses.dataclass
class TrainingState:
    """Parameters, changing buffers, properties and optimizer state of one training.

    Attributes:
        parameters: name to tensor on the CPU, in the order of the model, trained or not.
        trained: names of the parameters that are trained, in the same order.
        buffers: name to tensor of what a training step changes without a gradient: running statistics and counters
            of batch normalization.
        properties: what users keep with a checkpoint.
        optimizer: ``None`` where nothing is known of an optimizer.
        nominal: tensors are names without values, which arrive later (``copy_buffer_to_parameters``).
    """

    parameters: dict[str, Tensor]
    trained: tuple[str, ...]
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    properties: dict[str, Property] = dataclasses.field(default_factory=dict)
    optimizer: OptimizerState | None = None
    nominal: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Parameters, then buffers."""
        return self.parameters | self.buffers
