"""Which initializers a TrainingSession trains."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from lightning_ort.onnx_reader.parameters import trainable_initializers
from lightning_ort.onnx_training.parameters import TrainingParameters

__all__ = ["trained_weights"]


def trained_weights(model: onnx.ModelProto, parameters: TrainingParameters) -> list[str]:
    """Names in the order of the file.

    Raises:
        ValueError: ``weights_to_train`` or ``weights_not_to_train`` names an initializer that the model lacks.
    """
    known = [i.name for i in model.graph.initializer]
    wanted, excluded = parameters.weights_to_train, parameters.weights_not_to_train
    for attribute, names in (("weights_to_train", wanted), ("weights_not_to_train", excluded)):
        unknown = sorted(set(names) - set(known))
        if unknown:
            listed = ", ".join(map(repr, unknown))
            raise ValueError(f"{attribute}: the model has no initializer {listed}. It has: {', '.join(known)}.")
    chosen = wanted or set(trainable_initializers(model)) - _immutable(model, parameters.immutable_weights)
    return [name for name in known if name in chosen and name not in excluded]


def _immutable(model: onnx.ModelProto, rules: Mapping[str, Mapping[int, float]]) -> set[str]:
    """Initializers that are a constant of an operator: ``{op_type: {input position: value}}``."""
    values = {i.name: i for i in model.graph.initializer}
    found = set()
    for node in model.graph.node:
        for position, value in rules.get(node.op_type, {}).items():
            name = node.input[int(position)] if int(position) < len(node.input) else ""
            if name in values:
                array = numpy_helper.to_array(values[name])
                if array.size == 1 and np.float32(array.item()) == np.float32(value):
                    found.add(name)
    return found
