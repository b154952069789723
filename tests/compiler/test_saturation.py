"""Functions that ONNX Runtime computes to more than their bound: nobody gets such a number who could tell."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
import torch
import torch.nn.functional as F
from parity import needs_ort
from torch import Tensor, nn

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = needs_ort

# where tanh is 1 but for a unit in the last place, and where the sigmoid is
X = torch.cat([torch.arange(8.0, 9.0, 1e-4), torch.arange(17.4, 18.0, 1e-5), torch.tensor([17.482065, 0.5])])
X = torch.cat([X, -X])

READ: dict[str, Callable[[Tensor], Tensor]] = {
    "logarithm": lambda x: torch.log(1 - torch.tanh(x) ** 2 + 1e-7),
    "root": lambda x: (1 - torch.tanh(x) * torch.tanh(x) + 1e-8).sqrt(),
    "arc cosine": lambda x: torch.acos(torch.tanh(x) * (1 - 1e-7)),
    "inverse": lambda x: torch.atanh(x.tanh().view(2, -1).t() * 0.9999999),
    "cross entropy": lambda x: F.binary_cross_entropy((x.tanh() + 1) / 2, (x > 0).to(x.dtype), reduction="none"),
    "as it is": lambda x: torch.tanh(x),
    "row": lambda x: torch.stack([x, torch.tanh(x)])[1].relu(),
    "root of a rest": lambda x: (1 - torch.sigmoid(x)).sqrt(),
    "power of a rest": lambda x: (1 - torch.sigmoid(x)) ** 0.3,
    "root of a product": lambda x: (x.sigmoid() * (1 - x.sigmoid())).sqrt(),
}
SMOOTH: dict[str, tuple[Callable[[Tensor, nn.Linear], Tensor], str]] = {
    "layer": (lambda x, w: w(torch.tanh(w(x))).square().mean(), "Tanh"),
    "gelu": (lambda x, w: w(F.gelu(w(x), approximate="tanh")).square().mean(), "Tanh"),
    "difference": (lambda x, w: F.mse_loss(torch.tanh(w(x)), x), "Tanh"),
    "gate": (lambda x, w: w(F.silu(w(x)) * torch.sigmoid(w(x))).sum(), "Sigmoid"),
}


def models(step: Callable[..., Tensor], *arguments: object) -> tuple[Tensor, list[onnx.ModelProto]]:
    found: list[onnx.ModelProto] = []
    config = RuntimeConfig(
        placement="onnxruntime", on_session=lambda session, model: found.append(onnx.load_from_string(model))
    )
    return torch.compile(step, backend=ORTBackend(config))(*arguments), found


@pytest.mark.parametrize("name", READ)
def test_bounds_are_kept_where_they_are_read(name):
    function = READ[name]
    got, found = models(function, X)
    assert found, "nothing ran in ONNX Runtime"
    wanted = function(X)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert wanted.isfinite().all() and got.isfinite().all()
    if name in ("as it is", "row"):
        assert got.abs().max() == 1


@pytest.mark.parametrize("name", SMOOTH)
def test_where_nobody_reads_them_the_operator_stands_alone(name):
    step, op_type = SMOOTH[name]
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    loss, found = models(step, x, layer)
    loss.backward()
    types = [n.op_type for model in found for n in model.graph.node]
    assert op_type in types and "Clip" not in types
    torch.testing.assert_close(loss, step(x, layer))


def test_a_value_that_is_not_a_number_stays_so():
    got, _ = models(torch.tanh, torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]))
    assert got[0].isnan() and got[1:].tolist() == [1.0, -1.0, 0.0] and got[3].signbit()
