"""A fit under ``"ort"`` is a fit under ``"auto"``: weights, buffers, random stream, hooks, what is left behind."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from modules import (
    FEATURES,
    VOCABULARY,
    Classifier,
    ConvNet,
    Regressor,
    TextClassifier,
    curve,
    images,
    sentences,
    table,
)
from parity import (
    STRATEGY,
    MemoryLogger,
    assert_fit_parity,
    assert_in_ort,
    assert_same_metrics,
    assert_same_outcome,
    assert_same_state,
    fit,
    make_trainer,
    quiet,
    state_of,
    step_report,
)
from torch import nn


def test_classifier():
    """Shuffled data, BatchNorm, metric objects, a sanity check and validation after each epoch."""
    train = partial(table, shuffle=True)
    eager, _ = assert_fit_parity(Classifier, train, partial(table, 48, seed=1), graphs=3, logger=MemoryLogger)
    assert eager.trainer.callback_metrics["val_accuracy"] > 0.5


def test_convolutions():
    eager, _ = assert_fit_parity(ConvNet, partial(images, shuffle=True), partial(images, 32, seed=1), graphs=3)
    assert eager.trainer.callback_metrics["val_accuracy"] > 0.5


class Lazy(Classifier):
    """Layers whose weights are drawn in the first step, the second ones behind a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LazyLinear(16), nn.Tanh(), nn.Dropout(0.3), nn.LazyLinear(self.net[-1].out_features)
        )


def test_lazy_layers():
    def train(strategy):
        torch.manual_seed(0)
        module, trainer = Lazy(), make_trainer(strategy, max_steps=6)
        trainer.fit(module, table())
        return module.state_dict(), trainer

    with quiet():
        (wanted, _), (got, trainer) = train("auto"), train(STRATEGY)
    assert_same_state(wanted, got, 1e-4)
    step = step_report(trainer, "training_step")
    assert [entry.what for entry in step.in_torch] == ["the first call"]
    assert step.graphs > 0 and not step.graph_breaks


def test_regressor():
    assert_fit_parity(Regressor, curve, partial(curve, 32, seed=1), logger=MemoryLogger, graphs=3)


class Tied(LightningModule):
    """A language model whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.mixer = nn.Linear(8, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch, batch_idx):
        tokens, _ = batch
        logits = self.head(torch.tanh(self.mixer(self.embedding(tokens[:, :-1]))))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_tied_weights():
    _, other = assert_fit_parity(Tied, partial(sentences, shortest=9, longest=9))
    assert other.module.head.weight is other.module.embedding.weight


class Unused(LightningModule):
    """Parameters outside the loss have no gradient (not a zero one: weight decay would shrink them)."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(FEATURES, 1)
        self.unused = nn.Linear(FEATURES, 1)
        self.detached = nn.Linear(FEATURES, 1)
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = self.frozen(x)
        return F.mse_loss(self.used(x) + self.detached(x).detach(), y)

    def on_before_optimizer_step(self, optimizer):
        assert self.used.weight.grad is not None
        assert all(p.grad is None for n, p in self.named_parameters() if not n.startswith("used"))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


def test_parameters_without_gradient_stay():
    assert_fit_parity(Unused, curve, still=("unused", "detached"))


class Hooks(Regressor):
    """Writes down the hooks that Lightning calls, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def setup(self, stage):
        self.calls.append(f"setup {stage}")

    def configure_model(self):
        self.calls.append("configure_model")

    def on_fit_start(self):
        self.calls.append("on_fit_start")

    def on_train_start(self):
        self.calls.append("on_train_start")

    def on_train_batch_start(self, batch, batch_idx):
        self.calls.append(f"on_train_batch_start {batch_idx} {len(batch)}")

    def on_before_zero_grad(self, optimizer):
        self.calls.append("on_before_zero_grad")

    def on_before_backward(self, loss):
        self.calls.append(f"on_before_backward {loss.requires_grad} {tuple(loss.shape)}")

    def on_after_backward(self):
        self.calls.append("on_after_backward")
        self.calls.append(sum(p.grad is not None for p in self.parameters()))

    def on_before_optimizer_step(self, optimizer):
        self.calls.append(f"on_before_optimizer_step {type(optimizer).__name__}")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(f"on_train_batch_end {sorted(outputs)} {outputs['loss'].requires_grad}")

    def on_validation_model_eval(self):
        self.calls.append("on_validation_model_eval")
        super().on_validation_model_eval()

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(f"on_validation_batch_end {outputs}")

    def on_train_epoch_end(self):
        self.calls.append(f"on_train_epoch_end {self.training}")

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")


def test_hooks_are_called_as_before():
    eager, other = assert_fit_parity(Hooks, curve, partial(curve, 32, seed=1), max_epochs=3)
    assert len(eager.module.calls) > 100
    assert other.module.calls == eager.module.calls


class SkipsSteps(Regressor):
    """Returns None for a batch that should not count."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        if torch.isnan(loss):
            return None
        return loss


