"""``python -m benchmarks.orttrainer``: a step of ORTTrainer against eager torch with its fused AdamW, in turns."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from lightning_ort import ORTTrainer, ORTTrainerOptions, optim

VOCABULARY, WIDTH, LENGTH = 1000, 256, 128


class Block(nn.Module):
    """A transformer block with attention written out."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), heads
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        weights = (q @ k.transpose(-1, -2) / (D // self.heads) ** 0.5).masked_fill(~mask, -1e9).softmax(-1)
        x = x + self.project((weights @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.feedforward(self.norm2(x))


class GPT(nn.Module):
    """3.7 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, LENGTH, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embed(input) + self.positions)))


def _mlp() -> tuple[nn.Module, Tensor, Tensor]:
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers), torch.randn(64, 784), torch.randint(0, 10, (64,))


def _gpt() -> tuple[nn.Module, Tensor, Tensor]:
    return GPT(), *torch.randint(0, VOCABULARY, (2, 8, LENGTH)).unbind(0)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor, Tensor]], int]] = {"mlp": (_mlp, 100), "gpt": (_gpt, 3)}
"""name to a function that makes model, inputs and labels, and the number of steps per turn"""


def _loss(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), label.flatten())


def measure(name: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, of both."""
    torch.manual_seed(0)
    make, steps = MODELS[name]
    model, x, label = make()
    reference = copy.deepcopy(model)
    sizes = ["batch", *x.shape[1:]]
    outputs = [("loss", [], True), ("logits", [*(["batch", *label.shape[1:]]), "classes"])]
    description = {"inputs": [("input", sizes), ("label", ["batch", *label.shape[1:]])], "outputs": outputs}
    options = ORTTrainerOptions({"device": {"id": "cpu"}, "utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, description, optim.AdamConfig(lr=1e-3), _loss, options)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0, fused=True)

    def eager() -> Any:
        optimizer.zero_grad()
        loss = _loss(reference(x), label)
        loss.backward()
        optimizer.step()
        return loss

    contestants: dict[str, Callable[[], Any]] = {"ORTTrainer": lambda: trainer.train_step(x, label), "eager": eager}
    for step in contestants.values():
        for _ in range(3):
            step()
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant, step in contestants.items():
            for _ in range(steps):
                start = time.perf_counter()
                step()
                times[contestant].append(time.perf_counter() - start)
    return times


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure and print medians in milliseconds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.orttrainer", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, help="threads of torch and ONNX Runtime (default: torch's choice)")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    table = Table(title="Median of a step (fastest), ms", title_justify="left")
    for column in ("model", "ORTTrainer", "eager, fused AdamW", "eager / ORTTrainer"):
        table.add_column(column)
    results = {}
    for name in options.models:
        times = measure(name, options.rounds)
        ours, theirs = ([1e3 * t for t in times[c]] for c in ("ORTTrainer", "eager"))
        results[name] = {"ORTTrainer": median(ours), "eager": median(theirs)}
        cells = [f"{median(t):.2f} ({min(t):.2f})" for t in (ours, theirs)]
        table.add_row(name, *cells, f"{median(theirs) / median(ours):.2f} ({min(theirs) / min(ours):.2f})")
    Console(width=100).print(table)
    return results


if __name__ == "__main__":
    main()
