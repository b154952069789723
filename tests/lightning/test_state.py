"""State across steps and across strategies: freezing, BatchNorm, checkpoints, averaged weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    Callback,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from modules import Classifier, ConvNet, Regressor, TableData, curve, images, table
from parity import (
    STRATEGY,
    assert_fit_parity,
    assert_in_ort,
    assert_same_metrics,
    assert_same_state,
    fit,
    make_trainer,
    quiet,
    state_of,
)
from torch.optim.swa_utils import get_ema_avg_fn

pytestmark = pytest.mark.stock_only


class FreezeThenUnfreeze(BaseFinetuning):
    """Lightning's example: the first layer is frozen, and trained from epoch 3 on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[:2])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 3:
            self.unfreeze_and_add_param_group(pl_module.net[:2], optimizer, lr=0.01)


class TrainsUnfrozen(Classifier):
    """Gives the optimizer only what can be trained, as finetuning callbacks want it."""

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=self.hparams.lr, momentum=0.9)


def test_base_finetuning():
    eager, other = assert_fit_parity(TrainsUnfrozen, table, callbacks=FreezeThenUnfreeze, max_epochs=9)
    assert len(eager.trainer.optimizers[0].param_groups) == 2
    assert all(p.requires_grad for p in other.module.parameters())


def test_frozen_layers_never_move():
    """Never unfrozen: the weights are bit for bit those of the start, the rest trains."""

    def never() -> BaseFinetuning:
        callback = FreezeThenUnfreeze()
        callback.finetune_function = lambda *args: None
        return callback

    _, other = assert_fit_parity(TrainsUnfrozen, table, callbacks=never, max_epochs=9)
    assert torch.equal(other.module.net[0].weight, other.initial["net.0.weight"])


def test_backbone_finetuning():
    callbacks = partial(BackboneFinetuning, unfreeze_backbone_at_epoch=3, lambda_func=lambda epoch: 1.2)
    eager, _ = assert_fit_parity(ConvNet, images, callbacks=callbacks, max_epochs=12)
    assert len(eager.trainer.optimizers[0].param_groups) == 2


class Alternates(Callback):
    """Freezes the body in every odd epoch, by requires_grad."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.body.requires_grad_(trainer.current_epoch % 2 == 0)

    def on_train_end(self, trainer, pl_module):
        pl_module.body.requires_grad_(True)


def test_freezing_by_turns():
    """Two states, so two graphs: neither switching back nor the next switch may compile again."""
    _, other = assert_fit_parity(SGDRegressor, curve, callbacks=Alternates, max_epochs=9, graphs=2)
    assert_in_ort(other.trainer, recompilations=1)


class SGDRegressor(Regressor):
    """Momentum goes on for frozen parameters, whose gradients are None."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class SwitchesBatchNorm(Callback):
    """Freezes BatchNorm statistics in every third epoch, as detection models do."""

    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[1].train(trainer.current_epoch % 3 != 2)


def test_batch_norm_in_eval_mode_during_training():
    eager, other = assert_fit_parity(Classifier, table, callbacks=SwitchesBatchNorm, max_epochs=9)
    assert eager.module.net[1].num_batches_tracked == 36
    assert other.module.net[1].num_batches_tracked == 36


class AnyNorm(ConvNet):
    """Other forms of BatchNorm: cumulative average, no running statistics, not affine; InstanceNorm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[1] = torch.nn.Sequential(
            torch.nn.BatchNorm2d(4, momentum=None),
            torch.nn.Tanh(),
            torch.nn.BatchNorm2d(4, track_running_stats=False),
            torch.nn.Tanh(),
            torch.nn.BatchNorm2d(4, affine=False, eps=1e-3, momentum=0.3),
            torch.nn.Sigmoid(),
            torch.nn.InstanceNorm2d(4, track_running_stats=True),
        )


def test_other_norms_with_statistics():
    assert_fit_parity(AnyNorm, images, partial(images, 32, seed=1))


@pytest.mark.parametrize(("first", "second"), [("auto", STRATEGY), (STRATEGY, "auto"), (STRATEGY, STRATEGY)])
def test_resumed_training_equals_uninterrupted(first, second, tmp_path):
    """Half of the fit under one strategy, a checkpoint, the other half under another."""
    make, loaders = Resumed, (table, partial(table, 48, seed=1))
    whole = fit(make, *loaders, strategy="auto", max_epochs=10)
    half = fit(make, *loaders, strategy=first, max_epochs=5)
    path = tmp_path / "half.ckpt"
    half.trainer.save_checkpoint(path)
    rest = fit(make, *loaders, strategy=second, max_epochs=10, ckpt_path=path, seed=99)
    assert rest.trainer.global_step == whole.trainer.global_step == 60
    assert_same_state(state_of(whole.module), state_of(rest.module))
    assert_same_metrics(whole.trainer.callback_metrics, rest.trainer.callback_metrics)
    assert (state_of(half.module)["net.4.weight"] - state_of(rest.module)["net.4.weight"]).abs().max() > 1e-2
    # and the files themselves are alike
    checkpoint = torch.load(path, weights_only=False)
    eager = fit(make, *loaders, strategy="auto", max_epochs=5)
    eager.trainer.save_checkpoint(tmp_path / "eager.ckpt")
    expected = torch.load(tmp_path / "eager.ckpt", weights_only=False)
    assert [key for key in checkpoint if key != "lightning_ort"] == list(expected)
    assert_same_state(expected["state_dict"], checkpoint["state_dict"])
    loaded = make.load_from_checkpoint(path)
    assert_same_state(state_of(half.module), state_of(loaded), 0)


class Resumed(Classifier):
    """With optimizer moments and a scheduler to restore. A large epsilon keeps Adam from amplifying rounding."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)]


