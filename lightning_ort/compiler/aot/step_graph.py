"""The ONNX graph of one step, and what its inputs and outputs mean."""

from __future__ import annotations

import dataclasses

import onnx_ir as ir

from lightning_ort.compiler.aot.inputs import InputInfo

__all__ = ["StepGraph"]


@dataclasses.dataclass(frozen=True)
class StepGraph:
    """A graph whose parameters and buffers are inputs.

    Attributes:
        model: standard ONNX operators; executed as it is.
        inputs: what a user feeds, in order. Sizes that vary are names; equal names are equal sizes.
        outputs: names of what a user gets, in order. In a training or evaluation step the first is the loss.
        tensors: further inputs: name in the graph to the name of a parameter or buffer in the
            :class:`~lightning_ort.checkpoints.state.TrainingState`.
        gradients: name of each trained parameter to the output that is its gradient.
        updates: name of each buffer that changes to the output that is its new value.
        order: names of the tensors in the order in which they follow each other in one buffer, where that is not the
            order of the parameters in the state.
    """

    model: ir.Model
    inputs: tuple[InputInfo, ...]
    outputs: tuple[str, ...]
    tensors: dict[str, str]
    gradients: dict[str, str] = dataclasses.field(default_factory=dict)
    updates: dict[str, str] = dataclasses.field(default_factory=dict)
    order: tuple[str, ...] = ()
