"""Steps traced as on a GPU (see pretend_cuda.py), executed on the CPU, and compared with eager there."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import modules
import networks
import onnx
import pytest
import torch
import torch.nn.functional as F
from modules import images, sentences, table
from parity import assert_fit_parity, assert_same_tensors, step_tensors
from pretend_cuda import cuda_traces, hooks, possible
from test_coverage_layers import BATCH, LAYERS, Function, first, scalar
from torch import fx, nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.global_state import drawing_as_traced
from lightning_ort.compiler.random import DRAWS
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = pytest.mark.skipif(not possible, reason="knows torch's libraries for 64-bit Linux only")

aten = torch.ops.aten


class Cell(nn.Module):
    """One step of a recurrent network behind a layer."""

    def __init__(self, cell):
        super().__init__()
        self.first, self.cell = nn.Linear(8, 8), cell(8, 8)

    def forward(self, x):
        hidden = self.first(x)
        return (
            self.cell(x, hidden) if isinstance(self.cell, (nn.GRUCell, nn.RNNCell)) else sum(self.cell(x, (hidden, x)))
        )


class Sampler(nn.Module):
    """An affine transformation of images that depends on them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 6)

    def forward(self, x):
        grid = F.affine_grid(self.layer(x.mean((2, 3))).unflatten(-1, (2, 3)), x.shape, align_corners=False)
        return F.grid_sample(x, grid, align_corners=False)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


def ends_in(function):
    """A layer and a loss, or whatever else ``function`` is."""
    return lambda: Function(function, nn.Linear(8, 8))


VECTOR, SEQUENCE, IMAGE = (8,), (5, 8), (4, 9, 9)
# what torch has kernels of its own for on a GPU
OTHERS = {
    "lstm cell": (lambda: Cell(nn.LSTMCell), VECTOR),
    "gru cell": (lambda: Cell(nn.GRUCell), VECTOR),
    "rnn cell": (lambda: Cell(nn.RNNCell), VECTOR),
    "spatial transformer": (Sampler, IMAGE),
    "multi-head attention": (Attends, SEQUENCE),
    "channels last": (
        lambda: Function(
            lambda x: F.dropout(F.batch_norm(x.to(memory_format=torch.channels_last), None, None, training=True), 0.3),
            nn.Conv2d(4, 4, 3, padding=1),
        ),
        IMAGE,
    ),
    "dropout of a transposed tensor": (lambda: Function(lambda x: F.dropout(x.t(), 0.3).t(), nn.Linear(8, 8)), VECTOR),
    "lstm, two layers": (first(lambda: nn.LSTM(8, 8, 2, batch_first=True, dropout=0.3)), SEQUENCE),
    "a Python float and a scalar of the CPU": (
        lambda: Function(lambda x: x * torch.tensor(0.5) + 0.25, nn.Linear(8, 8)), VECTOR
    ),
    "multi-margin loss": (
        ends_in(lambda x: F.multi_margin_loss(x, x.detach().argmin(1), reduction="none")), VECTOR
    ),
    "multi-label margin loss": (
        ends_in(lambda x: F.multilabel_margin_loss(x, x.detach().argsort(1), reduction="none")), VECTOR
    ),
    "binary cross entropy": (
        ends_in(lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), reduction="none")), VECTOR
    ),
    "distances": (ends_in(F.pdist), VECTOR),
    "sorted": (ends_in(lambda x: x.sort(1)[0] + x.cummax(1)[0] + x.msort()), VECTOR),
    "maxima of single pixels": (ends_in(lambda x: F.adaptive_max_pool1d(x[..., :1], 1)), SEQUENCE),
}  # fmt: skip
SAME = [
    "rms norm", "group norm", "instance norm", "batch norm 2d", "batch norm 2d, eval", "conv", "conv, depthwise",
    "conv 3d", "transposed conv, groups", "max pool", "adaptive max pool", "upsample bicubic", "embedding", "gru",
    "encoder layer", "attention, mask", "attention, dropout", "alpha dropout", "weight norm",
]  # fmt: skip
CASES = OTHERS | {name: LAYERS[name] for name in SAME}


