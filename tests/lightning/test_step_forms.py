"""Every usual form of a step: what it returns, logs, measures, collects, and which Python values it reads."""

from __future__ import annotations

import gc
from collections import defaultdict
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback
from modules import CLASSES, FEATURES, Classifier, Regressor, curve, table
from parity import (
    STRATEGY,
    MemoryLogger,
    assert_fit_parity,
    assert_in_ort,
    assert_same_metrics,
    assert_same_outcome,
    fit,
    make_trainer,
    quiet,
    step_report,
)
from torch import nn
from torch.func import hessian, vmap
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassF1Score

VALIDATION = partial(table, 40, seed=1)


class ReturnsDict(Classifier):
    """A dict with the loss and more; the hook sees all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "hits": (logits.argmax(-1) == y).sum(), "index": batch_idx}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append((int(outputs["hits"]), outputs["index"], outputs["loss"].item()))


def test_step_returns_a_dict():
    eager, other = assert_fit_parity(ReturnsDict, table, graphs=2)
    assert len(other.module.seen) == 50
    for one, two in zip(eager.module.seen, other.module.seen, strict=True):
        assert one == pytest.approx(two, rel=1e-4)


class SkipsEveryThird(Classifier):
    """Returns None for each third batch."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 3 == 2:
            return None
        return super().training_step(batch, batch_idx)


def test_step_returns_none():
    """One graph for the training batches, however the index goes on."""
    eager, _ = assert_fit_parity(SkipsEveryThird, table, max_epochs=12, graphs=2)
    assert eager.trainer.global_step == 72


class ReturnsOutputs(Classifier):
    """Validation returns predictions; hooks and the epoch's end use them."""

    def __init__(self) -> None:
        super().__init__()
        self.predictions = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        return {"logits": logits, "labels": y, "loss": F.cross_entropy(logits, y)}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.predictions.append(outputs["logits"].softmax(-1))

    def on_validation_epoch_end(self):
        self.log("confidence", torch.cat(self.predictions).max(-1).values.mean())
        self.predictions.clear()


def test_validation_returns_outputs():
    assert_fit_parity(ReturnsOutputs, table, VALIDATION)


class LogsInAllForms(Classifier):
    """log and log_dict: on_step, on_epoch, progress bar, reduction, sync_dist, floats, in the step and in hooks."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("largest", logits.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("sum", torch.ones(()), on_step=False, on_epoch=True, reduce_fx=torch.sum)
        self.log("number", float(batch_idx) + 0.5, prog_bar=True, logger=False)
        self.log("weighted", loss, on_step=False, on_epoch=True, batch_size=len(y))
        hits = (logits.argmax(-1) == y).float().mean()
        self.log_dict({"hits": hits, "a/b": loss.detach() * 2}, on_step=True, on_epoch=True)
        self.log_dict({f"class_{i}": (y == i).float().mean() for i in range(3)})
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True, rank_zero_only=True)
        self.log_dict({"val_twice": loss * 2, "val_index": float(batch_idx)})

    def on_train_epoch_end(self):
        self.log("at_end", self.trainer.callback_metrics["epoch"] * 2)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("scaled", outputs["loss"] * 3)


def test_logging():
    eager, other = assert_fit_parity(LogsInAllForms, partial(table, 90), VALIDATION, logger=MemoryLogger)
    expected = {"both_step", "both_epoch", "largest", "a/b_epoch", "val_epoch", "at_end"}
    assert expected <= set(eager.trainer.callback_metrics)
    assert eager.trainer.logged_metrics.keys() == other.trainer.logged_metrics.keys()
    assert set(eager.trainer.progress_bar_metrics) == {"both_step", "both_epoch", "number", "val_step", "val_epoch"}


class Metrics(Classifier):
    """torchmetrics in every form that its Lightning page shows."""

    def __init__(self) -> None:
        super().__init__()
        metrics = torchmetrics.MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_")
        self.forwarded = MulticlassAccuracy(CLASSES, average="micro")
        self.updated = torchmetrics.MeanMetric()
        self.per_class = nn.ModuleList([MulticlassAccuracy(CLASSES) for _ in range(2)])
        self.confusion = MulticlassConfusionMatrix(CLASSES)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.log_dict(self.train_metrics(logits, y))  # values of this batch
        self.forwarded(logits.softmax(-1), y)
        self.log("forwarded", self.forwarded, on_step=True, on_epoch=True)  # the object
        self.updated.update(loss)
        self.log("updated", self.updated, on_step=False, on_epoch=True)
        self.log("functional", torchmetrics.functional.accuracy(logits, y, task="multiclass", num_classes=CLASSES))
        return loss

    def on_train_epoch_end(self):
        self.log_dict({f"{name}_all": value for name, value in self.train_metrics.compute().items()})
        self.train_metrics.reset()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_metrics.update(logits, y)
        self.log_dict(self.val_metrics, on_step=False, on_epoch=True)  # the collection
        self.per_class[batch_idx % 2].update(logits, y)
        self.confusion.update(logits.argmax(-1), y)

    def on_validation_epoch_end(self):
        self.log("first", self.per_class[0].compute())
        self.log("diagonal", self.confusion.compute().diagonal().float().sum())
        for metric in (*self.per_class, self.confusion):
            metric.reset()


def test_torchmetrics():
    eager, _ = assert_fit_parity(Metrics, table, VALIDATION, recompilations=6, logger=MemoryLogger)
    assert eager.trainer.callback_metrics["train_MulticlassAccuracy_all"] > 0.5
    assert eager.trainer.callback_metrics["diagonal"] > 20


class ManyMetrics(Classifier):
    """More metrics than a function may be compiled again, in a loop, which must not be broken."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleList(torchmetrics.MeanMetric() for _ in range(12))
        self.pair = torchmetrics.MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        for i, mean in enumerate(self.means):
            mean.update(loss * i)
            self.log(f"mean_{i}", mean, on_step=True, on_epoch=True)
        self.pair.update(logits, y)
        self.log_dict(self.pair, on_step=False, on_epoch=True)
        logits.detach().mul_(0)  # what was given to a metric is what it was then
        return loss


