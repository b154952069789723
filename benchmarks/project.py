"""One everyday project from start to end, in a process that does nothing else.

``python -m benchmarks.project '{"project": ..., "strategy": ..., "precision": ..., "threads": ..., "seconds": ...,
"epochs": ...}'`` trains, validates and predicts, and prints a JSON object as its last line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.everyday import load
from lightning_ort.bench.child import peak_memory
from lightning_ort.bench.contestants import account, prepared, strategy_of


class Clock(Callback):
    """Times epochs, their validation included, and ends the fit after so many seconds.

    Attributes:
        epochs: seconds of each.
        batches: of training.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds, self._began, self._start = seconds, 0.0, 0.0
        self.epochs: list[float] = []
        self.batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = time.perf_counter()
        self.epochs.append(now - self._start)
        if self._seconds is not None and now - self._began >= self._seconds:
            trainer.should_stop = True


def run(
    project: str, strategy: str, precision: Any = "32-true", seconds: float | None = None, epochs: int = -1
) -> dict[str, Any]:
    """Train for ``epochs``, or until ``seconds`` have passed, then validate and predict; returns what it took."""
    definition = load(project)
    seed_everything(0, verbose=False)
    data, module = definition.make_data(), definition.make_module()
    clock = Clock(seconds)
    callbacks = definition.make_callbacks() if hasattr(definition, "make_callbacks") else []
    start = time.perf_counter()
    trainer = Trainer(
        strategy=strategy_of(strategy),
        accelerator="cpu",
        precision=precision,
        max_epochs=epochs,
        callbacks=[clock, *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = prepared(module, strategy)
    trainer.fit(module, data)
    fitted = time.perf_counter()
    (metrics,) = trainer.validate(module, data, verbose=False)
    trainer.predict(module, data)
    return {
        "fit_s": fitted - start,
        "after_fit_s": time.perf_counter() - fitted,
        "epochs": len(clock.epochs),
        "epoch_s": clock.epochs,
        "batches": clock.batches,
        "val_loss": metrics["val_loss"],
        "peak_mb": peak_memory() / 1e6,
        "threads": torch.get_num_threads(),
        "compiler": account(trainer, strategy),
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    threads = settings.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    print(f"\n{json.dumps(run(**settings))}")


if __name__ == "__main__":
    main()
