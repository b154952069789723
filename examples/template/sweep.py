"""Train with all combinations of two settings, one after the other, and print them with the best first.

What is on the command line is passed on to every run: ``python sweep.py --trainer.max_epochs=2``.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

from lightning_ort.cli import ORTCLI

SETTINGS = {"model.init_args.width": [16, 64], "optimizer.init_args.lr": [1e-3, 1e-2]}
DEFAULTS = Path(__file__).parent / "configs" / "defaults.yaml"


def sweep(arguments: list[str]) -> list[tuple[float, str, Path]]:
    """Loss, name and folder of each run, the best first."""
    results = []
    for values in itertools.product(*SETTINGS.values()):
        chosen = dict(zip(SETTINGS, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        options = [f"--{key}={value}" for key, value in chosen.items()]
        cli = ORTCLI(
            args=["fit", f"--config={DEFAULTS}", f"--trainer.logger.init_args.name={name}", *options, *arguments]
        )
        best = float(cli.trainer.checkpoint_callback.best_model_score)
        results.append((best, name, Path(cli.trainer.log_dir)))
    return sorted(results)


def main() -> None:
    # LightningCLI would take them for its own
    arguments, sys.argv[1:] = sys.argv[1:], []
    sys.path.insert(0, str(Path(__file__).parent))
    print(f"{'val_loss':>8}  run")
    for loss, name, folder in sweep(arguments):
        print(f"{loss:8.4f}  {name}  ({folder / 'model.onnx'})")


if __name__ == "__main__":
    main()