def test_metrics_in_a_loop_are_one_graph():
    eager, other = assert_fit_parity(ManyMetrics, table, max_epochs=9)
    assert len(other.trainer.callback_metrics) >= 12 + 2
    assert_in_ort(other.trainer, graphs=1, recompilations=0)
    assert eager.trainer.callback_metrics["MulticlassAccuracy"] > 0.5


class AskedInALoop(Classifier):
    """What a metric answers breaks the graph, which Dynamo cannot do inside of a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.ModuleList(torchmetrics.MeanMetric() for _ in range(10))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for i, mean in enumerate(self.means):
            loss = loss + 0.01 * mean(loss.detach())
            self.log(f"mean {i}", mean, on_step=True)
            self.log_dict({f"loss {i}": loss.detach()})
            mean.update(loss.detach())
        return loss


def test_a_step_that_is_left_to_python_is_reported():
    """What it logs is Python's then, and is not compiled by itself, name by name."""
    _, other = assert_fit_parity(AskedInALoop, table, max_epochs=2, in_ort=())
    report = step_report(other.trainer, "training_step")
    (entry,) = report.in_torch
    assert not report.recompilations
    assert entry.what.startswith("training_step")
    assert "metrics are plain Python" in entry.reason
    assert __file__ in entry.source


class Curved(Classifier):
    """A transform of torch.func that Dynamo fails in the middle of."""

    def training_step(self, batch, batch_idx):
        curvature = vmap(hessian(lambda row: self.net[0](row).sin().sum()))(batch[0][:4])
        return super().training_step(batch, batch_idx) + 1e-3 * curvature.square().mean()


class CollectsGarbage(Callback):
    def on_train_batch_end(self, *args):
        gc.collect()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, in hessian
def test_an_error_inside_of_transforms_leaves_autograd_as_it_was():
    """Else what it leaves behind switches autograd off, for this fit and all others, when Python collects it."""
    assert_fit_parity(Curved, table, in_ort=(), max_steps=3, callbacks=lambda: [CollectsGarbage()])
    gc.collect()
    assert (torch.ones(1, requires_grad=True) * 2).requires_grad


