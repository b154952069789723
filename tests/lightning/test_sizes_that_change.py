"""Sizes that change are open in the first graph of a step, where a loader, another step or an earlier run tells."""

from __future__ import annotations

import dataclasses
from collections import UserDict

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from modules import TextClassifier, sentences
from parity import assert_same_outcome, assert_same_state, fit, make_trainer, needs_ort, state_of, step_report
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.lightning import open_sizes
from lightning_ort.lightning.open_sizes import smaller_at_the_end


def rows(n: int, batch_size: int = 8, **settings) -> DataLoader:
    generator = torch.Generator().manual_seed(n)
    data = TensorDataset(torch.randn(n, 4, generator=generator), torch.randn(n, 1, generator=generator))
    return DataLoader(data, batch_size=batch_size, **settings)


class Net(LightningModule):
    """A linear model with all steps, whose training step leaves the graph in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        hidden = self.a(batch[0]).tanh()
        torch._dynamo.graph_break()
        loss = nn.functional.mse_loss(self.b(hidden), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.b(self.a(batch[0]).tanh()), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self.b(self.a(batch[0]).tanh())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Attributes(Callback):
    """What hangs at the tensors of batches when their step is over."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.names |= {name for x in [*batch, outputs["loss"]] for name in x.__dict__}


def reports(trainer: Trainer) -> dict[str, tuple[int, int]]:
    """Per step, graphs and recompilations."""
    report = trainer.strategy.report()
    return {name: (report[name].graphs, len(report[name].recompilations)) for name in report}


def test_last_batches_that_are_smaller():
    """The loader tells; the graphs on each side of a graph break serve all batches, and nothing is left at tensors."""
    attributes = Attributes()
    ours = fit(Net, lambda: rows(20), lambda: rows(13), max_epochs=3, callbacks=lambda: [attributes])
    theirs = fit(Net, lambda: rows(20), lambda: rows(13), max_epochs=3, strategy="auto")
    assert_same_state(state_of(theirs.module), state_of(ours.module))
    ours.trainer.predict(ours.module, rows(21))
    assert reports(ours.trainer) == {"training_step": (3, 0), "validation_step": (1, 0), "predict_step": (1, 0)}
    assert not attributes.names


class Sized(LightningModule):
    """Compares the sizes of a batch with others, by itself and in torch's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm = nn.GRU(4, 6, batch_first=True), nn.LSTM(6, 6, batch_first=True, bidirectional=True)
        self.attention, self.head = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, 1)

    def training_step(self, batch, batch_idx):
        x = batch[0].unsqueeze(1).repeat(1, 3, 1)
        n = len(batch[1])
        assert x.shape == (n, 3, 4) and list(x.shape) != [n, 4] and (n, 3) == tuple(x.shape[:2])
        x = self.lstm(self.gru(x)[0])[0]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.mse_loss(self.head(x[:, -1]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_open_sizes_that_are_compared():
    ours = fit(Sized, lambda: rows(20), max_epochs=3)
    theirs = fit(Sized, lambda: rows(20), max_epochs=3, strategy="auto")
    assert_same_state(state_of(theirs.module), state_of(ours.module))
    assert reports(ours.trainer) == {"training_step": (1, 0)}
    assert not ours.trainer.strategy.report()["training_step"].in_torch


class Recurrent(LightningModule):
    """A recurrent layer of both directions over sequences, which a batch has of one length."""

    def __init__(self, kind, **options) -> None:
        super().__init__()
        self.layer = kind(4, 6, batch_first=True, bidirectional=True, **options)
        self.head = nn.Linear(12, 1)
        self.arrived: list[str] = []

    def on_fit_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.arrived.append(name))

    def training_step(self, batch, batch_idx):
        outputs, state = self.layer(batch)
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(outputs).tanh().mean() + hidden.square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def lengths(*steps: int) -> DataLoader:
    generator = torch.Generator().manual_seed(2)
    return DataLoader([torch.randn(3, n, 4, generator=generator) for n in steps], batch_size=None)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.GRU, {}),
        (nn.RNN, {}),
        (nn.RNN, {"nonlinearity": "relu"}),
        (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.3, "bias": False}),
    ],
)
def test_recurrent_layers_over_sequences_of_any_length(kind, options, precision):
    """They are no loop over one length, and their gradients arrive in eager's order."""

    def trained(strategy):
        loaders = (lambda: lengths(12, 9, 15, 7, 21, 11), lambda: lengths(8, 8))
        return fit(lambda: Recurrent(kind, **options), *loaders, strategy=strategy, precision=precision, max_epochs=2)

    if kind is nn.LSTM and precision == "bf16-mixed" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        # under autocast torch calls oneDNN, which has no LSTM in bfloat16 for processors without AVX-512
        for strategy in ("auto", "ort"):
            with pytest.raises(RuntimeError, match="primitive descriptor for the LSTM"):
                trained(strategy)
        return
    theirs, ours = trained("auto"), trained("ort")
    atol = 1e-6 if precision == "32-true" else 2e-2
    assert_same_state(state_of(theirs.module), state_of(ours.module), atol)
    torch.testing.assert_close(ours.trainer.callback_metrics, theirs.trainer.callback_metrics, rtol=1e-2, atol=atol)
    assert len(theirs.module.arrived) == 12 * len(state_of(theirs.module))
    assert ours.module.arrived == theirs.module.arrived
    assert reports(ours.trainer) == {"validation_step": (1, 0), "training_step": (1, 0)}
    assert not ours.trainer.strategy.report()["training_step"].in_torch


