"""Blocks that add a loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from lightning_ort.ondevice.onnxblock import blocks
from lightning_ort.ondevice.onnxblock.model_accessor import add_initializer, add_input_like, add_node, is_used, number

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss"]

_REDUCTIONS = ("mean", "sum", "none")


def _checked(reduction: str) -> str:
    if reduction not in _REDUCTIONS:
        raise RuntimeError(f"reduction={reduction!r}: expected one of {', '.join(map(repr, _REDUCTIONS))}.")
    return reduction


def _reduce(reduction: str, name: str) -> str:
    if reduction == "none":
        return name
    return (blocks.ReduceMean if reduction == "mean" else blocks.ReduceSum)(keepdims=False)(name)


class _Compared(blocks.Block):
    """A loss of an output and targets of its shape.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self._reduction = _checked(reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """The name of the loss.

        Args:
            loss_input_name: an output of the model.
            target_name: a value of the model, or what a new input, like that output, is called.
        """
        if not is_used(target_name):
            add_input_like(loss_input_name, target_name)
        return _reduce(self._reduction, self._each(loss_input_name, target_name))

    def _each(self, scores: str, target: str) -> str:
        raise NotImplementedError


class MSELoss(_Compared):
    """Adds the mean (or sum) of the squared differences between an output and targets."""

    def _each(self, scores: str, target: str) -> str:
        return blocks.Pow(2.0)(blocks.Sub()(scores, target))


class L1Loss(_Compared):
    """Adds the mean (or sum) of the absolute differences between an output and targets."""

    def _each(self, scores: str, target: str) -> str:
        return blocks.Abs()(blocks.Sub()(scores, target))


class BCEWithLogitsLoss(_Compared):
    """Adds the binary cross entropy of logits.

    It is computed as in ``torch.nn.BCEWithLogitsLoss``, by the logarithm of the sigmoid, which stays finite where the
    logarithm and the sigmoid one after the other do not.

    Args:
        weight: an array by which the loss of each element is multiplied.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        pos_weight: an array by which the loss of positive targets is multiplied.
    """

    def __init__(
        self, weight: np.ndarray | None = None, reduction: str = "mean", pos_weight: np.ndarray | None = None
    ) -> None:
        super().__init__(reduction)
        self._weight, self._pos_weight = weight, pos_weight

    def _each(self, scores: str, target: str) -> str:
        mul, sub, neg = blocks.Mul(), blocks.Sub(), blocks.Neg()
        # -log(sigmoid(x)) is softplus(-x), and -log(1 - sigmoid(x)) softplus(x)
        positive = mul(target, add_node("Softplus", [neg(scores)]))
        if self._pos_weight is not None:
            positive = mul(positive, add_initializer("bceloss.pos_weight", self._pos_weight))
        negative = mul(sub(number("bceloss.sub_ones", 1.0), target), add_node("Softplus", [scores]))
        loss = blocks.Add()(positive, negative)
        if self._weight is not None:
            loss = mul(add_initializer("bceloss.weight", self._weight), loss)
        return loss


class CrossEntropyLoss(blocks.Block):
    """Adds the cross entropy of scores (batch, classes, ...) and labels (batch, ...).

    Args:
        weight: an array with a factor per class.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: a label that counts nothing.
    """

    def __init__(
        self, weight: np.ndarray | None = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        super().__init__()
        self._weight, self._reduction, self._ignore_index = weight, _checked(reduction), ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """The name of the loss.

        Args:
            scores_input_name: an output of the model.
            labels_name: an int64 value of the model, or what a new input for the labels is called.
        """
        if not is_used(labels_name):
            kind: Any = add_input_like(scores_input_name, labels_name).type.tensor_type
            kind.elem_type = onnx.TensorProto.INT64
            if len(kind.shape.dim) > 1:
                del kind.shape.dim[1]
        inputs = [scores_input_name, labels_name]
        if self._weight is not None:
            inputs.append(add_initializer("celoss.weight", self._weight))
        return add_node(
            "SoftmaxCrossEntropyLoss", inputs, "loss", reduction=self._reduction, ignore_index=self._ignore_index
        )