class Collects(Classifier):
    """Half of all LightningModules: results are appended to attributes and read at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs = []
        self.validation_step_outputs = []
        self.test_step_outputs = defaultdict(list)
        self.history = {"loss": [], "index": []}
        self.summaries = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.training_step_outputs.append(loss.detach())
        self.history["loss"].append(loss.item())
        self.history["index"].append(batch_idx)
        return loss

    def on_train_epoch_end(self):
        self.summaries.append(torch.stack(self.training_step_outputs).mean().item())
        self.summaries.append(len(self.training_step_outputs))
        self.training_step_outputs.clear()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.validation_step_outputs.append({"loss": loss, "predictions": logits.argmax(-1), "labels": y})
        return loss

    def on_validation_epoch_end(self):
        predictions = torch.cat([output["predictions"] for output in self.validation_step_outputs])
        labels = torch.cat([output["labels"] for output in self.validation_step_outputs])
        self.log("val_loss", torch.stack([output["loss"] for output in self.validation_step_outputs]).mean())
        self.log("val_accuracy", (predictions == labels).float().mean())
        self.validation_step_outputs = []

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_step_outputs["logits"].append(logits)
        self.test_step_outputs["labels"].append(y)

    def on_test_epoch_end(self):
        logits, labels = (torch.cat(self.test_step_outputs[name]) for name in ("logits", "labels"))
        self.log("test_loss", F.cross_entropy(logits, labels))
        self.log("test_batches", float(len(self.test_step_outputs["logits"])))
        self.test_step_outputs.clear()


def test_results_collected_in_lists():
    """Lists and dicts of lists grow by one a step; that must not compile a graph a step, or leave another type."""
    eager, other = assert_fit_parity(Collects, table, VALIDATION, graphs=2)
    assert other.module.summaries == pytest.approx(eager.module.summaries, rel=1e-4)
    assert other.module.history["loss"] == pytest.approx(eager.module.history["loss"], rel=1e-4)
    assert other.module.history["index"] == eager.module.history["index"]
    assert len(other.module.history["loss"]) == 50
    assert type(other.module.history["loss"]) is list
    assert type(other.module.training_step_outputs) is list
    assert type(other.module.validation_step_outputs) is list
    for run in (eager, other):
        trainer = make_trainer("auto" if run is eager else STRATEGY)
        with quiet():
            (run.metrics,) = trainer.test(run.module, table(160, seed=2), verbose=False)
    assert other.metrics["test_batches"] == 10
    assert_same_metrics(eager.metrics, other.metrics)
    assert_in_ort(trainer, "test_step", graphs=2, recompilations=1)
    assert type(other.module.test_step_outputs) is defaultdict


class Stacks(Regressor):
    """Reads its growing list inside of the step: an average over the last losses, and a replay of old batches."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = []
        self.memory = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.recent.append(loss.detach())
        self.recent = self.recent[-5:]
        self.memory.append((x, y))
        old_x, old_y = self.memory[len(self.memory) // 2]
        return loss / (1 + torch.stack(self.recent).mean()) + 0.5 * F.mse_loss(self(old_x), old_y)


@pytest.mark.stock_only
def test_lists_read_by_the_step():
    """Right first; the number of compilations is bounded by the five sizes of the short list."""
    eager, other = assert_fit_parity(Stacks, curve, in_ort=())
    assert len(other.module.memory) == len(eager.module.memory) == 50
    torch.testing.assert_close(other.module.recent, eager.module.recent, rtol=1e-4, atol=1e-5)


class Counts(Regressor):
    """Counters and an annealed float as attributes, changed in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0
        self.beta = 0.0
        self.totals = {"samples": 0, "loss": 0.0}

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.n += 1
        self.beta = min(1.0, self.beta + 0.03)
        prediction = self(x)
        loss = F.mse_loss(prediction, y) + self.beta * 0.1 * prediction.pow(2).mean()
        self.totals["samples"] += x.shape[0]
        self.totals["loss"] += loss.item()
        self.log("beta", self.beta)
        return loss


def test_counters_and_annealing():
    """An int and a float that change each step are inputs of one graph, not fifty graphs."""
    eager, other = assert_fit_parity(Counts, curve, logger=MemoryLogger, graphs=3)
    assert eager.module.n == other.module.n == 50
    assert eager.module.beta == other.module.beta == 1.0
    assert eager.module.totals["samples"] == other.module.totals["samples"] == 800
    assert other.module.totals["loss"] == pytest.approx(eager.module.totals["loss"], rel=1e-4)


class ReadsTrainer(Regressor):
    """Uses batch_idx, current_epoch, global_step, hparams, the learning rate and the length of the epoch."""

    def __init__(self, weight: float = 0.5, names: tuple = ("a", "b"), schedule: str = "linear") -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        x, y = batch
        progress = self.global_step / self.trainer.max_steps
        warmup = min(1.0, 0.2 * (self.current_epoch + 1))
        scale = progress if self.hparams.schedule == "linear" else progress**2
        loss = F.mse_loss(self(x), y) * warmup / (1 + batch_idx)
        if batch_idx % 3 == 0:
            loss = loss + 0.01 * sum(p.pow(2).sum() for p in self.parameters())
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("rate", rate)
        self.log("scale", scale)
        return loss + scale * self.hparams["weight"] * self(x).abs().mean() + rate * len(self.hparams.names)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def test_index_epoch_step_and_hparams():
    """Two branches of the index, and the specialized first values of index, epoch and step."""
    eager, other = assert_fit_parity(ReadsTrainer, curve, logger=MemoryLogger, graphs=8, recompilations=7)
    assert other.module.hparams == eager.module.hparams


class SeveralLosses(Classifier):
    """A sum of losses of different kinds, one of them over a Python list of heads; helper methods and modules."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"one": nn.Linear(16, 2), "two": nn.Linear(16, CLASSES)})
        self.loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.loss_weights = [0.7, 0.3]

    def shared_step(self, batch, stage):
        x, y = batch
        hidden = self.net[:3](x)
        losses = {
            "main": self.loss(self.net[4](hidden), y),
            "one": F.cross_entropy(self.heads["one"](hidden), y % 2, weight=torch.tensor([0.4, 0.6])),
            "two": F.nll_loss(F.log_softmax(self.heads["two"](hidden), -1), y),
        }
        total = losses["main"] + sum(w * losses[n] for w, n in zip(self.loss_weights, ("one", "two"), strict=True))
        self.log_dict({f"{stage}_{name}": loss for name, loss in losses.items()})
        self.log(f"{stage}_total", total, prog_bar=stage == "val")
        return total

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.shared_step(batch, "val")


def test_shared_step():
    assert_fit_parity(SeveralLosses, table, VALIDATION, logger=MemoryLogger)


class LogsMidway(Classifier):
    """Logs between computations, so the step is several regions: gradients must pass through all of them."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net[:3](x)
        self.log("hidden", hidden.mean())
        logits = self.net[4](hidden)
        self.log("logits", logits.std())
        self.print(end="")
        loss = F.cross_entropy(logits, y)
        self.log("loss", loss)
        return loss + 0.1 * hidden.pow(2).mean()


def test_logging_between_computations():
    assert_fit_parity(LogsMidway, table, logger=MemoryLogger)


class ReadsLogged(Regressor):
    """Asks the Trainer for what the step itself has logged, of this batch and of those before."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("first", loss, on_step=True, on_epoch=True)
        self.log("twice", 2.0 * float(self.trainer.callback_metrics["first"]), prog_bar=True)
        self.log("thrice", 1.5 * self.trainer.progress_bar_metrics["twice"])
        self.log("known", float(len(self.trainer.logged_metrics)))
        return loss


def test_logged_values_read_by_the_step():
    """They are those of this step, not of the one before."""
    eager, other = assert_fit_parity(ReadsLogged, curve, logger=MemoryLogger, max_steps=6)
    for run in (eager, other):
        assert all(row["thrice"] == pytest.approx(3 * row["first_step"]) for _, row in run.trainer.logger.rows[:6])


class BreaksGraphs(Regressor):
    """Leaves tensors for numbers and numpy in the middle of the step, and comes back."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.body(x)
        scale = hidden.detach().abs().mean().item()
        largest = float(hidden.detach().numpy().max())
        prediction = self.head(hidden / (1 + scale))
        if largest > 1.5:
            prediction = prediction * 1.01
        return F.mse_loss(prediction, y)


def test_numbers_and_numpy_in_the_middle(caplog):
    """Dynamo has a dozen lines in the log for the first of them; the report has them all, in plain words."""
    type_of_tensor = torch._dynamo.variables.tensor.TensorVariable
    type_of_tensor._warn_capture_scalar_outputs.cache_clear()  # private: it warns once in a process
    _, other = assert_fit_parity(BreaksGraphs, curve)
    assert not [r for r in caplog.records if "Tensor.item()" in r.getMessage()]
    breaks = step_report(other.trainer, "training_step").graph_breaks
    assert any("becomes a number of Python" in b.reason for b in breaks)


class Distills(Regressor):
    """A frozen teacher under no_grad, a momentum copy updated in the step, and a stop-gradient target."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, 1).requires_grad_(False)
        self.momentum = nn.Linear(16, 1).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x)
            for slow, fast in zip(self.momentum.parameters(), self.head.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
        hidden = self.body(x)
        return F.mse_loss(self.head(hidden), y + 0.1 * target) + 0.1 * F.mse_loss(
            self.head(hidden), self.momentum(hidden).detach()
        )


def test_teacher_and_momentum_copy():
    """The momentum copy moves without being trainable, so the usual check for movement does not apply."""
    eager, other = fit(Distills, curve, strategy="auto"), fit(Distills, curve)
    assert (eager.module.momentum.weight - eager.initial["momentum.weight"]).abs().max() > 1e-2
    assert_same_outcome(eager, other)
    assert_in_ort(other.trainer)
