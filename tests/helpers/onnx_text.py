"""ONNX graphs written as text, and numbers for them."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser


def parse(text: str, opset: int = 17, **initializers: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in initializers.items())
    return model


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
