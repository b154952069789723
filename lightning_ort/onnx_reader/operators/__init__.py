"""The table of operators, by family: one small function each, with the semantics of the ONNX specification."""

from lightning_ort.onnx_reader.operators import (  # noqa: F401
    activations,
    attention,
    convolution,
    elementwise,
    indexing,
    linalg,
    losses,
    normalization,
    ordering,
    pooling,
    random,
    recurrent,
    reductions,
    resize,
    shapes,
)
