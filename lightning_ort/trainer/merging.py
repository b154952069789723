"""The graph of a step and the updates of its gradients as one ONNX model, for reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import onnx
from onnx import helper
from torch import Tensor

from lightning_ort.updates.appending import append_update
from lightning_ort.updates.graph import Slot, UpdateGraph
from lightning_ort.updates.pieces import Part, pieces_of

if TYPE_CHECKING:
    from lightning_ort.trainer.optimizer import Optimizer

__all__ = ["with_updates"]


def with_updates(step: onnx.ModelProto, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> onnx.ModelProto:
    """``step`` followed by the update of every weight whose gradient it gives.

    The updates are those that run, but for the cutting and joining of tensors: one weight is one tensor here.

    Args:
        step: a graph with outputs ``<weight>_grad``.
        optimizer: whose updates are meant.
        gradients: name to gradient.
    """
    given = {value.name for value in step.graph.output}
    names = [name for name in gradients if f"{name}_grad" in given]
    merged = onnx.ModelProto()
    merged.CopyFrom(step)
    if not names:
        return merged
    sizes, groups = [gradients[n].numel() for n in names], optimizer.groups_of(names)
    dtypes = {g: gradients[n].dtype for g, n in zip(groups, names, strict=True)}
    ordered = [dtypes[g] for g in range(len(dtypes))]
    pieces = pieces_of(sizes, groups, elementwise=False)
    update = UpdateGraph(optimizer.rule, pieces, ordered, clip=optimizer.clip, guard=optimizer.guard)
    inputs = {value.name for value in merged.graph.input}
    sources: dict[Slot, str] = {}
    for slot, value in zip(update.inputs, update.model.graph.inputs, strict=True):
        assert value.dtype is not None
        source = sources[slot] = _name(slot, names, str(value.name))
        if slot.what != "grad" and source not in inputs:
            shape = list(gradients[names[slot.where.param]].shape) if isinstance(slot.where, Part) else []
            merged.graph.input.append(helper.make_tensor_value_info(source, int(value.dtype), shape))
            inputs.add(source)
    append_update(
        merged.graph,
        update,
        [gradients[n].shape for n in names],
        sources,
        lambda slot: "all_finite" if slot.what == "finite" else f"{_name(slot, names, '')}_updated",
    )
    return merged


def _name(slot: Slot, names: list[str], number: str) -> str:
    if not isinstance(slot.where, Part):
        return f"update/{number}"
    name = names[slot.where.param]
    if slot.what == "param":
        return name
    return f"{name}_grad" if slot.what == "grad" else f"{name}/Moment_{int(slot.what) + 1}"