@pytest.mark.parametrize("name", CASES)
@torch._dynamo.config.patch(allow_rnn=True)
def test_a_graph_for_a_gpu_computes_what_eager_computes_and_leaves_nothing_to_torch(name):
    make, shape = CASES[name]
    torch.manual_seed(0)
    ours = make()
    eager = copy.deepcopy(ours)
    fallbacks: list = []
    x = torch.randn(BATCH, *shape)
    with cuda_traces() as traces:
        backend = ORTBackend(RuntimeConfig(placement="onnxruntime"), on_fallback=fallbacks.extend)
        got = step_tensors(ours, torch.compile(lambda x: scalar(ours(x)), backend=backend), x)
        wanted = step_tensors(eager, lambda x: scalar(eager(x)), x)
    assert_same_tensors(got, wanted)
    assert not fallbacks
    (traced,) = traces
    assert traced.inputs[-1].meta["val"].device.type == "cuda"


@pytest.mark.parametrize("pretence", [cuda_traces, nullcontext])
def test_the_gradient_of_a_convolution_computes_no_size_on_a_gpu(pretence):
    """The CPU would, for a node to wait for, and the session for it in each run."""
    models: list[bytes] = []
    layer = nn.Conv2d(4, 6, 3, padding=1)
    config = RuntimeConfig(placement="onnxruntime", on_session=lambda session, model: models.append(model))
    with pretence():
        step = torch.compile(lambda x: layer(x).square().mean(), backend=ORTBackend(config))
        step(torch.randn(2, 4, 9, 9)).backward()
    (model,) = models
    sizes = [node.op_type for node in onnx.load_from_string(model).graph.node if node.op_type == "Size"]
    assert sizes == ["Size"] * (pretence is nullcontext)


def operators_of(step, x, *, on_gpu):
    """Results of a step in ONNX Runtime, and the operators of its graph."""
    models: list[bytes] = []
    config = RuntimeConfig(placement="onnxruntime", on_session=lambda session, model: models.append(model))
    with cuda_traces() if on_gpu else nullcontext():
        result = torch.compile(step, backend=ORTBackend(config))(x)
    (model,) = models
    return result, [node.op_type for node in onnx.load_from_string(model).graph.node]


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, True), (torch.float64, False)])
def test_softmax_of_double_numbers_is_written_out_on_a_gpu(dtype, kernel):
    """The kernel there is off by 2e-8."""
    x = torch.randn(3, 5, dtype=dtype)
    result, operators = operators_of(lambda x: x.softmax(-1) * 2, x, on_gpu=True)
    torch.testing.assert_close(result, x.softmax(-1) * 2)
    assert ("Softmax" in operators) == kernel


@pytest.mark.parametrize("function", [torch.amax, torch.amin])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_extrema_of_infinite_rows_are_looked_at_on_a_gpu(function, on_gpu):
    """The kernel there ends at the largest finite number."""
    x = torch.tensor([[1.0, 2.0], [torch.inf, torch.inf], [-torch.inf, -torch.inf], [torch.nan, -torch.inf]])
    result, operators = operators_of(lambda x: function(x * 1, 1), x, on_gpu=on_gpu)
    assert torch.equal(result.nan_to_num(7.0, 8.0, -8.0), function(x, 1).nan_to_num(7.0, 8.0, -8.0))
    assert ("Equal" in operators) == on_gpu


