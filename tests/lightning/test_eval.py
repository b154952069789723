"""Validate, test and predict: the same metrics, predictions and modes as ``strategy="auto"``."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from modules import Classifier, Regressor, TableData, TextClassifier, curve, sentences, table
from parity import (
    STRATEGY,
    assert_in_ort,
    assert_same_metrics,
    assert_same_state,
    fit,
    make_trainer,
    quiet,
    state_of,
)


def each_strategy(run):
    """The results of ``run(strategy)`` under both strategies, from the same seed."""
    results = []
    for strategy in ("auto", STRATEGY):
        torch._dynamo.reset()
        seed_everything(4, verbose=False)
        with quiet():
            results.append(run(strategy))
    return results


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_validate_test_predict(inference_mode):
    """An untrained module, 40 rows in batches of 16: metrics, predictions, weights, modes."""

    def run(strategy):
        module, data = Classifier(dropout=0.5), TableData()
        module.net[3].eval()  # submodules keep the mode they had
        before = state_of(module)
        trainer = make_trainer(strategy, inference_mode=inference_mode)
        metrics = trainer.validate(module, data, verbose=False) + trainer.test(module, data, verbose=False)
        predictions = trainer.predict(module, data)
        assert_same_state(before, state_of(module), 0)
        return module, trainer, metrics, predictions

    (eager, _, expected, outputs), (module, trainer, actual, other_outputs) = each_strategy(run)
    assert len(expected) == 2
    for one, other in zip(expected, actual, strict=True):
        assert_same_metrics(one, other)
    assert [len(p) for p in outputs] == [16, 16, 8]
    assert_close(other_outputs, outputs)
    assert [p.is_inference() for p in other_outputs] == [inference_mode] * 3
    assert not any(p.requires_grad for p in other_outputs)
    assert [m.training for m in module.modules()] == [m.training for m in eager.modules()]
    for name in ("validation_step", "test_step", "predict_step"):
        assert_in_ort(trainer, name, graphs=4, recompilations=2)  # test_step breaks at its metric


@pytest.mark.parametrize("inference_mode", [True, False])
def test_validation_after_a_fit_is_that_within_it(inference_mode):
    """One graph: inference mode would have another one, and is on again where nothing was compiled before."""
    modes = []

    class Noting(Classifier):
        def on_test_epoch_end(self):
            modes.append(torch.is_inference_mode_enabled())

    def run(strategy):
        module, data = Noting(), TableData()
        trainer = make_trainer(strategy, max_epochs=2, inference_mode=inference_mode)
        trainer.fit(module, data)
        metrics = trainer.validate(module, data, verbose=False)
        assert trainer.validate_loop.inference_mode == inference_mode
        return trainer, metrics + trainer.test(module, data, verbose=False)

    (_, expected), (trainer, actual) = each_strategy(run)
    for one, other in zip(expected, actual, strict=True):
        assert_same_metrics(one, other)
    assert_in_ort(trainer, "validation_step", graphs=2, recompilations=1)  # whole batches, and the last one
    assert modes == [inference_mode] * 2


def test_evaluation_between_fits():
    """Inference mode in between leaves nothing behind that training trips over."""

    def run(strategy):
        module, data = Classifier(), TableData()
        trainer = make_trainer(strategy, max_steps=20)
        metrics = trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        metrics += trainer.test(module, data, verbose=False)
        trainer = make_trainer(strategy, max_steps=30)
        trainer.fit(module, data)
        metrics += trainer.validate(module, data, verbose=False)
        return state_of(module), metrics, trainer.predict(module, data)

    (state, metrics, predictions), (other_state, other_metrics, other_predictions) = each_strategy(run)
    assert_same_state(state, other_state)
    assert metrics[0]["val_loss"] > metrics[2]["val_loss"]
    for one, other in zip(metrics, other_metrics, strict=True):
        assert_same_metrics(one, other)
    assert_close(other_predictions, predictions)


class Predicts(Regressor):
    """No predict_step (the default calls forward with the batch), in a module whose batch is the input itself."""

    def forward(self, batch):
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        return super().forward(x)


def test_default_predict_step():
    def run(strategy):
        module, trainer = Predicts(), make_trainer(strategy)
        return trainer, trainer.predict(module, curve(40))

    (_, expected), (trainer, actual) = each_strategy(run)
    assert_close(actual, expected)
    assert_in_ort(trainer, "predict_step", graphs=2)


class PredictsDict(Classifier):
    """Predictions as a dict with labels, strings and numbers."""

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        logits = self(x)
        return {
            "label": logits.argmax(-1),
            "score": logits.softmax(-1).max(-1).values,
            "y": y,
            "name": f"{dataloader_idx}-{batch_idx}",
            "size": len(x),
        }


class Writes(BasePredictionWriter):
    """Collects what a prediction writer is given."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches.append((prediction, batch_indices, dataloader_idx))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.epoch = predictions


