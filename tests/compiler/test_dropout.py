"""Random steps: the same draws as eager under ``seed_everything``, and the same random stream afterwards."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from modules import CLASSES, FEATURES, VOCABULARY, Classifier, ConvNet, Regressor, curve, images, sentences, table
from parity import MemoryLogger, assert_fit_parity
from torch import nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig


def test_dropout_with_shuffled_data_and_validation():
    """The sampler draws from the stream that dropout draws from, so a single extra draw would show."""
    make = partial(Classifier, dropout=0.4)
    eager, _ = assert_fit_parity(make, partial(table, 90, shuffle=True), partial(table, 40, seed=1), graphs=3)
    assert eager.trainer.callback_metrics["val_accuracy"] > 0.5


class Dropouts(ConvNet):
    """The whole family of dropouts, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.spatial = nn.Sequential(nn.Dropout2d(0.2), nn.Dropout3d(0.1), nn.FeatureAlphaDropout(0.1))
        self.flat = nn.Sequential(nn.AlphaDropout(0.1), nn.Dropout(0.0), nn.Dropout1d(0.1))

    def forward(self, x):
        x = self.spatial(self.backbone[:3](x))
        x = self.flat(self.backbone[3:](x))
        x = F.dropout(x, 0.2, training=self.training)
        return self.head(F.feature_alpha_dropout(x, 0.1, self.training))


def test_family_of_dropouts():
    assert_fit_parity(Dropouts, images, partial(images, 32, seed=1))


