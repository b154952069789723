"""Convolutions that run in torch because its kernels are faster: the same results, and nobody is left in the dark."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.lowering import LOWERINGS, NotLowered
from lightning_ort.report import Report
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory


def make_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),  # eager sums its gradient with 3e-4 of error
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 4),
    )


def compiled(module, **options):
    graphs, fallbacks = [], []
    backend = ORTBackend(on_graph=graphs.append, on_fallback=fallbacks.extend, **options)
    return torch.compile(lambda x: module(x).square().mean(), backend=backend), graphs, fallbacks


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_same_results(placement):
    ours, eager = make_cnn(), make_cnn()
    # "error" is about what ONNX Runtime cannot run, and it can run these
    step, graphs, fallbacks = compiled(ours, config=RuntimeConfig(placement=placement), on_unsupported="error")
    for batch in (28, 26, 28):
        x = torch.randn(batch, 3, 32, 32)
        ours.zero_grad(), eager.zero_grad()
        loss, expected = step(x), eager(x).square().mean()
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            assert (p.grad - q.grad).abs().max() <= 1e-4 * q.grad.abs().max() + 1e-9
    for b, c in zip(ours.buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(b, c, rtol=1e-5, atol=1e-6)
    assert not fallbacks
    # three convolutions, not the one of single pixels
    names = ["aten.convolution.default"] * 3 + ["aten.convolution_backward.default"] * 3
    assert sorted(graphs[0].preferred) == (names if placement == "fastest" else [])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(2, 2, 3), (2, 2, 8, 8)),  # small
        (nn.Conv2d(64, 64, 1), (16, 64, 32, 32)),  # a matrix product
        (nn.Conv2d(8, 16, 3, padding=1).double(), (16, 8, 32, 32)),  # oneDNN has no doubles
    ],
    ids=["small", "pixels", "double"],
)
def test_stays_in_onnxruntime(layer, shape):
    layer = copy.deepcopy(layer)
    step, graphs, _ = compiled(layer)
    x = torch.randn(shape, dtype=layer.weight.dtype)
    step(x).backward()
    assert [g.preferred for g in graphs] == [[]]


def test_without_onednn(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    step, graphs, _ = compiled(nn.Conv2d(8, 16, 3, padding=1))
    step(torch.randn(16, 8, 32, 32)).backward()
    assert [g.preferred for g in graphs] == [[]]


def test_in_evaluation():
    module = make_cnn().eval()
    step, graphs, _ = compiled(module)
    x = torch.randn(28, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(step(x), module(x).square().mean(), rtol=1e-5, atol=0)
    assert graphs[0].preferred == ["aten.convolution.default"] * 3


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
def test_positions_among_equals_are_torchs(placement):
    graphs = []
    backend = ORTBackend(on_graph=graphs.append, config=RuntimeConfig(placement=placement), on_unsupported="error")
    x = torch.randint(0, 3, (40, 9), generator=torch.Generator().manual_seed(0)).double()

    def ranked(x):
        return *x.topk(4, 1), *x.sort(1), *x.kthvalue(3, 1), *x.median(1), (x + 1).topk(2, 1)[0]

    torch.testing.assert_close(torch.compile(ranked, backend=backend)(x), ranked(x), rtol=0, atol=0)
    assert sorted(graphs[0].preferred) == [
        f"aten.{name}" for name in ("kthvalue.default", "median.dim", "sort.default", "topk.default")
    ]


def test_report_names_them():
    report = Report()
    report.step("training_step").preferred.update(["aten.convolution.default"] * 3)
    line = "in torch by choice: aten.convolution.default, 3 times"
    assert line in str(report) and "placement='onnxruntime'" in str(report)


@pytest.mark.parametrize("known", [True, False])
def test_each_session_is_made_once(known, monkeypatch):
    """However many calls have to leave ONNX Runtime, also where only lowering shows it."""
    made: list = []
    session = SessionFactory.session
    monkeypatch.setattr(SessionFactory, "session", lambda self, *a, **kw: made.append(0) or session(self, *a, **kw))
    if known:
        monkeypatch.delitem(LOWERINGS, torch.ops.aten.sin.default)
    else:

        def refuse(builder, node, *args):
            raise NotLowered("not today")

        monkeypatch.setitem(LOWERINGS, torch.ops.aten.sin.default, refuse)
    fallbacks: list = []

    def step(x):
        for _ in range(8):
            x = (x @ x).sin() * 0.5 + 0.1
        return x

    backend = ORTBackend(RuntimeConfig(placement="onnxruntime"), on_fallback=fallbacks.extend)
    x = torch.randn(5, 5, dtype=torch.float64)
    torch.testing.assert_close(torch.compile(step, backend=backend)(x), step(x), rtol=1e-12, atol=0)
    assert (len(made), [f.operator for f in fallbacks]) == (9, ["aten.sin.default"] * 8)