class Pooled(LightningModule):
    """Maxima over windows of sequences, whose number follows from the length."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 6, 3, padding=1), nn.Conv1d(6, 1, 1)

    def training_step(self, batch, batch_idx):
        x = nn.functional.max_pool1d(self.first(batch.transpose(1, 2)), 3, 2, ceil_mode=True)
        return self.last(nn.functional.max_pool1d(x, 2)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_maxima_over_sequences_of_any_length(placement):
    def trained(strategy):
        loaders = (lambda: lengths(12, 9, 15, 8, 21, 11), lambda: lengths(8, 8))
        return fit(Pooled, *loaders, strategy=strategy, max_epochs=2)

    theirs, ours = trained("auto"), trained(ORTStrategy(placement=placement))
    assert_same_state(state_of(theirs.module), state_of(ours.module), 1e-6)
    torch.testing.assert_close(ours.trainer.callback_metrics, theirs.trainer.callback_metrics)
    assert reports(ours.trainer) == {"validation_step": (1, 0), "training_step": (1, 0)}


class Images(LightningModule):
    """Convolutions of each kind, over images that lie as ``layout`` says."""

    def __init__(self, layout: torch.memory_format) -> None:
        super().__init__()
        self.layout = layout
        self.frames = nn.Conv3d(1, 1, (3, 1, 1))
        self.images = nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8),
            nn.Conv2d(8, 8, 3, stride=2, padding=2, dilation=2),
            nn.ConvTranspose2d(8, 4, 2, 2),
        ).to(memory_format=layout)
        self.rows = nn.Conv1d(4 * 8, 3, 3)

    def forward(self, x):
        x = self.frames(x[:, None])[:, 0] if x.shape[1] > 3 else x
        x = self.images(x.contiguous(memory_format=self.layout))
        return self.rows(x.permute(0, 2, 1, 3).flatten(1, 2)).mean(-1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("placement", ["onnxruntime", "torch", "torch-channels-last"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [3, 5])
def test_last_batches_of_fewer_than_16_images(placement, layout, channels):
    """Torch has another kernel for them, which says nothing about the result."""

    def images(n: int) -> DataLoader:
        generator = torch.Generator().manual_seed(n)
        data = TensorDataset(torch.randn(n, channels, 8, 8, generator=generator), torch.arange(n) % 3)
        return DataLoader(data, 20)

    def trained(strategy):
        return fit(lambda: Images(layout), lambda: images(65), lambda: images(27), strategy=strategy, max_epochs=2)

    theirs, ours = trained("auto"), trained(ORTStrategy(placement=placement))
    expected, predicted = (torch.cat(run.trainer.predict(run.module, images(23))) for run in (theirs, ours))
    assert_same_state(state_of(theirs.module), state_of(ours.module), 1e-5)
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-5)
    counts = {"validation_step": (1, 0), "training_step": (1, 0), "predict_step": (1, 0)}
    assert reports(ours.trainer) == counts


def test_what_validation_has_seen(unpadded):
    """Two batches of another length in the sanity check, and training has open lengths from its first batch on."""
    run = fit(TextClassifier, sentences, lambda: sentences(n=35), max_epochs=1)
    assert reports(run.trainer) == {"training_step": (1, 0), "validation_step": (2, 1)}


def test_loaders_that_pad():
    """Tokens of a batch that is made in the user's way have open lengths from the first one on, in all steps."""
    theirs = fit(TextClassifier, sentences, lambda: sentences(n=35), max_epochs=1, strategy="auto")
    run = fit(TextClassifier, sentences, lambda: sentences(n=35), max_epochs=1)
    assert reports(run.trainer) == {"training_step": (1, 0), "validation_step": (1, 0)}
    assert_same_state(state_of(theirs.module), state_of(run.module))


