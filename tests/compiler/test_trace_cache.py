"""What was traced is used again for the same graph, and for no other."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from modules import Classifier, TableData
from networks import MLP
from parity import assert_same_metrics, fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.compiler import ORTBackend, compilation
from lightning_ort.compiler.torch_functions import are_replaced
from lightning_ort.compiler.trace_cache import TRACES, copied
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = pytest.mark.stock_only


@pytest.fixture(autouse=True)
def traces(monkeypatch):
    """The traces that are made, with an empty cache."""
    made, trace = [], compilation.trace

    def counted(*args, **kwargs):
        made.append(kwargs.get("native"))
        return trace(*args, **kwargs)

    monkeypatch.setattr(compilation, "trace", counted)
    TRACES.clear()
    yield made
    TRACES.clear()


def call(function, *args, placement="fastest"):
    """Results and gradients, compiled anew and by eager."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=ORTBackend(RuntimeConfig(placement=placement)))

    def results(f):
        torch.manual_seed(0)
        leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
        found = f(*leaves)
        found = list(found) if isinstance(found, tuple) else [found]
        total = sum(r.sum() for r in found)
        if total.requires_grad:
            total.backward()
        return [*found, *[a.grad for a in leaves if a.grad is not None], torch.get_rng_state()]

    got, wanted = results(compiled), results(function)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    return got


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def layers(x):
    return F.dropout(F.gelu(F.layer_norm(x, (6,))), 0.4).square().mean()


@pytest.mark.parametrize("placement", ["fastest", "torch"])
@pytest.mark.parametrize("function", [layers, lambda x: (x.sin().sum(), (x * 2).cos()), lambda x: x.detach().exp()])
def test_the_same_again(traces, function, placement):
    x = X.clone().requires_grad_()
    first = call(function, x, placement=placement)
    (*before,) = traces
    again = call(function, x, placement=placement)
    assert traces == before
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_under_other_settings_of_a_gpu(traces):
    """Which kernels a trace for one has depends on whether cuDNN is switched on, and on what the GPU is."""
    x = X.clone().requires_grad_()
    call(layers, x, placement="torch")
    (*before,) = traces
    with torch.backends.cudnn.flags(enabled=False):
        call(layers, x, placement="torch")
    assert len(traces) > len(before)


FACTOR = 1.0


@torch._dynamo.allow_in_graph
def opaque(x):
    return x * FACTOR


def test_functions_that_nobody_has_read(traces, monkeypatch):
    """What they compute may have changed since."""
    for factor in (1.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        call(lambda x: opaque(x).sum(), X.clone().requires_grad_())


@torch._dynamo.allow_in_graph
@torch.enable_grad()
def opaque_and_wrapped(x):
    return x * FACTOR


class Gain:
    def scaled(self, x):
        return x * FACTOR


gain = torch._dynamo.allow_in_graph(Gain().scaled)


@torch.library.custom_op("tests_of_trace_cache::kept", mutates_args=())
def kept(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


kept.register_fake(torch.empty_like)
kept.register_autograd(lambda ctx, g: g * FACTOR)


@pytest.mark.parametrize("placement", ["torch", "onnxruntime"])
@pytest.mark.parametrize("function", [opaque, opaque_and_wrapped, gain, kept])
def test_functions_of_others_follow_from_more_than_their_names(traces, monkeypatch, function, placement):
    for number, factor in enumerate((1.0, 3.0), 1):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        call(lambda x: (function(x) * 2).sum(), X.clone().requires_grad_(), placement=placement)
        assert len(traces) == number


def _tripled(original):
    return lambda *args, **kwargs: original(*args, **kwargs) * 3


@pytest.mark.parametrize("placement", ["torch", "onnxruntime"])
@pytest.mark.parametrize(("owner", "name"), [(F, "scaled_dot_product_attention"), (torch, "layer_norm")])
def test_functions_of_torch_that_somebody_has_replaced(monkeypatch, owner, name, placement):
    """Torch's own call others by their names while they are traced."""
    attention = nn.MultiheadAttention(6, 2, batch_first=True).double()

    def function(x):
        y = attention(x[None], x[None], x[None], need_weights=False)[0]
        return F.layer_norm(y.tanh(), (6,)).tanh().square().sum()

    x = X.double().requires_grad_()
    (first, *_) = call(function, x, placement=placement)
    monkeypatch.setattr(owner, name, _tripled(getattr(owner, name)))
    (other, *_) = call(function, x, placement=placement)
    assert (first - other).abs() > 1e-3


def test_who_seeds_takes_no_part(traces, monkeypatch):
    """The training build of ONNX Runtime has a function of its own there, as soon as somebody imports its ORTModule."""
    seed = torch.manual_seed

    def seed_both(number):
        return seed(number)

    monkeypatch.setattr(torch, "manual_seed", seed_both)
    x = X.clone().requires_grad_()
    call(layers, x)
    (*before,) = traces
    call(layers, x)
    assert traces == before


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
def test_kernels_of_torch_that_somebody_has_replaced():
    torch.func.vmap(torch.sin)(X)  # for which torch itself has kernels in Python
    assert not are_replaced()
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("silu", lambda x: x * torch.sigmoid(2 * x), "AutogradCPU")
        assert are_replaced()
    finally:
        library._destroy()
    assert not are_replaced()


def constant(value):
    return lambda x: (x * value).tanh().sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class ScaledOtherwise(Scaled):
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


ScaledOtherwise.__name__ = ScaledOtherwise.__qualname__ = "Scaled"


def autocast(dtype):
    def step(x):
        with torch.autocast("cpu", dtype):
            return (x.round() @ torch.ones(6, 2)).float().sum()

    return step


W = X.clone().requires_grad_()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((constant(2.0), W), (constant(3.0), W)),
        ((lambda x: x @ torch.eye(6), W), (lambda x: x @ torch.ones(6, 6), W)),
        ((lambda x: x * torch.tensor([1.0] * 6), W), (lambda x: x * torch.tensor([1.0] * 5 + [2.0]), W)),
        ((lambda x: Scaled.apply(x).sum(), W), (lambda x: ScaledOtherwise.apply(x).sum(), W)),
        ((autocast(torch.bfloat16), W), (autocast(torch.float16), W)),
        ((layers, W), (layers, X)),
        ((layers, W), (layers, X.double().requires_grad_())),
        ((layers, W), (layers, torch.randn(6, 4).t().requires_grad_())),
        ((layers, W), (layers, torch.randn(5, 6).requires_grad_())),
        ((lambda x: F.dropout(x, 0.4).sum(), W), (lambda x: F.dropout(x, 0.6).sum(), W)),
    ],
    ids=[
        "number",
        "operator",
        "constant",
        "function",
        "autocast",
        "gradients",
        "type",
        "strides",
        "size",
        "probability",
    ],
)
def test_another_graph(traces, one, other):
    call(*one)
    before = len(traces)
    call(*other)
    assert len(traces) > before


