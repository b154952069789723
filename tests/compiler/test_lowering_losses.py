"""Losses and what they are made of: numbers and gradients against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graph_harness import Case, check
from torch import Tensor, randint, randn

from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig

WEIGHT = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])


def labelled(b: int) -> list[Tensor]:
    return [randn(b, 5), randint(0, 5, (b,))]


def images(b: int) -> list[Tensor]:
    return [randn(b, 5, 3, 4), randint(0, 5, (b, 3, 4))]


def pairs(b: int) -> list[Tensor]:
    return [randn(b, 5), randn(b, 5)]


def probabilities(b: int) -> list[Tensor]:
    return [randn(b, 5), torch.rand(b, 5)]


def signs(b: int) -> list[Tensor]:
    return [randn(b, 5), randn(b, 5), (torch.arange(b) % 2 * 2 - 1).float()]


CROSS_ENTROPY = [
    Case("cross_entropy", F.cross_entropy, labelled),
    Case("sum", lambda x, y: F.cross_entropy(x, y, reduction="sum"), labelled),
    Case("none", lambda x, y: F.cross_entropy(x, y, reduction="none"), labelled),
    Case("ignore", lambda x, y: F.cross_entropy(x, y, ignore_index=2), labelled),
    Case("ignore_default", lambda x, y: F.cross_entropy(x, y.where(y > 1, -100)), labelled),
    Case("ignore_none", lambda x, y: F.cross_entropy(x, y, ignore_index=2, reduction="none"), labelled),
    Case("smoothing", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), labelled),
    Case("weight", lambda x, y: F.cross_entropy(x, y, weight=WEIGHT), labelled),
    Case("weight_ignore", lambda x, y: F.cross_entropy(x, y, weight=WEIGHT, ignore_index=1), labelled),
    Case(
        "weight_smoothing_sum",
        lambda x, y: F.cross_entropy(x, y, WEIGHT, label_smoothing=0.1, reduction="sum"),
        labelled,
    ),
    Case("probabilities", lambda x, p: F.cross_entropy(x, p.softmax(-1)), probabilities),
    Case("one_sample", lambda x: F.cross_entropy(x, torch.tensor(2)), lambda b: (randn(5),), dynamic=False),
    Case("large_logits", lambda x, y: F.cross_entropy(x * 100, y), labelled),
    Case(
        "tokens",
        lambda x, y: F.cross_entropy(x.view(-1, 5), y.view(-1)),
        lambda b: (randn(b, 4, 5), randint(0, 5, (b, 4))),
    ),
    Case("tokens_transposed", lambda x, y: F.cross_entropy(x.mT, y), lambda b: (randn(b, 4, 5), randint(0, 5, (b, 4)))),
    Case(
        "shifted_tokens",
        lambda x, y: F.cross_entropy(x[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        lambda b: (randn(b, 4, 5), randint(0, 5, (b, 4))),
    ),
    Case("images", F.cross_entropy, images),
    Case("images_ignore", lambda x, y: F.cross_entropy(x, y, ignore_index=1), images),
    Case("images_weight_none", lambda x, y: F.cross_entropy(x, y, WEIGHT, reduction="none"), images),
    Case("nll", lambda x, y: F.nll_loss(x.log_softmax(-1), y), labelled),
    Case("nll_of_anything", lambda x, y: F.nll_loss(x.sigmoid(), y, ignore_index=0), labelled),
    Case("scaled", lambda x, y: F.cross_entropy(x / 0.07, y) * 3, labelled),
    Case("two_losses", lambda x, y: F.cross_entropy(x, y) + 0.1 * x.log_softmax(1).square().mean(), labelled),
    Case("z_loss", lambda x, y: F.cross_entropy(x, y) + 1e-2 * x.logsumexp(-1).square().mean(), labelled),
    Case(
        "focal",
        lambda x, y: ((1 - x.softmax(1).gather(1, y[:, None])) ** 2 * F.cross_entropy(x, y, reduction="none")).mean(),
        labelled,
    ),
    Case(
        "contrastive",
        lambda x, y: F.cross_entropy(F.normalize(x) @ F.normalize(y).t() / 0.1, torch.arange(x.shape[0])),
        pairs,
        scale=4,
    ),
    Case(
        "double_backward",
        lambda x, y: torch.autograd.grad(F.cross_entropy(x, y), x, create_graph=True)[0].norm(),
        labelled,
    ),
]

LOSSES = [
    Case("mse", F.mse_loss, pairs),
    Case("mse_none", lambda x, y: F.mse_loss(x, y, reduction="none"), pairs),
    Case("mse_sum", lambda x, y: F.mse_loss(x, y, reduction="sum"), pairs, scale=10),
    Case("l1", F.l1_loss, pairs),
    Case("smooth_l1", lambda x, y: F.smooth_l1_loss(x, y, beta=0.5), pairs),
    Case("huber", lambda x, y: F.huber_loss(x, y, delta=0.7), pairs),
    Case("bce", lambda x, p: F.binary_cross_entropy(x.sigmoid(), p), probabilities),
    Case("bce_weight", lambda x, p: F.binary_cross_entropy(x.sigmoid(), p, WEIGHT, reduction="sum"), probabilities),
    Case(
        "bce_saturated",
        lambda x, p: F.binary_cross_entropy(x.clamp(0, 1), p.round()),
        lambda b: (randn(b, 5) * 3, torch.rand(b, 5)),
        gradients=False,
    ),
    Case("bce_logits", F.binary_cross_entropy_with_logits, probabilities),
    Case("bce_logits_large", lambda x, p: F.binary_cross_entropy_with_logits(x * 100, p), probabilities),
    Case(
        "bce_logits_weights",
        lambda x, p: F.binary_cross_entropy_with_logits(x, p, WEIGHT, pos_weight=WEIGHT),
        probabilities,
    ),
    Case("kl_div", lambda x, p: F.kl_div(x.log_softmax(-1), p.softmax(-1), reduction="batchmean"), probabilities),
    Case(
        "kl_div_log_target",
        lambda x, y: F.kl_div(x.log_softmax(1), y.log_softmax(1), log_target=True, reduction="sum"),
        pairs,
    ),
    Case("kl_div_zero_target", lambda x, p: F.kl_div(x.log_softmax(1), p.round(), reduction="sum"), probabilities),
    Case("cosine_embedding", lambda x, y, s: F.cosine_embedding_loss(x, y, s), signs),
    Case("triplet", lambda x, y, s: F.triplet_margin_loss(x, y, x.roll(1, 0)), signs),
    Case("margin_ranking", lambda x, y, s: F.margin_ranking_loss(x[:, 0], y[:, 0], s), signs),
    Case("hinge_embedding", lambda x, y, s: F.hinge_embedding_loss(x[:, 0], s), signs),
    Case("soft_margin", lambda x, y, s: F.soft_margin_loss(x[:, 0], s.detach()), signs),
    Case("poisson_nll", lambda x, p: F.poisson_nll_loss(x, p, full=True), probabilities),
    Case("multi_margin", F.multi_margin_loss, labelled),
    Case("multi_margin_p2", lambda x, y: F.multi_margin_loss(x, y, p=2, weight=WEIGHT), labelled),
    Case("multilabel_soft_margin", lambda x, p: F.multilabel_soft_margin_loss(x, p.round()), probabilities),
    Case(
        "multilabel_margin",
        F.multilabel_margin_loss,
        lambda b: (randn(b, 5), torch.tensor([3, 0, -1, 1, 2]).roll(b).expand(b, 5).contiguous()),
    ),
    Case(
        "dice",
        lambda x, y: 1 - 2 * (x.softmax(1) * F.one_hot(y, 5)).sum() / (x.softmax(1).sum() + y.shape[0]),
        labelled,
    ),
    Case("pairwise_distance", lambda x, y: F.pairwise_distance(x, y), pairs),
    Case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y), pairs),
    Case("cosine_similarity_of_self", lambda x, y: F.cosine_similarity(x, x.roll(1, 0), dim=-1), pairs),
    Case("normalize", lambda x, y: F.normalize(x, dim=-1), pairs),
    Case("normalize_zero", lambda x, y: F.normalize(x * 0, dim=-1), pairs),
    Case("custom_gradient", lambda x, y: Doubled.apply(x) * y, pairs),
    Case(
        "gradient_penalty",
        lambda x, y: torch.autograd.grad((x**3 * y).sum(), x, create_graph=True)[0].norm(dim=1),
        pairs,
    ),
    Case("checkpoint", lambda x, y: torch.utils.checkpoint.checkpoint(torch.tanh, x * y, use_reentrant=False), pairs),
    Case("inplace", lambda x, y: (x * y).mul_(2).add_(1).relu_(), pairs),
]


class Doubled(torch.autograd.Function):
    """A gradient that is not the derivative."""

    @staticmethod
    def forward(context, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(context, grad: Tensor) -> Tensor:
        return grad * (context.saved_tensors[0] > 0) * 2


DYNAMIC = {"mse", "l1", "bce_logits", "kl_div", "triplet", "multi_margin", "dice", "normalize", "gradient_penalty"}


@pytest.mark.parametrize("case", CROSS_ENTROPY, ids=str)
def test_cross_entropy(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses(case: Case) -> None:
    check(case if case.name in DYNAMIC else case.static)


def test_small_and_undefined_gradients_of_soft_margin_loss() -> None:
    """They are eager's to the last digits, and NaN where the loss is infinite."""
    x = torch.tensor([-34.57, -3.0, 100.0, 800.0], dtype=torch.float64, requires_grad=True)
    target = torch.full((4,), -1.0, dtype=torch.float64)

    def gradient(compiled: bool) -> Tensor:
        loss = torch.compile(F.soft_margin_loss, backend="lightning_ort") if compiled else F.soft_margin_loss
        return torch.autograd.grad(loss(x, target, reduction="none").sum(), x)[0]

    expected = gradient(compiled=False)
    assert expected[0] != 0
    assert expected[3].isnan()
    torch.testing.assert_close(gradient(compiled=True), expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)], ids=["", "weighted"])
def test_infinite_gradients_of_cross_entropy(weight: Tensor | None) -> None:
    """They are NaN at the label, as in eager: an infinity could be clipped to a number."""
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    target, factors = torch.tensor([0, 2, 1, 1]), torch.tensor([1.0, torch.inf, -torch.inf, 0.0], dtype=torch.float64)

    def loss(x: Tensor) -> Tensor:
        return (F.cross_entropy(x, target, weight, reduction="none") * factors).mean()

    compiled = torch.compile(loss, backend=ORTBackend(RuntimeConfig(placement="onnxruntime"), verify=False))
    (expected,), (got,) = (torch.autograd.grad(f(x), x) for f in (loss, compiled))
    assert expected.isnan().sum() == 2
    torch.testing.assert_close(got, expected, equal_nan=True)
