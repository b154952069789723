"""What a training has come to."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_ort import ORTExport


class Summary(Callback):
    """Print the metrics of the best epoch, and where its checkpoint and its ONNX model are, when ``fit`` has ended.

    Which epoch is the best is what the Trainer's ``ModelCheckpoint`` says. Stands behind ``ORTExport``.

    Attributes:
        epochs: metrics of each validation.
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = trainer.callback_metrics.items()
            self.epochs.append({name: float(value) for name, value in metrics if name.startswith("val_")})

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        saved = trainer.checkpoint_callback
        if not trainer.is_global_zero or not self.epochs or saved is None or saved.monitor is None:
            return
        choose = min if saved.mode == "min" else max
        best = choose(range(len(self.epochs)), key=lambda epoch: self.epochs[epoch][saved.monitor])
        print(f"\nbest epoch    {best + 1} of {len(self.epochs)}")
        for name, value in self.epochs[best].items():
            print(f"{name:<13} {value:.4f}")
        print(f"checkpoint    {saved.best_model_path}")
        for callback in trainer.callbacks:
            if isinstance(callback, ORTExport) and callback.exported is not None:
                print(f"model         {callback.exported.path}")
