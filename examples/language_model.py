"""Train a small transformer to continue text that ships with Python, through ORTTrainer; resume it, and export it.

python examples/language_model.py [--steps 200] [--folder .]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import pydoc_data.topics
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort import ORTTrainer, ORTTrainerOptions, optim

LENGTH, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 2, 32


def text() -> str:
    """The Zen of Python and the reference manual, as ``help()`` shows it."""
    with contextlib.redirect_stdout(io.StringIO()) as zen:
        import this  # noqa: F401  prints it
    return zen.getvalue() + "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))


class LanguageModel(nn.Module):
    """Predicts the next character at every position."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, WIDTH)
        self.positions = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e9).triu(1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x, src_mask=self.mask)
        return self.head(self.norm(x))


def loss_fn(logits: Tensor, following: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


def make_trainer(characters: int, steps: int) -> ORTTrainer:
    torch.manual_seed(0)
    description = {
        "inputs": [("tokens", ["batch", LENGTH]), ("following", ["batch", LENGTH])],
        "outputs": [("loss", [], True), ("logits", ["batch", LENGTH, characters])],
    }
    options = ORTTrainerOptions(
        {
            "device": {"id": "cpu"},
            "lr_scheduler": optim.lr_scheduler.CosineWarmupLRScheduler(total_steps=steps, warmup=0.1),
        }
    )
    config = optim.AdamConfig(lr=3e-3, lambda_coef=0.01)
    return ORTTrainer(LanguageModel(characters), description, config, loss_fn, options)


def main(steps: int, folder: Path) -> float:
    """Train, resume half-way, export; returns the last mean loss."""
    content = text()
    alphabet = sorted(set(content))
    numbers = {c: i for i, c in enumerate(alphabet)}
    data = torch.tensor([numbers[c] for c in content])
    generator = torch.Generator().manual_seed(0)

    def batch() -> tuple[Tensor, Tensor]:
        starts = torch.randint(0, len(data) - LENGTH - 1, (BATCH, 1), generator=generator)
        windows = data[starts + torch.arange(LENGTH + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    print(f"{len(content)} characters, {len(alphabet)} different ones")
    checkpoint = folder / "language_model.h5"
    checkpoint.unlink(missing_ok=True)
    trainer, losses, start = make_trainer(len(alphabet), steps), [], time.perf_counter()
    for step in range(steps):
        if step == steps // 2:
            trainer.save_checkpoint(checkpoint, {"step": step})
            trainer = make_trainer(len(alphabet), steps)
            print(f"Resumed at step {trainer.load_checkpoint(checkpoint)['step']}")
        losses.append(float(trainer.train_step(*batch())[0]))
        if (step + 1) % max(steps // 6, 1) == 0:
            print(f"step {step + 1}: loss {np.mean(losses[-20:]):.3f}")
    print(f"Trained in {time.perf_counter() - start:.0f} s")
    path = folder / "language_model.onnx"
    trainer.save_as_onnx(str(path))
    tokens, following = batch()
    expected = trainer.eval_step(tokens, following)[1].numpy()
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"tokens": tokens.numpy(), "following": following.numpy()})
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
    print(f"Wrote {path}; its logits are within {np.abs(logits - expected).max():.0e} of the trained module's.")
    return float(np.mean(losses[-20:]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, default=Path())
    arguments = parser.parse_args()
    main(arguments.steps, arguments.folder)
