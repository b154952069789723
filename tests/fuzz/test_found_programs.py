"""Random programs that went wrong once, cut down to what it took."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import pytest
import torch

from .programs import check
from .steps import Case, Program

FOUND = {
    "diagonal of a product": (
        """
        t0 = torch.atan(x) @ self.queue.clone().detach()
        t3 = torch.diagonal(t0).sum() + x.sum() * 0.01
        """,
        [Case(6), Case(4)],
    ),
    "bounds of rectified doubles": (
        """
        t0 = torch.clamp(F.relu(y.detach()), -0.5, 0.7)
        t3 = t0.tanh().sum() + x.sum()
        """,
        [Case(6), Case(6, "nan")],
    ),
    "undone norm without a gradient": (
        """
        t0 = torch.linalg.vector_norm(y + 0.1, 3, dim=-1)
        t1 = torch.cummax(t0, dim=-1)[0]
        t0.zero_()
        t2 = torch.atan(t1)
        t3 = x[x.detach() > 0.1].sum()
        t4 = torch.where(t2 > t2, t2, t2 * 0.5)
        """,
        [Case(6)],
    ),
    "softmax of NaN without a gradient": (
        """
        t0 = F.leaky_relu(y, 0.1)
        t1 = t0.softmax(0)
        if y.detach().sum().item() > 1e9:
            return y.sum(), y
        t2 = t1[None]
        t3 = t0.tanh().sum()
        """,
        [Case(6), Case(6, "nan"), Case(0)],
    ),
    "rounded quotient of repeated numbers": (
        """
        t0 = torch.div(torch.zeros_like(y[..., 0]) + 0.75, y.sum().abs() + 9, rounding_mode="floor")
        t1 = torch.div(torch.zeros_like(y[..., 0]) - 0.75, y.sum().abs() + 9, rounding_mode="trunc")
        t3 = (t0 * 0.3).tanh().sum() + (t1 * 0.7).tanh().sum() + y.sum()
        """,
        [Case(2)],
    ),
    "gradients at NaN, by torch's own operators": (
        """
        t0 = y.prod(-1)
        t3 = t0.mean() + (y * 0.5).prod() + torch.cos(y).max() + x.cumprod(-1).mean()
        """,
        [Case(6), Case(6, "nan")],
    ),
    "changed result without a gradient": (
        """
        t0 = torch.rsqrt(x.square() + 0.5)
        t1 = t0 * 2.0
        t2 = t1.softmax(-1)
        t4 = t1.tanh()
        torch._dynamo.graph_break()
        t2.view(-1)[:2].add_(0.5)
        t3 = t1.sin().mean() + t4.mean()
        """,
        [Case(6), Case(6)],
    ),
    "two outputs that are the same for one row": (
        """
        t0 = torch.cdist(x, x + 1.0)
        t1 = torch.logcumsumexp(t0, dim=-1)
        if t0.detach().sum().item() > 1e9:
            return t0.sum(), t0
        t3 = t0.mean() + (t1 * 0.3).sum()
        """,
        [Case(1), Case(1)],
    ),
    "direction of tiny numbers": (
        """
        t0 = F.softplus(x * 0.1 - 25.0)
        t1 = F.logsigmoid(y * 0.1 + 25.0)
        t3 = F.normalize(t0, dim=-1).prod(-1).sum() + F.normalize(t1, dim=-1).prod(-1).sum()
        """,
        [Case(6), Case(5)],
    ),
    "draws for what is transposed": (
        """
        t0 = torch.erf(F.hardshrink(x.T))
        torch._dynamo.graph_break()
        t1 = F.dropout(t0, 0.3, training=True)
        t2 = (image * 2.0).to(memory_format=torch.channels_last).tanh()
        torch._dynamo.graph_break()
        t3 = t1.square().sum() + F.dropout(t2, 0.3, training=True).square().mean() + torch.rand_like(t0).mean()
        """,
        [Case(6), Case(5), Case(1)],
    ),
    "margins": (
        """
        t0 = F.multi_margin_loss(x, labels)
        t1 = F.multilabel_margin_loss(x, torch.where(labels[:, None] > torch.arange(4), torch.arange(4), -1))
        t3 = t0 * 2 + t1
        """,
        [Case(6), Case(6, "nan"), Case(1)],
    ),
    "quotients without a rest": (
        """
        t0 = torch.div(x.round(decimals=1), 0.1, rounding_mode="floor")
        t1 = x.T // x[0, 0].abs()
        t2 = torch.div(y.pow(3), y.abs().amax() + 0.5, rounding_mode="floor")
        t4 = torch.stack([t.nan_to_num(7.0, 8.0, 9.0).clamp(-99, 99).sum() for t in (t0, t1, t2)])
        self.queue.view(-1)[:3].add_(t4.detach())
        t3 = x.mean() + y.mean()
        """,
        [Case(6), Case(6, "zeros"), Case(6, "inf"), Case(5, "nan")],
    ),
    "confident and right": (
        """
        t0 = F.binary_cross_entropy_with_logits(x * 0.1 - 25.0, torch.zeros_like(x))
        t1 = F.binary_cross_entropy_with_logits(y * 0.1 + 25.0, torch.ones_like(y), pos_weight=torch.tensor(3.0))
        t3 = t0 * 1e9 + t1 * 1e9 - x.sum()
        """,
        [Case(6), Case(5)],
    ),
    "padding of what padding has emptied": (
        """
        t0 = F.pad(x.prod(-1), (-1, 1)) + y.sum()
        t1 = F.pad(y, (1, -1, -1, 1)) + F.pad(x, (0, 0, 2, -1))[:1].sum()
        t2 = F.pad(image, (-2, -1, 1, -1)).tanh()
        t3 = (t0 * 0.3).tanh().sum() + (t1 * 0.3).tanh().sum() + t2.square().mean() + F.pad(x, (-2, -1)).sum()
        """,
        [Case(6), Case(1), Case(5)],
    ),
    "probabilities that vanish": (
        """
        t0 = (x * 1e5).masked_fill(x.detach() > x.detach().amax(-1, keepdim=True) - 0.1, -1.0).softmax(-1)
        t1 = torch.count_nonzero(t0, dim=0).to(t0.dtype) + torch.exp2(y.detach() * 1e6).count_nonzero()
        t3 = (t1 * 0.3).sum() + t0.square().sum() + y.mean()
        """,
        [Case(6), Case(5), Case(1), Case(4, "large")],
    ),
    "the sign of a sum that is zero": (
        """
        t0 = torch.copysign(y, (x * 0.0).abs().neg().sum())
        t1 = torch.copysign(x, (x * 0.0).abs().neg().mean(-1, keepdim=True))
        t3 = (t0 * 0.3).tanh().sum() + t1.sum() * torch.signbit((y * 0.0).abs().neg().sum())
        """,
        [Case(6), Case(5), Case(1), Case(4, "zeros")],
    ),
    "changed result of no rows": (
        """
        t0 = (x >= x).to(x.dtype) * x
        torch._dynamo.graph_break()
        t1 = torch.topk(t0, 2, dim=-1)[0]
        t2 = F.binary_cross_entropy_with_logits(y + y, y.sigmoid().detach())
        torch._dynamo.graph_break()
        t0.view(-1)[:2].add_(0.5)
        t3 = t1.mean() + t2.mean()
        """,
        [Case(0), Case(0)],
    ),
    "the sign of what all but vanishes": (
        """
        t0 = F.silu(y * 30.0)
        t1 = torch.div(t0, t0.abs() + 0.5, rounding_mode="floor")
        t3 = t1.mean() + (F.silu(x * 30.0) < 0).to(x.dtype).mean()
        """,
        [Case(6), Case(6, "large"), Case(5)],
    ),
    "detached views": (
        """
        t0 = y * 1.5
        t1 = y.detach()
        t2 = x.detach()[-1:]
        t4 = t0.detach()[:1]
        torch._dynamo.graph_break()
        t3 = (t1 * t1).mean() + (t2 * 0.3).tanh().sum() + t0.mean() + (t4 * t0).sum()
        """,
        [Case(6), Case(6), Case(5)],
    ),
    "views of what gets a gradient": (
        """
        t0 = torch.argsort(x, dim=-1, stable=True).to(x.dtype)
        t1 = t0[-1:]
        t2 = t0.detach()[:1]
        torch._dynamo.graph_break()
        t0.sub_(x, alpha=0.5)
        torch._dynamo.graph_break()
        t3 = (t0 * 0.3).tanh().mean() + t2.sum().detach()
        """,
        [Case(6), Case(6), Case(5)],
    ),
    "products over an open size": (
        """
        t0 = x.T.prod(-1)
        t1 = (y * 1.0).prod()
        t3 = t0.mean() + x.T.mean() + t1 * 0.5
        """,
        [Case(6), Case(5), Case(4, "inf"), Case(4, "nan"), Case(7, "zeros")],
    ),
    "a view without gradients first": (
        """
        t0 = y.softmax(-1)
        with torch.no_grad():
            t1 = Reversed.apply(t0)
        t2 = t1[t1.detach() > 0.1].sum()
        t3 = F.gelu(t0, approximate="tanh").mean()
        """,
        [Case(6), Case(6), Case(5)],
    ),
    "two views with open sizes": (
        """
        t0 = x * 2.0
        torch._dynamo.graph_break()
        t1 = t0.view(-1, x.shape[1])
        torch._dynamo.graph_break()
        t2 = torch.func.vmap(lambda t: t.tanh() + t.sum())(t0)
        t4 = t1.pow(3) * 0.1
        t3 = torch.take_along_dim(t2, t2.argmax(-1, keepdim=True), dim=-1).mean()
        """,
        [Case(6), Case(6), Case(5), Case(4)],
    ),
    "a size that is 1": (
        """
        t0 = x[..., -1] * 2.0
        t1 = F.pad(t0, (0, (7 - t0.shape[-1]) % 4))
        t2 = torch.unbind(t1, dim=-1)[1]
        t3 = t2.mean() + (t1 * 0.3).tanh().sum()
        """,
        [Case(6), Case(5), Case(4)],
    ),
    "a sign that another part of the step has chosen": (
        """
        t0 = x.flatten()[:12]
        t1 = t0.mean(0)
        t2 = torch.sort(t0, dim=-1)[0]
        t4 = F.pad(t2, (1, 2))
        t3 = (torch.copysign(t4, t1.nan_to_num()) * 0.3).tanh().sum() + t4.mean()
        """,
        [Case(5), Case(5)],
    ),
}


_SECOND: dict[torch.dtype, dict[str, Any]] = {
    torch.float64: {"verify": False, "placement": "torch"},
    torch.float32: {"verify": True},
}
"""what each type of numbers is tried with besides"""

_STOCK = importlib.util.find_spec("onnxruntime.training") is None
_TYPES = [*itertools.islice(itertools.cycle(_SECOND), _STOCK, _STOCK + len(FOUND))]


@pytest.mark.parametrize(("name", "dtype"), [*zip(FOUND, _TYPES, strict=True)], ids=str)
def test_found_program(name: str, dtype: torch.dtype) -> None:
    """With one type of numbers on this build of ONNX Runtime, and the other one on the other build."""
    text, calls = FOUND[name]
    lines = [line.removeprefix(" " * 8) for line in text.strip("\n").splitlines()]
    program = Program(0, dtype, [*lines, "loss = x.sum() + t3"], ["loss"])
    for options in ({"verify": False}, _SECOND[dtype]):
        failure = check(program, options=options, calls=calls)
        assert failure is None, str(failure)
