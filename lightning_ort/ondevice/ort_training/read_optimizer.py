"""Which optimizer an ``optimizer_model.onnx`` computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper

from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice.optimizers import OptimizerConfig
from lightning_ort.ondevice.ort_training.names import DOMAIN, METADATA
from lightning_ort.ondevice.ort_training.optimizer_model import optimizer_model
from lightning_ort.ondevice.ort_training.read_step import parsed

__all__ = ["read_optimizer"]

# attributes that a node need not have, as ONNX Runtime's schema has them
_ADAMW = {
    "alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "weight_decay": 1e-2, "adam_mode": 0, "correct_bias": 1
}  # fmt: skip


def read_optimizer(path: Path, count: int) -> OptimizerConfig:
    """The optimizer of a file of ``onnxruntime.training.artifacts`` or of this package.

    Args:
        path: of the file.
        count: number of trained parameters.

    Raises:
        FileNotFoundError, ValueError: no such file, no optimizer model, or one that was edited.
        UnsupportedError: a node besides the known optimizers and the clipping of gradients.
    """
    proto = parsed(path)
    own = {p.key: p.value for p in proto.metadata_props}.get(METADATA)
    if own is not None:
        return _own(path, proto, own, count)
    nodes = list(proto.graph.node)
    clip = None
    if nodes and nodes[0].op_type == "InplaceClipGradNorm" and list(nodes[0].input) == ["gradients"]:
        clip = float(_attributes(nodes[0])["max_norm"])
        gradients = nodes.pop(0).output[0]
    else:
        gradients = "gradients"
    for node in nodes:
        if node.domain != DOMAIN or node.op_type not in ("AdamWOptimizer", "SGDOptimizerV2"):
            raise UnsupportedError(
                f"{str(path)!r}: node {node.name or node.output[0]!r} ({node.op_type}) is not supported in an "
                "optimizer model; expected AdamWOptimizer or SGDOptimizerV2, after an InplaceClipGradNorm or without."
            )
    if len(nodes) != 1:
        raise ValueError(f"{str(path)!r} is no optimizer model: it has {len(nodes)} optimizers, expected one.")
    position = 3 if nodes[0].op_type == "AdamWOptimizer" else 2
    if len(nodes[0].input) <= position or nodes[0].input[position] != gradients:
        raise UnsupportedError(f"{str(path)!r}: {nodes[0].op_type} does not read the gradients, clipped or not.")
    if nodes[0].op_type == "SGDOptimizerV2":
        return OptimizerConfig("SGD", clip_grad_norm=clip)
    numbers = _ADAMW | _attributes(nodes[0])
    return OptimizerConfig(
        "AdamW",
        betas=(_short(numbers["alpha"]), _short(numbers["beta"])),
        eps=_short(numbers["epsilon"]),
        weight_decay=_short(numbers["weight_decay"]),
        bias_correction=bool(numbers["correct_bias"]),
        decay="after" if numbers["adam_mode"] else "before",
        clip_grad_norm=clip,
    )


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _short(number: float) -> float:
    """The decimal number that was rounded to float32."""
    return float(f"{number:.7g}")


def _own(path: Path, proto: onnx.ModelProto, text: str, count: int) -> OptimizerConfig:
    try:
        config = OptimizerConfig(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r}: its settings {text!r} are no optimizer's ({error}).") from error
    expected = ir.to_proto(optimizer_model(config, count)).graph
    if expected.SerializeToString(deterministic=True) != proto.graph.SerializeToString(deterministic=True):
        raise ValueError(
            f"{str(path)!r} does not compute what its settings say for {count} trained parameters: it was changed, or "
            "belongs to another checkpoint."
        )
    return config
