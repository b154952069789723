"""``python -m benchmarks.page``: tables and pictures of ``docs/benchmarks.md``, from ``benchmarks/results/``.

The tables of ``docs/several-devices.md`` too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import scaling
from benchmarks.parts import PARTS, columns_of, rows_of
from lightning_ort.bench.contestants import BASELINE
from lightning_ort.bench.table import caption, markdown_table

__all__ = ["PAGE", "PICTURES", "path_of", "picture_of", "rendered", "saved_reports", "with_results"]

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
PAGE = _ROOT / "docs" / "benchmarks.md"
PICTURES = _ROOT / "docs" / "benchmarks"
_BEGIN, _END = "<!-- python -m benchmarks.page writes from here -->", "<!-- to here -->"
_TITLES = {
    "models": "Steps of eight models",
    "growth": "Growth: a narrow GPT, deeper and deeper",
    "everyday": "Everyday projects, from start to end",
}


def path_of(report: dict[str, Any]) -> Path:
    """Where a report is kept: by part, precision and processor, so that a later one takes its place."""
    processor = re.sub(r"[^a-z0-9]+", "-", report["machine"]["cpu"].lower()).strip("-")
    return _RESULTS / f"{report['part']}-{report['settings']['precision']}-{processor}.json"


def picture_of(report: dict[str, Any]) -> Path:
    """Where the picture of a report is."""
    return PICTURES / path_of(report).with_suffix(".svg").name


def saved_reports() -> list[dict[str, Any]]:
    """All that ``python -m benchmarks`` has kept, part by part."""
    reports = [json.loads(path.read_text()) for part in PARTS for path in sorted(_RESULTS.glob(f"{part}-*.json"))]
    order = list(PARTS)
    return sorted(reports, key=lambda r: (order.index(r["part"]), r["settings"]["precision"]))


def rendered(reports: Sequence[dict[str, Any]]) -> str:
    """Markdown of all reports."""
    blocks = []
    for report in reports:
        processor, precision = report["machine"]["cpu"], report["settings"]["precision"]
        title = _TITLES[report["part"]]
        picture = picture_of(report)
        blocks += [
            f"### {title}, {precision}, {processor}",
            caption(report),
            f"![{title} as a picture]({picture.relative_to(PAGE.parent).as_posix()})",
            markdown_table(columns_of(report["part"]), rows_of(report)),
        ]
        blocks += [_means(report)] if report["part"] == "models" else []
    return "\n\n".join(blocks)


def _means(report: dict[str, Any]) -> str:
    speeds: dict[str, list[float]] = {}
    for r in report["results"]:
        if r["strategy"] != BASELINE and r.get("speed"):
            speeds.setdefault(r["strategy"], []).append(r["speed"]["median"])
    means = [f"{s} {geometric_mean(row):.2f}x of {len(row)} models" for s, row in speeds.items()]
    return f"Geometric mean of the speeds: {', '.join(means)}."


def with_results(page: str, results: str) -> str:
    """The text of a page with ``results`` in the place of what it had."""
    before, _, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"The page has no lines {_BEGIN!r} and {_END!r} between which the results go.")
    return f"{before}{_BEGIN}\n\n{results}\n\n{_END}{after}"


def main() -> None:
    """Write the pages and their pictures."""
    # only this needs matplotlib
    from benchmarks.pictures import draw

    reports = saved_reports()
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), rendered(reports)), encoding="utf-8")
    section = scaling.rendered(scaling.saved_reports())
    scaling.PAGE.write_text(with_results(scaling.PAGE.read_text(encoding="utf-8"), section), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    pictures = {picture_of(report): report for report in reports}
    for path in set(PICTURES.glob("*.svg")) - set(pictures):
        path.unlink()
    for path, report in pictures.items():
        draw(report, path)
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
