"""Graphs of the first training step, written to files for debugging."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
import onnx_ir as ir
import onnxruntime
from onnx import helper
from torch import Tensor, nn

from lightning_ort.optim.update.graph import Part, Slot, UpdateGraph, append_update, pieces_of
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.providers.cpu import cpu_session
from lightning_ort.runtime.session import OrtSession
from lightning_ort.trainer.description import Description
from lightning_ort.trainer.export import inferred, save

if TYPE_CHECKING:
    from lightning_ort.trainer.optimizer import Optimizer
    from lightning_ort.trainer.options import ORTTrainerOptions

__all__ = ["GraphFiles"]


class GraphFiles:
    """Writes what ``debug.graph_save_paths`` asks for, at the first training step.

    The graphs of the engine name their values after TorchDynamo's variables. They are written under the names of
    the weights, inputs and outputs, which are found by their addresses.

    Args:
        options: of the trainer.
    """

    def __init__(self, options: ORTTrainerOptions) -> None:
        self._paths = options.debug.graph_save_paths
        self._infer = options.utils.run_symbolic_shape_infer
        self._sessions: list[tuple[OrtSession, bytes]] = []
        self.pending = any(vars(self._paths).values())

    def watched(self, config: RuntimeConfig) -> RuntimeConfig:
        """``config`` whose sessions are seen here."""
        if not self.pending:
            return config

        def note(session: OrtSession, model: bytes) -> None:
            if self.pending:  # what is made later, for batches of other sizes say, is in no file
                self._sessions.append((session, model))

        # in one piece: a graph with operators left out would be of no use
        return dataclasses.replace(config, placement="onnxruntime", on_session=note)

    def write(
        self,
        description: Description,
        inputs: Sequence[Tensor],
        results: Sequence[Tensor],
        weights: Mapping[str, Tensor],
        optimizer: Optimizer,
        forward: ir.Model | None,
    ) -> None:
        """Write all files.

        Args:
            description: names of inputs and outputs.
            inputs: of the step that has just run.
            results: its outputs.
            weights: name to parameter or buffer; the gradients are still in ``grad``.
            optimizer: that will update the weights.
            forward: the model with its loss, if its path is set.
        """
        self.pending = False
        names = {t.data_ptr(): name for name, t in weights.items() if t.numel()}
        names |= {x.data_ptr(): e.name for e, x in zip(description.inputs, inputs, strict=True) if x.numel()}
        names |= {y.data_ptr(): e.name for e, y in zip(description.outputs, results, strict=True) if y.numel()}
        gradients = {n: p.grad for n, p in weights.items() if isinstance(p, nn.Parameter) and p.grad is not None}
        names |= {g.data_ptr(): f"{name}_grad" for name, g in gradients.items() if g.numel()}
        ranks = {e.name: y.dim() for e, y in zip(description.outputs, results, strict=True)}
        ranks |= {f"{name}_grad": g.dim() for name, g in gradients.items()}
        models = [
            _renamed(model, session.addresses(), names, ranks) for session, model in self._sessions if session.has_run
        ]
        self._sessions.clear()
        paths = self._paths
        if forward is not None and paths.model_after_graph_transforms_path:
            save(forward, paths.model_after_graph_transforms_path)
        for number, model in enumerate(models):
            if paths.model_with_gradient_graph_path:
                save(self._shaped(model), _numbered(paths.model_with_gradient_graph_path, number))
            if not (paths.model_with_training_graph_path or paths.model_with_training_graph_after_optimization_path):
                continue
            # where the step is cut into several graphs, each goes with the updates of its own gradients
            training = _with_updates(model, optimizer, gradients)
            if paths.model_with_training_graph_path:
                save(self._shaped(training), _numbered(paths.model_with_training_graph_path, number))
            if paths.model_with_training_graph_after_optimization_path:
                path = _numbered(paths.model_with_training_graph_after_optimization_path, number)
                options = onnxruntime.SessionOptions()
                options.log_severity_level = 3
                options.optimized_model_filepath = str(path)
                cpu_session(training.SerializeToString(), options)

    def _shaped(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return inferred(model) if self._infer else model


def _numbered(path: str, number: int) -> Path:
    """``path`` for the first graph of a step, and with a number for the others."""
    plain = Path(path)
    return plain if number == 0 else plain.with_name(f"{plain.stem}.{number}{plain.suffix}")


def _renamed(
    serialized: bytes, addresses: Mapping[str, int], names: Mapping[int, str], ranks: Mapping[str, int]
) -> onnx.ModelProto:
    model = onnx.load_from_string(serialized)
    graph = model.graph
    new: dict[str, str] = {}
    for value in [*graph.input, *graph.output]:
        name = names.get(addresses.get(value.name, 0))
        if name is not None and name not in new.values():
            new[value.name] = name
    for value in [*graph.input, *graph.output]:
        value.name = new.get(value.name, value.name)
    for value in graph.output:
        if not value.type.tensor_type.HasField("shape"):
            value.type.tensor_type.shape.SetInParent()
            for _ in range(ranks.get(value.name, 0)):
                value.type.tensor_type.shape.dim.add()
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [new.get(name, name) for name in values]
    return model


def _with_updates(step: onnx.ModelProto, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> onnx.ModelProto:
    """``step`` followed by the update of every weight whose gradient it gives.

    They compute what the optimizer computes, whoever runs that, and one weight is one tensor here.

    Args:
        step: a graph with outputs ``<weight>_grad``.
        optimizer: whose updates are meant.
        gradients: name to gradient.
    """
    given = {value.name for value in step.graph.output}
    # a process of several may update a share of the weights
    names = [name for name in gradients if f"{name}_grad" in given and name in optimizer.updater.counts]
    merged = onnx.ModelProto()
    merged.CopyFrom(step)
    if not names:
        return merged
    updater = optimizer.updater
    sizes, groups = [gradients[n].numel() for n in names], updater.groups_of(names)
    dtypes = {g: gradients[n].dtype for g, n in zip(groups, names, strict=True)}
    ordered = [dtypes[g] for g in range(len(dtypes))]
    pieces = pieces_of(sizes, groups, elementwise=False)
    update = UpdateGraph(updater.rule, pieces, ordered, clip=updater.clip, guard=updater.guard)
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
