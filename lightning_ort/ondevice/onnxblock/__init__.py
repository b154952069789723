"""Blocks that add losses and optimizers to ONNX models, with the interface of ``onnxruntime.training.onnxblock``."""

from lightning_ort.ondevice.onnxblock import blocks, loss, optim
from lightning_ort.ondevice.onnxblock.blocks import Block
from lightning_ort.ondevice.onnxblock.checkpoint_utils import load_checkpoint_to_model, save_checkpoint
from lightning_ort.ondevice.onnxblock.model_accessor import base, custom_op_library, empty_base
from lightning_ort.ondevice.onnxblock.training import ForwardBlock, TrainingBlock

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "custom_op_library",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]
