"""Lightning by its other name: ``import pytorch_lightning as pl``."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import lightning.pytorch
import pytest
import pytorch_lightning
import torch
import torch.nn.functional as F
from parity import assert_same_state, needs_ort, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTCheckpointIO, ORTExport, ORTPrecision, ORTStrategy, examine
from lightning_ort.lightning_packages import PACKAGES, package_of

pytestmark = [needs_ort, pytest.mark.stock_only]


class Classifier(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.before_updates = 0

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def forward(self, x):
        return self.net(x)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_before_optimizer_step(self, optimizer):
        self.before_updates += 1

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 6, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)


def fit(strategy, folder, **flags):
    pytorch_lightning.seed_everything(0, verbose=False)
    module = Classifier()
    with quiet():
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu", strategy=strategy, max_epochs=3, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, **flags,
        )  # fmt: skip
        trainer.fit(module, loader(), loader())
    return trainer, module


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("strategy", ["name", "object"])
def test_a_fit(strategy, tmp_path):
    eager, wanted = fit("auto", tmp_path / "auto")
    chosen = "ort" if strategy == "name" else ORTStrategy(print_report=False)
    trainer, module = fit(chosen, tmp_path / "ort", callbacks=[ORTExport()])
    assert isinstance(trainer.strategy, ORTStrategy)
    assert pytorch_lightning.strategies.SingleDeviceStrategy in type(trainer.strategy).__mro__
    assert trainer.strategy.report().step("training_step").graphs > 0
    assert_same_state(module.state_dict(), wanted.state_dict(), 1e-4)
    assert module.before_updates == wanted.before_updates
    for name, value in eager.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[name], value, rtol=1e-4, atol=1e-5)
    again = fit("auto", tmp_path / "other", max_steps=0)[1]
    path = trainer.checkpoint_callback.best_model_path
    with quiet():
        resumed = pytorch_lightning.Trainer(
            accelerator="cpu", strategy="ort", max_epochs=4, logger=False, enable_progress_bar=False,
            enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        resumed.fit(again, loader(), loader(), ckpt_path=path)
        predicted = resumed.predict(again, loader())
    assert resumed.global_step == 32
    torch.testing.assert_close(torch.cat(predicted), again.net(torch.cat([b[0] for b in loader()])))


@pytest.mark.parametrize("plugins", [[ORTPrecision("16-mixed")], [ORTPrecision("bf16-mixed"), ORTCheckpointIO()]])
def test_plugins(plugins, tmp_path):
    """Hooks around the update belong to the package that calls them."""
    trainer, module = fit("ort", tmp_path, plugins=plugins)
    assert trainer.precision_plugin is plugins[0]
    assert module.before_updates == trainer.global_step == 24
    assert all(p.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("package", [lightning.pytorch, pytorch_lightning])
def test_the_base_class_is_the_trainers(package):
    strategy = ORTStrategy(print_report=False)
    with quiet():
        package.Trainer(accelerator="cpu", strategy=strategy, logger=False, enable_checkpointing=False)
    assert package.strategies.SingleDeviceStrategy in type(strategy).__mro__
    with quiet():
        trainer = package.Trainer(
            accelerator="cpu", devices=2, strategy="ort", logger=False, enable_checkpointing=False
        )
    assert isinstance(trainer.strategy, ORTStrategy)
    assert package.strategies.DDPStrategy in type(trainer.strategy).__mro__
    for same in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert type(same) is type(strategy)


def test_which_package():
    assert [p.pytorch for p in PACKAGES] == ["lightning.pytorch", "pytorch_lightning"]
    assert package_of(Classifier()).pytorch == "pytorch_lightning"
    assert package_of(3, nn.Linear(1, 1)) is PACKAGES[0]


def test_examination(tmp_path):
    with quiet():
        found = examine(Classifier(), train_dataloaders=loader(), val_dataloaders=loader())
    assert found.report.step("training_step").graphs == 1


ALONE = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "lightning":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

import importlib.util
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name.partition(".")[0] == "lightning" else there(name, *a)
sys.meta_path.insert(0, Absent())

import pytorch_lightning as pl, torch
import lightning_ort
from pytorch_lightning.demos.boring_classes import BoringModel

trainer = pl.Trainer(accelerator="cpu", strategy="ort", max_steps=3, logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False, limit_val_batches=1)
trainer.fit(BoringModel())
assert trainer.strategy.report().step("training_step").graphs == 1
trainer = lightning_ort.ORTTrainer
assert "lightning" not in sys.modules
print("trained")
"""


def test_without_the_other_package():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], capture_output=True, text=True, check=False)
    assert "trained" in done.stdout, done.stderr[-2000:]
