"""Which initializers of a file without notes are trained: what a gradient reaches, and no constants of other tools."""

from __future__ import annotations

import onnx.parser
import pytest
import torch

from lightning_ort import TrainingParameters, TrainingSession
from lightning_ort.onnx_reader import to_torch

HEAD = '<ir_version: 9, opset_import: ["" : 20]>'


def model(initializers: str, *lines: str) -> onnx.ModelProto:
    """One of ``x`` [N, 6] and a weight ``w`` [6], whose result is ``loss``."""
    text = f"g (float[N,6] x) => (float loss) <float[6] w = {{1,2,3,4,5,6}}, {initializers}> {{ {' '.join(lines)} }}"
    return onnx.parser.parse_model(f"{HEAD}\n{text}")


def trained(proto: onnx.ModelProto, **options) -> set[str]:
    return set(to_torch(proto, **options).parameter_names.values())


MEAN = "loss = ReduceMean<keepdims=0>(y)"


@pytest.mark.parametrize("exponent", ["float p = {2}", "float p = {3}", "float[1] p = {2}"])
@pytest.mark.parametrize("base", ["h = Mul(x, w)", "a = Mul(x, w) h = Sub(a, w)"])
def test_an_exponent_of_what_may_be_below_zero_is_a_constant(exponent, base):
    proto = model(exponent, base, "y = Pow(h, p)", MEAN)
    assert trained(proto) == {"w"}
    assert trained(proto, parameters=["w", "p"]) == {"w", "p"}


@pytest.mark.parametrize(
    ("exponent", "base"),
    [
        ("float p = {3}, float low = {0.01}", "a = Mul(x, w) h = Clip(a, low)"),  # a generalized mean
        ("float p = {3}", "a = Mul(x, w) b = Relu(a) h = Add(b, b)"),
        ("float p = {2}, float one = {1}", "a = Mul(x, w) b = Mul(a, a) h = Add(b, one)"),
        ("float p = {0.45}", "h = Mul(x, w)"),  # of what is below zero there is no such power
        ("float p = {1}", "h = Mul(x, w)"),
    ],
)
def test_an_exponent_that_has_a_gradient_is_trained(exponent, base):
    assert {"w", "p"} <= trained(model(exponent, base, "y = Pow(h, p)", MEAN))


def test_a_session_trains_beside_an_exponent():
    proto = model("float two = {2}", "h = Mul(x, w)", "y = Pow(h, two)", MEAN)
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "AdamOptimizer"
    session = TrainingSession(proto, parameters)
    x = torch.randn(4, 6)
    w = torch.arange(1.0, 7).requires_grad_()
    optimizer = torch.optim.Adam([w], 0.01)
    for _ in range(4):
        (found,) = session.run(["loss"], {"x": x.numpy(), "Learning_Rate": [0.01]})
        loss = (x * w).square().mean()
        assert float(found) == pytest.approx(loss.item(), rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = session.get_model_state()["full_precision"]
    assert set(state) == {"w"} and abs(state["w"] - w.detach().numpy()).max() < 1e-4


def test_constants_that_another_tool_has_made_initializers_are_known_by_name():
    proto = model("float half = {0.5}, float other = {0.3}", "h = Mul(x, w)", "y = Mul(h, half)", "z = Mul(y, other)",
                  "loss = ReduceMean<keepdims=0>(z)")  # fmt: skip
    name = "/block.0/Constant_1_output_0"
    for initializer in proto.graph.initializer:
        initializer.name = name if initializer.name == "half" else initializer.name
    for node in proto.graph.node:
        node.input[:] = [name if n == "half" else n for n in node.input]
    assert trained(proto) == {"w", "other"}
    assert trained(proto, parameters=[name]) == {name}


@pytest.mark.parametrize(
    ("initializers", "lines"),
    [
        ("float t = {0.5}", "c = Greater(x, t) f = Cast<to=1>(c) y = Mul(f, w)"),
        ("float t = {0.5}", "s = Mul(x, t) k = Cast<to=7>(s) f = Cast<to=1>(k) y = Mul(f, w)"),
        ("float[1] t = {0.5}, int64[1] zero = {0}",
         "n = Shape<start=0, end=1>(x) f = Cast<to=1>(n) p = Mul(f, t) k = Cast<to=7>(p) s = Slice(x, zero, k, zero) "
         "y = Mul(s, w)"),
        ("float[6] t = {1,2,3,4,5,6}", "idle = Mul(x, t) y = Mul(x, w)"),
    ],
)  # fmt: skip
def test_what_no_gradient_reaches_is_not_trained(initializers, lines):
    proto = model(initializers, lines, MEAN)
    assert trained(proto) == {"w"}
    (loss,) = to_torch(proto)(torch.rand(4, 6))
    loss.backward()


def test_what_a_loop_begins_with_is_trained():
    body = (
        "h = Loop(n, t, w) <body = b (int64 i, bool c, float[6] before) => (bool co, float[6] after) "
        "{ co = Identity(c) m = Mul(before, s) after = Tanh(m) }>"
    )
    proto = model("int64 n = {2}, bool t = {1}, float s = {0.5}, float idle = {1}", body, "y = Mul(x, h)", MEAN)
    module = to_torch(proto)
    assert set(module.parameter_names.values()) == {"w", "s"}
    x = torch.randn(4, 6)
    w, s = torch.arange(1.0, 7).requires_grad_(), torch.tensor(0.5, requires_grad=True)
    h = w
    for _ in range(2):
        h = (h * s).tanh()
    (x * h).mean().backward()
    module(x)[0].backward()
    found = {module.parameter_names[name]: p.grad for name, p in module.named_parameters()}
    torch.testing.assert_close(found["w"], w.grad)
    torch.testing.assert_close(found["s"], s.grad)
