"""The table of operators, by family: one small function each, with the semantics of the ONNX specification."""

from lightning_ort.onnx_reader.operators import (  # noqa: F401
    activations,
    convolution,
    elementwise,
    generators,
    indexing,
    losses,
    matmul,
    normalization,
    pooling,
    random,
    recurrent,
    reductions,
    resize,
    scattering,
    sequences,
    shapes,
    sorting,
)
