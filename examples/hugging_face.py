"""Fine-tune a small BERT with transformers.Trainer, its model compiled for ONNX Runtime; test, save and load it.

python examples/hugging_face.py [--backend none] [--epochs 6] [--sampling random] [--multiple 16] [--folder bert]

The texts are paragraphs of Python's manual, which ships with Python; a paragraph's class is the chapter it is from.
Model and tokenizer are made here, and nothing is downloaded. What ``lightning_ort`` adds is one line:
``model.compile(...)``. It needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_pt_utils import LengthGroupedSampler

CLASSES, VOCABULARY, LONGEST, BATCH = 6, 2000, 64, 32


def paragraphs() -> tuple[list[str], list[int]]:
    """Paragraphs of the longest chapters, and the number of the chapter of each."""
    chapters = sorted(set(pydoc_data.topics.topics.values()), key=lambda text: (-len(text), text))[:CLASSES]
    found = [
        (paragraph, label)
        for label, chapter in enumerate(chapters)
        for paragraph in chapter.split("\n\n")
        if len(paragraph.split()) > 3
    ]
    texts, labels = zip(*found, strict=True)
    return list(texts), list(labels)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Words and signs that occur most often; what is longer than ``LONGEST`` tokens is cut."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=VOCABULARY, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, special.index(name)) for name in ("[CLS]", "[SEP]")]
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=LONGEST, **names)


class Paragraphs(Dataset):
    """Tokens and class of each paragraph; every fifth one is for testing."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], labels: list[int], test: bool) -> None:
        chosen = [i for i in range(len(texts)) if (i % 5 == 0) == test]
        tokens = tokenizer([texts[i] for i in chosen], truncation=True)["input_ids"]
        self.rows = [{"input_ids": row, "labels": labels[i]} for row, i in zip(tokens, chosen, strict=True)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def make_model() -> BertForSequenceClassification:
    """Two layers with random weights, in the place of ``from_pretrained``."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=LONGEST,
            num_labels=CLASSES,
        )
    )


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def padding(data: Paragraphs, sampling: str, multiple: int) -> tuple[float, int]:
    """What padding costs in one epoch: its share of all tokens, and how many lengths of batches there are."""
    lengths = [len(row["input_ids"]) for row in data.rows]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(data), generator=generator).tolist()
    if sampling == "group_by_length":
        order = list(LengthGroupedSampler(BATCH, lengths=lengths, generator=generator))
    batches = [[lengths[i] for i in order[start : start + BATCH]] for start in range(0, len(order), BATCH)]
    longest = [-(-max(batch) // multiple) * multiple for batch in batches]
    tokens = sum(len(batch) * length for batch, length in zip(batches, longest, strict=True))
    return 1 - sum(lengths) / tokens, len(set(longest))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="lightning_ort", help="of torch.compile; none leaves the model to PyTorch")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--sampling", choices=("random", "group_by_length"), default="group_by_length")
    parser.add_argument("--multiple", type=int, default=1, help="batches are padded to a multiple of it")
    parser.add_argument("--folder", type=Path, default=Path("bert"), help="where the trained model is saved")
    args = parser.parse_args()

    texts, labels = paragraphs()
    tokenizer = make_tokenizer(texts)
    train, test = (Paragraphs(tokenizer, texts, labels, test=part) for part in (False, True))
    for sampling in ("random", "group_by_length"):
        share, lengths = padding(train, sampling, args.multiple)
        print(f"{sampling}: {share:.0%} of the tokens of an epoch are padding, batches have {lengths} lengths")

    set_seed(0)
    model = make_model()
    if args.backend != "none":
        # the sizes of batches are open in the first graph
        model.compile(backend=args.backend, dynamic=True)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.folder),
            num_train_epochs=args.epochs,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=BATCH,
            learning_rate=2e-3,
            warmup_steps=20,
            train_sampling_strategy=args.sampling,
            eval_strategy="epoch",
            save_strategy="no",
            disable_tqdm=True,
            report_to=[],
            use_cpu=True,
        ),
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=args.multiple),
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        compute_metrics=accuracy,
    )
    trainer.train()
    trained = trainer.evaluate()
    trainer.save_model(str(args.folder))

    loaded = BertForSequenceClassification.from_pretrained(args.folder)
    again = Trainer(loaded, trainer.args, trainer.data_collator, eval_dataset=test, compute_metrics=accuracy).evaluate()
    print(f"\naccuracy on {len(test)} test paragraphs  {trained['eval_accuracy']:.4f}")
    print(f"of the saved model in PyTorch       {again['eval_accuracy']:.4f}")
    print(f"loss                                {trained['eval_loss']:.6f}")
    print(f"of the saved model in PyTorch       {again['eval_loss']:.6f}")
    print(f"saved in                            {args.folder}")


if __name__ == "__main__":
    main()
