"""The ONNX Runtime session of one step: outputs, gradients and new running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch

from lightning_ort.compiler.aot.emit import written
from lightning_ort.compiler.aot.inputs import InputInfo, input_infos
from lightning_ort.compiler.aot.joint import GRAD, NEW, trace_joint
from lightning_ort.compiler.aot.reference import StepReference
from lightning_ort.compiler.aot.sizes import independent, mismatch, settled, size_text
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.aot.step_runner import StepRunner
from lightning_ort.errors import MismatchError, UnsupportedError
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.onnx_reader import OnnxModule
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.training_session.gradient_graph import GradientGraphBuilder, passed_last
from lightning_ort.training_session.optimizer import WeightUpdate
from lightning_ort.training_session.parameters import TrainingParameters
from lightning_ort.verification import Doubts, Mismatch, varied

__all__ = ["TrainingGraph", "save_graphs"]

_ADVICE = (
    "Nothing was updated. Please report it with the model; TrainingSession(..., verify=False) would skip this check."
)

_MOST = 16
"""Further graphs, for other sizes of the inputs, that are kept; each has a session of its own."""


class TrainingGraph:
    """Runs a forward graph on weights that change, with the gradients of its loss where ``gradients`` are wanted.

    Where what it computes depends on sizes that are left open, further graphs are made for such sizes as they come.

    Args:
        proto: the forward graph.
        module: the same, read.
        loss: the output that is differentiated.
        gradients: initializers by which it is differentiated, to where their gradients are written at each run;
            without any, the graph evaluates.
        tensors: weights and running statistics by name, read at each run; a training run writes new statistics.
        sessions: makes the one session.
        verify: compare the first run with the same computation in torch.
        infos: the inputs, as far as they are known better than from ``proto``.
        sizes: what the graph is made at, and holds for at least: the sizes that vary, by name.

    Raises:
        ValueError: the loss depends on none of ``gradients``.
        UnsupportedError: the graph cannot be differentiated, or the loss is of a size that varies.

    Attributes:
        infos: the inputs, with what the operators require of their sizes.
        runner: of the graph.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        module: OnnxModule,
        loss: str,
        gradients: Mapping[str, torch.Tensor],
        tensors: Mapping[str, torch.Tensor],
        sessions: SessionFactory,
        *,
        verify: bool,
        infos: Sequence[InputInfo] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        def other(infos: Sequence[InputInfo], sizes: Mapping[str, int]) -> TrainingGraph:
            return TrainingGraph(
                proto, module, loss, gradients, tensors, sessions, verify=verify, infos=infos, sizes=sizes
            )

        self._make_other, self._others = other, dict[tuple[int, ...], TrainingGraph]()
        trains = bool(gradients)
        module.train(trains)
        incoming = [loss] if trains else []
        joint = trace_joint(
            module,
            input_infos(proto) if infos is None else infos,
            [loss],
            incoming,
            list(gradients),
            statistics=trains,
            hints=None if sizes is None else [sizes],
            conditional=True,
        )
        if trains and joint.unused >= set(gradients):
            raise ValueError(
                f"No weight is trained: the loss {loss!r} has a gradient by none of {', '.join(map(repr, gradients))}."
            )
        like = joint.results[loss].meta["val"]
        shape = [size_text(size, joint.names) for size in like.shape]
        if trains and not all(isinstance(size, int) for size in shape):
            raise UnsupportedError(
                f"loss_output_name={loss!r}: this output has shape {shape}, whose size varies; expected one number. "
                "Reduce it in the graph, by ReduceMean or ReduceSum with keepdims=0."
            )
        self.infos, self._joint = joint.infos, joint
        infos = [*joint.infos]
        model = written(passed_last(joint), proto, fed=tensors)
        inputs = {str(v.name) for v in model.graph.inputs}
        # no memory can be bound for what no node writes
        passed = [v for v in model.graph.outputs if v.is_graph_input()]
        for value in passed:
            model.graph.outputs.remove(value)
        self._passed = [str(v.name) for v in passed]
        # the gradient of the loss, which a graph whose gradients are all zero does not read
        self._seed = [torch.ones(like.shape, dtype=like.dtype, device="cpu")] if trains else []
        self._fed_seed = self._seed if f"{loss}{GRAD}" in inputs else []
        if self._fed_seed:
            infos.append(InputInfo(f"{loss}{GRAD}", like.dtype, tuple(like.shape)))
        graph = StepGraph(
            model,
            inputs=tuple(infos),
            outputs=tuple(o.name for o in proto.graph.output if o.name not in self._passed),
            tensors={n: n for n in tensors if n in inputs},
            gradients={n: f"{n}{GRAD}" for n in gradients},
            updates={n: new for n, new in joint.updates.items() if n in tensors},
        )
        self.runner = StepRunner(graph, tensors, gradients, sessions)
        self._fed = [info.name for info in infos[: len(infos) - len(self._fed_seed)]]
        self._loss, self._tensors, self._gradients = loss, tensors, gradients
        self._doubts = Doubts(_ADVICE)
        self._reference: StepReference | None = None
        if verify:
            statistics = [n for n in tensors if f"{n}{NEW}" not in module.output_names] if trains else ()
            reference = StepReference(module, joint, [loss], incoming, list(gradients), statistics)
            self._reference = None if reference.random else reference

    def __call__(self, feed: Mapping[str, torch.Tensor], scale: float) -> dict[str, np.ndarray]:
        """Outputs by name; gradients are those of ``scale`` times the loss.

        Raises:
            RefusedValueError: a node does not take the values that it was given.
            MismatchError: the first run gives something else than torch. Running statistics are as before then.
            UnsupportedError: there is no graph for these sizes.
        """
        sizes = self._sizes_of(feed)
        if not self._joint.holds_at(sizes):
            return self._for_sizes(sizes, feed)(feed, scale)
        for seed in self._seed:
            seed.fill_(scale)
        results = self._run(feed) if self._reference is None else self._compared(self._reference, feed, scale)
        return {name: result.numpy() for name, result in results.items()}

    def _sizes_of(self, feed: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The sizes that vary, by name."""
        if self._joint.conditions is None:
            return {}
        names = set(independent(self.infos))
        pairs = [pair for info in self.infos for pair in zip(info.shape, feed[info.name].shape, strict=True)]
        return {name: size for name, size in pairs if isinstance(name, str) and name in names}

    def _for_sizes(self, sizes: dict[str, int], feed: Mapping[str, torch.Tensor]) -> TrainingGraph:
        """A graph that holds for ``sizes``, for which this one does not."""
        key = tuple(sizes.values())
        graph = self._others.pop(key, None)
        for known in self._others.values() if graph is None else ():
            if mismatch(known.infos, [feed[i.name].shape for i in known.infos]) is None:
                graph = known if known._joint.holds_at(known._sizes_of(feed)) else graph
        if graph is None:
            infos = settled(self.infos, sizes)
            names = independent(infos)
            graph = self._make_other(infos, {name: size for name, size in sizes.items() if name in names})
        if len(self._others) == _MOST:
            del self._others[next(iter(self._others))]
        self._others[key] = graph
        return graph

    def _run(self, feed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        results = self.runner([*(feed[name] for name in self._fed), *self._fed_seed])
        passed = {n: (feed[n] if n in feed else self._tensors[n]).clone() for n in self._passed}
        return dict(zip(self.runner.graph.outputs, results, strict=True)) | passed

    def _compared(
        self, reference: StepReference, feed: Mapping[str, torch.Tensor], scale: float
    ) -> dict[str, torch.Tensor]:
        """Outputs of a run beside torch's; where it is not known which are right, torch's, as are gradients then.

        It is the last run to be compared if it could be, in full, and nothing was different. One without entries
        cannot: a mean of nothing is NaN in torch, and 0 in ONNX Runtime.
        """
        if not all(t.numel() for t in feed.values()):
            return self._run(feed)
        before = {n: self._tensors[n].clone() for n in self.runner.graph.updates}
        outputs = self._run(feed)
        try:
            wanted, mismatch, complete = self._difference(reference, feed, before, outputs, scale)
        except (RuntimeError, ValueError, IndexError):  # values that torch refuses; those of another run it may not
            return outputs
        if mismatch is None:
            self._reference = None if complete else reference
            return outputs

        def again(seed: int) -> Mismatch | None:
            return self._with_other_weights(reference, feed, before, scale, seed)

        try:
            self._doubts.settle(0, mismatch, again)
        except MismatchError:
            self._write(before)
            raise
        self._write({n: wanted[f"{n}{NEW}"] for n in before})
        for name, gradient in self._gradients.items():
            gradient.copy_(wanted[f"{name}{GRAD}"])
        return {name: wanted[name] for name in outputs}

    def _difference(
        self,
        reference: StepReference,
        feed: Mapping[str, torch.Tensor],
        before: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        scale: float,
    ) -> tuple[dict[str, torch.Tensor], Mismatch | None, bool]:
        """torch's results, what is not like them in the last run from the statistics ``before``, and whether all was
        compared: a scaled loss may have gradients beyond 16 bits, which are not."""
        values = {**self._tensors, **before, **feed, **{f"{self._loss}{GRAD}": seed for seed in self._seed}}
        got = dict(outputs)
        got |= {f"{n}{GRAD}": g for n, g in self._gradients.items()}
        got |= {f"{n}{NEW}": self._tensors[n] for n in before}
        wanted = reference.results(values)
        finite = all(bool(torch.isfinite(wanted[f"{n}{GRAD}"]).all()) for n in self._gradients)
        complete = finite or scale == 1.0
        compared = (
            wanted if complete else {n: t for n, t in wanted.items() if n.removesuffix(GRAD) not in self._gradients}
        )
        return wanted, reference.mismatch(got, compared, values), complete

    def _with_other_weights(
        self,
        reference: StepReference,
        feed: Mapping[str, torch.Tensor],
        before: Mapping[str, torch.Tensor],
        scale: float,
        seed: int,
    ) -> Mismatch | None:
        """What is not like torch's in a run with weights that are a little different."""
        now = {n: t.clone() for n, t in self._tensors.items()}
        self._write(before)
        names = list(self._tensors)
        chosen = [i for i, n in enumerate(names) if n in self._gradients]
        self._write(dict(zip(names, varied(list(self._tensors.values()), chosen, seed), strict=True)))
        try:
            return self._difference(reference, feed, before, self._run(feed), scale)[1]
        finally:
            self._write(now)

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, value in values.items():
            self._tensors[name].copy_(value)


def save_graphs(
    model: onnx.ModelProto,
    parameters: TrainingParameters,
    loss: str,
    weights: list[str],
    updates: WeightUpdate | None,
    *,
    verify: bool,
) -> None:
    """Write the forward graph as it was read, the gradient graph, and the graph of the update.

    The update is a graph of its own, because ONNX Runtime might write a weight before it has read it: the file of
    ``model_with_training_graph_path`` is the gradient graph, and the update lies beside it as ``<path>.update.onnx``.
    """
    if parameters.model_after_graph_transforms_path:
        save_onnx(ir.from_proto(model), Path(parameters.model_after_graph_transforms_path))
    paths = [p for p in (parameters.model_with_gradient_graph_path, parameters.model_with_training_graph_path) if p]
    if not paths:
        return
    builder = GradientGraphBuilder(model, {loss}, set(weights), loss)
    builder.build(verify=None if verify else False)
    for path in paths:
        builder.save(path)
    if parameters.model_with_training_graph_path and updates is not None:
        save_onnx(updates.updater.graph(), Path(f"{parameters.model_with_training_graph_path}.update.onnx"))