def test_predictions_as_dicts_from_two_loaders():
    def run(strategy):
        writer = Writes()
        trainer = make_trainer(strategy, callbacks=[writer])
        predictions = trainer.predict(PredictsDict(), [table(40), table(24, seed=1)])
        return predictions, writer

    (expected, writer), (actual, other) = each_strategy(run)
    assert [len(p) for p in expected] == [3, 2]
    assert_close([[{k: v for k, v in p.items() if k != "name"} for p in q] for q in actual],
                 [[{k: v for k, v in p.items() if k != "name"} for p in q] for q in expected])  # fmt: skip
    assert [p["name"] for q in actual for p in q] == ["0-0", "0-1", "0-2", "1-0", "1-1"]
    assert [indices for _, indices, _ in other.batches] == [indices for _, indices, _ in writer.batches]
    assert_close(other.epoch[1][1]["score"], writer.epoch[1][1]["score"])


def test_predictions_of_all_lengths():
    """Evaluation of ten lengths in at most three graphs."""

    def run(strategy):
        module, trainer = TextClassifier(), make_trainer(strategy)
        return trainer, trainer.validate(module, sentences(), verbose=False)

    (_, [expected]), (trainer, [actual]) = each_strategy(run)
    assert_same_metrics(expected, actual)
    assert_in_ort(trainer, "validation_step", graphs=3)


def test_predictions_outlive_the_next_batch():
    """Predictions of earlier batches are not overwritten by later runs (same shapes, so the same bindings)."""

    def run(strategy):
        return make_trainer(strategy).predict(Classifier(), table(160))

    expected, actual = each_strategy(run)
    assert len({p.sum().item() + p[0, 0].item() for p in expected}) == 10
    assert_close(actual, expected)


def test_gradients_in_evaluation():
    """inference_mode=False and enable_grad in the test step: saliency maps."""

    class Saliency(Classifier):
        def test_step(self, batch, batch_idx):
            x, y = batch
            with torch.enable_grad():
                x = x.clone().requires_grad_(True)
                self(x).gather(1, y.unsqueeze(1)).sum().backward()
            self.log("saliency", x.grad.abs().mean())

    def run(strategy):
        torch.manual_seed(1)
        trainer = make_trainer(strategy, inference_mode=False)
        return trainer.test(Saliency(), table(40), verbose=False)

    ([expected], [actual]) = each_strategy(run)
    assert expected["saliency"] > 0.01
    assert_same_metrics(expected, actual)


def test_test_after_fit_of_the_other_strategy():
    """Weights trained in ONNX Runtime score the same under auto, and the other way round."""
    trained = fit(Classifier, table)
    eager = fit(Classifier, table, strategy="auto")
    scores = []
    for run in (trained, eager):
        for strategy in ("auto", STRATEGY):
            with quiet():
                scores += make_trainer(strategy).test(run.module, table(80, seed=2), verbose=False)
    assert scores[0]["test_accuracy"] > 0.5
    for score in scores[1:]:
        assert_same_metrics(scores[0], score)


def test_several_test_loaders():
    """The index of the loader arrives, and the metric of each is its own."""

    class Indexed(Classifier):
        def test_step(self, batch, batch_idx, dataloader_idx=0):
            x, y = batch
            self.log("loss", torch.nn.functional.cross_entropy(self(x), y) * (1 + dataloader_idx))

    def run(strategy):
        return make_trainer(strategy).test(Indexed(), [table(40), table(40, seed=1)], verbose=False)

    expected, actual = each_strategy(run)
    assert len(expected) == 2
    for one, other in zip(expected, actual, strict=True):
        assert_same_metrics(one, other)
    assert next(iter(expected[1].values())) > 1.5 * next(iter(expected[0].values()))
