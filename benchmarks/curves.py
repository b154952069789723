"""``python -m benchmarks.curves``: the losses of ``auto`` and of ONNX Runtime, step by step, and their picture.

``--save`` trains the projects anew and keeps their losses; without it, the picture is drawn of those that are kept.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from benchmarks.panels import Panel, digest
from lightning_ort import ORTStrategy

__all__ = ["LOSSES", "PICTURE", "curve_panels", "draw_curves", "train"]

_ROOT = Path(__file__).parents[1]
LOSSES = _ROOT / "benchmarks" / "curves.json"
PICTURE = _ROOT / "docs" / "pictures" / "curves.svg"
_PROJECTS, _STEPS = ("tabular", "bert", "byol"), 120


class _Losses(Callback):
    """What each training step has returned."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(outputs["loss"].item())


def train(project: str, strategy: str, steps: int) -> list[float]:
    """The losses of ``steps`` steps from the same seed; with ``"ort"``, ONNX Runtime runs all that it can."""
    from benchmarks.everyday import load

    seed_everything(0, verbose=False)
    losses, definition = _Losses(), load(project)
    trainer = Trainer(
        strategy=ORTStrategy(placement="onnxruntime", print_report=False) if strategy == "ort" else strategy,
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        callbacks=[losses],
        logger=False,
        limit_val_batches=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(definition.make_module(), definition.make_data())
    return losses.values


def curve_panels(losses: dict[str, dict[str, list[float]]]) -> list[Panel]:
    """One panel a project; both curves have a point at each step."""
    panels = []
    for project, curves in losses.items():
        furthest = max(abs(a - b) for a, b in zip(curves["auto"], curves["ort"], strict=True))
        steps = [str(i) for i in range(1, len(curves["auto"]) + 1)]
        panels.append(Panel(f"{project}: at most {furthest:.0e} apart", steps, curves, "lines"))
    return panels


def draw_curves(losses: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Write the picture: ``ort`` in dashes on top of ``auto``."""
    # only this needs matplotlib
    import matplotlib
    from matplotlib.figure import Figure

    from benchmarks.pictures import COLOURS, STYLE, bare

    panels = curve_panels(losses)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "curves"}):
        figure = Figure(figsize=(9, 3), layout="constrained")
        for ax, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            steps = [int(label) for label in panel.labels]
            ax.plot(steps, panel.series["auto"], color=COLOURS["auto"], linewidth=3.5, alpha=0.6, label="auto")
            ax.plot(steps, panel.series["ort"], "--", color=COLOURS["ort"], linewidth=1.3, label="ort")
            ax.set_title(panel.title, fontsize=9)
            ax.set_xlabel("step")
            bare(ax)
        handles, names = ax.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=2, frameon=False)
        metadata = {"Date": None, "Creator": None, "Description": digest(panels)}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="train, and keep the losses")
    if parser.parse_args().save:
        losses = {p: {s: train(p, s, _STEPS) for s in ("auto", "ort")} for p in _PROJECTS}
        LOSSES.write_text(json.dumps(losses) + "\n")
        print(f"Wrote {LOSSES}")
    PICTURE.parent.mkdir(exist_ok=True)
    draw_curves(json.loads(LOSSES.read_text()), PICTURE)
    print(f"Wrote {PICTURE}")


if __name__ == "__main__":
    main()
