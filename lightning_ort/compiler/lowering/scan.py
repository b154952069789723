"""Writes the body of an ONNX ``Scan``, which repeats it for each step of a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx

from lightning_ort.compiler.lowering.builder import GraphBuilder
from lightning_ort.runtime.dtypes import ONNX

__all__ = ["ScanBody"]


class ScanBody:
    """A subgraph of ``node`` from states and one step of each scanned input to new states and one step of results.

    It may read values of the graph around it.
    """

    def __init__(self, g: GraphBuilder, node: fx.Node, dtype: torch.dtype) -> None:
        self._g, self._name, self._type = g, node.name, ir.TensorType(ONNX[dtype])
        self._inputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []

    def _fresh(self, hint: str) -> str:
        return f"{self._name}/step_{hint}_{len(self._inputs) + len(self._nodes)}"

    def input(self) -> ir.Value:
        """The next state, or the step of the next scanned input."""
        value = ir.Value(name=self._fresh("input"), type=self._type)
        self._inputs.append(value)
        return value

    def op(self, op_type: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any) -> Any:
        """Like :meth:`GraphBuilder.op`."""
        name = self._fresh(op_type)
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs, name=name)
        for i, value in enumerate(node.outputs):
            value.name = f"{name}_{i}"
        self._nodes.append(node)
        return node.outputs[0] if outputs == 1 else tuple(node.outputs)

    def scan(
        self,
        states: Sequence[ir.Value],
        scanned: Sequence[ir.Value],
        new_states: Sequence[ir.Value],
        results: Sequence[ir.Value],
        reverse: bool,
    ) -> tuple[ir.Value, ...]:
        """Write the ``Scan``; returns the final states and, for each result, all its steps in the order of time."""
        outputs: list[ir.Value] = []
        made = {id(v) for node in self._nodes for v in node.outputs}
        for value in (*new_states, *results):
            # each output must be another value, and none an input; a copy takes a tenth of what a step of LSTM does
            own = value if id(value) in made else self.op("Identity", value)
            made.discard(id(value))
            own.type = self._type
            outputs.append(own)
        body = ir.Graph(self._inputs, outputs, nodes=self._nodes, name=f"{self._name}/step")
        return self._g.op(
            "Scan",
            *states,
            *scanned,
            outputs=len(outputs),
            body=body,
            num_scan_inputs=len(scanned),
            scan_input_directions=[int(reverse)] * len(scanned),
            scan_output_directions=[int(reverse)] * len(results),
        )
