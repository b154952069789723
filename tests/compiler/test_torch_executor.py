"""Graphs that torch runs natively: the same kernels as eager, so the same numbers, bit for bit."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from networks import MLP
from parity import assert_same_outcome, fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.loss_scale import LossScaling, all_finite
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = pytest.mark.stock_only


def compiled(function, **options):
    graphs = []
    backend = ORTBackend(RuntimeConfig(placement="torch"), on_graph=graphs.append, on_unsupported="error", **options)
    return torch.compile(function, backend=backend), graphs


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(32, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu_(self.norm(self.first(x))), 2)
        return self.head(self.drop(F.adaptive_avg_pool2d(x, 2).flatten(1)))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(10, 16), nn.LayerNorm(16)
        self.qkv, self.head = nn.Linear(16, 48), nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.embedding(x))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.head(x + F.gelu(mixed))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 8, num_layers=2, dropout=0.4, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


NETWORKS = {
    "convolutions": (Convolutions, lambda n: torch.randn(n, 3, 8, 8)),
    "attention": (Attention, lambda n: torch.randint(10, (n, 5))),
    "recurrent": (Recurrent, lambda n: torch.randn(n, 5, 6)),
}


@pytest.mark.parametrize(
    ("name", "autocast"), [*((n, False) for n in NETWORKS), ("convolutions", True), ("attention", True)]
)
def test_same_bits_as_eager(name, autocast):
    make, data = NETWORKS[name]
    # eager has one kernel for a recurrent layer, where the graph has the operators of its steps
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "recurrent" else {"rtol": 0, "atol": 0}
    torch.manual_seed(0)
    ours = make()
    eager = copy.deepcopy(ours)

    def step_of(module):
        def step(x):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return module(x).float().square().mean()

        return step

    step, graphs = compiled(step_of(ours))
    for i, batch in enumerate((4, 3, 4)):
        x = data(batch)
        losses, states = [], []
        for module, function in ((ours, step), (eager, step_of(eager))):
            torch.manual_seed(i)
            module.zero_grad()
            losses.append(function(x))
            states.append(torch.get_rng_state())
            losses[-1].backward()
        assert torch.equal(*states)
        torch.testing.assert_close(*losses, **tolerance)
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **tolerance)
        for b, c in zip(ours.buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(b, c, rtol=0, atol=0)
    assert {g.executor for g in graphs} == {"torch"} and not any(g.widened for g in graphs)


def test_operators_are_torchs_own(monkeypatch):
    from lightning_ort.compiler.executors import torch as executor

    seen = []
    generate = executor.generate
    monkeypatch.setattr(
        executor, "generate", lambda module, *rest: seen.extend(module.graph.nodes) or generate(module, *rest)
    )
    for make, data in (NETWORKS["convolutions"], NETWORKS["attention"]):
        module = make()
        step, _ = compiled(lambda x, module=module: module(x).square().mean())
        step(data(4)).backward()
    names = {str(n.target).removeprefix("aten.") for n in seen}
    assert {
        "convolution_backward.default",
        "native_batch_norm_backward.default",
        "_scaled_dot_product_flash_attention_for_cpu_backward.default",
        "gelu_backward.default",
    } <= names


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 3, 5), {"scale_factor": 2.0, "mode": "nearest"}),
        ((2, 3, 5), {"scale_factor": 1.7, "mode": "linear"}),
        ((2, 3, 5, 6), {"scale_factor": 2.5, "mode": "nearest-exact"}),
        ((2, 3, 5, 6), {"size": (7, 4), "mode": "bilinear", "align_corners": True}),
        ((2, 3, 5, 6), {"scale_factor": (1.5, 2.0), "mode": "bilinear", "recompute_scale_factor": True}),
        ((2, 3, 5, 6), {"scale_factor": 0.5, "mode": "bilinear", "antialias": True}),
        ((2, 3, 5, 6), {"size": (4, 9), "mode": "bicubic"}),
        ((2, 3, 4, 5, 7), {"scale_factor": 2.0, "mode": "trilinear"}),
    ],
    ids=lambda value: value["mode"] if isinstance(value, dict) else None,
)
def test_interpolation_has_its_kernel(monkeypatch, shape, options, dynamic):
    """torch's way of tracing it writes it out in twenty operators; eager's kernel is in the graph, for all sizes."""
    from lightning_ort.compiler.executors import torch as executor

    seen = []
    generate = executor.generate
    monkeypatch.setattr(
        executor, "generate", lambda module, *rest: seen.extend(module.graph.nodes) or generate(module, *rest)
    )

    def function(x):
        return F.interpolate(x * 2, **options).square().sum()

    graphs = []
    backend = ORTBackend(RuntimeConfig(placement="torch"), on_graph=graphs.append, on_unsupported="error")
    step = torch.compile(function, backend=backend, dynamic=dynamic)
    for more in (0, 3, 1) if dynamic else (0,):
        x = torch.randn(shape[0] + more, *shape[1:-1], shape[-1] + more)
        gradients = []
        for f in (step, function):
            leaf = x.clone().requires_grad_()
            f(leaf).backward()
            gradients.append(leaf.grad)
        assert torch.equal(*gradients)
    assert len(graphs) == 1
    names = [str(n.target) for n in seen if "upsample" in str(n.target)]
    assert [name.endswith("_backward.default") for name in names] == [False, True]
    assert not any("index" in str(n.target) for n in seen)


def test_results_are_alone():
    """Nobody who changes what a step gave disturbs weights, other results or later runs, and the other way round."""
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))
    count = torch.zeros(4)

    def function(x):
        h = x @ (weight + bias)  # one gradient for two
        count.add_(1)
        halves = h.detach().chunk(2)
        return h.square().mean(), weight.detach().t() + 0, halves[0], halves[1], h.detach().sum(0).expand(3, 4)

    step, _ = compiled(function)
    x = torch.randn(4, 4)
    results, gradients = [], []
    for _ in range(3):
        weight.grad = bias.grad = None
        got = step(x)
        got[0].backward()
        memory = [t.untyped_storage().data_ptr() for t in (*got, weight.grad, bias.grad, weight, bias, x, count)]
        assert len(set(memory)) == len(memory)
        results.append([t.detach().clone() for t in got])
        gradients.append((weight.grad, weight.grad.clone()))
        for t in got[1:4]:
            t.fill_(7.0)
        bias.grad.fill_(7.0)
    for now, then in gradients:
        assert torch.equal(now, then)
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)
    assert count.tolist() == [3.0] * 4


def test_gradients_of_several_outputs():
    ours = Attention()
    eager = copy.deepcopy(ours)

    def step_of(module):
        def step(x):
            out = module(x)
            return out, out.exp().sum(-1)

        return step

    step, graphs = compiled(step_of(ours))
    x = torch.randint(10, (3, 5))
    for _ in range(3):
        for module, function in ((ours, step), (eager, step_of(eager))):
            module.zero_grad()
            a, b = function(x)
            (a.square().sum() + 2 * b.mean()).backward()
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-6)
    assert [g.executor for g in graphs] == ["torch"] * 2


def test_gradients_of_gradients():
    net, x = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(5, 6)
    step, _ = compiled(lambda x: net(x).pow(3).sum())
    found = []
    for function in (step, lambda x: net(x).pow(3).sum()):
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        gradient.square().sum().backward()
        found.append([p.grad for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_scaled_loss():
    scaling = LossScaling(2.0**16)
    ours = nn.Linear(6, 3)
    eager = copy.deepcopy(ours)

    def step_of(module):
        def step(x):
            with torch.autocast("cpu", torch.float16):
                return (module(x).float() * 1e-7).mean()

        return step

    step, _ = compiled(step_of(ours), scaling=scaling)
    x = torch.randn(5, 6)
    step(x).backward()
    (step_of(eager)(x) * scaling.scale).backward()
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        assert p.grad.abs().min() > 0
        torch.testing.assert_close(p.grad, q.grad / scaling.scale, rtol=1e-6, atol=0)
    assert all_finite([p.grad for p in ours.parameters()])
    ours.zero_grad()
    step(x * torch.inf).backward()
    assert not all_finite([p.grad for p in ours.parameters()])


def test_inputs_that_are_views():
    """An input whose entries share memory is no result of the step that only reads it."""
    net = nn.Linear(6, 6)

    def function(x, first):
        return (net(x) + 0.1 * first.clone().t()).square().mean()

    step, _ = compiled(function)
    x = torch.randn(12, 6)[::2]
    first = torch.randn(1, 6).expand(6, -1)
    torch.testing.assert_close(step(x, first), function(x, first), rtol=0, atol=0)


def test_without_gradients():
    module = Convolutions().eval()
    step, graphs = compiled(lambda x: module(x))
    x = torch.randn(4, 3, 8, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(step(x), module(x))
    assert {g.executor for g in graphs} == {"torch"}


def test_fit():
    train = partial(DataLoader, TensorDataset(torch.randn(32, 48), torch.randint(10, (32,))), batch_size=8)
    flags = {"max_steps": 6, "train": train}
    eager = fit(MLP, strategy="auto", **flags)
    ours = fit(MLP, strategy=ORTStrategy(placement="torch", optimizer="torch", print_report=False), **flags)
    assert_same_outcome(eager, ours, 0.0)
    report = ours.trainer.strategy.report()
    step = report["training_step"]
    assert (step.graphs, step.graphs_in_torch, step.all_in_ort) == (1, 1, False)
    assert "in torch by choice: 1 of 1 graphs (as placement asks for)" in str(report)


def test_a_wrong_graph_is_noticed(monkeypatch):
    from lightning_ort.compiler.executors.torch import TorchExecutable
    from lightning_ort.errors import MismatchError

    run = TorchExecutable.run
    monkeypatch.setattr(TorchExecutable, "run", lambda self, inputs: [t * 1.01 for t in run(self, inputs)])
    net = nn.Linear(6, 3)
    step, _ = compiled(lambda x: net(x).square().mean())
    with pytest.raises(MismatchError):
        step(torch.randn(5, 6))


@pytest.mark.parametrize("placement", ["torch", "onnxruntime"])
@pytest.mark.parametrize(
    "layer", [lambda x: F.group_norm(x, 2), lambda x: F.layer_norm(x, x.shape[2:]), lambda x: F.avg_pool2d(x, 2)]
)
def test_gradients_that_arrive_as_one_number(layer, placement):
    """Those of a sum are one number, expanded: operators that read memory entry by entry get them written out."""

    def step(a, x):
        return a.sum(), layer(x)

    def run(function):
        torch.manual_seed(0)
        a, x = torch.randn(3, requires_grad=True), torch.randn(5, 4, 3, 6, requires_grad=True)
        loss, y = function(a, x)
        (loss + y.sum() * 0.3).backward()
        return x.grad

    compiled = torch.compile(step, backend="lightning_ort", options={"placement": placement, "verify": False})
    for _ in range(3):
        torch.testing.assert_close(run(compiled), run(step), atol=1e-6, rtol=1e-4)
