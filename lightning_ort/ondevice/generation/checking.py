"""New artifacts against the same computation in torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.compiler.aot.step_graph import StepGraph
from lightning_ort.compiler.aot.step_runner import StepRunner
from lightning_ort.compiler.rounding import RoundingNoise
from lightning_ort.ondevice.formats import Artifacts
from lightning_ort.ondevice.generation.objectives import ModuleForward
from lightning_ort.ondevice.generation.sources import Source
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.verification import Results, compare

__all__ = ["check_artifacts", "check_step"]

_ADVICE = "Nothing was written. Please report it with the model; verify=False skips this check."


def check_artifacts(artifacts: Artifacts, source: Source, example: Mapping[str, Tensor], *, random: bool) -> None:
    """Raise unless loss, gradients and buffers of ``example`` are torch's.

    A training step that draws random numbers cannot be compared; the evaluation is.

    Raises:
        MismatchError: names what differs.
        ValueError: the loss is not finite.
    """
    forward = ModuleForward(source.objective, source.infos)
    if not random:
        source.objective.train()
        check_step(artifacts.train, artifacts.state, forward, example, _ADVICE)
    source.objective.eval()
    check_step(artifacts.evaluation, artifacts.state, forward, example, _ADVICE)


def check_step(
    graph: StepGraph, state: TrainingState, forward: ModuleForward, example: Mapping[str, Tensor], advice: str
) -> None:
    """Raise unless what ``graph`` computes from ``example`` is what ``forward`` computes in torch.

    Args:
        graph: of ``forward`` in its present mode, without random numbers.
        state: parameters and buffers, which are not changed.
        advice: the end of the message.

    Raises:
        MismatchError: names what differs.
        ValueError: the loss is not finite.
    """
    tensors = {n: t.clone(memory_format=torch.contiguous_format) for n, t in state.tensors.items()}
    gradients = {n: torch.empty_like(tensors[n]) for n in graph.gradients}
    found = StepRunner(graph, tensors, gradients, SessionFactory())(
        [example[i.name].contiguous() for i in graph.inputs]
    )
    numbers = {name: i for i, name in enumerate([*forward.parameters, *forward.buffers])}
    got = Results(
        dict(enumerate(found)),
        {numbers[n]: g for n, g in gradients.items()},
        {numbers[n]: tensors[n] for n in graph.updates},
    )
    names = {
        "outputs": dict(enumerate(graph.outputs)),
        "gradients": {i: f"the gradient of {n!r}" for n, i in numbers.items()},
        "updates": {i: f"the new value of {n!r}" for n, i in numbers.items()},
    }

    class InTorch:
        def evaluate(self, dtype: torch.dtype | None = None, noise: int | None = None) -> Results:
            with contextlib.nullcontext() if noise is None else RoundingNoise(noise, torch.device("cpu")):
                values = _torch(forward, state.tensors, example, list(graph.gradients), dtype)
            updates = {numbers[n]: values[2][n] for n in graph.updates}
            return Results(dict(enumerate(values[0])), {numbers[n]: g for n, g in values[1].items()}, updates)

    wanted = InTorch().evaluate()
    loss = float(wanted.outputs[0])
    if not math.isfinite(loss):
        raise ValueError(
            f"In torch the loss of the example is {loss}. A loss must not depend on a metric (what metrics compute has "
            "no gradient and is left out); else give another example."
        )
    compare(got, wanted, names, InTorch(), advice=advice)


def _torch(
    forward: ModuleForward,
    state: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    trained: list[str],
    dtype: torch.dtype | None,
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, gradients and buffers."""

    def own(tensor: Tensor) -> Tensor:
        copy = tensor.detach().cpu().clone()
        return copy.to(dtype) if dtype is not None and copy.is_floating_point() else copy

    tensors = {n: own(state.get(n, t)) for n, t in (forward.parameters | forward.buffers).items()}
    with torch.enable_grad():
        for name in trained:
            tensors[name].requires_grad_()
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or before)
        try:
            results = forward.call(tensors, [own(example[i.name]) for i in forward.infos])
            leaves = [tensors[n] for n in trained]
            grads = torch.autograd.grad(results[0], leaves, allow_unused=True) if trained else []
        finally:
            torch.set_default_dtype(before)
    gradients = {n: torch.zeros_like(tensors[n]) if g is None else g for n, g in zip(trained, grads, strict=True)}
    return [r.detach() for r in results], gradients, {n: tensors[n].detach() for n in forward.buffers}
