"""What users change of a module, or in it, after its steps were compiled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from modules import CLASSES, FEATURES, Classifier, table
from parity import assert_fit_parity, make_trainer, needs_ort, quiet, step_report
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_ort.compiler.decompositions.registry import IS_TORCH_2_14

pytestmark = [needs_ort, pytest.mark.stock_only]


class Clipped(Classifier):
    """Weights of a critic, as in a Wasserstein GAN."""

    def training_step(self, batch, batch_idx):
        for p in self.parameters():
            p.data.clamp_(-0.05, 0.05)
        return super().training_step(batch, batch_idx)


class Binary(Classifier):
    """Computes with the signs of weights, and updates the weights."""

    def training_step(self, batch, batch_idx):
        weight = self.net[0].weight
        kept = weight.data.clone()
        weight.data = weight.data.sign()
        loss = super().training_step(batch, batch_idx)
        weight.data = kept
        return loss


class Target(Classifier):
    """A target network by moving average that nobody has frozen."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.target = copy.deepcopy(self.net)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss = loss + F.mse_loss(self.net(batch[0]), self.target(batch[0]).detach())
        for old, new in zip(self.target.parameters(), self.net.parameters(), strict=True):
            old.data.copy_(0.5 * old.data + 0.5 * new.data)
        return loss


class Shrunk(Classifier):
    def training_step(self, batch, batch_idx):
        vector = nn.utils.parameters_to_vector(self.net.parameters())
        nn.utils.vector_to_parameters(vector.detach() * 0.9, self.net.parameters())
        return super().training_step(batch, batch_idx)


class ShrunkTogether(Classifier):
    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            torch._foreach_mul_(list(self.parameters()), 0.9)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Clipped, Binary, Target, Shrunk, ShrunkTogether])
def test_weights_written_past_autograd(kind):
    """Torch does not count these writes. The step runs in torch, and the report says so.

    From torch 2.14 on, Dynamo compiles what is between such an assignment of ``.data`` and the next by itself.
    """
    _, other = assert_fit_parity(kind, table, in_ort=())
    assert (kind is Binary and IS_TORCH_2_14) or any(
        "changed in place" in t.reason for t in step_report(other.trainer, "training_step").in_torch
    )


class _Later(Callback):
    """Registers a hook in the middle of a fit, and takes it back."""

    def __init__(self, register) -> None:
        self.register, self.handle = register, None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 20:
            self.handle = self.register(module.net)
        if trainer.global_step == 40:
            self.handle.remove()


def _forward(net):
    return net[1].register_forward_hook(lambda module, args, output: output * 0.5)


def _forward_pre(net):
    return net[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))


def _backward(net):
    return net[-1].register_full_backward_hook(lambda module, before, after: (before[0] * 0,))


def _of_all(net):
    first = net[0]
    return register_module_forward_hook(lambda module, args, output: output * 0.5 if module is first else None)


@pytest.mark.parametrize("register", [_forward, _forward_pre, _backward, _of_all])
def test_hooks_that_come_and_go(register):
    assert_fit_parity(Classifier, table, in_ort=(), callbacks=lambda: [_Later(register)])


def test_features_of_a_second_prediction():
    found = []
    for strategy in ("auto", "ort"):
        torch.manual_seed(0)
        module, trainer, features = Classifier(), make_trainer(strategy), []
        module.predict_step = lambda batch, batch_idx, module=module: module.net(batch[0])
        with quiet():
            trainer.predict(module, table())
            module.net[0].register_forward_hook(lambda m, args, output, kept=features: kept.append(output.clone()))
            trainer.predict(module, table())
        found.append(features)
    assert len(found[0]) == len(found[1]) > 0
    torch.testing.assert_close(found[1], found[0])


