"""NaN, infinities, ties, zeros and denormals go where eager lets them go, in values and in gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from special_values import (
    Case,
    column,
    differences,
    images,
    labelled,
    probabilities,
    rows,
    signals,
    single,
    spotted,
    with_other,
)
from torch import Tensor, nn

BOTH = (torch.float32, torch.float64)
BINS = torch.tensor([[0, 1, 2, 0, 1]] * 20)


def named(data: Any, functions: dict[str, Callable[..., Any]], *, special: bool = True) -> list[Case]:
    return [Case(name, function, data, special) for name, function in functions.items()]


def of_torch(module: Any, names: str) -> dict[str, Callable[..., Any]]:
    return {name: getattr(module, name) for name in names.split()}


FAMILIES: dict[str, Sequence[Case]] = {
    "activations": named(
        single,
        of_torch(F, "relu relu6 elu selu leaky_relu softplus hardtanh hardswish hardshrink softshrink logsigmoid silu"),
    )
    + named(
        single,
        {
            "leaky_relu_0": lambda x: F.leaky_relu(x, 0.0),
            "elu_alpha": lambda x: F.elu(x, 0.5),
            "prelu": lambda x: F.prelu(x[None, :, None], torch.full((32,), 0.25, dtype=x.dtype)),
            "threshold": lambda x: F.threshold(x, 0.5, 20.0),
            "log_of_sigmoid": lambda x: x.sigmoid().log(),
        },
    ),
    "elementary": named(single, of_torch(torch, "abs sign erf exp log1p nan_to_num frac asinh"))
    + named(
        single,
        {
            "sqrt": lambda x: x.masked_fill(x == 0, 0).sqrt(),
            "rsqrt": lambda x: x.masked_fill(x == 0, 0).rsqrt(),
            "remainder": lambda x: x.clamp(-1e12, 1e12) % -3,
            "clamp": lambda x: x.clamp(-1, 1),
            "masked_fill": lambda x: x.masked_fill(x.abs() > 5, 0),
            "where_root": lambda x: torch.where(x > 0, x.sqrt(), 0.0),
            "row_mask": lambda x: x.expand(2, 32).masked_fill(torch.arange(32) % 2 == 0, 0.0),
        },
    ),
    "of_two": [*named(
        with_other([4, 3], [4, 3]),
        {
            **of_torch(torch, "maximum minimum fmax fmin hypot atan2"),
            "l1_loss": F.l1_loss,
            "smooth_l1": F.smooth_l1_loss,
            "huber": F.huber_loss,
            "cdist_1": lambda x, y: torch.cdist(x, y, 1.0),
            "cdist_2": torch.cdist,
            "cdist_inf": lambda x, y: torch.cdist(x, y, math.inf),
        },
    ), Case("bce", F.binary_cross_entropy, probabilities)],
    "rows": named(
        rows,
        {
            "max": lambda x: list(x.max(1)),
            "min": lambda x: list(x.min(1)),
            "argmax": lambda x: [x.argmax(1), x.argmin(1), x.argmax(), x.argmin()],
            "amax": lambda x: [x.amax(1), x.amin(1)],
            "logsumexp": lambda x: x.logsumexp(1),
            "softmax": lambda x: [x.softmax(1), x.log_softmax(0)],
            "log_softmax": lambda x: x.log_softmax(1),
            "layer_norm": lambda x: F.layer_norm(x, (5,)),
            "norms": lambda x: [x.norm(p, dim=1) for p in (1, 2, math.inf)],
            "causal_attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(2, 2, 1, 5, 5)], is_causal=True),
            "prod": lambda x: x.prod(1),
            "cummax": lambda x: list(x.cummax(1)),
            "mean": lambda x: list(torch.var_mean(x[:14], 1)),
            "scatter_amax": lambda x: x.new_zeros(20, 3).scatter_reduce(1, BINS, x, "amax"),
            "index_reduce": lambda x: x.new_zeros(3, 5).index_reduce(0, torch.arange(20) % 3, x, "amin"),
        },
    )
    + named(
        column,
        {
            "std_of_one": lambda x: x.std(1),
            "prod_of_one": lambda x: x.prod(1),
            "norm_of_one": lambda x: x.norm(dim=1),
        },
    ),
    "ranks": named(
        spotted(2, 40),
        {
            "topk": lambda x: list(x.topk(5, 1)),
            "topk_smallest": lambda x: list(x.topk(20, 1, largest=False)),
            "kthvalue": lambda x: list(x.kthvalue(7, 1)),
            "median": lambda x: list(x.median(1)),
            "nanmedian": lambda x: list(x.nanmedian(1)),
            "sort": lambda x: list(x.sort(1)),
            "stable": lambda x: list(torch.sort(x, dim=1, descending=True, stable=True)),
            "values": lambda x: x.detach().topk(5, 1)[0],
        },
    )
    + named(
        spotted(2, 40),
        {f"{f.__name__}_of_all": f for f in (torch.median, torch.nanmedian, torch.max, torch.min)},
    ),
    "losses": named(
        labelled,
        {
            "cross_entropy": F.cross_entropy,
            "summed": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
            "weighted": lambda x, t: F.cross_entropy(x, t, torch.arange(5, dtype=x.dtype)),
            "nll": F.nll_loss,
            "smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
            "nothing_counts": lambda x, t: F.cross_entropy(x, torch.full_like(t, -100)),
            "multi_margin": lambda x, t: F.multi_margin_loss(x, t.clamp(min=0), reduction="none"),
            "multi_margin_squared": lambda x, t: F.multi_margin_loss(x, t.clamp(min=0), p=2),
            "multilabel_margin": lambda x, t: F.multilabel_margin_loss(x, t.clamp(-1)[:5].expand(8, 5).contiguous()),
        },
    ),
    "maxima_of_windows": named(
        images,
        {
            "disjoint": lambda x: F.max_pool2d(x, 2),
            "disjoint_odd": lambda x: F.max_pool2d(x[..., :5], 2),
            "overlapping": lambda x: F.max_pool2d(x, 3, 2, 1),
            "values_only": lambda x: F.max_pool2d(x.detach(), 3, 2, 1),
            "adaptive": lambda x: F.adaptive_max_pool2d(x, 4),
            "after_relu": lambda x: F.max_pool2d(F.relu(x), 2),
        },
    )
    + named(
        signals,
        {"along_a_line": lambda x: F.max_pool1d(x, 2), "line_overlapping": lambda x: F.max_pool1d(x, 3, 1)},
    ),
    "averages_of_windows": named(
        images,
        {
            "disjoint": lambda x: F.avg_pool2d(x, 2),
            "odd": lambda x: F.avg_pool2d(x[..., :5], 2, divisor_override=3),
            "adaptive": lambda x: F.adaptive_avg_pool2d(x, 3),
            "unfold": lambda x: F.unfold(x, 2, stride=2),
            "unfold_odd": lambda x: F.unfold(x[..., :5], 2, stride=2),
            "nearest": lambda x: F.interpolate(x, scale_factor=2),
            "nearest_down": lambda x: F.interpolate(x, size=4),
        },
    )
    + named(
        images,
        {
            "overlapping": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
            "ceil": lambda x: F.avg_pool2d(x[..., :5], 2, ceil_mode=True),
        },
        special=False,
    ),
}  # fmt: skip
COMPUTED = {"relu": "activations", "leaky_relu": "activations", "row_mask": "elementary", "masked_fill": "elementary",
            "cross_entropy": "losses", "disjoint": "maxima_of_windows", "softmax": "rows"}  # fmt: skip


def as_lines(found: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {text}" for name, texts in found.items() for text in texts[:3])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_special_values(family: str, dtype: torch.dtype) -> None:
    found = differences(FAMILIES[family], dtype)
    assert not found, as_lines(found)


def test_of_results_of_other_operators() -> None:
    cases = [c for name, family in COMPUTED.items() for c in FAMILIES[family] if c.name == name]
    found = differences(cases, torch.float32, computed=True)
    assert not found, as_lines(found)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        features = F.max_pool2d(F.relu(self.norm(self.conv(x))), 4)
        return F.cross_entropy(self.out(features.flatten(1)), y)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_network_that_diverges_does_so_here(bad: float) -> None:
    """Loss and gradients are NaN where eager's are, for data and for weights that are not numbers."""
    network = Network()
    compiled = torch.compile(network, backend="lightning_ort", options={"verify": False})
    y = torch.tensor([0, 1, 2])
    for place in ("data", "weight"):
        x = torch.randn(3, 1, 8, 8)
        with torch.no_grad():
            (x if place == "data" else network.out.weight).view(-1)[5] = bad
        losses, gradients = [], []
        for step in (network, compiled):
            network.zero_grad()
            loss = step(x, y)
            loss.backward()
            losses.append(loss.detach())
            gradients.append([p.grad.isnan() for p in network.parameters()])
        torch.testing.assert_close(losses[1], losses[0], equal_nan=True)
        for (name, _), expected, got in zip(network.named_parameters(), *gradients, strict=True):
            assert torch.equal(got, expected), f"{name}, {bad} in the {place}"


