"""Models of transformers: in its own Trainer, compiled for ONNX Runtime, and inside of a LightningModule."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch import Trainer as LightningTrainer
from torch.utils.data import DataLoader

pytest.importorskip("transformers", reason="`make test-hugging-face` has it")

from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from lightning_ort.errors import UnsupportedError

pytestmark = [
    pytest.mark.stock_only,
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(transformers|accelerate)"),
]

ROOT = Path(__file__).parents[1]
EXAMPLE, PAGE = ROOT / "examples" / "hugging_face.py", ROOT / "docs" / "hugging-face.md"
CLASSES, WORDS = 3, 50


def texts(number: int) -> list[dict[str, Any]]:
    """Tokens of many lengths, and which word is frequent in them."""
    generator = torch.Generator().manual_seed(number)
    rows = []
    for _ in range(number):
        length = int(torch.randint(4, 24, (), generator=generator))
        label = int(torch.randint(0, CLASSES, (), generator=generator))
        tokens = torch.randint(CLASSES + 1, WORDS, (length,), generator=generator)
        tokens[::3] = 1 + label
        rows.append({"input_ids": tokens, "labels": label})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As long as the longest; token 0 is padding."""
    tokens = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    mask = (tokens != 0).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def shifted(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """For a model of language: labels are the tokens themselves, but for padding."""
    batch = padded(rows)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def bert() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, num_labels=CLASSES, max_position_embeddings=24, **sizes)
    )


def gpt() -> PreTrainedModel:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 24}
    tokens = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, loss_type="ForCausalLM", **sizes, **tokens))


def train(make_model: Any, collate: Any, folder: Path, backend: str | None, **arguments: Any) -> Trainer:
    set_seed(0)
    model = make_model()
    if backend is not None:
        model.compile(backend=backend, dynamic=True)
    settings = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", **arguments}
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder), per_device_train_batch_size=8, learning_rate=3e-3, report_to=[], use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, **settings,
        ),
        data_collator=collate,
        train_dataset=texts(44),
        eval_dataset=texts(16),
    )  # fmt: skip
    trainer.train()
    return trainer


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    states = one.state_dict(), other.state_dict()
    assert states[0].keys() == states[1].keys()
    return max(float((states[0][name] - states[1][name]).abs().max()) for name in states[0])


def test_bert_has_the_weights_of_the_plain_trainer_and_goes_on_with_its_checkpoints(tmp_path):
    arguments = {"train_sampling_strategy": "group_by_length", "label_smoothing_factor": 0.0}
    plain = train(bert, padded, tmp_path / "plain", None, **arguments)
    ours = train(bert, padded, tmp_path / "ours", "lightning_ort", **arguments)
    assert difference(plain.model, bert()) > 1e-2, "nothing was trained"
    assert difference(plain.model, ours.model) < 2e-6
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    predicted, expected = ours.predict(texts(16)).predictions, plain.predict(texts(16)).predictions
    assert abs(predicted - expected).max() < 1e-5

    ours.save_model(str(tmp_path / "saved"))
    assert difference(BertForSequenceClassification.from_pretrained(tmp_path / "saved"), ours.model) == 0

    # the second epoch once more, from what the other Trainer has written after the first
    resumed = bert()
    resumed.compile(backend="lightning_ort", dynamic=True)
    trainer = Trainer(
        resumed, ours.args, data_collator=padded, train_dataset=ours.train_dataset, eval_dataset=ours.eval_dataset
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-6"))
    assert difference(resumed, plain.model) < 2e-6


def test_gpt_accumulates_and_clips_gradients_as_the_plain_trainer(tmp_path):
    arguments = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "num_train_epochs": 1}
    plain = train(gpt, shifted, tmp_path / "plain", None, **arguments)
    ours = train(gpt, shifted, tmp_path / "ours", "lightning_ort", **arguments)
    assert difference(plain.model, gpt()) > 1e-3
    assert difference(plain.model, ours.model) < 5e-6


def test_options_of_the_backend_arrive(tmp_path):
    class Spectral(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((torch.fft.rfft(x).abs().sum(-1) * self.scale - labels) ** 2).mean()}

    model = Spectral()
    model.compile(backend="lightning_ort", options={"on_unsupported": "error"})
    data = [{"x": torch.randn(8), "labels": 1.0} for _ in range(4)]
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, dataloader_pin_memory=False)
    with pytest.raises(UnsupportedError, match="fft"):
        Trainer(model, arguments, train_dataset=data).train()


def test_why_it_is_not_an_argument_of_the_trainer(tmp_path, monkeypatch):
    # TrainingArguments sets it, for accelerate
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    arguments = TrainingArguments(
        output_dir=str(tmp_path), torch_compile_backend="lightning_ort", report_to=[], use_cpu=True
    )
    with pytest.raises(ValueError, match="LIGHTNING_ORT"):
        Trainer(bert(), arguments)


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = bert()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
def test_a_lightning_module_around_a_model_of_transformers():
    modules, reports = {}, {}
    for strategy in ("auto", "ort"):
        seed_everything(0)
        module = modules[strategy] = Classifier()
        trainer = LightningTrainer(
            strategy=strategy, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, DataLoader(texts(44), batch_size=8, collate_fn=padded, shuffle=True))
        reports[strategy] = trainer.strategy
    assert difference(modules["auto"], modules["ort"]) < 2e-6
    report = reports["ort"].report()["training_step"]
    assert report.calls == 12 and report.graph_breaks == [] and report.in_torch == []


@pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_the_python_of_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain, with_options, lightning = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names = {"torch": torch, "collate": padded, "train": texts(12), "test": texts(8), "model": bert()}
    exec(plain, names)
    assert difference(BertForSequenceClassification.from_pretrained("bert/trained"), names["model"]) == 0
    names["model"] = bert()
    exec(with_options, names)
    assert names["model"](**padded(texts(4))).loss.isfinite()
    names |= {"model": bert(), "loader": DataLoader(texts(12), batch_size=4, collate_fn=padded)}
    exec(lightning, names)
    assert names["trainer"].strategy.report()["training_step"].calls == 3


@pytest.mark.slow
def test_the_example_trains_saves_and_loads(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--epochs", "1", "--folder", str(tmp_path / "bert")]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    random, grouped = (int(share) for share in re.findall(r"(\d+)% of the tokens", run.stdout))
    assert grouped < random / 2
    ours, again = (
        float(x) for x in re.findall(r"^(?:loss|of the saved model in PyTorch) +(\d\.\d{6})$", run.stdout, re.M)
    )
    # six chapters, none of which is known at the start
    assert ours == pytest.approx(again, abs=2e-5) and ours < 1.75
    assert (tmp_path / "bert" / "model.safetensors").is_file()
