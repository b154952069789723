"""Manual optimization: several optimizers, own accumulation, own clipping, gradient penalties."""

from __future__ import annotations

from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from modules import FEATURES, Regressor, curve
from parity import MemoryLogger, assert_fit_parity, assert_in_ort, fit
from torch import nn

pytestmark = pytest.mark.stock_only

LATENT = 6


class GAN(LightningModule):
    """Lightning's GAN example: two optimizers, toggled, noise from torch.randn."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(LATENT, 16), nn.LeakyReLU(0.2), nn.Linear(16, FEATURES))
        self.discriminator = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch, batch_idx):
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], LATENT)
        z = z.type_as(real)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(real.size(0), 1).type_as(real)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(real), valid)
        fake = torch.zeros(real.size(0), 1).type_as(real)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        g = torch.optim.SGD(self.generator.parameters(), lr=10 * self.hparams.lr, momentum=0.5)
        d = torch.optim.RMSprop(self.discriminator.parameters(), lr=self.hparams.lr)
        return [g, d], []


class ToggledGAN(GAN):
    """The same with the ``toggled_optimizer`` context manager, and one training of both networks in three for G."""

    def training_step(self, batch, batch_idx):
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], LATENT).type_as(real)
        with self.toggled_optimizer(optimizer_d):
            fake = self.discriminator(self(z).detach())
            d_loss = F.relu(1 - self.discriminator(real)).mean() + F.relu(1 + fake).mean()
            optimizer_d.zero_grad()
            self.manual_backward(d_loss)
            optimizer_d.step()
            for parameter in self.discriminator.parameters():
                parameter.data.clamp_(-0.5, 0.5)
        if (batch_idx + 1) % 3 == 0:
            with self.toggled_optimizer(optimizer_g):
                g_loss = -self.discriminator(self(z)).mean()
                optimizer_g.zero_grad()
                self.manual_backward(g_loss)
                optimizer_g.step()
                self.log("g_loss", g_loss)


@pytest.mark.parametrize("make", [GAN, ToggledGAN])
def test_gan(make):
    eager, other = assert_fit_parity(make, curve, max_epochs=9, logger=MemoryLogger, in_ort=())
    # Dynamo leaves to Python what lies in the with block; the networks that are called there are compiled
    assert_in_ort(other.trainer, in_torch=["training_step from line"] if make is ToggledGAN else ())
    assert eager.trainer.global_step == (108 if make is GAN else 72)


class Accumulates(Regressor):
    """Steps every fourth batch, clips by hand, and steps the scheduler by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.mse_loss(self(x), y)
        self.manual_backward(loss / 4)
        if (batch_idx + 1) % 4 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()
        self.log("train_loss", loss, on_step=True, on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)]


def test_updates_without_a_closure_compile_nothing(monkeypatch):
    """To wrap what Lightning passes in the place of a closure would take longer than a small update."""
    wrapped, compile_ = [], torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, **options: wrapped.append(function) or compile_(function, **options)
    )
    fit(GAN, curve, strategy="ort", max_steps=6)
    assert [function.__name__ for function in wrapped] == ["training_step"]


def test_accumulation_clipping_and_scheduler_by_hand():
    eager, _ = assert_fit_parity(Accumulates, curve, max_epochs=50, logger=MemoryLogger)
    assert eager.trainer.global_step == 50


class Closure(Regressor):
    """Manual optimization with a closure around forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()

        def closure():
            loss = F.mse_loss(self(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)


def test_closure():
    assert_fit_parity(Closure, curve)


class Recorded(Closure):
    """Test doubles in the place of updates and closures."""

    def __init__(self) -> None:
        super().__init__()
        self.closure = MagicMock()

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx:
            optimizer.step(closure=self.closure)
        else:
            super().training_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["class", "instance"])
def test_doubles_see_what_they_see_in_eager(where):
    """And nothing of what Dynamo looks for in functions; one that comes in the middle of a fit is called, too."""

    class Doubles(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            owner = torch.optim.Adam if where == "class" else trainer.optimizers[0]
            if batch_idx == 1:
                self.patch = patch.object(owner, "step", side_effect=lambda closure: closure())
                self.step = self.patch.start()
            elif batch_idx == 3:
                self.patch.stop()

    seen = []
    for strategy in ("auto", "ort"):
        doubles = Doubles()
        run = fit(Recorded, curve, strategy=strategy, limit_train_batches=5, max_epochs=1, callbacks=[doubles])
        calls = doubles.step.mock_calls
        seen.append(([(c[0], len(c.args), sorted(c.kwargs)) for c in calls], run.module.closure.call_count))
    assert seen[0] == seen[1] == ([("", 0, ["closure"])] * 2, 4)


class TwoLosses(Regressor):
    """Two backward calls through one forward: the first keeps the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        hidden = self.body(x)
        prediction = self.head(hidden)
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(prediction, y), retain_graph=True)
        self.manual_backward(0.1 * hidden.pow(4).mean() + 0.1 * prediction.abs().mean())
        optimizer.step()