class TwoPhases(Classifier):
    """Trains otherwise after a while."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 25:
            self.training_step = self.second_phase

    def second_phase(self, batch, batch_idx):
        self.log("second", 1.0)
        return 3 * Classifier.training_step(self, batch, batch_idx)


def test_a_step_that_is_replaced():
    assert_fit_parity(TwoPhases, table)


class Padded(Classifier):
    """An encoder over sequences, whose padding torch leaves out in evaluation and fills with zeros."""

    norm: nn.Module | None = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        layer = nn.TransformerEncoderLayer(FEATURES, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=copy.deepcopy(self.norm))
        self.head = nn.Linear(FEATURES, CLASSES)

    def loss(self, batch, at_the_end=True, additive=False):
        x, y = batch
        sequences = torch.stack([x, 2 * x, -x], 1)
        padding = torch.zeros(sequences.shape[:2], dtype=torch.bool)
        padding[1:, 1:] = True
        if not at_the_end:
            padding[1] = torch.tensor([True, False, False])
        if additive:
            padding = torch.zeros(padding.shape).masked_fill(padding, -1e4)
        return F.cross_entropy(self.head(self.encoder(sequences, src_key_padding_mask=padding).mean(1)), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("val_other", self.loss(batch, at_the_end=False))
        self.log("val_additive", self.loss(batch, additive=True))


class PaddedAndNormalized(Padded):
    norm = nn.LayerNorm(FEATURES)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [Padded, PaddedAndNormalized])
def test_padding_of_an_encoder_in_evaluation(kind):
    assert_fit_parity(kind, table, lambda: table(160, seed=2), still=("net",))


class HoldingATeacher(Classifier):
    """Past ``nn.Module.__setattr__``: what it makes in its first step is no part of it."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            object.__setattr__(self, "teacher", nn.Linear(FEATURES, CLASSES))
            object.__setattr__(self, "factor", nn.Parameter(torch.full((), 0.5)))
        with torch.no_grad():
            target = self.teacher(batch[0]) * self.factor
        return super().training_step(batch, batch_idx) + F.mse_loss(self.net(batch[0]), target)


def test_a_layer_that_is_set_past_the_module_is_not_registered():
    module = assert_fit_parity(HoldingATeacher, table, max_steps=3)[1].module
    assert [name for name in module.state_dict() if "net" not in name] == []
    assert "teacher" in module.__dict__
    assert "factor" in module.__dict__


class Edited(Classifier):
    """Its parts are what a notebook with ``%autoreload 2`` writes other code into."""

    def validation_step(self, batch, batch_idx):
        self.log("value", self.scaled(self.net(batch[0]).square().mean()) * self.factor)

    def scaled(self, value):
        return value * self.times(1)

    @staticmethod
    def times(number):
        return number

    @property
    def factor(self):
        return 1


def _edited_step(self, batch, batch_idx):
    self.log("value", self.scaled(self.net(batch[0]).square().mean()) * 10)


EDITS = {
    "step": (Edited.validation_step, _edited_step),
    "method": (Edited.scaled, lambda self, value: value * 10),
    "static method": (Edited.times, lambda number: 10 * number),
    "property": (Edited.factor.fget, lambda self: 10),
}


@pytest.mark.parametrize("edit", EDITS)
def test_code_that_is_written_into_a_function_is_noticed(edit, monkeypatch):
    trainer, module = make_trainer("ort"), Edited()
    with quiet():
        (before,) = trainer.validate(module, table(), verbose=False)
        (again,) = trainer.validate(module, table(), verbose=False)
        graphs = step_report(trainer, "validation_step").graphs
        function, other = EDITS[edit]
        monkeypatch.setattr(function, "__code__", other.__code__)
        (after,) = trainer.validate(module, table(), verbose=False)
    assert again == before
    assert step_report(trainer, "validation_step").graphs > graphs
    assert after["value"] == pytest.approx(10 * before["value"])


class Doubled(Classifier):
    def training_step(self, batch, batch_idx):
        return Classifier.training_step(self, batch, batch_idx)


def test_other_code_of_a_step_within_a_fit():
    def doubled(self, batch, batch_idx):
        return 2 * Classifier.training_step(self, batch, batch_idx)

    class Edit(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            losses.append(float(outputs["loss"]))
            if batch_idx == 2:
                Doubled.training_step.__code__ = doubled.__code__

    found = []
    for strategy in ("auto", "ort"):
        losses: list[float] = []
        before = Doubled.training_step.__code__
        torch.manual_seed(0)
        with quiet():
            make_trainer(strategy, max_epochs=1, callbacks=[Edit()]).fit(Doubled(), table())
        Doubled.training_step.__code__ = before
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][3] > 1.5 * found[0][2]
