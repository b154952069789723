"""The models, batches and recorded trainings of ONNX Runtime's ORTTrainer 1.16.3."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ort import ORTTrainer, ORTTrainerOptions, optim

DATA = Path(__file__).parents[1] / "data" / "orttrainer"
ADAM, LAMB, SGD = optim.AdamConfig, optim.LambConfig, optim.SGDConfig


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(20, 32), nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Encoder(nn.Module):
    """One pre-norm transformer block that classifies 8 tokens; parameters are registered in the recorded order."""

    def __init__(self, vocabulary: int = 32, width: int = 16, hidden: int = 32, length: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, width)
        self.pos = nn.Parameter(torch.zeros(length, width))
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.f1, self.f2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x) + self.pos
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln1(x)).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (width // 2) ** 0.5, -1)
        x = x + self.o((weights @ v).transpose(1, 2).reshape(batch, length, width))
        x = x + self.f2(F.gelu(self.f1(self.ln2(x))))
        return self.head(self.ln(x).mean(1))


def make(name: str = "mlp", seed: int = 1234) -> nn.Module:
    """The model with the weights that every recording starts from."""
    model = MLP() if name == "mlp" else Encoder()
    random = np.random.RandomState(seed)
    weights = {}
    for key, value in model.state_dict().items():
        array = np.asarray(random.randn(*value.shape) * 0.2, np.float32)
        if key.startswith("ln") and key.endswith("weight"):
            array = array + np.float32(1)
        weights[key] = torch.from_numpy(array)
    model.load_state_dict(weights)
    return model


def batches(name: str = "mlp", count: int = 20, seed: int = 99, size: int = 16) -> list[tuple[Tensor, Tensor]]:
    random = np.random.RandomState(seed)
    found = []
    for _ in range(count):
        if name == "mlp":
            x, classes = random.randn(size, 20).astype(np.float32), 10
        else:
            x, classes = random.randint(0, 32, (size, 8)).astype(np.int64), 12
        labels = random.randint(0, classes, (size,)).astype(np.int64)
        found.append((torch.from_numpy(x), torch.from_numpy(labels)))
    return found


def description(name: str = "mlp") -> dict[str, Any]:
    return {
        "inputs": [("x", ["b", 20 if name == "mlp" else 8]), ("label", ["b"])],
        "outputs": [("loss", [], True), ("logits", ["b", 10 if name == "mlp" else 12])],
    }


def cross_entropy(prediction: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(prediction, label)


def options(**sections: Any) -> ORTTrainerOptions:
    return ORTTrainerOptions({"device": {"id": "cpu"}, **sections})


def trainer(config: Any = None, name: str = "mlp", model: nn.Module | None = None, **sections: Any) -> ORTTrainer:
    """An ORTTrainer of a recorded model; ``sections`` are options."""
    return ORTTrainer(
        make(name) if model is None else model,
        description(name),
        config or ADAM(lr=0.01),
        loss_fn=cross_entropy,
        options=options(**sections),
    )


@dataclasses.dataclass
class Recording:
    """One training as it was recorded: its settings and its numbers."""

    name: str

    def __post_init__(self) -> None:
        self.settings = json.loads((DATA / f"{self.name}.json").read_text())
        with np.load(DATA / f"{self.name}.npz") as arrays:
            self.arrays = dict(arrays)

    def config(self) -> Any:
        values = dict(self.settings["hp"])
        mode = values.pop("mode", None)
        if mode is not None:
            values["weight_decay_mode"] = ADAM.DecayMode(mode)
        kind = {"adam": ADAM, "lamb": LAMB, "sgd": SGD}[self.settings["opt"]]
        if "groups" in self.settings:
            values["params"] = self.settings["groups"]
        return kind(**values)

    def options(self) -> dict[str, Any]:
        settings = self.settings
        sections: dict[str, Any] = dict(settings.get("options", {}))
        # the recorded CPU kernel took the option and ignored it; what clipping gives is known from formulas
        clip = self.name.startswith("FORMULA") and "clip" in settings
        frozen = settings.get("frozen", [])
        sections["utils"] = {**sections.get("utils", {}), "grad_norm_clip": clip, "frozen_weights": frozen}
        if "acc" in settings:
            sections["batch"] = {"gradient_accumulation_steps": settings["acc"]}
        if "sched" in settings:
            values = dict(settings["sched"])
            kind = getattr(optim.lr_scheduler, f"{values.pop('name')}WarmupLRScheduler")
            sections["lr_scheduler"] = kind(**values)
        return sections

    def train(
        self, steps: int | None = None, **sections: Any
    ) -> tuple[ORTTrainer, list[float], list[float], list[Tensor]]:
        """Trainer, losses, learning rates and the outputs of the last step."""
        name = self.settings["model"]
        found = trainer(self.config(), name, **self.options(), **sections)
        schedule = found.options.lr_scheduler
        losses, rates, results = [], [], []
        for x, label in batches(name, self.settings["steps"])[:steps]:
            results = found.train_step(x, label)
            losses.append(float(results[0]))
            rates.append(found.optim_config.lr if schedule is None else schedule.get_last_lr()[0])
        return found, losses, rates, results


# two recordings show bugs of the original: weights frozen by prepacking, weights updated before they were read
RECORDINGS = sorted(p.stem for p in DATA.glob("*.json") if "BUG" not in p.stem and "HAZARD" not in p.stem)
