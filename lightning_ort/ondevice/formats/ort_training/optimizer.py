"""``optimizer_model.onnx``: an update by the operators that ONNX Runtime's training API knows.

The API takes a graph with exactly one ``AdamWOptimizer`` or ``SGDOptimizerV2`` and keeps two moments per parameter for
the one, and for the other one that is not used. Both operators write into the memory of the parameters, and no other
operator can. So all updates are made of these two:

* Decay in the gradient is added to each gradient before.
* Momentum is ``AdamWOptimizer`` whose second moment stays zero (``beta=1``), so that it divides by ``epsilon=1``.
* A direction that is no moment (Nesterov's, LAMB's) is made of what ``AdamWOptimizer`` does to parameters that are
  zero, and applied by ``SGDOptimizerV2`` in the branches of an ``If``, where the API does not count it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper

from lightning_ort.errors import UnsupportedError
from lightning_ort.ondevice.formats.ort_training.names import DOMAIN, METADATA, OPTIMIZER_INPUTS, TRAINING_OPSET
from lightning_ort.ondevice.formats.ort_training.read_step import parsed
from lightning_ort.ondevice.optimizer_config import OptimizerConfig

__all__ = ["optimizer_model", "optimizer_of", "read_optimizer"]

_OPSET = 20
_IR_VERSION = 10
_MOMENTS = ("first_order_moments", "second_order_moments")


def optimizer_model(config: OptimizerConfig, count: int) -> ir.Model:
    """The graph of one update.

    Args:
        config: what is computed. It is kept with the graph, which has no place for the learning rate.
        count: number of trained parameters.

    Raises:
        UnsupportedError: what the two operators cannot be made to compute.
    """
    if not count:
        raise UnsupportedError("There is no trained parameter, so there is nothing to update.")
    model = _Writer(config, count).model()
    model.metadata_props[METADATA] = json.dumps(dataclasses.asdict(config))
    return model


class _Writer:
    def __init__(self, config: OptimizerConfig, count: int) -> None:
        self._config, self._count = config, count
        # AdamWOptimizer has two moments, SGDOptimizerV2 gets one
        self._plain = config.kind == "SGD" and not config.momentum
        sequence = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        inputs = [
            ir.Value(name=OPTIMIZER_INPUTS[0], type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])),
            ir.Value(name=OPTIMIZER_INPUTS[1], type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1])),
            *(ir.Value(name=n, type=sequence) for n in OPTIMIZER_INPUTS[2:]),
            *(ir.Value(name=n, type=sequence) for n in _MOMENTS[: 1 if self._plain else 2]),
        ]
        opsets = {"": _OPSET, DOMAIN: TRAINING_OPSET}
        self._graph = ir.Graph(inputs, [], nodes=[], opset_imports=opsets, name="update")
        self._rate, self._step, self._params, self._gradients, *self._moments = inputs

    def model(self) -> ir.Model:
        updated = self._update()
        updated.name = "updated_flag"
        updated.type, updated.shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([1])
        self._graph.outputs.append(updated)
        return ir.Model(self._graph, ir_version=_IR_VERSION, producer_name="lightning_ort")

    def _update(self) -> ir.Value:
        config, gradients = self._config, self._gradients
        if config.clip_grad_norm is not None:
            gradients = self._op("InplaceClipGradNorm", gradients, domain=DOMAIN, max_norm=float(config.clip_grad_norm))
        if config.kind in ("Adam", "SGD") and config.weight_decay:
            decay = self._number(config.weight_decay)
            gradients = self._each(lambda g, p: self._op("Add", g, self._op("Mul", p, decay)), gradients, self._params)
        if self._plain:
            return self._op("SGDOptimizerV2", self._rate, self._params, gradients, domain=DOMAIN)
        if config.kind == "SGD":
            return self._heavy(gradients)
        if config.kind == "Lamb":
            return self._lamb(gradients)
        return self._adam(self._rate, self._params, gradients, **self._adam_attributes())[0]

    def _adam_attributes(self) -> dict[str, Any]:
        config = self._config
        decay = config.weight_decay if config.kind == "AdamW" else 0.0
        # without a correction of the bias, the two modes differ only in the decay
        after = config.decay == "after" or not (config.bias_correction or decay)
        if not after and not config.bias_correction:
            raise UnsupportedError(
                "ONNX Runtime's AdamWOptimizer has no weight decay before the update without bias correction. Set "
                "bias_correction=True or decay='after', or use flavour='portable'."
            )
        return {
            "adam_mode": int(after), "alpha": config.betas[0], "beta": config.betas[1], "epsilon": config.eps,
            "weight_decay": decay, "correct_bias": int(config.bias_correction),
        }  # fmt: skip

    def _adam(self, rate: ir.Value, params: ir.Value, gradients: ir.Value, **attributes: Any) -> list[ir.Value]:
        """Whether it was done, and the updated parameters."""
        node = ir.node(
            "AdamWOptimizer",
            [rate, self._step, params, gradients, *self._moments],
            attributes=attributes,
            domain=DOMAIN,
            num_outputs=2,
        )
        self._graph.append(node)
        return list(node.outputs)

    def _heavy(self, gradients: ir.Value) -> ir.Value:
        kept = self._config.momentum
        if kept >= 1:
            raise UnsupportedError(
                f"momentum={kept}: ONNX Runtime's AdamWOptimizer keeps a mean of gradients, a momentum below 1 "
                "only. Use flavour='portable'."
            )
        # the operator adds the share 1 - alpha of a gradient, in float32
        whole = self._number(1 / float(np.float32(1) - np.float32(kept)))
        larger = self._each(lambda g: self._op("Mul", g, whole), gradients)
        attributes = {
            "adam_mode": 1, "alpha": kept, "beta": 1.0, "epsilon": 1.0, "weight_decay": 0.0, "correct_bias": 0
        }  # fmt: skip
        if not self._config.nesterov:
            return self._adam(self._rate, self._params, larger, **attributes)[0]
        done, negative = self._adam(self._number([1.0]), self._zeros(), larger, **attributes)
        momentum = self._number(kept)
        direction = self._each(lambda g, n: self._op("Sub", g, self._op("Mul", n, momentum)), gradients, negative)
        return self._applied(direction, done)

    def _lamb(self, gradients: ir.Value) -> ir.Value:
        config = self._config
        mode = {"adam_mode": 0 if config.bias_correction else 1, "correct_bias": int(config.bias_correction)}
        done, negative = self._adam(
            self._number([1.0]),
            self._zeros(),
            gradients,
            **mode,
            alpha=config.betas[0],
            beta=config.betas[1],
            epsilon=config.eps,
            weight_decay=0.0,
        )
        decay, zero, one = self._number(config.weight_decay), self._number(0.0), self._number(1.0)

        def direction(negative: ir.Value, param: ir.Value) -> ir.Value:
            towards = self._op("Sub", self._op("Mul", param, decay), negative)
            length, reach = (self._op("ReduceL2", x, keepdims=0) for x in (param, towards))
            ratio = self._op("Div", length, reach)
            if config.ratio_min > -math.inf:
                ratio = self._op("Max", ratio, self._number(config.ratio_min))
            if config.ratio_max < math.inf:
                ratio = self._op("Min", ratio, self._number(config.ratio_max))
            # a weight or a direction of zero has no ratio
            both = self._op("And", self._op("Greater", length, zero), self._op("Greater", reach, zero))
            return self._op("Mul", towards, self._op("Where", both, ratio, one))

        return self._applied(self._each(direction, negative, self._params), done)

    def _zeros(self) -> ir.Value:
        """A sequence shaped like the parameters, in memory of its own."""
        return self._each(lambda p: self._op("ConstantOfShape", self._op("Shape", p)), self._params)

    def _applied(self, direction: ir.Value, done: ir.Value) -> ir.Value:
        """Take ``direction`` times the learning rate from the parameters."""
        branches = []
        for name in ("then", "else"):
            node = ir.node("SGDOptimizerV2", [self._rate, self._params, direction], domain=DOMAIN)
            # the operator gives its flag another shape than it declares
            shaped = ir.node("Reshape", [node.outputs[0], self._indices(1)])
            node.outputs[0].name, shaped.outputs[0].name = f"done_{name}", f"updated_{name}"
            shaped.outputs[0].type, shaped.outputs[0].shape = ir.TensorType(ir.DataType.BOOL), ir.Shape([1])
            branches.append(ir.Graph([], shaped.outputs, nodes=[node, shaped], name=name))
        # a condition that is known would let ONNX Runtime unpack the branch, and the API count its operator
        return self._op("If", done, then_branch=branches[0], else_branch=branches[1])

    def _each(self, function: Callable[..., ir.Value], *sequences: ir.Value) -> ir.Value:
        """The sequence of ``function`` of the elements of ``sequences``."""
        results = []
        for i in range(self._count):
            index = self._number(i)
            results.append(function(*(self._op("SequenceAt", s, index) for s in sequences)))
        return self._op("SequenceConstruct", *results)

    def _op(self, op_type: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes=attributes, domain=domain)
        self._graph.append(node)
        return node.outputs[0]

    def _indices(self, *numbers: int) -> ir.Value:
        return self._constant(np.array(numbers, dtype=np.int64))

    def _number(self, number: float | list[float]) -> ir.Value:
        return self._constant(np.array(number, dtype=np.int64 if isinstance(number, int) else np.float32))

    def _constant(self, array: np.ndarray) -> ir.Value:
        name = f"{array.dtype}_{array.tolist()}"
        if name not in self._graph.initializers:
            value = ir.Value(name=name, const_value=ir.Tensor(array, name=name))
            self._graph.register_initializer(value)
        return self._graph.initializers[name]


# attributes that a node need not have, as ONNX Runtime's schema has them
_ADAMW = {
    "alpha": 0.9, "beta": 0.999, "epsilon": 1e-8, "weight_decay": 1e-2, "adam_mode": 0, "correct_bias": 1
}  # fmt: skip


def read_optimizer(path: Path, count: int) -> OptimizerConfig:
    """The optimizer of a file of ``onnxruntime.training.artifacts`` or of this package.

    Args:
        path: of the file.
        count: number of trained parameters.

    Raises:
        FileNotFoundError, ValueError: no such file, no optimizer model, or one that was edited.
        UnsupportedError: a node besides the known optimizers and the clipping of gradients.
    """
    return optimizer_of(parsed(path), repr(str(path)), count)


def optimizer_of(proto: onnx.ModelProto, what: str, count: int) -> OptimizerConfig:
    """What a model computes; see :func:`read_optimizer`.

    Args:
        what: what errors call the model.
    """
    own = {p.key: p.value for p in proto.metadata_props}.get(METADATA)
    if own is not None:
        return _own(what, proto, own, count)
    nodes = list(proto.graph.node)
    clip = None
    if nodes and nodes[0].op_type == "InplaceClipGradNorm" and list(nodes[0].input) == ["gradients"]:
        clip = float(_attributes(nodes[0])["max_norm"])
        gradients = nodes.pop(0).output[0]
    else:
        gradients = "gradients"
    for node in nodes:
        if node.domain != DOMAIN or node.op_type not in ("AdamWOptimizer", "SGDOptimizerV2"):
            raise UnsupportedError(
                f"{what}: node {node.name or node.output[0]!r} ({node.op_type}) is not supported in an "
                "optimizer model; expected AdamWOptimizer or SGDOptimizerV2, after an InplaceClipGradNorm or without."
            )
    if len(nodes) != 1:
        raise ValueError(f"{what} is no optimizer model: it has {len(nodes)} optimizers, expected one.")
    position = 3 if nodes[0].op_type == "AdamWOptimizer" else 2
    if len(nodes[0].input) <= position or nodes[0].input[position] != gradients:
        raise UnsupportedError(f"{what}: {nodes[0].op_type} does not read the gradients, clipped or not.")
    if nodes[0].op_type == "SGDOptimizerV2":
        return OptimizerConfig("SGD", clip_grad_norm=clip)
    numbers = _ADAMW | _attributes(nodes[0])
    return OptimizerConfig(
        "AdamW",
        betas=(_short(numbers["alpha"]), _short(numbers["beta"])),
        eps=_short(numbers["epsilon"]),
        weight_decay=_short(numbers["weight_decay"]),
        bias_correction=bool(numbers["correct_bias"]),
        decay="after" if numbers["adam_mode"] else "before",
        clip_grad_norm=clip,
    )


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _short(number: float) -> float:
    """The decimal number that was rounded to float32."""
    return float(f"{number:.7g}")


def _own(what: str, proto: onnx.ModelProto, text: str, count: int) -> OptimizerConfig:
    try:
        config = OptimizerConfig(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: its settings {text!r} are no optimizer's ({error}).") from error
    expected = ir.to_proto(optimizer_model(config, count)).graph
    if expected.SerializeToString(deterministic=True) != proto.graph.SerializeToString(deterministic=True):
        raise ValueError(
            f"{what} does not compute what its settings say for {count} trained parameters: it was changed, or "
            "belongs to another checkpoint."
        )
    return config
