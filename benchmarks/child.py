"""One running ``Trainer.fit`` of a model of this folder that works only when it is its turn.

``python -m benchmarks.child '{"model": ..., "precision": ..., "accelerator": ..., "logs": ..., "fused": ...,
"options": ...}'``
trains as :mod:`lightning_ort.bench.child` says; ``options`` go to the model's ``make_module``.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from benchmarks.models import load
from lightning_ort.bench.child import Child
from lightning_ort.bench.contestants import account, prepared, strategy_of

_BATCHES = 8


class Batches:
    """Batches without end, made beforehand so that no loading is timed."""

    def __init__(self, model: str) -> None:
        generator = torch.Generator().manual_seed(0)
        make_batch = load(model).make_batch
        self._batches = [make_batch(generator) for _ in range(_BATCHES)]

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(self._batches)


def train(
    child: Child,
    model: str,
    precision: Any,
    accelerator: str,
    logs: bool,
    fused: bool | None,
    options: Mapping[str, Any],
) -> None:
    """Train until there are no more turns; steps log only with ``logs``, ``fused`` goes to the optimizer."""
    seed_everything(0, verbose=False)
    module = load(model).make_module(**options)
    module.logs, module.fused = logs, fused
    trainer = Trainer(
        strategy=strategy_of(child.strategy),
        accelerator=accelerator,
        devices=1,
        precision=precision,
        max_epochs=-1,
        callbacks=[child.turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(prepared(module, child.strategy), Batches(model))
    child.end(account(trainer, child.strategy))


def main() -> None:
    child = Child.of_this_process()
    if child is None:
        sys.exit("Started by `python -m benchmarks`, which says in the environment what is to be measured.")
    train(child, **json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
