"""Results as a table, in the terminal or as Markdown for the documentation.

``python -m benchmarks.table benchmarks/results/FILE.json`` prints the Markdown.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["markdown", "print_table"]

_COLUMNS = ("model", "strategy", "step", "speed", "range", "compile", "peak memory", "graphs", "breaks", "fallbacks")


def _rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    peaks = {r["model"]: r.get("peak_mb") for r in report["results"] if r["strategy"] == "auto"}
    rows, last = [], None
    for r in report["results"]:
        name = "" if r["model"] == last else r["model"]
        last = r["model"]
        if "error" in r:
            rows.append((name, r["strategy"], "failed", *[""] * (len(_COLUMNS) - 3)))
            continue
        peak = f"{r['peak_mb']:.0f} MB"
        if peaks.get(last):
            peak += f" ({r['peak_mb'] / peaks[last]:.2f}x)"
        speed = r["speed"]
        rows.append((
            name,
            r["strategy"],
            f"{r['step_ms']:.3g} ms" if r["step_ms"] < 100 else f"{r['step_ms']:.0f} ms",
            f"{speed['median']:.2f}x" if speed else "",
            f"{speed['least']:.2f}-{speed['most']:.2f}" if speed else "",
            f"{r['compile_s']:.1f} s",
            peak,
            _graphs(r["compiler"]),
            _count(r, "graph_breaks"),
            _count(r, "in_torch"),
        ))  # fmt: skip
    return rows


def _graphs(compiler: dict[str, Any]) -> str:
    """How many there are, and who runs them where that was a matter of speed."""
    if not compiler.get("graphs_in_torch"):
        return str(compiler.get("graphs", ""))
    return f"{compiler['graphs']} ({compiler['graphs_in_torch']} in torch)"


def _count(result: dict[str, Any], name: str) -> str:
    value = result["compiler"].get(name, "")
    return str(len(value) if isinstance(value, list) else value)


def _caption(report: dict[str, Any]) -> str:
    machine, versions = report["machine"], report["versions"]
    threads = sorted({r["threads"] for r in report["results"] if "threads" in r})
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {'/'.join(map(str, threads))} threads, "
        f"{machine['memory_gb']} GB; load at the start {machine['load_average']:.1f}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"{report['settings'].get('precision', '32-true')}; {report['date']}"
    )


def print_table(report: dict[str, Any], console: Console) -> None:
    """Print the results, where they come from, and what failed."""
    table = Table(caption=_caption(report), caption_justify="left", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    for row in _rows(report):
        table.add_row(*row, end_section=row[1] == report["settings"]["strategies"][-1])
    console.print(table)
    for r in report["results"]:
        if "error" in r:
            console.print(f"{r['model']} with {r['strategy']}: {r['error']}", markup=False, highlight=False)


def markdown(report: dict[str, Any]) -> str:
    """The same as a Markdown table."""
    lines = [_COLUMNS, ("---", "---", *["---:"] * (len(_COLUMNS) - 2)), *_rows(report)]
    return "\n".join([_caption(report), "", *(f"| {' | '.join(cells)} |" for cells in lines)])


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