def poisoned():
    """Every epoch's third batch is not a number."""
    loader = curve()
    loader.dataset.tensors[0][40] = float("nan")
    return loader


def test_skips_a_batch_by_a_condition_on_the_loss():
    eager, _ = assert_fit_parity(SkipsSteps, poisoned, max_epochs=6)
    assert all(p.isfinite().all() for p in eager.module.parameters())


def test_many_fits_in_one_process():
    """A notebook fits the same class again and again; Dynamo's recompile limit must not push it into torch."""
    torch._dynamo.reset()
    for seed in range(10):
        torch.manual_seed(seed)
        module = Classifier()
        expected = copy.deepcopy(module)
        trainer = make_trainer(max_steps=2)
        with quiet():
            trainer.fit(module, table())
            make_trainer("auto", max_steps=2).fit(expected, table())
        assert_same_state(state_of(expected), state_of(module))
        assert_in_ort(trainer, graphs=2)


class BreaksInside(Classifier):
    """Dynamo compiles its ``forward``, and what follows the break in there, by themselves."""

    def forward(self, x):
        y = self.net(x)
        torch._dynamo.graph_break()
        return y * 2


@pytest.mark.parametrize("door", ["Trainer", "torch.compile"])
def test_functions_with_graphs_of_their_own_in_many_fits(door):
    """What was compiled of them for other Trainers is not taken, and does not count."""
    torch._dynamo.reset()
    for seed in range(10):
        torch.manual_seed(seed)
        trainer = make_trainer(max_steps=2)
        with quiet():
            trainer.fit(BreaksInside(), table())
        step = trainer.strategy.report()["training_step"]
        assert (step.graphs, step.recompilations, step.in_torch) == (5, [], []), trainer.strategy.report()
        if door == "torch.compile":  # of the same code, for everybody
            module = BreaksInside()
            torch.compile(module, backend="eager")(torch.ones(2, 12)).sum().backward()