class Transformer(LightningModule):
    """A language model on nn.TransformerEncoder, dropout everywhere."""

    def __init__(self, dropout: float = 0.2, norm_first: bool = False, activation: str = "relu") -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.positions = nn.Parameter(torch.randn(1, 32, 8) * 0.1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, activation, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, VOCABULARY)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch[0])
        self.log("train_loss", loss, batch_size=8)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch[0]), batch_size=8)

    def loss(self, tokens):
        length = tokens.shape[1] - 1
        x = self.dropout(self.embedding(tokens[:, :-1]) + self.positions[:, :length])
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        logits = self.head(self.encoder(x, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("arguments", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post-norm", "pre-norm"])
def test_transformer_encoder(arguments):
    loader = partial(sentences, shortest=9, longest=9)
    make = partial(Transformer, **arguments)
    assert_fit_parity(make, loader, partial(loader, 16), logger=MemoryLogger, graphs=2)


def test_transformer_of_variable_length():
    """Masks of another size in every batch, still of few graphs."""
    assert_fit_parity(Transformer, partial(sentences, shortest=5, longest=14), logger=MemoryLogger, graphs=3)


class SDPA(Regressor):
    """nanoGPT's attention: F.scaled_dot_product_attention with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        q, k, v = self.project(x.view(-1, 3, 4)).split(4, dim=2)
        q, k, v = (t.view(-1, 3, 2, 2).transpose(1, 2) for t in (q, k, v))
        dropout = 0.3 if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_scaled_dot_product_attention():
    assert_fit_parity(SDPA, curve, partial(curve, 32, seed=1), still=("body", "head"), graphs=2)


class LSTM(Regressor):
    """Two layers with dropout in between."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(3, 6, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 1)

    def forward(self, x):
        states, _ = self.body(x.view(-1, 4, 3))
        return self.head(states[:, -1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_dropout_between_recurrent_layers():
    assert_fit_parity(LSTM, curve, partial(curve, 32, seed=1))


class VAE(LightningModule):
    """A variational autoencoder; noise by randn_like, validation samples as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.ELU(), nn.Linear(16, 6))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, FEATURES))

    def losses(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.exp(0.5 * log_variance) * torch.randn_like(log_variance)
        reconstruction = F.mse_loss(self.decoder(z), x, reduction="sum") / len(x)
        divergence = -0.5 * torch.mean(torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp(), dim=1))
        return {"reconstruction": reconstruction, "divergence": divergence}

    def training_step(self, batch, batch_idx):
        x, _ = batch
        losses = self.losses(x)
        self.log_dict(losses)
        return losses["reconstruction"] + 0.1 * losses["divergence"]

    def validation_step(self, batch, batch_idx):
        x, _ = batch
        self.log_dict({f"val_{name}": value for name, value in self.losses(x).items()})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_variational_autoencoder():
    assert_fit_parity(VAE, partial(table, shuffle=True), partial(table, 40, seed=1), logger=MemoryLogger)


class Draws(Regressor):
    """Every way to draw numbers in a step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        n = x.shape[0]
        x = x + 0.05 * torch.randn(n, FEATURES) + torch.empty_like(x).uniform_(-0.1, 0.1)
        x = x * torch.empty_like(x).bernoulli_(0.9) + 0.1 * torch.rand_like(x) * torch.rand(1)
        x = x + 0.01 * torch.randint(0, 5, (n, 1)) + 0.1 * torch.zeros_like(x).normal_()
        x = x + torch.normal(0.0, 0.05, size=(n, FEATURES))
        order = torch.randperm(n)
        weight = torch.rand(())
        x, y = weight * x + (1 - weight) * x[order], weight * y + (1 - weight) * y[order]
        return F.mse_loss(self(x), y)


def test_all_kinds_of_draws():
    assert_fit_parity(Draws, curve, graphs=1)


class DrawsFromTensors(Regressor):
    """Distributions whose parameters are tensors, some of them computed in the step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = x * torch.bernoulli(torch.full_like(x, 0.9))
        x = torch.normal(x, 0.05 * x.abs())
        x = x * torch.bernoulli(torch.sigmoid(x + 3))
        return F.mse_loss(self(x), y)


def test_draws_from_tensors():
    """These cannot be drawn ahead of the step; they may run in torch, with eager's numbers."""
    assert_fit_parity(DrawsFromTensors, curve, in_ort=())


class Samples(Regressor):
    """torch.distributions and Gumbel softmax, with reparametrized gradients; RReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.choice = nn.Linear(FEATURES, CLASSES)
        self.values = nn.Linear(CLASSES, 1)
        self.scale = nn.Parameter(torch.zeros(1))
        self.activation = nn.RReLU()

    def training_step(self, batch, batch_idx):
        x, y = batch
        chosen = F.gumbel_softmax(self.choice(x), tau=1.0)
        mean = self.values(self.activation(chosen)) + self(x)
        prediction = torch.distributions.Normal(mean, self.scale.exp() * 0.1).rsample()
        return F.mse_loss(prediction, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_distributions():
    """Whatever ONNX Runtime cannot draw is drawn by torch; the stream must be eager's."""
    assert_fit_parity(Samples, curve, in_ort=())


@torch.library.custom_op("test_dropout::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


noisy.register_fake(torch.empty_like)
noisy.register_autograd(lambda ctx, grad: grad)


class DrawsUnseen(Regressor):
    """An operator of the user's, of which a graph does not tell that it draws, before or after other draws."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        x = F.dropout(noisy(F.dropout(x, 0.1) if batch_idx % 2 else x), 0.1)
        return F.mse_loss(self(x), y)


def test_draws_of_operators_of_the_user():
    assert_fit_parity(DrawsUnseen, curve, in_ort=())


def test_monte_carlo_dropout():
    """Dropout left on in validation, by a module that overrides the hook."""

    class MonteCarlo(Classifier):
        def on_validation_start(self):
            self.net[3].train()

        def validation_step(self, batch, batch_idx):
            x, y = batch
            samples = torch.stack([self(x).softmax(-1) for _ in range(3)])
            self.log("spread", samples.std(0).mean())
            self.log("val_loss", F.nll_loss(samples.mean(0).log(), y))

    eager, _ = assert_fit_parity(partial(MonteCarlo, dropout=0.5), table, partial(table, 40, seed=1))
    assert eager.trainer.callback_metrics["spread"] > 0.01


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.4), nn.AlphaDropout(0.4), nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.4))]
)
def test_dropout_of_each_sample_by_itself(layer, randomness):
    """Under ``vmap`` a mask is drawn into an expanded tensor."""

    def step(x):
        return torch.func.vmap(layer, randomness=randomness)(x)

    x = torch.randn(4, 6, requires_grad=True)
    results = []
    for function in (step, torch.compile(step, backend="lightning_ort")):
        torch.manual_seed(1)
        out = function(x)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), x), torch.rand(2)])
    for got, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(got, expected)


BEHIND = {
    "roll": lambda x: x.roll((1, -2), (1, 2)),
    "flat roll": lambda x: x.roll(3),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 4),
    "max_unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "logsigmoid": F.logsigmoid,
    "rrelu": lambda x: F.rrelu(x, training=False),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "nearest-exact": lambda x: F.interpolate(x, (11, 9), mode="nearest-exact"),
    "bilinear": lambda x: F.interpolate(x, (11, 9), mode="bilinear"),
    "smoothed": lambda x: F.interpolate(x, (5, 4), mode="bilinear", antialias=True),
    "bicubic": lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic", align_corners=True),
    "trilinear": lambda x: F.interpolate(x[:, :, None], scale_factor=2, mode="trilinear"),
    "area": lambda x: F.interpolate(x, (5, 4), mode="area"),
    "uneven means": lambda x: F.adaptive_avg_pool2d(x, (3, 5)),
    "adaptive maxima": lambda x: F.adaptive_max_pool2d(x, 2),
    "maxima of volumes": lambda x: F.adaptive_max_pool3d(x.unflatten(1, (4, 4)), 2),
    "means of volumes": lambda x: F.adaptive_avg_pool3d(x.unflatten(1, (4, 4)), 3),
    "circular": lambda x: F.pad(x, (1, 2, 1, 0), mode="circular"),
    "cummax": lambda x: x.cummax(2)[0],
    "cumprod": lambda x: x.cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "quotients": lambda x: x.detach().floor_divide(x[:, :, :1].detach() + 2) * x,
    "rounded quotients": lambda x: x.detach().div(torch.tensor(0.1).double(), rounding_mode="floor") * x,
    "signs": lambda x: x.copysign(-x.detach()[0]),
    "sums of exponentials": lambda x: torch.logaddexp(x[0, 0, 0], x),
    "steps": lambda x: torch.heaviside(x.detach().round(), x[0, 0].detach()) * x,
    "baddbmm": lambda x: torch.baddbmm(x[0].mT, x[0].mT, torch.ones(16, 8, 8, dtype=x.dtype), beta=2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "batch norm of sequences": lambda x: F.batch_norm(x.flatten(2).mT, None, None, training=True),
    "batch norm of rows": lambda x: F.batch_norm(x[0, 0].T, torch.zeros(8).double(), torch.ones(8).double()),
}


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("lies", [torch.channels_last, torch.contiguous_format, "permuted"])
@pytest.mark.parametrize("name", BEHIND)
def test_masks_lie_as_what_they_are_for(name, lies, placement):
    """Where torch's tracing has other strides than its kernels, the numbers would come in another order."""
    x = torch.randn(2, 16, 8, 6, dtype=torch.float64)
    x = (
        x.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
        if lies == "permuted"
        else x.contiguous(memory_format=lies)
    )
    x.requires_grad_()

    def step(x):
        return F.dropout(BEHIND[name](x.cos()), 0.5).square().mean()

    compiled = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))
    found = []
    for function in (step, compiled):
        torch.manual_seed(0)
        loss = function(x)
        found.append((loss, *torch.autograd.grad(loss, x), torch.rand(3)))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_own_generator():
    """A generator of the module's own: the global stream is not touched by it."""

    class Owned(Regressor):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(5)

        def training_step(self, batch, batch_idx):
            x, y = batch
            return F.mse_loss(self(x + 0.1 * torch.randn(x.shape, generator=self.generator)), y)

    assert_fit_parity(Owned, curve, in_ort=())