@pytest.mark.parametrize(
    "scaled",
    [
        lambda loss: loss * math.inf,
        lambda loss: loss * -math.inf,
        lambda loss: loss / 0,
        lambda loss: loss / torch.tensor(0.0),
        lambda loss: loss * 1e38 * 1e5,
    ],
    ids=["inf", "-inf", "/ 0", "/ tensor", "overflow"],
)
def test_losses_times_a_constant_infinity(scaled) -> None:
    """A sum of infinite gradients is not a number where they have both signs, and is not infinity times a sum."""
    torch.manual_seed(0)
    net, x, y = nn.Linear(4, 2), torch.randn(4, 4), torch.randn(4, 2)

    def step(x: Tensor) -> Tensor:
        return scaled(F.mse_loss(net(x), y))

    found = []
    for function in (step, torch.compile(step, backend="lightning_ort", options={"placement": "onnxruntime"})):
        net.zero_grad()
        function(x).backward()
        found.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(found[1], found[0], equal_nan=True)
    assert found[0][1].isnan().any()


@pytest.mark.parametrize("shape", [(), (2,), (2, 1), (1, 2, 1)], ids=lambda shape: f"{len(shape) + 2} dimensions")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_causal_attention_hides(shape: tuple[int, ...], bad: float) -> None:
    """A score that is no number makes rows that do not see it NaN where torch's kernel, of some ranks, adds a mask."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(*shape, 5, 4) for _ in range(3))
    query[..., 0], key.view(-1, 5, 4)[0, 3, 0] = 1, bad

    def step(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    for training in (False, True):
        compiled = torch.compile(step, backend="lightning_ort", options={"placement": "onnxruntime", "verify": False})
        got, expected = compiled(query.requires_grad_(training)), step(query)
        torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 0.0, 0.5])
def test_gradients_that_arrive_at_a_loss(factor: float) -> None:
    """Entries that do not lead to the loss stay zero, whatever arrives there; a loss that does not count is none."""

    def step(x: Tensor) -> Tensor:
        return torch.diagonal(x).sum() + x[0].sqrt().sum()

    compiled = torch.compile(step, backend="lightning_ort")
    for start in (1.0, 0.0):  # where the square root's derivative is infinite
        x = torch.full((5, 4), start, requires_grad=True)
        for retain in (True, False):
            found = []
            for function in (step, compiled):
                loss = function(x)
                for again in range(1 + retain):
                    (gradient,) = torch.autograd.grad(loss, x, torch.tensor(factor), retain_graph=retain and not again)
                    found.append(gradient)
            for got, expected in zip(found[len(found) // 2 :], found[: len(found) // 2], strict=True):
                torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("verify", [True, False])
def test_outputs_without_gradients_stay_out_of_those_of_others(verify: bool) -> None:
    """A region's outputs that lead to no loss have NaN gradients nowhere, whatever their values."""

    def step(x: Tensor) -> Tensor:
        a, b = x.tanh(), x.softmax(0)
        torch._dynamo.graph_break()
        return a.sin().sum() + b.detach().sum()

    gradients = []
    for function in (step, torch.compile(step, backend="lightning_ort", options={"verify": verify})):
        for batch in (3, 3, 0):
            x = torch.ones(batch, 4)
            x[:1, 1] = math.nan
            x.requires_grad_()
            function(x).backward()
            gradients.append(x.grad)
    for got, expected in zip(gradients[3:], gradients[:3], strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)


