"""Lightning's callbacks, tuners, profilers and debugging flags around an ONNX Runtime step."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.profilers import AdvancedProfiler, SimpleProfiler
from modules import Classifier, Regressor, TableData, curve, table
from parity import (
    STRATEGY,
    MemoryLogger,
    assert_fit_parity,
    assert_same_state,
    fit,
    make_trainer,
    needs_ort,
    quiet,
    state_of,
)

pytestmark = pytest.mark.stock_only

VALIDATION = partial(table, 48, seed=1)


def test_early_stopping():
    """Both stop after the same epoch, before the last one, for the same score."""
    callbacks = partial(EarlyStopping, monitor="val_loss", patience=2, min_delta=0.1)
    eager, other = assert_fit_parity(Classifier, table, VALIDATION, callbacks=callbacks, max_epochs=30)
    assert 3 <= eager.trainer.early_stopping_callback.stopped_epoch < 29
    stopped = other.trainer.early_stopping_callback
    assert stopped.stopped_epoch == eager.trainer.early_stopping_callback.stopped_epoch
    assert stopped.best_score.item() == pytest.approx(eager.trainer.early_stopping_callback.best_score.item(), rel=1e-4)


class Scheduled(Regressor):
    """Two groups and a scheduler, for the monitor to log."""

    def configure_optimizers(self):
        groups = [{"params": self.body.parameters(), "lr": 0.02}, {"params": self.head.parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_learning_rate_monitor():
    callbacks = partial(LearningRateMonitor, logging_interval="step", log_momentum=True)
    eager, _ = assert_fit_parity(Scheduled, curve, callbacks=callbacks, logger=MemoryLogger)
    rates = [row["lr-SGD/pg2"] for _, row in eager.trainer.logger.rows if "lr-SGD/pg2" in row]
    assert rates == pytest.approx([0.05 * 0.95**step for step in range(50)])


def test_gradient_accumulation_scheduler():
    """One, then two, then three batches a step; 20 epochs of 6 batches."""
    callbacks = partial(GradientAccumulationScheduler, {0: 1, 4: 2, 8: 3})
    eager, _ = assert_fit_parity(SGDRegressor, curve, callbacks=callbacks, max_epochs=20)
    assert eager.trainer.global_step == 4 * 6 + 4 * 3 + 12 * 2


class SGDRegressor(Regressor):
    """Plain momentum: weights show the scale of gradients."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def test_batch_size_finder(tmp_path):
    """Finds the same batch size and then trains with it to the same weights."""
    callbacks = partial(BatchSizeFinder, mode="power", steps_per_trial=2, init_val=4, max_trials=4)
    eager, other = fit_twice(callbacks, tmp_path)
    assert eager.trainer.datamodule.batch_size == other.trainer.datamodule.batch_size == 32
    assert_same_state(state_of(eager.module), state_of(other.module))
    assert eager.trainer.global_step == other.trainer.global_step == 50


def callback_of(run, kind):
    """The run's one callback of this class."""
    (callback,) = [callback for callback in run.trainer.callbacks if isinstance(callback, kind)]
    return callback


def fit_twice(callbacks, directory):
    """Tuners write a temporary checkpoint, so they need a directory."""
    flags = {"callbacks": callbacks, "default_root_dir": directory, "datamodule": TableData}
    return fit(Classifier, strategy="auto", **flags), fit(Classifier, **flags)


def test_learning_rate_finder(tmp_path):
    """The same curve of losses, so the same suggestion; then trains with it to the same weights."""
    callbacks = partial(LearningRateFinder, min_lr=1e-4, max_lr=1.0, num_training_steps=30, early_stop_threshold=None)
    eager, other = fit_twice(callbacks, tmp_path)
    assert eager.module.hparams.lr != 0.05
    assert other.module.hparams.lr == pytest.approx(eager.module.hparams.lr, rel=1e-9)
    expected, actual = callback_of(eager, LearningRateFinder), callback_of(other, LearningRateFinder)
    losses = expected.optimal_lr.results["loss"]
    assert len(losses) >= 30
    assert actual.optimal_lr.results["loss"] == pytest.approx(losses, rel=1e-3)
    assert_same_state(state_of(eager.module), state_of(other.module))


def test_device_stats_monitor():
    """Logs the CPU's numbers next to the losses; those are compared, the CPU's only counted."""
    rows = []
    for strategy in ("auto", STRATEGY):
        run = fit(Regressor, curve, strategy=strategy, callbacks=DeviceStatsMonitor, logger=MemoryLogger, max_steps=10)
        stats = [list(row) for _, row in run.trainer.logger.rows if any("cpu_percent" in name for name in row)]
        assert len(stats) == 20
        losses = [row["train_loss"] for _, row in run.trainer.logger.rows if "train_loss" in row]
        rows.append((stats, losses))
    names, other_names = ({name.split(".")[-1] for row in stats for name in row} for stats, _ in rows)
    assert other_names == names
    assert rows[1][1] == pytest.approx(rows[0][1], rel=1e-4)


def test_simple_profiler():
    """The same actions, the same number of times; the strategy's steps are named after its class."""
    counts = []
    for strategy in ("auto", STRATEGY):
        run = fit(Regressor, curve, partial(curve, 32), strategy=strategy, profiler=SimpleProfiler, max_steps=20)
        name = type(run.trainer.strategy).__name__
        recorded = run.trainer.profiler.recorded_durations
        counts.append({action.replace(name, "Strategy"): len(times) for action, times in recorded.items()})
    assert counts[0]["[Strategy]Strategy.training_step"] == 20
    assert counts[1] == counts[0]


