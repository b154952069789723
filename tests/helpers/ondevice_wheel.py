"""ONNX Runtime's own on-device training, where it is installed, and recordings of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

DATA = Path(__file__).parents[1] / "data" / "ondevice"
WHEEL = importlib.util.find_spec("onnxruntime.training") is not None
needs_wheel = pytest.mark.skipif(not WHEEL, reason="this ONNX Runtime has no training API (onnxruntime-training-cpu)")


class WheelTraining:
    """A training with ``onnxruntime.training.api``."""

    def __init__(self, folder: Path, checkpoint: Path | None = None, optimizer: Path | None = None) -> None:
        from onnxruntime.training import api

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        self.api = api
        self.state = api.CheckpointState.load_checkpoint(str(checkpoint or folder / "checkpoint"))
        evaluation = folder / "eval_model.onnx"
        self.module = api.Module(
            str(folder / "training_model.onnx"),
            self.state,
            str(evaluation) if evaluation.exists() else None,
            session_options=options,
        )
        self.optimizer = api.Optimizer(str(optimizer or folder / "optimizer_model.onnx"), self.module)

    def step(self, *inputs: np.ndarray) -> Any:
        self.module.train()
        result = self.module(*inputs)
        self.optimizer.step()
        self.module.lazy_reset_grad()
        return result

    def evaluate(self, *inputs: np.ndarray) -> Any:
        self.module.eval()
        return self.module(*inputs)

    def save(self, path: Path) -> None:
        self.api.CheckpointState.save_checkpoint(self.state, str(path), include_optimizer_state=True)

    def data(self) -> dict[str, np.ndarray]:
        return {name: p.data.copy() for name, p in self.state.parameters}
