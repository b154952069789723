"""ORTTrainer: ONNX Runtime's training API for plain PyTorch modules, on the engine of this package."""

from __future__ import annotations

from lightning_ort.optim.step_info import TrainStepInfo
from lightning_ort.trainer.options import ORTTrainerOptions, PropagateCastOpsStrategy
from lightning_ort.trainer.trainer import ORTTrainer

__all__ = ["ORTTrainer", "ORTTrainerOptions", "PropagateCastOpsStrategy", "TrainStepInfo"]
