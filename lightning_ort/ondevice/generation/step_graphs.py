"""The ONNX graphs of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from lightning_ort.compiler.aot.emit import described, written
from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.compiler.aot.joint import GRAD, NEW, Joint, trace_joint
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.passes import standardize
from lightning_ort.compiler.transformer_modules import transformers_in_graphs
from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice.generation.objectives import ModuleForward, ResultError
from lightning_ort.ondevice.names import check_names

__all__ = ["evaluation_graph", "gradient_graph", "part_of", "training_graph"]


def training_graph(forward: ModuleForward, trained: Sequence[str]) -> tuple[StepGraph, list[str], bool]:
    """Results, gradients by ``trained`` and new buffers, in training mode.

    Returns:
        The graph, the names of the buffers that change, and whether it draws random numbers. The graph has gradients
        of what leads to the loss alone: where torch has none, it changes nothing, not even by weight decay.

    Raises:
        ValueError: a tensor is called like the gradient or the new value of another one.
        UnsupportedError: an operation without an ONNX form, or sizes that cannot vary.
    """
    forward.objective.train()
    loss: list[str] = []
    with transformers_in_graphs(), _result_errors():
        joint = trace_joint(
            forward, forward.infos, loss, [], trained, statistics=True, what=_what(forward), hints=forward.hints
        )
    if joint.unused:
        return training_graph(forward, [n for n in trained if n not in joint.unused])
    meant = {f"{n}{GRAD}": f"the gradient of {n!r}" for n in trained}
    meant |= {f"{n}{NEW}": f"the new value of {n!r}" for n in forward.buffers}
    check_names(
        meant.get, inputs=forward.input_names, results=forward.output_names, parameters=forward.parameters,
        buffers=forward.buffers,
    )  # fmt: skip
    changed = [n for n in forward.buffers if f"{n}{NEW}" in joint.results]
    graph = _graph(forward, joint, [*forward.parameters, *changed], trained, changed)
    return graph, changed, bool(joint.traced.draws)


@contextlib.contextmanager
def _result_errors() -> Iterator[None]:
    """Let an error about what the model returns be about that alone, and not about the sizes of the inputs."""
    try:
        yield
    except UnsupportedError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ResultError):
            cause = cause.__cause__
        if cause is None:
            raise
        # the reason has the names of sizes, which its own cause lacks
        raise UnsupportedError(str(error.__cause__).removeprefix(f"{type(cause).__name__}: ")) from error


def gradient_graph(forward: ModuleForward, fed: Collection[str], wanted: Sequence[str]) -> tuple[StepGraph, bool]:
    """Results, and gradients of the first by ``wanted``, in training mode; new buffers are not given.

    Args:
        fed: parameters that are inputs; the others, and the buffers, are constants.

    Returns:
        The graph, and whether it draws random numbers.

    Raises:
        UnsupportedError: an operation without an ONNX form, or sizes that cannot vary.
    """
    forward.objective.train()
    with transformers_in_graphs(), _result_errors():
        joint = trace_joint(forward, forward.infos, [], [], wanted, what=_what(forward), hints=forward.hints)
    return _graph(forward, joint, fed, wanted, []), bool(joint.traced.draws)


def evaluation_graph(forward: ModuleForward, changing: Sequence[str]) -> StepGraph:
    """Results in evaluation mode.

    Args:
        changing: buffers that are inputs; the others are constants.
    """
    forward.objective.eval()
    with transformers_in_graphs(), _result_errors():
        joint = trace_joint(forward, forward.infos, [], [], [], what=_what(forward), hints=forward.hints)
    return _graph(forward, joint, [*forward.parameters, *changing], [], [])


def part_of(graph: StepGraph, outputs: Sequence[str], inputs: Sequence[InputInfo]) -> StepGraph:
    """What of an evaluation computes ``outputs`` from ``inputs``. Its other results keep their names inside."""
    model = graph.model.clone()
    _name_inside(model.graph)
    kept = {str(v.name): v for v in model.graph.outputs}
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept[n] for n in outputs)
    RemoveUnusedNodesPass()(model)
    fed = {i.name for i in inputs}
    for value in list(model.graph.inputs):
        if value.name not in fed and not value.uses() and not value.is_graph_output():
            model.graph.inputs.remove(value)
    left = {str(v.name) for v in model.graph.inputs}
    return StepGraph(
        model, tuple(inputs), tuple(outputs), {n: source for n, source in graph.tensors.items() if n in left}
    )


def _name_inside(graph: ir.Graph) -> None:
    """Let results be the values that the graph reads, instead of copies of them that an Identity has named."""
    for position, value in enumerate(graph.outputs):
        node = value.producer()
        if node is None or node.op_type != "Identity":
            continue
        source = node.inputs[0]
        if source is None or source.producer() is None or source.is_graph_output():
            continue
        name, source.type, source.shape = value.name, value.type, value.shape
        for user, i in list(value.uses()):
            user.replace_input_with(i, source)
        graph.outputs[position] = source
        graph.remove(node, safe=True)
        source.name = name


def _what(forward: ModuleForward) -> str:
    return type(forward.objective.model).__name__


def _graph(
    forward: ModuleForward, joint: Joint, fed: Collection[str], trained: Sequence[str], changed: Sequence[str]
) -> StepGraph:
    forward.infos = joint.infos
    clash = sorted({*forward.input_names, *forward.parameters, *forward.buffers} & set(forward.output_names))
    if clash:
        raise ValueError(
            f"{', '.join(map(repr, clash))}: a result is called like an input or a parameter; rename the parameter, or "
            "give the results other names by output_names."
        )
    model = standardize(written(joint, described(joint, forward.output_names), fed=fed))
    taken = {str(v.name) for v in model.graph.inputs}
    return StepGraph(
        model,
        tuple(forward.infos),
        tuple(forward.output_names),
        {name: name for name in fed if name in taken},
        {name: f"{name}{GRAD}" for name in trained},
        {name: f"{name}{NEW}" for name in changed},
    )
