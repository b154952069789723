"""Artifacts of standard ONNX operators, safetensors and JSON, for any ONNX Runtime in any language."""

from __future__ import annotations

from pathlib import Path

from lightning_ort.checkpoints.portable import is_checkpoint, load_checkpoint, save_checkpoint
from lightning_ort.checkpoints.state import Property, TrainingState
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.ondevice.formats import Artifacts
from lightning_ort.ondevice.formats.portable.manifest import Manifest, manifest_of
from lightning_ort.ondevice.formats.portable.writing import write_artifacts
from lightning_ort.ondevice.optimizer_config import OptimizerConfig

__all__ = ["Portable"]


class Portable:
    """The flavour ``"portable"``; see :class:`~lightning_ort.ondevice.formats.Flavour`."""

    name = "portable"

    def owns_checkpoint(self, path: Path) -> bool:
        return is_checkpoint(path)

    def owns_model(self, path: Path) -> bool:
        return manifest_of(path) is not None

    def load_checkpoint(self, path: Path) -> TrainingState:
        return load_checkpoint(path)

    def save_checkpoint(self, state: TrainingState, path: Path, *, include_optimizer_state: bool) -> None:
        save_checkpoint(state, path, include_optimizer_state=include_optimizer_state)

    def check_property(self, name: str, value: Property) -> None:
        """Accept any property: JSON has numbers of all sizes."""

    def load_train_step(self, path: Path, state: TrainingState) -> StepGraph:
        return self._manifest(path).step_graph("gradients", state)

    def load_eval_step(self, path: Path, state: TrainingState) -> StepGraph:
        return self._manifest(path).step_graph("eval_step", state)

    def load_optimizer(self, path: Path, state: TrainingState) -> OptimizerConfig:
        return self._manifest(path).optimizer()

    def write(
        self, artifacts: Artifacts, directory: Path, prefix: str, *, nominal_checkpoint: bool = False
    ) -> list[Path]:
        return write_artifacts(artifacts, directory, prefix, nominal_checkpoint=nominal_checkpoint)

    def _manifest(self, path: Path) -> Manifest:
        found = manifest_of(path)
        assert found is not None, "asked before by owns_model"
        return found
