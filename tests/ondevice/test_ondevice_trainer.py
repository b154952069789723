"""Artifacts of what a Trainer has trained: the training goes on where it was left."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from ondevice_models import opened, train
from orttrainer_models import batches, make
from safetensors.torch import load_file
from torch.utils.data import DataLoader

import lightning_ort
from lightning_ort.ondevice import OptimizerConfig, generate_artifacts
from lightning_ort.ondevice.exchange_optimizers import optimizer_of_torch
from lightning_ort.ondevice.formats import flavour_named
from lightning_ort.ondevice.optimizer_config import config_of

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "lamb": lambda p: lightning_ort.optim.Lamb(p, 0.02, weight_decay=0.01, ratio_max=5.0),
    "after": lambda p: lightning_ort.optim.AdamW(p, 0.02, decay_after=True, max_norm=0.5),
}


class Module(LightningModule):
    def __init__(self, optimizer="adamw"):
        super().__init__()
        self.net, self.kind = make(), optimizer

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.parameters())

    def train_dataloader(self):
        return DataLoader(batches(count=6), batch_size=None)


def fit(module, tmp_path, **settings):
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **settings,
    )  # fmt: skip
    trainer.fit(module)
    return trainer


def go_on(module, optimizer, data, clip=None):
    """Losses of training with torch."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(module.net(x), y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_fit_goes_on_with_its_artifacts(tmp_path):
    module = Module()
    callback = lightning_ort.ORTArtifacts()
    strategy = lightning_ort.ORTStrategy(print_report=False)
    trainer = fit(module, tmp_path, strategy=strategy, callbacks=[callback], gradient_clip_val=0.5)
    assert callback.artifacts.state.optimizer.step == 6
    numbers = sum(p.numel() for p in module.parameters())
    assert (
        repr(callback.artifacts)
        == f"<Artifacts: 6 trained parameters ({numbers:,} numbers) with AdamW, from x, target>"
    )
    strategy.export_artifacts(tmp_path / "again")
    state, ours, optimizer = opened(tmp_path / "artifacts")
    written = [load_file(tmp_path / d / "checkpoint.safetensors") for d in ("artifacts", "again")]
    assert written[0].keys() == written[1].keys()
    assert all(torch.equal(tensor, written[1][name]) for name, tensor in written[0].items())
    assert optimizer.step_count == 6 and optimizer.get_learning_rate() == 0.02
    expected = go_on(module, trainer.optimizers[0], batches(count=10)[6:], clip=0.5)
    np.testing.assert_allclose(train(ours, optimizer, batches(count=10)[6:]), expected, rtol=0, atol=1e-5)
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(state.parameters[name].data, parameter.detach(), rtol=0, atol=1e-4)


def test_nothing_is_written_in_a_trial(tmp_path):
    callback = lightning_ort.ORTArtifacts(tmp_path / "artifacts")
    fit(Module(), tmp_path, callbacks=[callback], fast_dev_run=True)
    assert callback.artifacts is None and not (tmp_path / "artifacts").exists()
    with pytest.raises(ValueError, match="flavour='x': expected 'portable' or"):
        lightning_ort.ORTArtifacts(flavour="x")
    with pytest.raises(ValueError, match="no module yet"):
        lightning_ort.ORTStrategy().export_artifacts(tmp_path)


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return generate_artifacts(Module(), tmp_path_factory.mktemp("generated"), inputs=batches()[0], verify=False)


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
def test_states_of_torch_optimizers_go_on(kind, generated, tmp_path):
    module, data = Module(kind), batches(count=8)
    optimizer = module.configure_optimizers()
    go_on(module, optimizer, data[:4])
    config, parameters = config_of(optimizer), dict(module.named_parameters())
    values = {n: p.detach().clone() for n, p in parameters.items()}
    state = dataclasses.replace(generated.state, parameters=values)
    state.optimizer = optimizer_of_torch(state, optimizer, parameters)
    flavour_named("portable").write(dataclasses.replace(generated, state=state, optimizer=config), tmp_path, "")
    _, ours, own = opened(tmp_path)
    assert own.step_count == 4 or kind == "sgd"
    np.testing.assert_allclose(train(ours, own, data[4:]), go_on(module, optimizer, data[4:]), rtol=0, atol=2e-6)


def test_only_what_the_optimizer_holds_is_trained(tmp_path):
    module = Module()
    optimizer = torch.optim.SGD(module.net.fc3.parameters(), 0.1)
    found = generate_artifacts(module, tmp_path, inputs=batches()[0], optimizer=optimizer, verify=False)
    assert found.state.trained == ("net.fc3.weight", "net.fc3.bias")
    assert found.optimizer == OptimizerConfig("SGD", 0.1)


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (lambda p: torch.optim.Adagrad(p), "optimizer is a Adagrad; artifacts can hold torch's AdamW, torch's Adam"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=True, which artifacts have not"),
        (
            lambda p: torch.optim.SGD([{"params": p[:1], "lr": 1.0}, {"params": p[1:]}]),
            "groups with different settings",
        ),
    ],
    ids=["class", "setting", "groups"],
)
def test_optimizers_that_artifacts_cannot_hold_are_refused(make_optimizer, message, tmp_path):
    module = Module()
    with pytest.raises(ValueError, match=message):
        generate_artifacts(
            module, tmp_path / "new", inputs=batches()[0], optimizer=make_optimizer(list(module.parameters()))
        )
    assert not (tmp_path / "new").exists()
