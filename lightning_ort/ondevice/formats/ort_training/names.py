"""What ONNX Runtime's training API calls the inputs and outputs of its graphs."""

from __future__ import annotations

__all__ = ["BUFFER", "DOMAIN", "METADATA", "OPTIMIZER_INPUTS", "OUT", "RESET", "TRAINING_OPSET"]

DOMAIN = "com.microsoft"
"""of the operators that update memory in place"""

TRAINING_OPSET = 1

BUFFER = "_grad.accumulation.buffer"
"""suffix of the input that is the sum of a parameter's gradients so far"""

OUT = "_grad.accumulation.out"
"""suffix of the outputs that tell of an update in place; the API does not show them to users"""

RESET = "lazy_reset_grad"
"""the input that says whether sums of gradients start anew"""

OPTIMIZER_INPUTS = ("learning_rate", "step", "params", "gradients")
"""first inputs of an optimizer graph; those of its moments follow"""

METADATA = "lightning_ort.optimizer"
"""where an optimizer graph of this package keeps its settings"""
