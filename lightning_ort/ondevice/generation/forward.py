"""An objective with its inputs, in the form in which graphs are traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from lightning_ort.ondevice.generation.inputs import hints_of
from lightning_ort.ondevice.generation.objectives import Objective
from lightning_ort.onnx_gradients.inputs import InputInfo
from lightning_ort.onnx_gradients.region import Region, weighted_sum
from lightning_ort.onnx_reader import OnnxModule

__all__ = ["ModuleForward"]


class ModuleForward:
    """Makes a region of ``objective``; see :class:`~lightning_ort.onnx_gradients.region.Forward`.

    Args:
        objective: what is computed.
        infos: its inputs.
        example: of the inputs; it is traced with those sizes before others.

    Attributes:
        parameters: name to parameter.
        buffers: name to buffer.
        hints: sizes to trace with.
        requiring_grad: names of the parameters that require a gradient.

    Raises:
        ValueError: an input is called like a parameter.
    """

    def __init__(
        self, objective: Objective, infos: Sequence[InputInfo], example: Mapping[str, Tensor] | None = None
    ) -> None:
        self.objective, self.infos = objective, list(infos)
        self.hints = hints_of(infos, example)
        self.input_names = [i.name for i in infos]
        self.output_names: list[str] = []
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.requiring_grad: list[str] = []
        self._paths: dict[str, str] = {}
        model = objective.model
        known = {}
        if isinstance(model, OnnxModule):
            known = {f"model.{path}": name for path, name in (model.parameter_names | model.buffer_names).items()}
        for path, parameter in objective.named_parameters():
            name = self._name(path, known)
            self.parameters[name] = parameter.detach()
            if parameter.requires_grad:
                self.requiring_grad.append(name)
        for path, buffer in objective.named_buffers():
            self.buffers[self._name(path, known)] = buffer
        clash = sorted(set(self.input_names) & set(self._paths))
        if clash:
            raise ValueError(f"{clash} are names of inputs and of parameters; give the inputs other names.")

    def _name(self, path: str, known: dict[str, str]) -> str:
        name = known.get(path, path.removeprefix("model."))
        self._paths[name] = path
        return name

    def call(self, tensors: Mapping[str, Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
        """The results with these parameters and buffers, which are changed where the objective changes its own."""
        state = {self._paths[n]: t for n, t in tensors.items()}
        results = torch.func.functional_call(self.objective, state, tuple(inputs))
        for name, tensor in tensors.items():
            # a buffer that was given another tensor instead of being changed
            if state[self._paths[name]] is not tensor:
                tensor.copy_(state[self._paths[name]])
        self.output_names = list(results)
        return list(results.values())

    def region(self, differentiated: Sequence[str]) -> Region:
        """The objective as a function of its tensors and inputs."""
        tensors = self.parameters | self.buffers
        root = nn.Module()
        root.call = _Call(self, list(tensors), differentiated)
        graph = fx.Graph()
        places = [graph.placeholder(f"tensor_{i}") for i in range(len(tensors))]
        inputs = [graph.placeholder(f"input_{i}") for i in range(len(self.infos))]
        graph.output(graph.call_module("call", (places, inputs)))
        return Region(fx.GraphModule(root, graph), tensors)


class _Call(nn.Module):
    """The objective on other tensors than its own, after the sum of what is differentiated."""

    def __init__(self, forward: ModuleForward, names: Sequence[str], differentiated: Sequence[str]) -> None:
        super().__init__()
        # in a list, so that the objective does not become a part of this module
        self._forward, self._names, self._differentiated = [forward], list(names), list(differentiated)

    def forward(self, tensors: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Any]:
        forward = self._forward[0]
        results = forward.call(dict(zip(self._names, tensors, strict=True)), inputs)
        named = dict(zip(forward.output_names, results, strict=True))
        names = self._differentiated or forward.output_names[:1]
        return [weighted_sum([named[n] for n in names], [None] * len(names)), *results]
