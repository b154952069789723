"""Gradients that go to the parameters without torch's engine, and all that has them go by way of it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import Precision
from modules import Classifier, table
from parity import assert_fit_parity, fit
from torch import nn
from torch.autograd.graph import get_gradient_edge

from lightning_ort.compiler.hand_out import hand_out
from lightning_ort.lightning import steps

pytestmark = pytest.mark.stock_only


@pytest.fixture
def handed_out(monkeypatch):
    """Whether each backward went without the engine."""
    found = []

    def spy(loss, node):
        found.append(hand_out(loss, node))
        return found[-1]

    monkeypatch.setattr(steps, "hand_out", spy)
    return found


class KeepsZeros(Classifier):
    """Gradients of earlier steps are zeros, which are added to."""

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Dictionary(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "other": batch[0].mean()}


class Unused(Classifier):
    """Has a parameter that leads nowhere, one that is frozen, and one of two names."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def training_step(self, batch, batch_idx):
        again = self.second(self.first(batch[0][:, :4] * self.frozen))
        return super().training_step(batch, batch_idx) + again.square().mean()


@pytest.mark.parametrize(
    ("module", "flags"),
    [
        (Classifier, {}),
        (Classifier, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        (Classifier, {"precision": "64-true", "accumulate_grad_batches": 7}),
        (KeepsZeros, {}),
        (Dictionary, {"accumulate_grad_batches": 2}),
        (Unused, {"still": ("unused", "frozen")}),
    ],
)
def test_nothing_waits(handed_out, module, flags):
    """The weights are those of torch's own backward, to the bit what the engine makes of the same gradients."""
    _, other = assert_fit_parity(module, table, **flags)
    assert handed_out and all(handed_out)
    flags = {name: value for name, value in flags.items() if name != "still"}
    direct = other.module.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "hand_out", lambda loss, node: False)
        by_engine = fit(module, table, strategy="ort", **flags).module.state_dict()
    for name, value in direct.items():
        assert torch.equal(value, by_engine[name]), name


class HookedParameter(Classifier):
    def on_fit_start(self):
        next(self.parameters()).register_hook(lambda gradient: gradient * 3)


class AfterAccumulation(Classifier):
    def on_fit_start(self):
        next(self.parameters()).register_post_accumulate_grad_hook(self.triple)

    @staticmethod
    def triple(parameter):
        parameter.grad.mul_(3)


class HookedEnd(Classifier):
    """Hooks at the node that adds a gradient up, which the module keeps alive."""

    def on_fit_start(self):
        self.__dict__["kept"] = node = get_gradient_edge(next(self.parameters())).node
        node.register_prehook(lambda gradients: (gradients[0] * 3,))


class HookedLoss(Classifier):
    """The hook is a part of the graph."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.register_hook(lambda gradient: gradient * 3)
        return loss


class HookedNode(Classifier):
    def on_before_backward(self, loss):
        loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))


class NodeBehindBreak(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        torch._dynamo.graph_break()
        loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))
        return loss


class OwnBackward(Classifier):
    def backward(self, loss):
        (loss * 3).backward()


class PatchedBackward(Classifier):
    def on_fit_start(self):
        self.__dict__["backward"] = lambda loss: (loss * 3).backward()


@pytest.mark.parametrize(
    "module",
    [
        HookedParameter, AfterAccumulation, HookedEnd, HookedLoss, HookedNode, NodeBehindBreak, OwnBackward,
        PatchedBackward,
    ],
)  # fmt: skip
def test_somebody_waits(handed_out, module):
    eager, _ = assert_fit_parity(module, table, in_ort=())
    assert any(handed_out) == (module is HookedLoss)
    plain = fit(Classifier, table, strategy="auto").module.state_dict()
    assert any(not torch.allclose(value, plain[name]) for name, value in eager.module.state_dict().items())


@pytest.mark.parametrize("owner", [torch.Tensor, LightningModule, Precision], ids=lambda owner: owner.__name__)
def test_doubles(owner):
    """A backward that a test has put in the place of another one is called."""
    with mock.patch.object(owner, "backward", autospec=True, side_effect=owner.backward) as double:
        fit(Classifier, table, max_steps=3)
    assert double.call_count == 3


@pytest.mark.parametrize("spec", [None, Callback])
def test_doubles_of_callbacks(spec):
    callback = mock.Mock(spec=spec, state_key="double")
    callback.state_dict.return_value = {}
    fit(Classifier, table, max_steps=3, callbacks=[callback])
    assert callback.on_before_backward.call_count == 3


def test_doubles_of_the_plugin():
    plugin = Precision()
    plugin.backward = mock.Mock(side_effect=plugin.backward)
    fit(Classifier, table, max_steps=3, plugins=[plugin])
    assert plugin.backward.call_count == 3


class NodeHooks(Callback):
    def on_before_backward(self, trainer, pl_module, loss):
        loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))


def test_callbacks_before_backward(handed_out):
    assert_fit_parity(Classifier, table, callbacks=NodeHooks)
    assert not any(handed_out)


def _of_the_plugin(trainer, module):
    trainer.precision_plugin.backward = lambda loss, *args, **kwargs: (loss * 3).backward()


def _of_the_class(trainer, module):
    module.__class__ = OwnBackward


def _sees_the_loss(trainer, module):
    module.on_before_backward = lambda loss: loss.grad_fn.register_prehook(lambda gradients: (gradients[0] * 3,))


def _another_callback(trainer, module):
    trainer.callbacks.append(NodeHooks())


class Later(Callback):
    """Puts something in the way of gradients when the fit has begun."""

    def __init__(self, change):
        self._change = change

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self._change(trainer, pl_module)


@pytest.mark.parametrize("change", [_of_the_plugin, _of_the_class, _sees_the_loss, _another_callback])
def test_what_comes_later_is_met(handed_out, change):
    assert_fit_parity(Classifier, table, callbacks=lambda: Later(change), max_epochs=2, in_ort=())
    assert handed_out[:6] == [True] * 6 and not any(handed_out[6:])


def test_who_looks_for_anomalies_or_profiles(handed_out):
    """Both follow the operators of the engine."""
    fit(Classifier, table, max_steps=3, detect_anomaly=True)
    with torch.profiler.profile():
        fit(Classifier, table, max_steps=3)
    assert not any(handed_out)
    fit(Classifier, table, max_steps=3)
    assert handed_out == [False] * 6 + [True] * 3


class TimesZero(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (0.0 if batch_idx == 2 else 1.0)


def test_losses_times_zero(handed_out):
    assert_fit_parity(TimesZero, table)
    assert handed_out


class ChangesWeights(Classifier):
    def on_before_zero_grad(self, optimizer):
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.5)


@pytest.mark.parametrize("strategy", ["auto", "ort"])
def test_weights_changed_before_backward(strategy):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(ChangesWeights, table, strategy=strategy)


def test_a_second_backward():
    """What has been handed out is used up."""
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    step = torch.compile(lambda x: net(x).square().mean(), backend="lightning_ort")
    for _ in range(2):
        net.zero_grad()
        loss = step(torch.ones(2, 3)) / 2
        source = loss.grad_fn.next_functions[0][0]
        assert hand_out(loss, source)
        expected = torch.autograd.grad(net(torch.ones(2, 3)).square().mean() / 2, [*net.parameters()])
        for p, gradient in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, gradient)
        assert not hand_out(loss, source)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
