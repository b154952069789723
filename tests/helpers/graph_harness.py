"""Trace a function with its gradients, lower all of it to one ONNX graph, and compare with eager torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from lightning_ort.compiler.lowering import GraphBuilder
from lightning_ort.compiler.passes import optimize
from lightning_ort.compiler.trace import Derivative, trace
from lightning_ort.runtime.providers.cpu import chosen_by_bits

BATCH = 7
"""A size that test inputs use for nothing but the batch: dimensions of this size are traced as symbolic."""

SMALLER = 4

# torch writes its traces to this logger when a handler listens, as pytest's does: a third of the time of a test.
logging.getLogger("torch.__trace").propagate = False
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 2e-3}


@dataclasses.dataclass
class Case:
    name: str
    function: Callable[..., Any]
    inputs: Callable[[int], Sequence[Any]]
    """batch size to arguments; called with BATCH for tracing"""
    dynamic: bool = True
    gradients: bool = True
    scale: float = 1.0
    """factor on the tolerance"""

    def __str__(self) -> str:
        return self.name

    @property
    def static(self) -> Case:
        """The same at one batch size, which is traced three times as fast."""
        return dataclasses.replace(self, dynamic=False)


class Lowered:
    """One ONNX graph of outputs and gradients of ``function``."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        torch.manual_seed(seed)
        example = case.inputs(BATCH)
        self.region = region = _with_loss(case)
        fakes = _fakes(example, case)
        with tracing(TracingContext(fakes[0].fake_mode)):
            derivative = Derivative.LOSS if case.gradients else Derivative.NONE
            self.traced = trace(_as_module(region, len(fakes)), fakes, derivative, [0])
        self.model = lowered_model(self)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        options.log_severity_level = 3
        options.add_session_config_entry("session.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(
            ir.to_proto(self.model).SerializeToString(),
            options,
            providers=["CPUExecutionProvider"],
            disabled_optimizers=["MatMulScaleFusion"],
        )

    def __call__(self, *inputs: Tensor) -> list[np.ndarray]:
        names = {i.name for i in self.session.get_inputs()}
        feed = {n.name: x.detach().numpy() for n, x in zip(self.traced.inputs, inputs, strict=True) if n.name in names}
        return self.session.run(None, feed)


def _as_module(region: Callable[..., Any], arguments: int) -> fx.GraphModule:
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(arguments)]
    graph.output(graph.call_function(region, tuple(placeholders)))
    return fx.GraphModule(torch.nn.Module(), graph)


def lowered_model(lowered: Lowered) -> ir.Model:
    traced, g = lowered.traced, GraphBuilder(by_bits=chosen_by_bits())
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            g.add_input(node)
        elif node.op == "get_attr":
            g.add_initializer(node, getattr(traced.module, node.target))
        elif node.op == "call_function":
            g.lower(node)
    results = [o for o in traced.outputs if isinstance(o, fx.Node)]
    results += [n for n in traced.gradients.values() if n is not None]
    return optimize(g.model(results))


def _with_loss(case: Case) -> Callable[..., Any]:
    """The outputs of the case after a scalar whose gradient reaches each of their elements with another factor.

    The sine also keeps the scalar of the order of one for outputs of any size.
    """

    def region(*inputs: Any) -> Any:
        outputs = case.function(*inputs)
        outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
        if not case.gradients:
            return outputs
        parts = [o.sin().sum() for o in outputs if o.requires_grad]
        return [sum(parts[1:], parts[0]), *outputs]

    return region


def _fakes(inputs: Sequence[Any], case: Case) -> list[Any]:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(x: Tensor, number: int) -> Tensor:
        kinds = [DimDynamic.DUCK if case.dynamic and s == BATCH else DimDynamic.STATIC for s in x.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * x.dim())
        result = mode.from_tensor(x.detach(), symbolic_context=context, source=ConstantSource(f"x{number}"))
        return result.requires_grad_(x.is_floating_point() and case.gradients)

    return [fake(x, i) for i, x in enumerate(inputs)]


def eager(case: Case, inputs: Sequence[Tensor], region: Callable[..., Any]) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point() and case.gradients) for x in inputs]
    outputs = region(*leaves)
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(outputs[0], wanted, allow_unused=True) if case.gradients else ()
    return [o.detach() for o in outputs] + [x for x in gradients if x is not None]


def check(case: Case) -> Lowered:
    """Compare values and gradients with eager, at two batch sizes when the case is dynamic."""
    lowered = Lowered(case)
    for batch in (BATCH, SMALLER) if case.dynamic else (BATCH,):
        torch.manual_seed(batch)
        inputs = case.inputs(batch)
        got = lowered(*inputs)
        expected = eager(case, inputs, lowered.region)
        assert len(got) == len(expected)
        skipped = int(case.gradients)  # the loss only leads to the gradients
        for number, (a, b) in list(enumerate(zip(got, expected, strict=True)))[skipped:]:
            _assert_equal(torch.from_numpy(a), b, case, f"{case.name}: result {number}, batch {batch}")
    return lowered


def _assert_equal(got: Tensor, expected: Tensor, case: Case, label: str) -> None:
    assert got.dtype == expected.dtype, f"{label}: {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{label}: {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got, expected), f"{label}: {got} != {expected}"
        return
    tolerance = TOLERANCE[got.dtype] * case.scale
    finite = expected[expected.isfinite()].abs()
    bound = tolerance * max(float(finite.max()) if finite.numel() else 0.0, 1e-3)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=bound, equal_nan=True, msg=lambda m: f"{label}: {m}")


def op_types(lowered: Lowered) -> list[str]:
    """Types of all ONNX nodes of the graph, in order."""
    return [n.op_type for n in lowered.model.graph]
