"""Hooks of tensors that a step gives out beside its loss, which come when the step has run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from modules import Classifier, table
from parity import assert_same_outcome, fit
from torch import Tensor, nn

from lightning_ort import ORTStrategy
from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig


class Step:
    """A step that gives its loss, an activation and scores, with hooks as a case says."""

    def __init__(self, placement: str | None, reduction: str, further: bool) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 6).double(), nn.Linear(6, 4).double()
        self.reduction, self.further = reduction, further
        step = self.step
        if placement is not None:
            torch._dynamo.reset()
            step = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))
        self.run, self.seen = step, []

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.body(x).tanh()
        scores = self.head(hidden)
        return F.cross_entropy(scores, y, reduction=self.reduction), hidden, scores

    def see(self, gradient: Tensor) -> None:
        self.seen.append(gradient.clone())

    def train(self, hooks: Any) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            x = torch.randn(3, 8, dtype=torch.float64, generator=generator)
            loss, hidden, scores = self.run(x, torch.tensor([0, 1, 2]))
            hooks(self, hidden, scores)
            total = loss.sum()
            if self.further:  # a part of their gradients comes from outside
                total = total + hidden.pow(3).sum() * 0.7 + scores.sin().sum()
            total.backward()
            self.seen += [x.grad.clone() for x in (hidden, scores) if x.retains_grad]
        return [*self.seen, *[p.grad for net in (self.body, self.head) for p in net.parameters()]]


def changed(step: Step, hidden: Tensor, scores: Tensor) -> None:
    hidden.register_hook(lambda g: g * g)


def several(step: Step, hidden: Tensor, scores: Tensor) -> None:
    hidden.register_hook(step.see)
    hidden.register_hook(lambda g: 3 * g)
    hidden.register_hook(step.see)
    hidden.register_hook(lambda g: 100 * g).remove()
    scores.register_hook(lambda g: g / 2)


def retained(step: Step, hidden: Tensor, scores: Tensor) -> None:
    hidden.retain_grad()
    scores.retain_grad()


def retained_and_changed(step: Step, hidden: Tensor, scores: Tensor) -> None:
    retained(step, hidden, scores)
    several(step, hidden, scores)


def removed(step: Step, hidden: Tensor, scores: Tensor) -> None:
    hidden.register_hook(lambda g: 100 * g).remove()


@pytest.mark.parametrize("further", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("hooks", [changed, several, retained, retained_and_changed, removed])
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_gradients_pass_by_the_hooks(placement: str, hooks: Any, reduction: str, further: bool) -> None:
    ours, theirs = (Step(name, reduction, further).train(hooks) for name in (placement, None))
    assert len(ours) == len(theirs)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_gradients_of_gradients_pass_by_the_hooks() -> None:
    found = []
    for placement in ("onnxruntime", None):
        step = Step(placement, "mean", further=False)
        loss, hidden, _ = step.run(torch.ones(3, 8, dtype=torch.float64), torch.tensor([0, 1, 2]))
        hidden.register_hook(lambda g: g * g)
        (gradient,) = torch.autograd.grad(loss, step.body.weight, create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [step.body.weight, step.head.weight]))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_a_tensor_that_nobody_holds_keeps_its_hook() -> None:
    gradients = []
    for placement in ("onnxruntime", None):
        step = Step(placement, "mean", further=False)
        loss, hidden, _ = step.run(torch.ones(3, 8, dtype=torch.float64), torch.tensor([0, 1, 2]))
        hidden.register_hook(lambda g: 5 * g)
        del hidden, _
        loss.backward()
        gradients.append(step.body.weight.grad)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)


class Saliency(Classifier):
    """Keeps the activations of each step, and looks at their gradients by Lightning's hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.hidden = self.body(batch[0])
        return F.cross_entropy(self.head(self.hidden), batch[1])

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(12, 7), nn.Linear(7, 4)
        self.largest: list[float] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.hidden.retain_grad()
        self.hidden.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def on_after_backward(self) -> None:
        assert self.hidden.grad is not None
        self.largest.append(self.hidden.grad.abs().max().item())


@pytest.mark.parametrize("several_graphs", [False, True])
def test_fit(several_graphs: bool) -> None:
    class Broken(Saliency):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            torch._dynamo.graph_break()
            return 2 * loss

    kind: type[LightningModule] = Broken if several_graphs else Saliency
    ours, theirs = (fit(kind, table, strategy=s, max_steps=6) for s in (ORTStrategy(placement="onnxruntime"), "auto"))
    assert_same_outcome(theirs, ours)
    assert ours.module.largest == pytest.approx(theirs.module.largest, rel=1e-4)
    assert max(theirs.module.largest) == pytest.approx(0.01)


def train_with_views(placement: str | None, of: str, wait: str) -> list[Tensor]:
    torch.manual_seed(0)
    body, head = nn.Linear(6, 8).double(), nn.Linear(8, 3).double()

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weight = body.weight.t()
        h = (x @ weight + body.bias).tanh()
        view = {"a result": h[:, :4], "a result as a whole": h.view(-1, 2, 4), "a weight": weight}[of]
        if of == "a result":
            scores = head(torch.cat([view * 2, h[:, 4:]], 1))
        else:
            scores = head(view.flatten(1) if of == "a result as a whole" else h)
        return F.cross_entropy(scores, y), h, view

    seen: list[Tensor] = []

    def see(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return 3 * gradient

    run = step
    if placement is not None:
        torch._dynamo.reset()
        run = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))
    for _ in range(3):
        loss, _h, view = run(torch.randn(3, 6, dtype=torch.float64), torch.tensor([0, 1, 2]))
        if wait == "hook":
            view.register_hook(see)
        else:
            view.retain_grad()
        loss.backward()
        seen += [view.grad.clone()] if wait == "retain" else []
    return [*seen, *[p.grad for net in (body, head) for p in net.parameters()]]


@pytest.mark.parametrize("wait", ["hook", "retain"])
@pytest.mark.parametrize("of", ["a result", "a result as a whole", "a weight"])
def test_views_that_a_step_gives_beside_what_they_are_of(of, wait):
    found, expected = train_with_views("onnxruntime", of, wait), train_with_views(None, of, wait)
    assert len(found) == len(expected) == 7
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
