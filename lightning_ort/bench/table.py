"""Results as a table, in the terminal or as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_ort.bench.advice import break_even, shown_step
from lightning_ort.bench.contestants import BASELINE

__all__ = ["caption", "markdown_table", "print_table", "step_columns", "step_rows", "wide_console"]

_COLUMNS = ("model", "strategy", "step", "speed", "range", "compile", "pays from", "peak memory", "graphs", "breaks",
            "fallbacks")  # fmt: skip


def step_columns() -> tuple[str, ...]:
    """Titles of the columns of :func:`step_rows`."""
    return _COLUMNS


def step_rows(results: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """One row per result of :func:`~.measure.measure`, with ratios to those of the same model under ``auto``."""
    baselines = {r["model"]: r for r in results if r["strategy"] == BASELINE and "error" not in r}
    last = None
    for r in results:
        name = "" if r["model"] == last else r["model"]
        last = r["model"]
        if "error" in r:
            yield (name, r["strategy"], "failed", *[""] * (len(_COLUMNS) - 3))
            continue
        baseline, speed = baselines.get(last), r["speed"]
        peak = f"{r['peak_mb']:.0f} MB"
        pays = ""
        if baseline is not None:
            peak += f" ({r['peak_mb'] / baseline['peak_mb']:.2f}x)"
            steps = break_even(r, baseline)
            pays = "" if r is baseline else "never" if steps is None else f"{steps:,}"
        yield (
            name,
            r["strategy"],
            shown_step(r),
            f"{speed['median']:.2f}x" if speed else "",
            f"{speed['least']:.2f}-{speed['most']:.2f}" if speed else "",
            f"{r['compile_s']:.1f} s",
            pays,
            peak,
            _graphs(r["compiler"]),
            _count(r, "graph_breaks"),
            _count(r, "in_torch"),
        )


def _graphs(compiler: Mapping[str, Any]) -> str:
    """How many there are, and who runs them where that was a matter of speed."""
    by = [f"{n} in torch"] if (n := compiler.get("graphs_in_torch")) else []
    by += ["step as it is"] if "training_step" in compiler.get("as_they_are", ()) else []
    return f"{compiler.get('graphs', '')} ({', '.join(by)})" if by else str(compiler.get("graphs", ""))


def _count(result: Mapping[str, Any], name: str) -> str:
    value = result["compiler"].get(name, "")
    return str(len(value) if isinstance(value, list) else value)


def caption(report: Mapping[str, Any]) -> str:
    """What the figures of ``report`` were measured on, and when."""
    machine, versions = report["machine"], report["versions"]
    threads = sorted({r["threads"] for r in report["results"] if "threads" in r})
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {'/'.join(map(str, threads))} threads, "
        f"{machine['memory_gb']} GB; load at the start {machine['load_average']:.1f}; "
        f"{', '.join(f'{name} {version}' for name, version in versions.items())}; "
        f"{report['settings'].get('precision', '32-true')}; {report['date']}"
    )


def wide_console() -> Console:
    """Where tables are printed: wide enough for them, and names and errors as they are."""
    # what is not a terminal counts as 80 columns wide
    return Console(width=max(140, Console().width), markup=False, emoji=False, highlight=False)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], report: Mapping[str, Any], console: Console
) -> None:
    """Print ``rows``, what they were measured on, and what failed; the first two columns are names."""
    table = Table(caption=caption(report), caption_justify="left", box=box.SIMPLE, pad_edge=False)
    for i, column in enumerate(columns):
        lists = any(", " in row[i] for row in rows)  # which may have several lines, so that no figure is cut
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=not lists)
    for i, row in enumerate(rows):
        # the name of a group stands in its first row
        table.add_row(*row, end_section=bool(i + 1 < len(rows) and rows[i + 1][0]))
    console.print(table)
    for r in report["results"]:
        if "error" in r:
            console.print(f"{r['model']} with {r['strategy']}: {r['error']}")


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same as a Markdown table; the first two columns are names."""
    lines = [columns, ("---", "---", *["---:"] * (len(columns) - 2)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