def test_loaders_that_might_pad_and_do_not(monkeypatch, tmp_path, opened):
    """The next run has the graphs of the first, with lengths open, and makes none of its own."""
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "1")
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path))

    def same_length():
        tokens, labels = torch.randint(1, 20, (32, 7)), torch.randint(2, (32,))
        data = TensorDataset(tokens, labels)
        return DataLoader(data, batch_size=4, collate_fn=lambda rows: tuple(map(torch.stack, zip(*rows, strict=True))))

    for _ in range(2):
        opened.clear()
        run = fit(TextClassifier, same_length, max_epochs=1)
        assert reports(run.trainer) == {"training_step": (1, 0)}
        assert opened[0] == {1}


@pytest.fixture
def unpadded(monkeypatch):
    """Loaders say nothing of padding."""
    monkeypatch.setattr(open_sizes, "makes_batches_its_own_way", lambda trainer, step: False)


@pytest.fixture
def opened(monkeypatch):
    """Which dimensions were marked as open, per call."""
    opened, real = [], open_sizes.marked_open

    def marked_open(sizes):
        opened.append({dim for _, dim in sizes})
        return real(sizes)

    monkeypatch.setattr(open_sizes, "marked_open", marked_open)
    return opened


def test_what_an_earlier_run_has_seen(monkeypatch, tmp_path, unpadded):
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "1")
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path))
    first = fit(TextClassifier, lambda: sentences(n=32), max_epochs=1)
    assert reports(first.trainer) == {"training_step": (2, 1)}
    again = fit(TextClassifier, lambda: sentences(n=32), max_epochs=1)
    assert reports(again.trainer) == {"training_step": (1, 0)}
    assert_same_state(state_of(first.module), state_of(again.module))
    # no two runs may differ, whatever is in a cache
    fixed = fit(TextClassifier, lambda: sentences(n=32), max_epochs=1, deterministic=True)
    torch.use_deterministic_algorithms(False)
    assert reports(fixed.trainer) == {"training_step": (2, 1)}
    for entry in (tmp_path / "sizes").iterdir():
        entry.write_text('{"version": "0", "sizes": [[null]]}')
    assert reports(fit(TextClassifier, lambda: sentences(n=32), max_epochs=1).trainer) == {"training_step": (2, 1)}


def test_equal_batches_stay_closed(opened):
    """Where all batches are equal, a graph has the numbers in it, which leaves more to its compiler."""
    run = fit(Net, lambda: rows(24), max_epochs=2)
    assert reports(run.trainer) == {"training_step": (3, 0)}
    assert opened == [set()] * 3
    fit(Net, lambda: rows(20), max_epochs=2)
    assert {0} in opened


def loader_of(what: str):
    if what == "iterable":

        class Stream(IterableDataset):
            def __iter__(self):
                return iter(torch.randn(20, 4))

        return DataLoader(Stream(), batch_size=8)
    if what == "own sampler":
        data = TensorDataset(torch.randn(20, 4))
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 8, drop_last=False))
    return {
        "smaller": lambda: rows(20),
        "equal": lambda: rows(24),
        "dropped": lambda: rows(20, drop_last=True),
        "one batch": lambda: rows(5),
        "several": lambda: {"a": rows(20), "b": [rows(11, 4)]},
        "a list": lambda: [torch.randn(2, 4)],
    }[what]()


