"""Blocks that make the model of an optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import helper

from lightning_ort.ondevice.formats.ort_training.names import DOMAIN, OPTIMIZER_INPUTS
from lightning_ort.ondevice.onnxblock import blocks
from lightning_ort.ondevice.onnxblock.model_accessor import add_node
from lightning_ort.ondevice.onnxblock.training import ForwardBlock

__all__ = ["SGD", "AdamW", "ClipGradNorm"]

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]
"""what is trained, and what is not"""


class ClipGradNorm(blocks.Block):
    """Adds a node that scales all gradients so that their norm together is at most ``max_norm``."""

    def __init__(self, max_norm: float) -> None:
        super().__init__()
        self._max_norm = float(max_norm)

    def build(self, gradients_name: str) -> str:
        """The name of the clipped gradients, a sequence."""
        result = add_node(
            "InplaceClipGradNorm", [gradients_name], "clip_grad_norm_output", domain=DOMAIN, max_norm=self._max_norm
        )
        sequence = helper.make_tensor_sequence_value_info(result, onnx.TensorProto.FLOAT, None)
        self.base.graph.value_info.append(sequence)
        return result


class _Optimizer(ForwardBlock):
    """The model of an optimizer, from the parameters of a training block.

    Args:
        clip_grad: a :class:`ClipGradNorm`, or ``None``.
    """

    _moments: tuple[str, ...]

    def __init__(self, clip_grad: blocks.Block | None = None) -> None:
        super().__init__()
        self._clip_grad = clip_grad

    def build(self, parameters: Parameters) -> str:
        """The name of the flag that tells of the update.

        Args:
            parameters: what is trained and what is not, as ``TrainingBlock.parameters()`` gives them.
        """
        trained = parameters[0]
        dtype = trained[0].data_type if trained else onnx.TensorProto.FLOAT
        rate, step, params, gradients = OPTIMIZER_INPUTS
        graph = self.base.graph
        graph.input.append(helper.make_tensor_value_info(rate, onnx.TensorProto.FLOAT, [1]))
        graph.input.append(helper.make_tensor_value_info(step, onnx.TensorProto.INT64, [1]))
        for name in (params, gradients, *self._moments):
            graph.input.append(helper.make_tensor_sequence_value_info(name, dtype, None))
        if self._clip_grad is not None:
            gradients = self._clip_grad(gradients)
        updated = self._update(rate, step, params, gradients)
        graph.output.append(helper.make_tensor_value_info(updated, onnx.TensorProto.BOOL, [1]))
        return updated

    def _update(self, rate: str, step: str, params: str, gradients: str) -> str:
        raise NotImplementedError


class AdamW(_Optimizer):
    """AdamW, with the decay after the update.

    Args:
        bias_correction: whether the moments are corrected for having begun at zero.
        betas: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: factor of the decay.
        clip_grad: a :class:`ClipGradNorm`, or ``None``.
    """

    _moments = ("first_order_moments", "second_order_moments")

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: blocks.Block | None = None,
    ) -> None:
        super().__init__(clip_grad)
        self._attributes: dict[str, Any] = {
            "alpha": float(betas[0]), "beta": float(betas[1]), "epsilon": float(eps),
            "weight_decay": float(weight_decay), "correct_bias": int(bias_correction), "adam_mode": 1,
        }  # fmt: skip

    def _update(self, rate: str, step: str, params: str, gradients: str) -> str:
        inputs = [rate, step, params, gradients, *self._moments]
        return add_node("AdamWOptimizer", inputs, "adamw.updated_flag", domain=DOMAIN, **self._attributes)


class SGD(_Optimizer):
    """Gradient descent.

    Args:
        clip_grad: a :class:`ClipGradNorm`, or ``None``.
    """

    _moments = ("first_order_moments",)

    def _update(self, rate: str, step: str, params: str, gradients: str) -> str:
        return add_node("SGDOptimizerV2", [rate, params, gradients], "update_completed", domain=DOMAIN)
