"""Hooks of parameters, which are called in eager's order, and only where a gradient arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.dynamo import DYNAMO_SETTINGS
from lightning_ort.runtime.config import RuntimeConfig


class Tied(nn.Module):
    """One layer is called twice, and the first weights are the last ones, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.norm = nn.Embedding(12, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x[..., 0].abs().mul(3).long().clamp(max=11))
        h = self.norm(self.layer(self.layer(h).tanh()) + h)
        return h @ self.embedding.weight.T


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 5, num_layers=2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient * weight * 2, (gradient * x * 2).sum((0, 1))


class Blocks(nn.Module):
    """A layer under torch.utils.checkpoint, and an autograd function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(lambda h: self.inner(h).tanh(), self.first(x), use_reentrant=False)
        return self.last(Doubled.apply(h, self.weight))


class Broken(nn.Module):
    """Three graphs, and weights that two of them read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.both, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.both(self.first(x).relu())
        torch._dynamo.graph_break()
        h = self.both(h.tanh())
        torch._dynamo.graph_break()
        return self.last(h)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)


def convolutions() -> nn.Module:
    blocks = [nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 4, 3, bias=False)]
    return nn.Sequential(*blocks, nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 3))


NETWORKS = {
    "layers": lambda: nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 6), nn.PReLU(), nn.Linear(6, 3)),
    "convolutions": convolutions,
    "encoder": encoder,
    "recurrent": Recurrent,
    "tied": Tied,
    "blocks": Blocks,
    "broken": Broken,
}


@pytest.fixture(autouse=True)
def settings():
    with torch._dynamo.config.patch(DYNAMO_SETTINGS):
        yield


def compiled(step: Callable[..., Any], placement: str | None) -> Callable[..., Any]:
    if placement is None:
        return step
    torch._dynamo.reset()
    return torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))


def train(make: Callable[[], nn.Module], placement: str | None, kind: str) -> tuple[list[str], list[Tensor]]:
    """Whose hook was called, in order, and the gradients, which have noise drawn in hooks."""
    torch.manual_seed(0)
    net, calls = make().double(), []

    def noisy(name: str, gradient: Tensor) -> Tensor:
        calls.append(name)
        return gradient + torch.randn_like(gradient)

    def arrived(name: str, p: Tensor) -> None:
        calls.append(name)
        p.grad.add_(torch.randn_like(p))

    for name, p in net.named_parameters():
        if kind == "gradient":
            p.register_hook(lambda g, name=name: noisy(name, g))
        else:
            p.register_post_accumulate_grad_hook(lambda p, name=name: arrived(name, p))
    step = compiled(lambda x: net(x).square().mean(), placement)
    for _ in range(3):
        step(torch.randn(5, 4, 8, dtype=torch.float64)).backward()
    return calls, [p.grad for p in net.parameters()]


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_order_and_noise_are_those_of_eager(placement, network, kind):
    calls, gradients = train(NETWORKS[network], placement, kind)
    expected_calls, expected = train(NETWORKS[network], None, kind)
    assert calls == expected_calls
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-10)


def train_two_losses(placement: str | None, losses: str) -> tuple[list[tuple[str, Any]], list[Tensor | None]]:
    torch.manual_seed(0)
    body, head, critic = [nn.Linear(6, n).double() for n in (6, 3, 1)]
    calls: list[tuple[str, Any]] = []
    named = {f"{name}.{n}": p for name, net in zip(("body", "head", "critic"), (body, head, critic), strict=True)
             for n, p in net.named_parameters()}  # fmt: skip
    for name, p in named.items():
        p.register_hook(lambda g, name=name: calls.append((name, None if g is None else g.shape)))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = body(x).tanh()
        return F.softplus(head(h)).sum(), critic(h).square().sum()

    run = compiled(step, placement)
    for i in range(4):
        first, second = run(torch.randn(4, 6, dtype=torch.float64))
        if losses == "in turns":
            (second if i % 2 else first).backward()
        elif losses == "one by one":
            first.backward(retain_graph=True)
            second.backward()
        else:
            {"first": first, "second": second, "both": first + 2 * second}[losses].backward()
    return calls, [p.grad for p in named.values()]


@pytest.mark.parametrize("losses", ["first", "second", "both", "in turns", "one by one"])
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_hooks_are_not_called_where_no_gradient_arrives(placement, losses):
    calls, gradients = train_two_losses(placement, losses)
    expected_calls, expected = train_two_losses(None, losses)
    assert calls == expected_calls
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def penalized(placement: str | None) -> tuple[list[str], list[Tensor]]:
    torch.manual_seed(0)
    net, calls = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), []
    for name, p in net.named_parameters():
        p.register_hook(lambda g, name=name: (calls.append(name), 1.5 * g)[1])
    loss = compiled(lambda x: net(x).square().sum(), placement)(torch.randn(3, 4, dtype=torch.float64))
    gradients = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    (loss + sum(g.square().sum() for g in gradients)).backward()
    return calls, [p.grad for p in net.parameters()]


def test_gradients_of_gradients_pass_hooks():
    calls, gradients = penalized("onnxruntime")
    expected_calls, expected = penalized(None)
    assert calls == expected_calls
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)


def train_beside(placement: str | None) -> tuple[list[str], list[Tensor]]:
    torch.manual_seed(0)
    first, second, third = (nn.Linear(5, 5).double() for _ in range(3))
    calls: list[str] = []
    for name, net in (("first", first), ("second", second), ("third", third)):
        net.weight.register_hook(lambda g, name=name: calls.append(name))

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        h = first(x).tanh()
        return second(h).square().sum(), third(second(first(h))).sum(dim=1)

    run = compiled(step, placement)
    for _ in range(3):
        run(torch.randn(3, 5, dtype=torch.float64))[0].backward()
    return calls, [net.weight.grad for net in (first, second)]


def test_the_order_is_that_of_the_loss_alone():
    """Whatever else the graph gives, of whose gradients weights would come in another order."""
    calls, gradients = train_beside("onnxruntime")
    expected_calls, expected = train_beside(None)
    assert calls == expected_calls == ["second", "first"] * 3
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
