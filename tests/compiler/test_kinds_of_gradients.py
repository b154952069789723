"""Gradients that are sparse, of another type than their parameter, or many at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.hand_out import hand_out, node_of_loss
from lightning_ort.runtime.config import RuntimeConfig


def compiled(step, placement):
    if placement is None:
        return step
    torch._dynamo.reset()
    return torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))


def of_sparse_embedding(placement):
    torch.manual_seed(0)
    words, head = nn.Embedding(9, 4, sparse=True).double(), nn.Linear(4, 2).double()
    step = compiled(lambda tokens: head(words(tokens).mean(1)).square().sum(), placement)
    for _ in range(2):
        step(torch.tensor([[1, 3], [3, 8]])).backward()
    assert words.weight.grad.is_sparse
    return [words.weight.grad.to_dense(), head.weight.grad]


def of_many(placement):
    """By the hidden values that a step gives out, and by its loss."""
    torch.manual_seed(0)
    first, second = nn.Linear(5, 4).double(), nn.Linear(4, 3).double()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        h = second(first(x).tanh())
        return h.square().mean(), h

    step, found = compiled(function, placement), []
    for _ in range(3):
        loss, h = step(torch.randn(2, 5, dtype=torch.float64))
        each = torch.eye(3, dtype=torch.float64).unsqueeze(1).expand(3, 2, 3)
        found += torch.autograd.grad(h, first.weight, each, is_grads_batched=True, retain_graph=True)
        three = torch.arange(3, dtype=torch.float64)
        found += torch.autograd.grad(loss, second.weight, three, is_grads_batched=True, retain_graph=True)
        loss.backward()
    return [*found, first.weight.grad]


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("case", [of_sparse_embedding, of_many])
def test_gradients_are_those_of_eager(case, placement):
    torch.testing.assert_close(case(placement), case(None), rtol=0, atol=1e-12)


def test_gradients_of_a_type_of_their_own():
    """bfloat16 weights that add up their gradients in float32."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3).bfloat16()
    net.weight.grad_dtype = torch.float32
    step = compiled(lambda x: net(x).float().square().sum(), "onnxruntime")
    loss = step(torch.ones(2, 4, dtype=torch.bfloat16))
    assert not hand_out(loss, node_of_loss(loss))
    loss.backward()
    assert (net.weight.grad.dtype, net.bias.grad.dtype) == (torch.float32, torch.bfloat16)
    (expected,) = torch.autograd.grad(net(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().sum(), net.weight)
    torch.testing.assert_close(net.weight.grad, expected, rtol=2e-2, atol=1e-2, check_dtype=False)