def test_advanced_profiler(tmp_path):
    """Python's profiler is on while steps are compiled; the report has the same actions."""
    actions = []
    for strategy in ("auto", STRATEGY):
        profiler = partial(AdvancedProfiler, tmp_path / f"{len(actions)}", "profile")
        run = fit(Regressor, curve, strategy=strategy, profiler=profiler, max_steps=20)
        (path,) = (tmp_path / f"{len(actions)}").iterdir()
        name = type(run.trainer.strategy).__name__
        lines = [line for line in path.read_text().splitlines() if line.startswith("Profile stats for: ")]
        actions.append([line.replace(name, "Strategy") for line in lines])
    assert "Profile stats for: [Strategy]Strategy.training_step" in actions[0]
    assert sorted(actions[1]) == sorted(actions[0])


@needs_ort
def test_profiler_names_the_strategy():
    run = fit(Regressor, curve, profiler=SimpleProfiler, max_steps=20)
    assert len(run.trainer.profiler.recorded_durations["[Strategy]ORTStrategy.training_step"]) == 20


@pytest.mark.parametrize("fast_dev_run", [True, 3])
def test_fast_dev_run(fast_dev_run):
    eager, _ = assert_fit_parity(Classifier, table, VALIDATION, fast_dev_run=fast_dev_run)
    assert eager.trainer.global_step == int(fast_dev_run)


class CountsBatches(Classifier):
    """Counts the batches of each kind, in Python."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.batches = {"train": 0, "val": 0}

    def training_step(self, batch, batch_idx):
        self.batches["train"] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.batches["val"] += 1
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("flags", "train", "val"),
    [
        ({"overfit_batches": 2}, 50, 50),
        ({"limit_train_batches": 0.5, "limit_val_batches": 2, "num_sanity_val_steps": 1}, 50, 33),
        ({"val_check_interval": 4, "check_val_every_n_epoch": None, "num_sanity_val_steps": 0}, 50, 36),
        ({"num_sanity_val_steps": -1, "limit_val_batches": 1, "check_val_every_n_epoch": 3}, 50, 3),
        ({"limit_val_batches": 0}, 50, 0),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_numbers_of_batches(flags, train, val):
    in_ort = None if val else ["training_step"]
    eager, other = assert_fit_parity(CountsBatches, table, VALIDATION, in_ort=in_ort, **flags)
    assert eager.module.batches["train"] == train
    assert abs(eager.module.batches["val"] - val) <= 3
    assert other.module.batches == eager.module.batches


def test_detect_anomaly_trains_as_before():
    assert_fit_parity(Classifier, table, detect_anomaly=True)


class Diverges(Regressor):
    """Not a number from the sixth batch on: sqrt of a negative number."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        offset = 1.0 if self.global_step < 5 else -1.0
        return torch.sqrt(self(x).pow(2) * 0.01 + offset).mean()


@pytest.mark.parametrize("strategy", ["auto", STRATEGY])
def test_detect_anomaly_finds_nan(strategy):
    """The step that yields NaN raises, after five good ones."""
    module = Diverges()
    trainer = make_trainer(strategy, detect_anomaly=True)
    with quiet(), pytest.raises(RuntimeError, match="nan"):
        trainer.fit(module, curve())
    assert trainer.global_step == 5
    assert all(p.isfinite().all() for p in module.parameters())


def test_nan_passes_without_detect_anomaly():
    """NaN is no error of ours: the weights become what they become in eager."""
    for strategy in ("auto", STRATEGY):
        run = fit(Diverges, curve, strategy=strategy, max_steps=8)
        assert run.module.head.weight.isnan().all()


class Touches(Callback):
    """A user's callback: reads gradients, clips by hand, records norms, changes the learning rate, stops."""

    def __init__(self) -> None:
        self.norms = []

    def on_after_backward(self, trainer, pl_module):
        self.norms.append(torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 0.2).item())

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.99
        if len(self.norms) == 40:
            trainer.should_stop = True


def test_callback_of_a_user():
    eager, other = assert_fit_parity(SGDRegressor, curve, callbacks=Touches)
    assert eager.trainer.global_step == 40
    expected, actual = callback_of(eager, Touches), callback_of(other, Touches)
    assert actual.norms == pytest.approx(expected.norms, rel=1e-4)


class Interrupts(Callback):
    """Fails in the middle, as a callback with a bug does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == 13:
            raise ZeroDivisionError("in a callback")


def test_an_error_in_the_middle_leaves_a_usable_module():
    """The error arrives unchanged; the weights are those of 13 steps; another fit goes on from there."""
    states = []
    for strategy in ("auto", STRATEGY):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Classifier()
        with quiet():
            with pytest.raises(ZeroDivisionError, match="in a callback"):
                make_trainer(strategy, callbacks=[Interrupts()]).fit(module, table())
            states.append(state_of(module))
            make_trainer(strategy, max_steps=10).fit(module, table())
            states.append(state_of(module))
    assert_same_state(states[0], states[2])
    assert_same_state(states[1], states[3])
    assert (states[0]["net.4.weight"] - states[1]["net.4.weight"]).abs().max() > 1e-2


def test_checkpoint_and_resume_around_tuning(tmp_path):
    """Default checkpointing and the default logger off-line: files land where they always land."""
    names = []
    for strategy in ("auto", STRATEGY):
        directory = tmp_path / f"{len(names)}"
        callbacks = partial(ModelCheckpoint, filename="{epoch}-{val_loss:.2f}", monitor="val_loss", mode="min")
        flags = {"callbacks": callbacks, "enable_checkpointing": True, "default_root_dir": directory}
        fit(Classifier, table, VALIDATION, strategy=strategy, max_epochs=4, **flags)
        names.append(sorted(str(p.relative_to(directory)) for p in directory.rglob("*.ckpt")))
    assert len(names[0]) == 1
    assert names[1] == names[0]
