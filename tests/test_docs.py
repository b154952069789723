"""The Python of the pages runs as printed, in one process per page, after what a reader has anyway."""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import onnx.parser
import onnxruntime
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy, ORTTrainer, optim

pytestmark = pytest.mark.stock_only

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUIET = {
    "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False,
    "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1, "num_sanity_val_steps": 0,
    "max_epochs": 1,
}  # fmt: skip


def python_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.randn(64, 12), torch.arange(64) % 3), batch_size=16)

    val_dataloader = test_dataloader = train_dataloader


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = Network(), nn.CrossEntropyLoss()
        self.example_input_array = torch.randn(4, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self.loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-3)


def write_onnx(path: str = "model.onnx", targets: str = "y") -> None:
    """A linear classifier with its loss."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[N,12] x, int64[N] {targets}) => (float loss) {{
            h = Gemm<transB=1>(x, w, b) loss = SoftmaxCrossEntropyLoss(h, {targets}) }}"""
    )
    fc = nn.Linear(12, 3)
    model.graph.node[0].input[1:] = ["fc.weight", "fc.bias"]
    for name, tensor in (("fc.weight", fc.weight), ("fc.bias", fc.bias)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(tensor.detach().numpy(), name))
    onnx.save(model, path)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (self.embedding(tokens) * mask.unsqueeze(-1)).sum(1)


ARRAYS = "x, y = torch.randn(5, 12).numpy(), torch.arange(5).numpy() % 3"
DESCRIPTION = (
    'description = {"inputs": [("x", ["batch", 12]), ("label", ["batch"])], '
    '"outputs": [("loss", [], True), ("logits", ["batch", 3])]}'
)
FROM_OTHERS = (ModelCheckpoint, ORTStrategy, ORTTrainer)
"""What a page speaks of without importing it."""

BEFORE = {
    "README.md": ["model, datamodule = Model(), Data()", ""],
    "bucketing.md": [
        "texts = [torch.ones(int(n)) for n in torch.randint(4, 40, (200,))]\n"
        "pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)"
    ],
    "checkpoints.md": [f"model, datamodule, loss_fn = Model(), Data(), nn.CrossEntropyLoss(); {DESCRIPTION}"],
    "cuda.md": [None],
    "command-line.md": ["module, datamodule = Model(), Data()"],
    "export.md": [
        "module, best = Model(), ModelCheckpoint('runs', monitor='val_loss')\n"
        "trainer = Trainer(strategy='ort', callbacks=[best]); trainer.fit(module, Data())",
        "module, tokens, mask = Masked(), torch.ones(3, 5, dtype=torch.int64), torch.ones(1, 5)",
    ],
    "fabric.md": ["network, loader = Network(), Data().train_dataloader()", "", ""],
    "hugging-face.md": [None, None, None],  # tests/test_hugging_face.py runs them
    "interrupting.md": ["model, datamodule = Model(), Data()"],
    "migration.md": ["model, loader = Network(), Data().train_dataloader()"],
    "notebooks.md": ["model, datamodule = Model(), Data()"],
    "on-device-ort-training.md": [
        "module, images, labels = Network(), torch.randn(5, 12), torch.arange(5) % 3",
        "module = Network(); optimizer = torch.optim.AdamW(module.parameters())\n"
        f"{DESCRIPTION}\n"
        "ort_trainer = ORTTrainer(Network(), description, optim.AdamConfig(), nn.CrossEntropyLoss())\n"
        "nn.functional.cross_entropy(module(torch.randn(5, 12)), torch.arange(5) % 3).backward(); optimizer.step()",
    ],
    "on-device.md": [
        "network, x, labels = Network(), torch.randn(5, 12), torch.arange(5) % 3\n"
        "batches = [(x.numpy(), labels.numpy())] * 2",
        "write_onnx('network.onnx')",
    ],
    "onnx-gradients.md": [f"write_onnx(); {ARRAYS}"],
    "onnx-reader.md": [f"write_onnx(); {ARRAYS}; x, y = map(torch.from_numpy, (x, y))"],
    "optimizers.md": ["", ""],
    "orttrainer.md": [
        "model = nn.Linear(784, 10); x, label = torch.randn(5, 784), torch.arange(5)",
        "import os; os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0')",
    ],
    "precision.md": ["", None],
    "several-devices.md": ["", ""],
    "report.md": ["trainer = Trainer(strategy='ort'); trainer.fit(Model(), Data())"],
    "threads.md": ["before = torch.get_num_threads()"],
    "tutorial.md": ["", "", "", "", "", "", ""],
    "training-session.md": [f"write_onnx(targets='label'); {ARRAYS}; batches = [(x, y)] * 3"],
}
"""Page to what stands before each of its blocks; ``None`` for one that needs another environment, or a GPU."""

AFTER = {
    "optimizers.md": "one = type('One', (Model,), {'configure_optimizers': configure_optimizers})\n"
    "Trainer(strategy='ort').fit(one(), Data())",
    "orttrainer.md": "for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK'): del os.environ[name]\n"
    "trainer.train_step(x, label)",
    "bucketing.md": "import math\n"
    "assert sorted(i for batch in loader.batch_sampler for i in batch) == list(range(200))\n"
    "assert math.ceil(200 / 16) == len(loader) and 1 - sum(lengths) / tokens < 0.1",
    "threads.md": "torch.set_num_threads(before)",
    "tutorial.md": "torch.testing.assert_close(torch.from_numpy(logits), module.eval()(torch.from_numpy(images)))",
    "fabric.md": "assert strategy.report() is fabric.strategy.report()",
    "checkpoints.md": "assert ort_trainer.state_dict()['train_step_info']['step'] == 20, 'as many as Lightning made'",
}
"""Page to what makes use of what its blocks define."""


def test_links_and_pictures_of_the_readme_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert "docs/report.md" in links and any(link.endswith(".svg") for link in links)
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_all_options_of_the_strategy_are_told() -> None:
    text = (ROOT / "docs" / "strategy.md").read_text(encoding="utf-8")
    told: dict[str, str] = {}
    for names, default in re.findall(r"^\| (`.*?) \| (.*?) \|", text, re.M):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), default)
    parameters = inspect.signature(ORTStrategy).parameters
    assert set(told) == set(parameters) - {"kwargs"}
    for name, parameter in parameters.items():
        if parameter.default is not None and name != "kwargs":
            value = parameter.default
            assert told[name] == (f'`"{value}"`' if isinstance(value, str) else f"`{value}`"), name


def test_every_block_is_known() -> None:
    assert {p.name: len(python_of(p)) for p in PAGES if python_of(p)} == {n: len(b) for n, b in BEFORE.items()}


@pytest.mark.filterwarnings("ignore:device.id is 'cuda' by default", "ignore:Checkpoint directory .* is not empty")
@pytest.mark.parametrize("name", BEFORE)
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = functools.partial(Trainer, **QUIET)
    monkeypatch.setattr("lightning.pytorch.Trainer", trainer)
    names: dict[str, Any] = {f.__name__: f for f in (*FROM_OTHERS, Network, Masked, Data, Model, write_onnx)}
    names |= {
        "functools": functools,
        "Trainer": trainer,
        "nn": nn,
        "optim": optim,
        "torch": torch,
        "onnxruntime": onnxruntime,
    }
    (page,) = [p for p in PAGES if p.name == name]
    for before, block in zip(BEFORE[name], python_of(page), strict=True):
        if before is None:
            continue
        exec(before, names)
        exec(compile(block, str(page), "exec"), names)
    exec(AFTER.get(name, ""), names)