def test_inputs_that_share_memory(traces):
    """A graph that changes one of two tensors is traced for two that are apart, and refused for two that are not."""

    def step(x, y):
        x.mul_(2)
        return x + y

    def run(x, y):
        torch._dynamo.reset()
        return torch.compile(step, backend="lightning_ort")(x, y)

    x, y = torch.ones(4), torch.ones(4)
    assert torch.equal(run(x, y), torch.full((4,), 3.0))
    z = torch.ones(8)
    assert torch.equal(run(z[:4], z[2:6]), step(*[(w := torch.ones(8))[:4], w[2:6]]))


def test_modes(traces):
    f = torch.compile(lambda x: x.exp() * 2, backend="lightning_ort")
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        torch._dynamo.reset()
        with mode():
            assert torch.equal(f(X), X.exp() * 2)


@pytest.mark.parametrize("placement", ["fastest", "torch"])
def test_open_sizes(traces, placement):
    """Graphs of any size are used again too, at other sizes."""
    module = nn.Linear(6, 3)

    def results(sizes):
        torch._dynamo.reset()
        f = torch.compile(lambda x: module(x).tanh().mean(), backend=ORTBackend(RuntimeConfig(placement=placement)))
        for n in sizes:
            x = torch.randn(n, 6)
            torch.testing.assert_close(f(x), module(x).tanh().mean())
            module.zero_grad()
            f(x).backward()
            got = module.weight.grad
            module.zero_grad()
            module(x).tanh().mean().backward()
            torch.testing.assert_close(got, module.weight.grad)

    results([4, 5, 9])
    before = len(traces)
    results([4, 5, 3, 17])
    assert len(traces) == before


def test_open_sizes_that_a_trace_has_settled(traces):
    """What was assumed of a size holds for the guards of one region: such a trace is not used again."""

    def step(x):
        return x.sum() * (2 if x.shape[0] % 4 == 1 else 3)

    for sizes in ([4, 5, 9, 6], [4, 6, 7, 9, 13]):
        torch._dynamo.reset()
        f = torch.compile(step, backend="lightning_ort")
        for n in sizes:
            x = torch.randn(n, 3)
            torch.testing.assert_close(f(x), step(x))


def test_copies_are_apart(traces):
    """An executor rewrites its graph; the next one gets what was traced."""
    call(layers, W)
    (kept,) = [traced for _, traced in TRACES._kept.values()]
    copy, again = copied(kept), copied(kept)
    for node in list(copy.graph.nodes):
        if node.op == "call_function":
            node.args = ()
    assert str(again.graph) == str(kept.graph)
    assert not set(copy.graph.nodes) & set(kept.graph.nodes)
    mine = set(again.graph.nodes)
    assert {*again.inputs, *again.draws, *again.gradients.values()} <= mine
    assert all(o is None or o in mine for o in again.outputs)


def test_a_second_trainer_traces_nothing(traces):
    data = TensorDataset(torch.randn(40, 48), torch.randint(10, (40,)))

    def run():
        return fit(MLP, lambda: DataLoader(data, batch_size=8), strategy=ORTStrategy(print_report=False), max_steps=6)

    first = run()
    before = len(traces)
    second = run()
    assert len(traces) == before
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_validation_in_a_fit_and_by_itself(traces):
    """The latter is in inference mode in another Trainer: compiled again by Dynamo, whose graph is the same."""
    run = fit(Classifier, datamodule=lambda: TableData(), strategy=ORTStrategy(print_report=False), max_epochs=1)
    before, graphs = len(traces), run.trainer.strategy.report()["validation_step"].graphs
    flags = {"logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    other = Trainer(strategy=ORTStrategy(print_report=False), **flags)
    (found,) = other.validate(run.module, TableData(), verbose=False)
    assert len(traces) == before
    assert other.strategy.report()["validation_step"].graphs == graphs
    (expected,) = Trainer(**flags).validate(run.module, TableData(), verbose=False)
    assert_same_metrics(expected, found)


def test_the_oldest_are_forgotten(monkeypatch):
    monkeypatch.setattr("lightning_ort.compiler.trace_cache._NODES", 60)
    for value in range(12):
        call(constant(float(value)), W)
    assert 0 < len(TRACES) < 12
    assert sum(len(t.graph.nodes) for _, t in TRACES._kept.values()) <= 60