@pytest.mark.parametrize("network", ["Classifier", "ConvNet", "TextClassifier", "MLP", "networks.ConvNet", "GPT"])
def test_networks_train_by_graphs_for_a_gpu(network):
    loaders = {"Classifier": table, "ConvNet": images, "TextClassifier": sentences}
    with cuda_traces() as traces:
        if network in loaders:
            make = getattr(modules, network)
            make = (lambda: modules.Classifier(dropout=0.3)) if network == "Classifier" else make
            assert_fit_parity(make, loaders[network], max_steps=4)
        else:
            make = getattr(networks, network.removeprefix("networks."))
            assert_fit_parity(make, lambda: networks.examples(make, 32), max_steps=2, tolerance=1e-3)
    devices = {n.meta["val"].device.type for t in traces for n in t.inputs if isinstance(n.meta["val"], torch.Tensor)}
    assert "cuda" in devices


def test_dropout_is_drawn_by_the_kernel_that_torch_uses_on_a_gpu():
    def step(x):
        return F.dropout(x @ x, 0.4).sum(), torch.rand(3, device=x.device)

    x = torch.randn(8, 8)
    with cuda_traces() as traces:
        torch.manual_seed(0)
        loss, noise = torch.compile(step, backend=ORTBackend())(x)
    torch.manual_seed(0)
    # on the CPU, this operator draws as F.dropout does
    wanted = aten.native_dropout(x @ x, 0.4, True)[0].sum(), torch.rand(3)

    torch.testing.assert_close((loss, noise), wanted)
    drawn = [n.meta["draw"][0] for n in traces[0].draws]
    assert drawn == [torch.ops.lightning_ort.dropout_factor.default, aten.rand.default]
    assert set(drawn) <= DRAWS.keys()


@pytest.mark.parametrize(
    "like", [torch.ones(64), torch.ones(6, 4, dtype=torch.float64).t()], ids=["vector", "transposed"]
)
def test_factors_of_dropout_are_zero_or_the_inverse_of_what_is_kept(like):
    drawn = DRAWS[torch.ops.lightning_ort.dropout_factor.default](torch.empty_like(like), None, 0.25)

    assert drawn.stride() == like.stride()
    assert drawn.dtype == like.dtype
    kept = drawn > 0
    assert 0 < kept.sum() < drawn.numel()
    torch.testing.assert_close(drawn[kept], torch.full_like(drawn[kept], 4 / 3))


@pytest.mark.parametrize("draw", [lambda p: torch.bernoulli(p), lambda p: torch.empty_like(p).bernoulli_(p)],
                         ids=["bernoulli", "in place"])  # fmt: skip
def test_numbers_that_a_gpu_draws_by_another_kernel_than_the_cpu_are_left_to_torch(draw):
    def step(x):
        return x * draw(x.detach().sigmoid())

    fallbacks: list = []
    with cuda_traces():
        torch.manual_seed(0)
        got = torch.compile(step, backend=ORTBackend(on_fallback=fallbacks.extend))(torch.ones(9))
    torch.manual_seed(0)

    assert torch.equal(got, step(torch.ones(9)))
    assert [f.operator for f in fallbacks] == ["the whole region"]
    assert "aten.bernoulli" in fallbacks[0].reason


def test_the_pretence_ends():
    with hooks():
        pass

    assert torch.accelerator.current_accelerator() is None or torch.backends.cuda.is_built()
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("function", "cudnn"), [(torch.lstm, False), (torch.relu, True)], ids=["lstm", "relu"])
def test_on_a_gpu_torch_draws_beside_a_graph_as_the_graph_does(monkeypatch, function, cudnn):
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    region = fx.GraphModule(nn.Module(), graph)

    def state():
        backends = torch.backends
        return backends.cuda.flash_sdp_enabled(), backends.cuda.mem_efficient_sdp_enabled(), backends.cudnn.enabled

    before = state()
    if cudnn:  # nothing is set then, where disable_global_flags() forbids it
        monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    with drawing_as_traced(region, torch.device("cuda", 0)):
        inside = state()
    with drawing_as_traced(region, torch.device("cpu")):
        assert state() == before

    assert inside == (False, False, cudnn)
    assert state() == before == (True, True, True)
