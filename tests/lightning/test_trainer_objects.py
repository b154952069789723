"""What a Trainer, its module and its callbacks can do besides training: be copied, be saved, be compiled already."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from lightning.pytorch import Callback
from modules import Regressor, curve
from parity import MemoryLogger, assert_fit_parity, assert_same_state, fit, make_trainer, needs_ort, quiet, state_of
from torchmetrics import MeanSquaredError, MetricCollection

pytestmark = pytest.mark.stock_only


class Keeper(Callback):
    """A callback that knows its Trainer, as progress bars do, and copies itself while a fit goes on."""

    def __init__(self) -> None:
        self.trainer = None
        self.copies = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.trainer = trainer
        self.copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        pickle.dumps(trainer)


@pytest.mark.parametrize("optimizer", ["torch", "ort"])
@needs_ort
def test_copies(optimizer):
    """Trainers, modules, callbacks can be copied and saved in a fit and after it, as under auto, and train on."""
    from lightning_ort import ORTStrategy

    keeper = Keeper()
    trainer = make_trainer(ORTStrategy(optimizer=optimizer, print_report=False), max_steps=2, callbacks=[keeper])
    module = Regressor()
    with quiet():
        trainer.fit(module, curve())
    torch.save(module, io.BytesIO())
    for copied in keeper.copies:
        assert_same_state(state_of(module), state_of(copied), 0)
    for other in (copy.deepcopy(keeper), pickle.loads(pickle.dumps(keeper))):
        again, own = other.trainer, copy.deepcopy(module)
        assert again.strategy.report()["training_step"].calls == 2
        again.fit_loop.epoch_loop.max_steps = 4
        with quiet():
            again.fit(own, curve())
        assert again.global_step == 4
        assert again.strategy.report()["training_step"].all_in_ort
        assert trainer.strategy.report()["training_step"].calls == 2


class Copying(Regressor):
    """Uses copies of its metrics, and one of itself, inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()
        self.errors = MetricCollection({"square": MeanSquaredError()})

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self(x).detach()
        single, several = self.error.clone(), self.errors.clone(prefix="copied_")
        self.log("single", single(prediction, y))
        self.log_dict(several(prediction, y))
        self.log("counts", float(self.error.update_count + self.errors["square"].update_count + single.update_count))
        twin = copy.deepcopy(self)
        twin.error.update(prediction, y)
        assert twin.log.__self__ is twin
        self.log("twin", float(twin.error.update_count + self.error.update_count))
        return super().training_step(batch, batch_idx)


def test_copies_made_in_a_step():
    """They are what they are in eager: not the originals by another name."""
    assert_fit_parity(Copying, curve, max_steps=3, logger=MemoryLogger, in_ort=())


def test_checkpoint_of_a_module_that_has_lost_its_trainer(tmp_path):
    run = fit(Regressor, curve, max_steps=2)
    run.module.trainer = None
    run.trainer.save_checkpoint(tmp_path / "lost.ckpt")
    weights = torch.load(tmp_path / "lost.ckpt", weights_only=False)["state_dict"]
    assert_same_state({k: v for k, v in state_of(run.module).items() if k in weights}, weights, 0)


def test_a_checkpoint_that_is_read_before_a_fit(tmp_path):
    """By whoever wants to look into it, before a module is connected or attached; the fit restores it as ever."""
    run = fit(Regressor, curve, max_steps=2)
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    trainer, module = make_trainer(max_steps=4), Regressor()
    assert trainer.strategy.load_checkpoint(tmp_path / "two.ckpt")["global_step"] == 2
    trainer.strategy.connect(module)
    assert trainer.strategy.load_checkpoint(tmp_path / "two.ckpt")["global_step"] == 2
    with quiet():
        trainer.fit(module, curve(), ckpt_path=tmp_path / "two.ckpt")
    assert trainer.global_step == 4


def test_a_checkpoint_without_optimizer_states(tmp_path):
    """As made by hand, or of a fit without optimizers: Lightning takes it in silence, this strategy says so."""
    run = fit(Regressor, curve, max_steps=2)
    run.trainer.save_checkpoint(tmp_path / "two.ckpt")
    saved = torch.load(tmp_path / "two.ckpt", weights_only=False)
    torch.save({**saved, "optimizer_states": []}, tmp_path / "weights.ckpt")
    trainer, module = make_trainer(max_steps=3), Regressor()
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, curve(), ckpt_path=tmp_path / "weights.ckpt")
    assert any("no states of optimizers" in str(w.message) for w in caught)
    assert trainer.global_step == 3


def test_a_module_that_is_compiled_already():
    """Its steps go to ONNX Runtime, uncompiled, and it is compiled for the user's backend afterwards as before."""
    runs = [fit(Regressor, curve, strategy="auto", max_steps=4)]
    calls = []

    def users_backend(graph, example_inputs):
        calls.append(graph)
        return graph.forward

    runs.append(fit(lambda: torch.compile(Regressor(), backend=users_backend), curve, max_steps=4))
    compiled = runs[1].module
    names = {f"_orig_mod.{name}": value for name, value in state_of(runs[0].module).items()}
    assert_same_state(names, state_of(compiled))
    assert not calls
    assert runs[1].trainer.strategy.report()["training_step"].all_in_ort
    compiled(torch.ones(2, 12))
    assert calls
