"""Where the tensors of a training on a device lie."""

from __future__ import annotations

from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.runtime.memory import Packed

__all__ = ["TrainingMemory"]


class TrainingMemory:
    """What all modules and optimizers of one state have in common, so that each goes on from where another one is.

    Args:
        values: what is copied into it; see :meth:`show_in`.

    Attributes:
        parameters: those that are trained.
        gradients: theirs.
        tensors: parameters, trained or not, and buffers by name.
        moments: of the optimizers, by their names; ``None`` before the first.
        accumulates: whether the next gradients are added to those that are there.
    """

    def __init__(self, values: TrainingState) -> None:
        trained = {n: values.parameters[n] for n in values.trained}
        frozen = {n: p.contiguous() for n, p in values.parameters.items() if n not in trained}
        self.parameters, self.gradients = Packed(trained), Packed(trained)
        self.parameters.fill(trained)
        self.tensors = self.parameters.views | frozen | values.buffers
        self.accumulates = False
        self._scratch: Packed | None = None
        self.moments: dict[str, Packed] | None = None

    def show_in(self, values: TrainingState) -> None:
        """Let the parameters and buffers of ``values`` be those that lie here."""
        values.parameters = {n: self.tensors[n] for n in values.parameters}
        values.buffers = {n: self.tensors[n] for n in values.buffers}

    def keep_gradients(self) -> None:
        """Remember the gradients, which the next step overwrites."""
        if self._scratch is None:
            self._scratch = Packed(self.gradients.views)
        for dtype, flat in self.gradients.flat.items():
            self._scratch.flat[dtype].copy_(flat)

    def add_kept(self) -> None:
        """Add what was kept to the gradients that a step has written."""
        assert self._scratch is not None
        for dtype, flat in self.gradients.flat.items():
            flat.add_(self._scratch.flat[dtype])

    def restore_kept(self) -> None:
        """Let the gradients be what was kept: the step has failed."""
        assert self._scratch is not None
        for dtype, flat in self.gradients.flat.items():
            flat.copy_(self._scratch.flat[dtype])
