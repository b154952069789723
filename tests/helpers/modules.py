"""Small LightningModules as Lightning users write them, and loaders of synthetic data they can learn."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

FEATURES = 12
CLASSES = 4
VOCABULARY = 20


def table(n: int = 96, batch_size: int = 16, shuffle: bool = False, seed: int = 0) -> DataLoader:
    """Rows of 12 features with one of 4 labels."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=generator)
    teacher = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(100))
    return DataLoader(TensorDataset(x, (x @ teacher).argmax(-1)), batch_size=batch_size, shuffle=shuffle)


def curve(n: int = 96, batch_size: int = 16, shuffle: bool = False, seed: int = 0) -> DataLoader:
    """Rows of 12 features with a smooth target of one column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=generator)
    y = torch.sin(x[:, :3].sum(-1, keepdim=True)) + 0.1 * x[:, 3:4]
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def images(n: int = 64, batch_size: int = 16, shuffle: bool = False, seed: int = 0) -> DataLoader:
    """Images of 8x8 with one bright quadrant, which is the label."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 8, 8, generator=generator)
    y = torch.randint(0, 4, (n,), generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        image[:, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


class Sentences(Dataset):
    """Token sequences of another length every 8 (two of three a little shorter).

    The label says whether the first half of the vocabulary prevails.
    """

    def __init__(self, n: int, shortest: int, longest: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        spread = longest - shortest + 1
        lengths = [shortest + i // 8 * 7 % spread - (i % 3 if spread > 1 else 0) for i in range(n)]
        self.tokens = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
        self.labels = [int((t < VOCABULARY // 2).float().mean() > 0.5) for t in self.tokens]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.tokens[index], self.labels[index]


def pad(samples: list[tuple[torch.Tensor, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Collate to the longest sequence of the batch; token 0 is padding."""
    tokens = nn.utils.rnn.pad_sequence([t for t, _ in samples], batch_first=True)
    return tokens, torch.tensor([label for _, label in samples])


def sentences(n: int = 80, batch_size: int = 8, shortest: int = 3, longest: int = 17, shuffle=False) -> DataLoader:
    """Batches of padded token sequences, of another length in every batch unless shuffled."""
    return DataLoader(Sentences(n, shortest, longest), batch_size=batch_size, collate_fn=pad, shuffle=shuffle)


class Classifier(LightningModule):
    """An MLP with BatchNorm, all four steps, a logged loss and a logged metric object."""

    def __init__(self, lr: float = 0.05, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(CLASSES)
        self.test_accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_accuracy(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy)

    def test_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.test_accuracy(logits, y)
        self.log_dict({"test_loss": F.cross_entropy(logits, y), "test_accuracy": self.test_accuracy})

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, _ = batch
        return self(x).softmax(-1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class ByHand(LightningModule):
    """Before a class whose training step gives the loss: the same in manual optimization."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Regressor(LightningModule):
    """A smooth MLP (no kinks, no zero gradients): the module for optimizers and precision."""

    def __init__(self, lr: float = 0.01, width: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.LayerNorm(width))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.mse_loss(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class ConvNet(LightningModule):
    """Convolutions, BatchNorm2d, max-pool: a small image classifier."""

    def __init__(self, lr: float = 0.02) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 8, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(32, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y))

    def on_validation_epoch_end(self):
        self.log("val_accuracy", self.accuracy.compute())
        self.accuracy.reset()

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(parameters, lr=self.hparams.lr, momentum=0.9)


class TextClassifier(LightningModule):
    """Embedding and masked mean over sequences of any length."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(VOCABULARY, 8, padding_idx=0)
        self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

    def forward(self, tokens):
        mask = (tokens != 0).unsqueeze(-1)
        mean = (self.embedding(tokens) * mask).sum(1) / mask.sum(1)
        return self.head(mean)

    def training_step(self, batch, batch_idx):
        tokens, y = batch
        loss = F.cross_entropy(self(tokens), y)
        self.log("train_loss", loss, batch_size=len(y))
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, y = batch
        self.log("val_loss", F.cross_entropy(self(tokens), y), batch_size=len(y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)


class TableData(LightningDataModule):
    """The synthetic table as a datamodule, with a batch size that BatchSizeFinder can change."""

    def __init__(self, batch_size: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def train_dataloader(self):
        return table(batch_size=self.batch_size)

    def val_dataloader(self):
        return table(48, batch_size=self.batch_size, seed=1)

    def test_dataloader(self):
        return table(40, batch_size=self.batch_size, seed=2)

    def predict_dataloader(self):
        return table(40, batch_size=self.batch_size, seed=3)
