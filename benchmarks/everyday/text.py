"""Paragraphs of Python's manual, which ships with Python, and the chapter each is from."""

from __future__ import annotations

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

__all__ = ["CLASSES", "PADDING", "VOCABULARY", "Paragraphs", "pad"]

CLASSES, VOCABULARY, LONGEST = 6, 2000, 64
PADDING, UNKNOWN = 0, 1


class Paragraphs(Dataset):
    """Tokens of a paragraph and the number of its chapter, of the :data:`CLASSES` longest chapters."""

    def __init__(self) -> None:
        # several names stand for one text
        chapters = sorted({text: name for name, text in topics.items()}, key=lambda text: (-len(text), text))[:CLASSES]
        found = [
            (re.findall(r"\w+|[^\w\s]", paragraph.lower())[:LONGEST], label)
            for label, text in enumerate(chapters)
            for paragraph in text.split("\n\n")
        ]
        words = [(row, label) for row, label in found if len(row) > 3]
        counts = Counter(word for row, _ in words for word in row)
        known = {word: i for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 2), start=2)}
        self._examples = [(torch.tensor([known.get(word, UNKNOWN) for word in row]), label) for row, label in words]

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._examples[index]


def pad(examples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """A batch as long as its longest paragraph."""
    tokens, labels = zip(*examples, strict=True)
    return {
        "tokens": pad_sequence(list(tokens), batch_first=True, padding_value=PADDING),
        "lengths": torch.tensor([len(row) for row in tokens]),
        "labels": torch.tensor(labels),
    }