def test_resume_in_the_middle_of_an_epoch(tmp_path):
    """A checkpoint written by ModelCheckpoint after 20 of 50 steps: every way to go on ends at the same weights."""
    ends = []
    for first, second in [("auto", "auto"), ("auto", STRATEGY), (STRATEGY, "auto")]:
        directory = tmp_path / f"{len(ends)}"
        callbacks = partial(ModelCheckpoint, directory, every_n_train_steps=20, filename="{step}")
        fit(Resumed, table, strategy=first, max_steps=33, callbacks=callbacks, enable_checkpointing=True)
        rest = fit(Resumed, table, strategy=second, ckpt_path=directory / "step=20.ckpt", seed=99)
        assert rest.trainer.global_step == 50
        ends.append(state_of(rest.module))
    assert_same_state(ends[0], ends[1])
    assert_same_state(ends[0], ends[2])


def test_model_checkpoint_best_and_last(tmp_path):
    """The same epochs are kept, the best is found under the same score, and the test loads it."""
    results = []
    for strategy in ("auto", STRATEGY):
        torch._dynamo.reset()
        torch.manual_seed(0)
        directory = tmp_path / f"{len(results)}"
        callback = ModelCheckpoint(
            directory,
            filename="{epoch}",
            monitor="val_loss",
            save_top_k=2,
            save_last=True,
            auto_insert_metric_name=False,
        )
        trainer = make_trainer(strategy, max_epochs=9, callbacks=[callback], enable_checkpointing=True)
        module, data = Classifier(lr=0.5), TableData()
        with quiet():
            trainer.fit(module, data)
            tested = trainer.test(ckpt_path="best", datamodule=data, verbose=False)
            tested += trainer.test(ckpt_path="last", datamodule=data, verbose=False)
        results.append((sorted(p.name for p in directory.iterdir()), callback, tested))
    (files, expected, tests), (other_files, actual, other_tests) = results
    assert len(files) == 3
    assert other_files == files
    assert actual.best_model_score.item() == pytest.approx(expected.best_model_score.item(), rel=1e-4)
    assert tests[0] != tests[1], "best and last are the same"
    for one, other in zip(tests, other_tests, strict=True):
        assert_same_metrics(one, other)


def test_stochastic_weight_averaging():
    """With BatchNorm, so the callback adds an epoch that only renews the statistics (momentum=None)."""
    callbacks = partial(StochasticWeightAveraging, swa_lrs=0.02, swa_epoch_start=4, annealing_epochs=2)
    plain = fit(Classifier, table, strategy="auto", max_epochs=9)
    eager, _ = assert_fit_parity(Classifier, table, callbacks=callbacks, max_epochs=9)
    assert (state_of(plain.module)["net.4.weight"] - state_of(eager.module)["net.4.weight"]).abs().max() > 1e-3


class EMA(WeightAveraging):
    """Lightning's documented moving average."""

    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn(decay=0.9))

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx >= 10


@pytest.mark.parametrize("callbacks", [EMA, WeightAveraging])
def test_weight_averaging(callbacks):
    """Validation runs with averaged weights swapped in, training goes on with the plain ones."""
    plain = fit(Classifier, table, strategy="auto")
    validation = partial(table, 48, seed=1)
    eager, _ = assert_fit_parity(Classifier, table, validation, callbacks=callbacks)
    assert (state_of(plain.module)["net.4.weight"] - state_of(eager.module)["net.4.weight"]).abs().max() > 1e-3


class Perturbs(Callback):
    """Changes weights behind the module's back: in place, by .data, and by load_state_dict."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        with torch.no_grad():
            if batch_idx == 1:
                pl_module.net[0].weight.mul_(0.99)
            if batch_idx == 2:
                pl_module.net[4].bias.data = pl_module.net[4].bias.data + 0.01
            if batch_idx == 3:
                pl_module.load_state_dict({k: v.clone() for k, v in pl_module.state_dict().items()})
            if batch_idx == 4:
                pl_module.net[1].running_mean = pl_module.net[1].running_mean * 0.5


def test_weights_changed_by_a_callback():
    assert_fit_parity(Classifier, table, partial(table, 48, seed=1), callbacks=Perturbs)


class ReplacesLayer(Callback):
    """Puts a new head in place of the old one after the second epoch."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            pl_module.head = torch.nn.Linear(16, 1)
            trainer.optimizers[0].add_param_group({"params": pl_module.head.parameters(), "lr": 0.02})


def test_layer_replaced_during_training():
    assert_fit_parity(SGDRegressor, curve, callbacks=ReplacesLayer, max_epochs=9)
