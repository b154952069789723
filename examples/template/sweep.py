"""Train with all combinations of two settings, one after the other; print them with the best first, and draw them.

What is on the command line is passed on to every run: ``python sweep.py --trainer.max_epochs=2``.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_ort.cli import ORTCLI

SETTINGS = {"model.init_args.width": [16, 64], "optimizer.init_args.lr": [1e-3, 1e-2]}
HERE = Path(__file__).parent
DEFAULTS = HERE / "configs" / "defaults.yaml"


class Run(NamedTuple):
    """One training.

    Attributes:
        name: its settings.
        folder: what it has written.
        epochs: metrics of each validation.
        best: the least loss of a validation.
    """

    name: str
    folder: Path
    epochs: list[dict[str, float]]
    best: float


def sweep(arguments: list[str]) -> list[Run]:
    """All runs, the best first."""
    runs = []
    combinations = list(itertools.product(*SETTINGS.values()))
    for number, values in enumerate(combinations, 1):
        chosen = dict(zip(SETTINGS, values, strict=True))
        name = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in chosen.items())
        options = [f"--{key}={value}" for key, value in chosen.items()]
        with quiet():
            cli = ORTCLI(
                args=["fit", f"--config={DEFAULTS}", f"--trainer.logger.init_args.name={name}", *options, *arguments]
            )
        (summary,) = (c for c in cli.trainer.callbacks if type(c).__name__ == "Summary")
        best = float(cli.trainer.checkpoint_callback.best_model_score)
        runs.append(Run(name, Path(cli.trainer.log_dir), summary.epochs, best))
        print(f"trained {number} of {len(combinations)}: {name}", flush=True)
    return sorted(runs, key=lambda run: run.best)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning and each run say; errors come through."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def draw(runs: list[Run], path: Path) -> None:
    """The validation losses of all epochs, one curve a run."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for run in runs:
        losses = [epoch["val_loss"] for epoch in run.epochs]
        axes.plot(range(1, len(losses) + 1), losses, marker=".", label=f"{run.name}: {run.best:.4f}")
    axes.set(xlabel="epoch", ylabel="val_loss", yscale="log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(title="run and its best", loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    # LightningCLI would take them for its own
    arguments, sys.argv[1:] = sys.argv[1:], []
    sys.path.insert(0, str(HERE))
    runs = sweep(arguments)
    print(f"\n{'val_loss':>8}  run")
    for run in runs:
        print(f"{run.best:8.4f}  {run.name}  ({run.folder / 'model.onnx'})")
    picture = runs[0].folder.parents[1] / "sweep.png"
    try:
        draw(runs, picture)
    except ImportError:
        print("\nThere is no picture, which needs matplotlib: pip install matplotlib")
    else:
        print(f"\nWrote {picture}")


if __name__ == "__main__":
    main()
