"""Within ``torch.autograd.graph.saved_tensors_hooks``, steps are eager's: hooks see what it saves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig


class Net(nn.Module):
    """Steps that keep rounded copies of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()
        self.digits, self.packed = 4.0, 0

    def pack(self, x: Tensor) -> Tensor:
        self.packed += 1
        return (x * self.digits).round() / self.digits if x.is_floating_point() else x

    def noisy(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x) if x.is_floating_point() else x

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.b(torch.tanh(self.a(x))), y)

    def inside(self, x: Tensor, y: Tensor) -> Tensor:
        with saved_tensors_hooks(self.pack, lambda x: x):
            return self.loss(x, y)

    def drawing(self, x: Tensor, y: Tensor) -> Tensor:
        with saved_tensors_hooks(self.noisy, lambda x: x):
            return self.loss(x, y)


def train(placement: str | None, name: str, around: Callable[[Net, int], Any]) -> tuple[int, list[Tensor]]:
    net = Net()
    step: Callable[..., Tensor] = getattr(net, name)
    if placement is not None:
        torch._dynamo.reset()
        step = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))
    for i in range(4):
        with around(net, i):
            step(torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])).backward()
        net.digits += 1
    return net.packed, [p.grad for p in net.parameters()]


def outside(net: Net, step: int) -> Any:
    return contextlib.nullcontext()


def late(net: Net, step: int) -> Any:
    return contextlib.nullcontext() if step < 2 else saved_tensors_hooks(net.pack, lambda x: x)


def early(net: Net, step: int) -> Any:
    return contextlib.nullcontext() if step > 1 else saved_tensors_hooks(net.pack, lambda x: x)


@pytest.mark.parametrize(
    ("name", "around"),
    [("inside", outside), ("drawing", outside), ("loss", late), ("loss", early), ("loss", outside)],
)
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_hooks_have_the_effect_that_they_have_in_eager(placement, name, around):
    packed, gradients = train(placement, name, around)
    expected_packed, expected = train(None, name, around)
    assert packed == expected_packed
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
