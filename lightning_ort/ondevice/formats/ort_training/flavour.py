"""The format of ONNX Runtime's own on-device training."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import torch

from lightning_ort.checkpoints.ort_training import is_checkpoint, read_checkpoint, write_checkpoint
from lightning_ort.checkpoints.state import OptimizerState, Property, TrainingState
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.ondevice.formats import Artifacts
from lightning_ort.ondevice.formats.ort_training.optimizer import optimizer_model, read_optimizer
from lightning_ort.ondevice.formats.ort_training.read_step import read_evaluation, read_training
from lightning_ort.ondevice.formats.ort_training.write_step import evaluation_model, training_model
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.validation import shown

__all__ = ["OrtTraining"]


class OrtTraining:
    """Files that ``onnxruntime.training.api`` reads and writes; see :class:`~lightning_ort.ondevice.formats.Flavour`.

    They are called as ``onnxruntime.training.artifacts`` calls them: ``training_model.onnx``, ``eval_model.onnx``,
    ``optimizer_model.onnx``, ``checkpoint`` and ``nominal_checkpoint``.
    """

    name = "ort-training"

    def owns_checkpoint(self, path: Path) -> bool:
        """Whether an existing file begins like a checkpoint of ONNX Runtime."""
        return is_checkpoint(path)

    def owns_model(self, path: Path) -> bool:
        """Whether an existing file is an ONNX model."""
        try:
            return path.is_file() and bool(onnx.load_model(path, load_external_data=False).graph.output)
        except Exception:  # whatever protobuf makes of other files
            return False

    def load_checkpoint(self, path: Path) -> TrainingState:
        """Read a checkpoint."""
        return read_checkpoint(path)

    def save_checkpoint(self, state: TrainingState, path: Path, *, include_optimizer_state: bool) -> None:
        """Write a checkpoint."""
        write_checkpoint(state, path, include_optimizer_state=include_optimizer_state)

    def check_property(self, name: str, value: Property) -> None:
        """Raise unless a checkpoint can hold that property: integers have 64 bits in it, and floats 32.

        Raises:
            ValueError: it is too large, or a text that is no Unicode.
        """
        if isinstance(value, str):
            possible, expected = not any("\ud800" <= c <= "\udfff" for c in value), "a text without lone surrogates"
        elif isinstance(value, int):
            possible, expected = -(2**63) <= value < 2**63, "an int of 64 bits, or a str"
        else:
            possible, expected = (
                not math.isfinite(value) or abs(value) <= torch.finfo(torch.float32).max,
                "a float of 32 bits, or a str",
            )
        if not possible:
            raise ValueError(
                f"Property {name!r} is {shown(value)}, which a checkpoint of flavour {self.name!r} cannot hold; "
                f"expected {expected}."
            )

    def load_train_step(self, path: Path, state: TrainingState) -> StepGraph:
        """A training model in standard operators."""
        return read_training(path, state)

    def load_eval_step(self, path: Path, state: TrainingState) -> StepGraph:
        """An evaluation model in standard operators."""
        return read_evaluation(path, state)

    def load_optimizer(self, path: Path, state: TrainingState) -> OptimizerConfig:
        """What an optimizer model computes."""
        return read_optimizer(path, len(state.trained))

    def write(
        self, artifacts: Artifacts, directory: Path, prefix: str, *, nominal_checkpoint: bool = False
    ) -> list[Path]:
        """Write all files.

        Raises:
            UnsupportedError: what ONNX Runtime's training API cannot do; nothing has been written then.
        """
        state = artifacts.state
        models = {
            "training_model.onnx": training_model(artifacts.train, state),
            "eval_model.onnx": evaluation_model(artifacts.evaluation, state),
        }
        if artifacts.optimizer is not None:
            models["optimizer_model.onnx"] = optimizer_model(artifacts.optimizer, len(state.trained))
            if state.optimizer is None:
                optimizer = OptimizerState(artifacts.optimizer.kind, artifacts.optimizer.lr)
                state = TrainingState(state.parameters, state.trained, state.buffers, state.properties, optimizer)
        written = []
        for name, model in models.items():
            written.append(directory / f"{prefix}{name}")
            save_onnx(model, written[-1])
        written += write_checkpoint(state, directory / f"{prefix}checkpoint", include_optimizer_state=True)
        if nominal_checkpoint:
            nominal = directory / f"{prefix}nominal_checkpoint"
            written += write_checkpoint(state, nominal, include_optimizer_state=False, nominal=True)
        return written