def test_two_backward_calls():
    assert_fit_parity(TwoLosses, curve)


class UpdatesBetween(Regressor):
    """The losses come first. The update by one changes what the other was computed from and needs no gradient of."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr)
        self.automatic_optimization = False
        self.critic = nn.Linear(16, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        prediction = self.head(hidden)
        loss = F.mse_loss(prediction, y)
        of_critic = F.mse_loss(self.critic(hidden.detach()), (prediction - y).detach().abs())
        actor, critic = self.optimizers()
        actor.zero_grad()
        self.manual_backward(loss)
        actor.step()
        critic.zero_grad()
        self.manual_backward(of_critic)
        critic.step()

    def configure_optimizers(self):
        actor = torch.optim.Adam([*self.body.parameters(), *self.head.parameters()], lr=self.hparams.lr)
        return actor, torch.optim.SGD(self.critic.parameters(), lr=0.05)


def test_updates_between_backward_calls():
    assert_fit_parity(UpdatesBetween, curve)


class GradientPenalty(GAN):
    """WGAN-GP: the penalty differentiates a gradient once more."""

    def training_step(self, batch, batch_idx):
        real, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(real.shape[0], LATENT).type_as(real)

        self.toggle_optimizer(optimizer_d)
        fake = self(z).detach()
        alpha = torch.rand(real.shape[0], 1).type_as(real)
        between = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        score = self.discriminator(between)
        (gradient,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True, retain_graph=True)
        penalty = ((gradient.norm(2, dim=1) - 1) ** 2).mean()
        d_loss = self.discriminator(fake).mean() - self.discriminator(real).mean() + 10 * penalty
        self.log("penalty", penalty)
        optimizer_d.zero_grad()
        self.manual_backward(d_loss)
        optimizer_d.step()
        self.untoggle_optimizer(optimizer_d)

        self.toggle_optimizer(optimizer_g)
        g_loss = -self.discriminator(self(z)).mean()
        optimizer_g.zero_grad()
        self.manual_backward(g_loss)
        optimizer_g.step()
        self.untoggle_optimizer(optimizer_g)

    def configure_optimizers(self):
        g = torch.optim.SGD(self.generator.parameters(), lr=self.hparams.lr)
        d = torch.optim.SGD(self.discriminator.parameters(), lr=self.hparams.lr)
        return [g, d], []


def test_gradient_penalty_is_never_dropped():
    """The penalty's own graph may run in torch; the weights must be eager's. The last bias cancels out of the loss."""
    still = ["discriminator.3.bias"]
    eager, other = assert_fit_parity(GradientPenalty, curve, max_epochs=8, in_ort=(), still=still, logger=MemoryLogger)
    assert_in_ort(other.trainer, graphs=16, in_torch=[""])  # regions before and after the penalty, not one per step
    assert eager.trainer.callback_metrics["penalty"] > 0


class LazilyRegularized(LightningModule):
    """Penalties of gradients in some steps, as a StyleGAN has them: by inputs, and by what the generator maps to."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.mapping, self.synthesis = nn.Linear(FEATURES, 4), nn.Linear(4, FEATURES)
        self.critic = nn.Linear(FEATURES, 1)
        self.register_buffer("length", torch.zeros(()))

    def generated(self, z):
        style = torch.tanh(self.mapping(z))
        return torch.sin(self.synthesis(style)), style

    def training_step(self, batch, batch_idx):
        of_generator, of_critic = self.optimizers()
        real = batch[0].detach().requires_grad_(batch_idx % 2 == 0)
        score = self.critic(real)
        loss = F.softplus(self.critic(torch.randn_like(batch[0]))).mean() + F.softplus(-score).mean()
        if batch_idx % 2 == 0:
            loss = loss + torch.autograd.grad(score.sum(), real, create_graph=True)[0].square().mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        made, style = self.generated(torch.randn_like(batch[0]))
        loss = F.softplus(-self.critic(made)).mean()
        if batch_idx % 3 == 0:
            slope = torch.autograd.grad((made * torch.randn_like(made)).sum(), style, create_graph=True)[0]
            length = slope.square().sum(1).sqrt()
            loss = loss + (length - self.length).square().mean()
            self.length.copy_(length.mean().detach())
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()

    def configure_optimizers(self):
        weights = [*self.mapping.parameters(), *self.synthesis.parameters()]
        return torch.optim.SGD(weights, 0.1), torch.optim.SGD(self.critic.parameters(), 0.1)


def test_penalties_of_some_steps():
    assert_fit_parity(LazilyRegularized, curve, max_steps=12, recompilations=40)
