"""Ctrl-C: while a step is compiled it waits, and what it leaves can be gone on with."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.contest import Contest
from lightning_ort.compiler.interrupts import Interrupts

pytestmark = [
    pytest.mark.stock_only,
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers", "ignore:The number of training batches", "ignore:Checkpoint directory"
    ),
]


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder: Path, callbacks=(), ckpt_path=None) -> tuple[Trainer, Model]:
    model = Model()
    trainer = Trainer(
        strategy="ort", accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[ModelCheckpoint(folder, save_last=True), *callbacks],
    )  # fmt: skip
    x = torch.arange(48.0).view(8, 6).sin()
    # Lightning ends the process with status 1
    with contextlib.suppress(SystemExit):
        trainer.fit(model, DataLoader(TensorDataset(x), 2), ckpt_path=ckpt_path)
    return trainer, model


def test_compiling_is_finished_first_and_nothing_was_updated(tmp_path, monkeypatch):
    compiled = []
    call = ORTBackend.__call__

    def interrupted(self, graph, example_inputs):
        signal.raise_signal(signal.SIGINT)
        compiled.append(call(self, graph, example_inputs))
        return compiled[-1]

    with monkeypatch.context() as patch:
        patch.setattr(ORTBackend, "__call__", interrupted)
        trainer, model = fit(tmp_path / "interrupted")
    assert trainer.interrupted and trainer.global_step == 0
    assert len(compiled) == 1, "it was not held back"
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), Model().parameters(), strict=True))
    # the same process trains on, to the same weights
    _, again = fit(tmp_path / "again")
    torch._dynamo.reset()
    _, fresh = fit(tmp_path / "fresh")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), fresh.parameters(), strict=True))


def test_a_fit_goes_on_from_the_last_checkpoint(tmp_path):
    class Interrupting(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 6:
                signal.raise_signal(signal.SIGINT)

    trainer, _ = fit(tmp_path / "one", [Interrupting()])
    assert trainer.interrupted and trainer.global_step == 6
    resumed, model = fit(tmp_path / "one", ckpt_path=str(tmp_path / "one" / "last.ckpt"))
    assert resumed.global_step == 8
    _, whole = fit(tmp_path / "two")
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_the_second_one_does_not_wait():
    said = []
    interrupts = Interrupts(said.append)
    interrupts.hold()
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    assert len(said) == 1 and "once more" in said[0]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    interrupts.release()  # there is none any more


class TimeUp(Exception):
    """What a handler of an alarm raises."""


@pytest.mark.parametrize("owner", [ORTBackend, Contest])
def test_alarms_wait_and_are_not_taken_for_something_else(tmp_path, monkeypatch, measuring, owner):
    """Dynamo, and who measures candidates, would go on without what raises."""
    name = "__call__" if owner is ORTBackend else "settle"
    call, seen = getattr(owner, name), []

    def ring(number, frame):
        seen.append(number)
        raise TimeUp

    def interrupted(self, *args, **kwargs):
        signal.raise_signal(signal.SIGALRM)
        assert not seen
        return call(self, *args, **kwargs)

    before = signal.signal(signal.SIGALRM, ring)
    monkeypatch.setattr(owner, name, interrupted)
    try:
        with pytest.raises(TimeUp):
            fit(tmp_path)
        assert seen == [signal.SIGALRM]
        assert signal.getsignal(signal.SIGALRM) is ring
    finally:
        signal.signal(signal.SIGALRM, before)


def test_who_has_a_handler_of_his_own_keeps_it():
    seen = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    interrupts = Interrupts(print)
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    interrupts.release()
    assert seen == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
