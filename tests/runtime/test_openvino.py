"""bfloat16 where an execution provider has kernels for it: OpenVINO, on a CPU that has the instructions."""

from __future__ import annotations

import json

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers import openvino

OPENVINO = "OpenVINOExecutionProvider"


@pytest.fixture
def with_openvino(monkeypatch):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [OPENVINO, "CPUExecutionProvider"])
    monkeypatch.setattr(openvino, "_cpu_has_bfloat16", lambda: True)


@pytest.mark.usefixtures("with_openvino")
def test_the_hint_is_given_and_the_users_settings_stay():
    def hints(*options):
        found = SessionFactory(RuntimeConfig([OPENVINO], list(options) or None)).in_bfloat16()
        return None if found is None else json.loads(found.providers[OPENVINO]["load_config"])["CPU"]

    assert hints() == {"INFERENCE_PRECISION_HINT": "bf16"}
    assert hints({"device_type": "CPU", "load_config": '{"CPU": {"NUM_STREAMS": "1"}}'}) == {
        "NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "bf16",
    }  # fmt: skip
    assert hints({"load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'}) == {"INFERENCE_PRECISION_HINT": "f32"}
    assert hints({"device_type": "GPU"}) is None
    config = RuntimeConfig([OPENVINO, "CPUExecutionProvider"], {"CPUExecutionProvider": {"a": "1"}})
    assert SessionFactory(config).in_bfloat16().providers["CPUExecutionProvider"] == {"a": "1"}


@pytest.mark.usefixtures("with_openvino")
def test_other_providers_and_processors_have_none(monkeypatch):
    assert SessionFactory().in_bfloat16() is None
    assert SessionFactory(RuntimeConfig(["CPUExecutionProvider", OPENVINO])).in_bfloat16() is None
    monkeypatch.setattr(openvino, "_cpu_has_bfloat16", lambda: False)
    assert SessionFactory(RuntimeConfig([OPENVINO])).in_bfloat16() is None


def test_torch_tells_what_the_processor_has():
    known = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    assert openvino._cpu_has_bfloat16() is bool(known)


class Net(nn.Module):
    """Two linear layers and a convolution; the result of autocast, in bfloat16, is given out."""

    def __init__(self):
        super().__init__()
        self.conv, self.first, self.second = nn.Conv2d(1, 4, 3), nn.Linear(144, 32), nn.Linear(32, 5)

    def forward(self, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.second(self.first(self.conv(x).relu().flatten(1)).tanh())
            return F.cross_entropy(logits, y), logits.detach()


def step_of(net, config, **options):
    graphs, fallbacks = [], []
    backend = ORTBackend(config, on_graph=graphs.append, on_fallback=fallbacks.extend, **options)
    torch.manual_seed(1)
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 5, (16,))
    loss, logits = torch.compile(lambda *batch: net(*batch), backend=backend)(x, y)
    loss.backward()
    assert not fallbacks
    return loss.detach(), logits, [p.grad.clone() for p in net.parameters()], graphs, (x, y)


def test_results_are_not_rounded_on_the_way(monkeypatch):
    """Such a provider is given the float32 graph, which gives float32's gradients elsewhere."""
    monkeypatch.setattr(SessionFactory, "in_bfloat16", lambda self: self)
    torch.manual_seed(0)
    net = Net()
    loss, logits, gradients, graphs, (x, y) = step_of(net, RuntimeConfig())
    assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
    assert [g.widened for g in graphs] == [0] and graphs[0].half == {torch.bfloat16}
    net.zero_grad()
    plain = net.second(net.first(net.conv(x).relu().flatten(1)).tanh())
    expected = F.cross_entropy(plain, y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, plain.detach().bfloat16(), rtol=2**-7, atol=0)
    for got, p in zip(gradients, net.parameters(), strict=True):
        assert (got - p.grad).abs().max() <= 1e-5 * p.grad.abs().max()


@pytest.mark.skipif(
    OPENVINO not in onnxruntime.get_available_providers() or not openvino._cpu_has_bfloat16(),
    reason="needs onnxruntime-openvino, and a CPU with bfloat16 instructions",
)
def test_openvino_computes_in_bfloat16():
    torch.manual_seed(0)
    net = Net()
    loss, _, gradients, graphs, (x, y) = step_of(net, RuntimeConfig([OPENVINO]))
    assert [g.widened for g in graphs] == [0]
    net.zero_grad()
    expected, _ = net(x, y)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=0.02, atol=0)
    for got, p in zip(gradients, net.parameters(), strict=True):
        assert (got - p.grad).norm() <= 0.05 * p.grad.norm()
        assert not torch.equal(got, p.grad)