NEARLY_NEUTRAL: dict[str, Callable[[Tensor, float], Tensor]] = {
    "a sum with nearly zero": lambda x, c: 1 / (x.sum(1) - x.sum(1) + c),
    "a difference with nearly zero": lambda x, c: 1 / (x.sum(1) - x.sum(1) - c),
    "a product with nearly one": lambda x, c: (x.tanh() * (1 + c) - x.tanh()) / c,
    "a quotient by nearly one": lambda x, c: (x.tanh() / (1 + c) - x.tanh()) / c,
    "a double within floats": lambda x, c: (x.double().mean(1) * (1 + c) - x.double().mean(1)) / c,
}


@pytest.mark.parametrize("name", NEARLY_NEUTRAL)
def test_constants_that_are_neutral_only_as_floats(name: str) -> None:
    """What a mean over a mask adds to its count, so that it is never zero, is zero for a float."""
    dtype = torch.float32 if "floats" in name else torch.float64
    number = torch.finfo(torch.float64).tiny if "zero" in name else 1e-9

    def step(x: Tensor) -> Tensor:
        result = NEARLY_NEUTRAL[name](x, number)
        return result.to(x.dtype)

    x = torch.rand(3, 4, dtype=dtype) + 0.5
    compiled = torch.compile(step, backend="lightning_ort", options={"placement": "onnxruntime", "verify": False})
    torch.testing.assert_close(compiled(x), step(x), rtol=1e-6, atol=0)