def test_fit_goes_on_with_new_trainers():
    """Three fits of one module, the second with the other strategy; validation in between."""
    results = []
    for strategies in (("auto", "auto", "auto"), (STRATEGY, "auto", STRATEGY)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = Classifier()
        metrics = []
        for strategy in strategies:
            trainer = make_trainer(strategy, max_steps=17)
            with quiet():
                trainer.fit(module, table())
                metrics += trainer.validate(module, table(32, seed=1), verbose=False)
        results.append((state_of(module), metrics))
    (expected, expected_metrics), (actual, actual_metrics) = results
    assert_same_state(expected, actual)
    for one, other in zip(expected_metrics, actual_metrics, strict=True):
        assert_same_metrics(one, other)


def test_one_trainer_fits_twice():
    """``trainer.fit`` a second time, after raising max_epochs, goes on where the first stopped."""
    results = []
    for strategy in ("auto", STRATEGY):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module, trainer = Classifier(), make_trainer(strategy, max_epochs=2)
        with quiet():
            trainer.fit(module, table())
            trainer.fit_loop.max_epochs = 5
            trainer.fit(module, table())
        assert trainer.global_step == 30
        results.append(state_of(module))
    assert_same_state(*results)


def test_nothing_is_left_on_the_module():
    """After fit the module is the plain module: same attributes, copied, pickled and called as before."""
    eager = fit(Classifier, table, strategy="auto", max_steps=3)
    other = fit(Classifier, table, max_steps=3)
    assert sorted(vars(other.module)) == sorted(vars(eager.module))
    assert list(other.module.state_dict()) == list(eager.module.state_dict())
    assert type(other.module).training_step is Classifier.training_step
    x = torch.randn(5, FEATURES)
    expected = eager.module.eval()(x)
    other.module._trainer = None  # a trainer holds loaders and loops that no strategy pickles
    copies = [other.module, copy.deepcopy(other.module), pickle.loads(pickle.dumps(other.module))]
    for module in copies:
        torch.testing.assert_close(module.eval()(x), expected, rtol=1e-4, atol=1e-5)
        batch = (x, torch.zeros(5, dtype=torch.long))
        loss = F.cross_entropy(module.train()(batch[0]), batch[1])
        loss.backward()
        assert module.net[0].weight.grad.abs().sum() > 0


class KeepsGradients(Regressor):
    """Keeps each step's gradients, as gradient-statistics code does, without cloning them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []
        self.copies = []

    def on_before_optimizer_step(self, optimizer):
        self.kept.append([p.grad for p in self.parameters()])
        self.copies.append([p.grad.clone() for p in self.parameters()])


def test_gradients_are_not_overwritten_by_the_next_run():
    eager, other = assert_fit_parity(KeepsGradients, curve)
    for run in (eager, other):
        assert len(run.module.kept) == 50
        for kept, copies in zip(run.module.kept, run.module.copies, strict=True):
            for tensor, copied in zip(kept, copies, strict=True):
                assert torch.equal(tensor, copied)


class KeepsOutputs(Regressor):
    """Returns predictions with the loss and keeps them across steps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = []
        self.copies = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        prediction = self(x)
        return {"loss": F.mse_loss(prediction, y), "prediction": prediction.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.kept.append(outputs["prediction"])
        self.copies.append(outputs["prediction"].clone())


def test_outputs_are_not_overwritten_by_the_next_run():
    eager, other = assert_fit_parity(KeepsOutputs, curve)
    for run in (eager, other):
        assert len(run.module.kept) == 50
        assert all(torch.equal(a, b) for a, b in zip(run.module.kept, run.module.copies, strict=True))
    torch.testing.assert_close(other.module.kept, eager.module.kept, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("setting", ["requires_grad inputs", "buffers", "complex code"])
def test_awkward_modules(setting):
    make = {"requires_grad inputs": InputGradient, "buffers": Buffers, "complex code": Branches}[setting]
    assert_fit_parity(make, curve)


class InputGradient(Regressor):
    """Adversarial training: the gradient with respect to the input, then a loss on the perturbed input."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x.clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(F.mse_loss(self(x), y), x)
        return F.mse_loss(self(x.detach() + gradient / gradient.norm()), y)


class Buffers(Regressor):
    """A running mean and a step counter in buffers, updated in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        self.steps += 1
        loss = F.mse_loss(self(x - self.mean), y)
        self.last = loss.detach()
        return loss


class Branches(Regressor):
    """Python control flow: loops over layers, early branches on shapes, helper functions, f-strings, try/finally."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = {}
        for name, weight in [("l1", 0.1), ("l2", 1.0)]:
            losses[f"loss_{name}"] = weight * self._distance(self(x), y, name)
        try:
            total = sum(losses.values())
        finally:
            losses.clear()
        return total if x.shape[0] > 1 else total * 0

    @staticmethod
    def _distance(a, b, name):
        return (a - b).pow(2).mean() if name == "l2" else F.smooth_l1_loss(a, b)


def test_variable_length_text():
    eager, _ = assert_fit_parity(TextClassifier, partial(sentences, shuffle=True), graphs=3)
    assert eager.trainer.callback_metrics["train_loss"] < 0.6


def test_comparison_notices_a_difference():
    """The comparison itself fails for a weight that is 2e-4 off, and passes at 5e-5."""
    eager = fit(Regressor, curve, strategy="auto", max_steps=3)
    other = fit(Regressor, curve, strategy="auto", max_steps=3)
    weight = other.module.head.weight
    index = weight.abs().argmax()
    with torch.no_grad():
        weight.view(-1)[index] *= 1 + 5e-5
        assert_same_outcome(eager, other)
        weight.view(-1)[index] *= 1 + 2e-4
    with pytest.raises(AssertionError, match=r"head\.weight"):
        assert_same_outcome(eager, other)
