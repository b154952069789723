"""The section of ``docs/several-devices.md`` on what more processes bring, measured and on paper."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from lightning_ort.bench.table import caption, markdown_table

__all__ = ["COLUMNS", "LINKS", "PAGE", "PART", "RESULTS", "Link", "all_reduce", "half", "path_of", "rendered", "rows",
           "saved_reports"]  # fmt: skip

_ROOT = Path(__file__).parents[1]
RESULTS = _ROOT / "benchmarks" / "results"
PAGE = _ROOT / "docs" / "several-devices.md"
PART = "data-parallel"
COLUMNS = ("model", "scaling", "ranks", "ddp", "ort", "ddp / ort", "range", "efficiency", "gradients", "sent")
_ON_PAPER = (8, 64, 1024)
_MANY = 1 << 20


class Link(NamedTuple):
    """Between each rank and the next one.

    Attributes:
        name: for the table.
        bandwidth: bytes per second, each way.
        latency: seconds of a message.
    """

    name: str
    bandwidth: float
    latency: float


LINKS = (Link("1 Gbit/s, 100 µs", 1.25e8, 1e-4), Link("10 Gbit/s, 30 µs", 1.25e9, 3e-5),
         Link("100 Gbit/s, 3 µs", 1.25e10, 3e-6))  # fmt: skip


def all_reduce(size: float, ranks: int, link: Link) -> float:
    """Seconds in which a ring of ``ranks`` sums ``size`` bytes: ``2 P (n - 1) / (n B) + 2 (n - 1) L``."""
    return 2 * size * (ranks - 1) / (ranks * link.bandwidth) + 2 * (ranks - 1) * link.latency


def half(efficiency: Callable[[int], float]) -> int | None:
    """The largest number of ranks, up to a million, with an ``efficiency`` of 50%, which falls; ``None`` below two."""
    if efficiency(2) < 0.5:
        return None
    low, high = 2, _MANY
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if efficiency(middle) >= 0.5 else (low, middle - 1)
    return low


def path_of(report: Mapping[str, Any]) -> Path:
    """Where a report is kept: by processor, so that a later one takes its place."""
    processor = re.sub(r"[^a-z0-9]+", "-", report["machine"]["cpu"].lower()).strip("-")
    return RESULTS / f"{PART}-{processor}.json"


def saved_reports() -> list[dict[str, Any]]:
    """All that are kept."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{PART}-*.json"))]


def rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Cells of :data:`COLUMNS`; the efficiency is that of ort, against its single process."""
    alone = {r["model"]: median(r["ort_ms"]) for r in report["results"] if r["ranks"] == 1}
    order = {name: i for i, name in enumerate(dict.fromkeys(r["model"] for r in report["results"]))}
    found = []
    for r in sorted(report["results"], key=lambda r: (order[r["model"]], r["scaling"] == "strong", r["ranks"])):
        ratios = [theirs / ours for theirs, ours in zip(r["torch_ms"], r["ort_ms"], strict=True)]
        ours = median(r["ort_ms"])
        ideal = alone.get(r["model"], float("nan")) / (r["ranks"] if r["scaling"] == "strong" else 1)
        found.append((
            r["model"], "" if r["ranks"] == 1 else r["scaling"], str(r["ranks"]), _ms(median(r["torch_ms"])), _ms(ours),
            f"{median(ratios):.2f}x", f"{min(ratios):.2f}-{max(ratios):.2f}",
            f"{ideal / ours:.0%}" if r["model"] in alone else "", _bytes(r["gradient_bytes"]),
            "" if r["ranks"] == 1 else _bytes(r["sent_bytes"]),
        ))  # fmt: skip
    return found


def rendered(reports: list[dict[str, Any]]) -> str:
    """Markdown of all reports."""
    blocks = [] if reports else ["No figures are kept: `python -m benchmarks.data_parallel --save` measures them."]
    for report in reports:
        cores = report["machine"]["cores"]
        blocks += [
            f"### Measured, {report['machine']['cpu']}",
            "Milliseconds of a step, `ddp` (one rank: `auto`) and `ort` in turns in the same processes; the ratio, and "
            "its range over rounds. Weak scaling: a whole batch per rank. Strong scaling: its rows shared out. "
            "Efficiency: the time of one process over that of all (strong: over as many times that of all). With more "
            f"ranks than the {cores} cores, ranks wait for cores and not for each other. Bytes sent are those of the "
            "loopback interface per rank and step, with headers.",
            markdown_table(COLUMNS, rows(report)),
            caption(report),
            "### On paper",
            markdown_table(
                ("model", "link", "weak, 8 ranks", "64", "1,024", "50% at", "strong, 8 ranks", "64", "1,024", "50% at"),
                list(_on_paper(report)),
            ),
        ]
    return "\n\n".join(blocks)


def _on_paper(report: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for r in report["results"]:
        if r["ranks"] != 1:
            continue
        alone, size = median(r["ort_ms"]) / 1e3, r["gradient_bytes"]
        for link in LINKS:

            def weak(ranks: int, alone: float = alone, size: float = size, link: Link = link) -> float:
                return alone / (alone + all_reduce(size, ranks, link))

            def strong(ranks: int, alone: float = alone, size: float = size, link: Link = link) -> float:
                return alone / (alone + ranks * all_reduce(size, ranks, link))

            cells = [
                cell
                for efficiency in (weak, strong)
                for cell in (*(f"{efficiency(n):.0%}" for n in _ON_PAPER), _ranks(half(efficiency)))
            ]
            yield (r["model"], link.name, *cells)


def _ranks(number: int | None) -> str:
    return "never" if number is None else f"over {_MANY:,}" if number == _MANY else f"{number:,}"


def _ms(value: float) -> str:
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def _bytes(value: float) -> str:
    return f"{value / 1e6:.2f} MB" if value >= 1e6 else f"{value / 1e3:.1f} kB"
