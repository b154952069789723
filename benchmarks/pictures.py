"""Pictures of reports, readable on light and on dark pages; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.panels import Panel, digest, panels_of
from lightning_ort.bench.contestants import BASELINE

__all__ = ["COLOURS", "STYLE", "bare", "draw"]

_INK = "#808080"
COLOURS = {
    BASELINE: "#8c8c8c", "compile": "#d98324", "ort": "#2b83d6", "ort+inductor": "#3d9e5f",
    "compile, cold": "#d98324", "compile, warm": "#e8b87e", "ort, cold": "#2b83d6", "ort, warm": "#86b9e8",
}  # fmt: skip
STYLE = {"svg.fonttype": "none", "font.size": 9} | dict.fromkeys(
    ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK
)


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the picture of ``report`` as SVG; the same report gives the same file."""
    panels = panels_of(report)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "benchmarks"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, panel in zip(axes, panels, strict=True):
            _draw_panel(ax, panel)
        figure.suptitle(f"{report['machine']['cpu']}, {report['settings']['precision']}, {report['date']}")
        # below, where no bar is in its way; all panels have the same series, or fewer
        handles, names = max((ax.get_legend_handles_labels() for ax in axes), key=lambda found: len(found[1]))
        figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
        metadata = {"Date": None, "Creator": None, "Description": digest(panels)}
        figure.savefig(path, format="svg", transparent=True, metadata=metadata)


def _draw_panel(ax: Axes, panel: Panel) -> None:
    for i, (name, values) in enumerate(panel.series.items()):
        colour = COLOURS.get(name)
        if panel.kind == "lines":
            ax.plot([float(label) for label in panel.labels], values, "o-", label=name, color=colour)
        else:
            width = 0.8 / len(panel.series)
            places = [place - 0.4 + (i + 0.5) * width for place in range(len(panel.labels))]
            ax.bar(places, [value or 0 for value in values], width, label=name, color=colour)
    if panel.kind == "bars":
        ax.set_xticks(range(len(panel.labels)), panel.labels, rotation=40)
    else:
        ax.set_xticks([float(label) for label in panel.labels], panel.labels)
        ax.set_ylim(bottom=0)
    if panel.at_one:
        ax.axhline(1, color=_INK, linewidth=1)
    if panel.logarithmic:
        ax.set_yscale("log")
    ax.set_title(panel.title, fontsize=9)
    bare(ax)


def bare(ax: Axes) -> None:
    """A light grid, and no frame."""
    ax.grid(axis="y", color=_INK, alpha=0.25)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