@pytest.mark.parametrize(
    ("what", "limit", "expected"),
    [
        ("smaller", 1.0, {8}),
        ("smaller", 2, set()),
        ("smaller", 3, {8}),
        ("smaller", 0.5, set()),
        ("equal", 1.0, set()),
        ("dropped", 1.0, set()),
        ("one batch", 1.0, set()),
        ("several", 1.0, {8, 4}),
        ("own sampler", 1.0, {8}),
        ("iterable", 1.0, None),
        ("a list", 1.0, None),
    ],
)
def test_what_loaders_tell(what, limit, expected):
    class Module(LightningModule):
        found = None

        def training_step(self, batch, batch_idx):
            self.found = smaller_at_the_end(self.trainer, "training_step")
            return self.w.sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    module = Module()
    module.w = nn.Parameter(torch.ones(2))
    trainer = make_trainer("auto", max_epochs=1, limit_train_batches=limit)
    trainer.fit(module, loader_of(what))
    assert module.found == expected


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: list


@pytest.mark.parametrize(
    "collate",
    [
        lambda x, y: {"x": x, "more": [y]},
        lambda x, y: UserDict(x=x, more=(y,)),
        lambda x, y: Batch(x, [y]),
    ],
    ids=["dict", "mapping", "dataclass"],
)
def test_kinds_of_batches(collate):
    class Module(Net):
        def training_step(self, batch, batch_idx):
            x, more = (batch.x, batch.more) if isinstance(batch, Batch) else (batch["x"], batch["more"])
            return nn.functional.mse_loss(self.b(self.a(x).tanh()), more[0])

    def loader():
        return rows(20, collate_fn=lambda rows: collate(*map(torch.stack, zip(*rows, strict=True))))

    run = fit(Module, loader, max_epochs=2)
    graphs, recompilations = reports(run.trainer)["training_step"]
    assert (graphs, recompilations) == (1, 0)


class SemiSupervised(LightningModule):
    """Losses of batches of two loaders, which the step reads as numbers before it returns their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU())
        self.classes, self.turns, self.pixels, self.before = (
            nn.Linear(16, 10),
            nn.Linear(16, 4),
            nn.Linear(16, 64),
            None,
        )

    def training_step(self, batch, batch_idx):
        (x, y), (u,) = batch["labelled"], batch["other"]
        k = torch.randint(0, 4, (len(u),))
        turned = torch.stack([torch.rot90(image, int(times), (1, 2)) for image, times in zip(u, k, strict=True)])
        losses = [
            nn.functional.cross_entropy(self.classes(self.body(x)), y),
            nn.functional.cross_entropy(self.turns(self.body(turned)), k),
            nn.functional.mse_loss(self.pixels(self.body(u)), u.flatten(1)),
        ]
        with torch.no_grad():
            sure, guess = self.classes(self.body(u)).softmax(-1).max(-1)
        noisy = self.classes(self.body(u + 0.1 * torch.randn_like(u)))
        guessed = nn.functional.cross_entropy(noisy, guess, reduction="none") * (sure >= 0.12).to(x.dtype)
        total = sum(losses) + guessed.mean()
        self.before = [float(loss.detach()) for loss in losses]
        return {"loss": total, "parts": [loss.detach() for loss in losses]}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def loaders_of_two_lengths() -> CombinedLoader:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(32, 1, 8, 8, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    loaders = {
        "labelled": DataLoader(TensorDataset(images[:12], labels), 4),
        "other": DataLoader(TensorDataset(images[12:]), 6),
    }
    return CombinedLoader(loaders, "max_size_cycle")


@needs_ort
def test_a_graph_that_cannot_be_compiled_for_its_loss_late():
    """Sizes that were fixed meanwhile leave the gradients to the pair of graphs that there is."""
    eager, other = (
        fit(SemiSupervised, loaders_of_two_lengths, strategy=strategy, max_epochs=2, max_steps=-1)
        for strategy in ("auto", ORTStrategy(print_report=False))
    )
    assert_same_outcome(eager, other)
    assert other.module.before == pytest.approx(eager.module.before, rel=1e-5)
    assert step_report(other.trainer, "training_step").graphs > 1
