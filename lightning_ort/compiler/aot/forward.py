"""A forward module as a graph of its outputs, with everything it reads as an input."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ort.compiler.decompositions.registry import composites
from lightning_ort.compiler.functional_graph import plain_kernels
from lightning_ort.onnx_reader import OnnxModule

__all__ = ["Forward", "Region", "region_of", "run_fake", "weighted_sum"]


@dataclasses.dataclass
class Region:
    """``module`` takes the initializers, the graph inputs and the incoming gradients, in this order.

    Its first result is the scalar whose derivative by the parameters and inputs is wanted: the sum of each
    differentiated output times its incoming gradient. The outputs of the ONNX graph follow.

    Attributes:
        tensors: ONNX name to value, of the initializers that are read as tensors.
    """

    module: fx.GraphModule
    tensors: dict[str, torch.Tensor]


class Forward(Protocol):
    """What else than an ONNX graph can be differentiated.

    Attributes:
        input_names: names of the inputs.
        output_names: names of the outputs, known once a graph was made of the region.
    """

    input_names: list[str]
    output_names: list[str]

    def region(self, differentiated: Sequence[str]) -> Region:
        """See :class:`Region`; the gradient of each output is 1."""


def region_of(module: OnnxModule | Forward, differentiated: Sequence[str], incoming: Sequence[str]) -> Region:
    """The region of ``module``.

    Args:
        differentiated: outputs that are summed.
        incoming: those of them whose gradient is an input; that of the others is 1.
    """
    if not isinstance(module, OnnxModule):
        assert not incoming, "incoming gradients need an ONNX graph"
        return module.region(differentiated)
    tensors: dict[str, torch.Tensor] = {}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lifted: dict[str, fx.Node] = {}
    for path, name in (module.parameter_names | module.buffer_names).items():
        tensors[name] = operator.attrgetter(path)(module)
        lifted[path] = graph.placeholder(f"tensor_{len(lifted)}")
    for number, node in enumerate(n for n in module.graph.nodes if n.op == "placeholder"):
        copies[node] = graph.placeholder(f"input_{number}")
    weights = {name: graph.placeholder(f"incoming_{number}") for number, name in enumerate(incoming)}
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in lifted:
            copies[node] = lifted[str(node.target)]
        elif node.op not in ("placeholder", "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
            if "onnx_node" in node.meta:
                # where the compiler looks for the user's line
                copies[node].meta["stack_trace"] = f'File "ONNX", line 0, in graph\nnode {node.meta["onnx_node"]!r}'
    results = [copies[n] for n in module.graph.output_node().args[0]]
    outputs = dict(zip(module.output_names, results, strict=True))
    total = graph.call_function(
        weighted_sum, ([outputs[n] for n in differentiated], [weights.get(n) for n in differentiated])
    )
    graph.output([total, *results])
    return Region(fx.GraphModule(module, graph), tensors)


def weighted_sum(outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Sum of the sums of ``outputs``, each times its weight.

    A sum that depends on nothing that wants a gradient is a leaf of its own: torch refuses to differentiate a constant.
    """
    terms = [(o if w is None else o * w).sum() for o, w in zip(outputs, weights, strict=True)]
    total = functools.reduce(torch.add, terms)
    if total.requires_grad or not torch.is_grad_enabled():
        return total
    return (total if total.is_floating_point() else total.float()).detach().requires_grad_()


def run_fake(region: Region, mode: FakeTensorMode, inputs: Sequence[torch.Tensor]) -> list[Any]:
    """Results of ``region`` on fake tensors of ``mode``, by the operators with which it is traced.

    torch's own kernels would take some open sizes for numbers.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(mode)))
        for context in (mode, torch.no_grad(), enable_python_dispatcher(), composites(), plain_kernels()):
            stack.enter_context(context)
        return fx.Interpreter(region.module).run(*inputs)
