"""``torch.cond`` and its like, which have no form in ONNX here: they run in torch, and all else in ONNX Runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._higher_order_ops import scan, while_loop

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.errors import UnsupportedError
from lightning_ort.runtime.config import RuntimeConfig

# torch's own use of what it has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def chosen(net, x):
    return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (net(x),)).square().mean()


def chosen_layer(net, x):
    return torch.cond(x.sum() > 0, lambda t: net(t), lambda t: t.cos(), (x,)).square().mean() + net(x).mean()


def repeated(net, x):
    with torch.no_grad():
        _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 0.5), (torch.tensor(0), x))
    return (net(x) * y).square().mean()


def scanned(net, x):
    last, all_of_them = scan(lambda c, a: (c + a.sin(), c * a), torch.zeros(4), net(x), dim=0)
    return all_of_them.square().mean() + last.mean()


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize("step", [chosen, chosen_layer, repeated, scanned], ids=lambda step: step.__name__)
def test_control_flow(step, placement):
    torch.manual_seed(0)
    net, fallbacks = nn.Linear(4, 4), []
    backend = ORTBackend(RuntimeConfig(placement=placement), on_fallback=fallbacks.extend)
    compiled = torch.compile(step, backend=backend)
    for sign in (1, -1, 1):
        x = sign * torch.rand(3, 4)
        found = []
        for function in (step, compiled):
            net.zero_grad()
            loss = function(net, x)
            loss.backward()
            with torch.no_grad():
                found.append([loss.detach(), function(net, x), *(p.grad for p in net.parameters())])
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-6)
    if placement == "onnxruntime":
        assert fallbacks


def test_may_be_refused():
    backend = ORTBackend(RuntimeConfig(placement="onnxruntime"), on_unsupported="error")
    with pytest.raises(UnsupportedError, match="cond"):
        torch.compile(chosen, backend=backend)(nn.Linear(4, 4), torch.ones(2, 4))
