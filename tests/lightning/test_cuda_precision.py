"""16-bit steps as compiled for a GPU: products and convolutions stay in 16 bits, all else is rounded to them."""

from __future__ import annotations

import copy
import operator

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from lightning_ort.compiler import ORTBackend, plan
from lightning_ort.compiler.executors import onnxruntime as executor
from lightning_ort.compiler.mixed_precision import CONVOLUTIONS, PRODUCTS, Widening
from lightning_ort.compiler.placement import better_in_torch
from lightning_ort.compiler.trace import Traced
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers import native_to

aten = torch.ops.aten


class Net(nn.Module):
    """Convolution, attention and linear layers."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 5)

    def forward(self, x):
        x = self.norm(F.gelu(self.conv(x)).flatten(2).transpose(1, 2))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1))


def loss_of(module, x, y, dtype):
    with torch.autocast("cpu", dtype=dtype):
        return F.cross_entropy(module(x), y)


def for_gpu(config):
    """What makes sessions for a GPU, as far as it tells where operators are placed."""
    sessions = SessionFactory(config)
    sessions.provider = native_to(torch.device("cuda"))
    return sessions


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Choices for a GPU, in sessions of the CPU."""

    def choose(graph, sessions):
        return better_in_torch(graph, for_gpu(sessions.config))

    def rewrite(traced, *, rounded, kept):
        return Widening(traced, rounded=rounded, kept=PRODUCTS | CONVOLUTIONS)

    monkeypatch.setattr(executor, "Widening", rewrite)
    monkeypatch.setattr(plan, "better_in_torch", choose)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float16, 2e-2), (torch.bfloat16, 6e-2)], ids=["float16", "bfloat16"]
)
def test_gradients_are_those_of_eager(dtype, allowed):
    torch.manual_seed(0)
    ours = Net()
    eager = copy.deepcopy(ours)
    x, y = torch.randn(6, 3, 6, 6), torch.arange(6) % 5
    graphs, models = [], []
    config = RuntimeConfig(on_session=lambda session, model: models.append(onnx.load_from_string(model)))
    step = torch.compile(lambda x, y: loss_of(ours, x, y, dtype), backend=ORTBackend(config, on_graph=graphs.append))
    step(x, y).backward()
    loss_of(eager, x, y, dtype).backward()

    for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if name != "attention.in_proj_bias":  # that of the keys is zero but for rounding
            assert (p.grad - q.grad).abs().max() <= allowed * q.grad.abs().max(), name
    # ONNX Runtime has no kernels for gradients of convolutions, and no convolution of bfloat16
    wanted = [str(t) for t in (aten.convolution.default, aten.convolution_backward.default)]
    assert sorted(graphs[0].preferred) == wanted[dtype == torch.float16 :]
    if dtype == torch.float16:
        assert not graphs[0].fallbacks
        half = {node.input[0] for m in models for node in m.graph.node if node.op_type in ("MatMul", "Gemm", "Conv")}
        casts = {n.output[0]: n.attribute[0].i for m in models for n in m.graph.node if n.op_type == "Cast"}
        assert any(casts.get(name) == onnx.TensorProto.FLOAT16 for name in half)


def test_a_rewritten_graph_computes_the_same_in_torch():
    def step(x, w, k):
        h = (x.flatten(1) @ w).relu().view(2, 4, 3, 3)
        y = F.conv2d(h, k, padding=1)
        grads = aten.convolution_backward(y.sigmoid(), h, k, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1,
                                          [True, True, False])  # fmt: skip
        return y.tanh(), grads[0].exp(), grads[1] * 2

    args = [torch.randn(s).to(torch.bfloat16) for s in [(2, 4, 9), (36, 36), (4, 4, 3, 3)]]
    module = torch.fx.experimental.proxy_tensor.make_fx(step, tracing_mode="fake")(*args)
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    traced = Traced(module, inputs, {}, [], list(module.graph.output_node().args[0]), {}, {})
    widening = Widening(traced, kept=PRODUCTS | CONVOLUTIONS)

    results = fx.Interpreter(module).run(*args)
    for got, wanted in zip(results, step(*args), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    types = {
        n.target: {m.meta["val"].dtype for m in n.all_input_nodes}
        for n in module.graph.nodes
        if isinstance(n.meta.get("val"), (torch.Tensor, tuple)) and n.target is not operator.getitem
    }
    for target in (aten.mm.default, *CONVOLUTIONS):
        assert types[target] == {torch.bfloat16}, target
    for target in (aten.relu.default, aten.sigmoid.default, aten.tanh.default, aten.exp.default):
        assert types[target] == {torch.float32}, target
    assert widening.count == 5


@pytest.mark.parametrize(
    ("pixels", "dtype", "wanted"),
    [
        (8, torch.float32, []),
        (512, torch.float32, [aten.convolution_backward.default]),
        (8, torch.float16, [aten.convolution_backward.default]),
        (8, torch.bfloat16, [aten.convolution.default, aten.convolution_backward.default]),
    ],
)
def test_what_a_gpu_leaves_to_cudnn(pixels, dtype, wanted):
    def step(x, w):
        y = aten.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        return aten.convolution_backward(y, x, w, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])[1]

    with torch._subclasses.FakeTensorMode():
        args = [torch.empty(8, 16, pixels, pixels, dtype=dtype), torch.empty(16, 16, 3, 3, dtype=dtype)]
        graph = torch.fx.experimental.proxy_tensor.make_fx(step)(*args).graph

    assert [n.target for n in graph.nodes if n in better_in_torch(graph, for_gpu(RuntimeConfig()))] == wanted
    assert not better_in_torch(graph, for_gpu(RuntimeConfig(placement="onnxruntime")))
