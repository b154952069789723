"""What onnxblocks make of a model: losses and optimizers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import helper
from torch import Tensor

from lightning_ort.ondevice.formats.ort_training.optimizer import optimizer_of
from lightning_ort.ondevice.onnxblock import Block, base, empty_base
from lightning_ort.ondevice.onnxblock.model_accessor import without_values
from lightning_ort.ondevice.onnxblock.training import as_names, with_outputs
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.runtime.tensors import ONNX

__all__ = ["optimizer_of_block", "with_loss"]


@contextlib.contextmanager
def _context(block: Any, model: onnx.ModelProto | None) -> Iterator[Any]:
    """The base that ``block`` works on: blocks of ONNX Runtime's training build have one of their own."""
    if isinstance(block, Block):
        with empty_base() if model is None else base(model) as accessor:
            yield accessor
        return
    theirs = importlib.import_module("onnxruntime.training.onnxblock")
    with theirs.empty_base(17) if model is None else theirs.base(model) as accessor:
        yield accessor


def with_loss(
    model: onnx.ModelProto, block: Any, loss_inputs: Sequence[str] | None, additional: Sequence[str]
) -> tuple[onnx.ModelProto, list[str], list[str]]:
    """``model`` with the loss of ``block``.

    Args:
        loss_inputs: names that the block gets; by default those of all outputs.
        additional: values that become outputs as well.

    Returns:
        A model whose outputs are what the block returns, then ``additional``, then those of ``model``; what the block
        returns; and the initializers that it made to be trained.

    Raises:
        TypeError: the block returns no name.
        LookupError: it returns the name of nothing.
    """
    own = [o.name for o in model.graph.output]
    with _context(block, model) as accessor:
        returned = block(*(loss_inputs or own))
        built = onnx.ModelProto()
        built.CopyFrom(accessor.model)
        made = list(getattr(accessor, "made", ()))
    losses = as_names(returned) if isinstance(returned, (str, list, tuple)) else []
    if not losses or not all(isinstance(n, str) for n in losses):
        raise TypeError(f"loss={block!r} returned {returned!r}; expected the name of the loss, first of several names.")
    inferred = onnx.shape_inference.infer_shapes(without_values(built))
    for value in inferred.graph.value_info:
        if all(v.name != value.name for v in built.graph.value_info):
            built.graph.value_info.append(value)
    return with_outputs(built, [*losses, *additional, *own]), losses, made


def optimizer_of_block(block: Any, parameters: Mapping[str, Tensor], trained: Sequence[str]) -> OptimizerConfig:
    """What the model that ``block`` makes of the parameters computes.

    Raises:
        UnsupportedError, ValueError: a node besides the known optimizers and the clipping of gradients.
    """
    protos = {
        n: helper.make_tensor(n, int(ONNX[t.dtype]), list(t.shape), t.contiguous().numpy().tobytes(), raw=True)
        for n, t in parameters.items()
    }
    groups = [protos[n] for n in trained], [protos[n] for n in protos if n not in trained]
    with _context(block, None) as accessor:
        block(groups)
        model = onnx.ModelProto()
        model.CopyFrom(accessor.model)
    return optimizer_of(model, f"The model of {type(block).__name__}", len(trained))
