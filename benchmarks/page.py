"""``python -m benchmarks.page``: tables and pictures of pages in ``docs/``, from ``benchmarks/results/``."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from benchmarks import scaling
from benchmarks.parts import PARTS, STEPS, columns_of, rows_of
from lightning_ort.bench.advice import break_even
from lightning_ort.bench.contestants import BASELINE
from lightning_ort.bench.table import caption, markdown_table

__all__ = [
    "PAGE", "PICTURES", "SHORT_PAGE", "path_of", "picture_of", "rendered", "saved_reports", "summary", "with_results",
]  # fmt: skip

_ROOT = Path(__file__).parents[1]
_RESULTS = _ROOT / "benchmarks" / "results"
PAGE = _ROOT / "docs" / "benchmarks.md"
SHORT_PAGE = _ROOT / "docs" / "should-i-use-it.md"
PICTURES = _ROOT / "docs" / "benchmarks"
_BEGIN, _END = "<!-- python -m benchmarks.page writes from here -->", "<!-- to here -->"
_TITLES = {
    "models": "Steps of eight models, nothing logged",
    "logged": "Steps of eight models, with self.log",
    "unfused": "Steps of eight models, with AdamW as most write it",
    "growth": "Growth: a narrow GPT, deeper and deeper",
    "everyday": "Everyday projects, from start to end",
}
_KINDS = {
    "models": "nothing logged",
    "logged": "with `self.log`",
    "unfused": "nothing logged, AdamW without `fused=True`",
}
_NETWORKS = {
    "rl": "policy of two layers, batches of 32",
    "tabular": "embeddings and two layers for tables",
    "mlp": "three layers for images",
    "cnn": "three convolutions",
    "resnet": "ResNet-18",
    "gpt": "GPT of 4 layers, width 256",
    "bert": "BERT of 4 layers, width 256",
    "lstm": "LSTM of 2 layers",
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
        blocks += [_means(report)] if report["part"] in STEPS else []
    return "\n\n".join(blocks)


def summary(reports: Sequence[dict[str, Any]]) -> str:
    """Markdown of what each network gains in its float32 steps with ``ort``, the most first."""
    blocks = []
    for report in reports:
        if report["part"] not in STEPS or report["settings"]["precision"] != "32-true":
            continue
        results = [r for r in report["results"] if "error" not in r]
        baselines = {r["model"]: r for r in results if r["strategy"] == BASELINE}
        ours = [r for r in results if r["strategy"] == "ort" and r["speed"]]
        blocks += [
            "| network | speed of a step, `auto` = 1 | compiling | pays from step |",
            "| --- | --- | --- | --- |",
        ]
        for r in sorted(ours, key=lambda r: -r["speed"]["median"]):
            steps = break_even(r, baselines[r["model"]])
            speed = f"{r['speed']['median']:.2f} ({r['speed']['least']:.2f} to {r['speed']['most']:.2f})"
            paid = "never" if steps is None else f"{float(f'{steps:.2g}'):,.0f}"
            blocks.append(f"| {_NETWORKS[r['model']]} | {speed} | {r['compile_s']:.1f} s | {paid} |")
        machine, kind = report["machine"], _KINDS[report["part"]]
        blocks += [
            "",
            f"{machine['cpu']}, {machine['cores']} cores, float32, {kind}, {report['date']}; range over turns in "
            "brackets.",
            "",
        ]
    return "\n".join(blocks).rstrip()


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
    argparse.ArgumentParser("python -m benchmarks.page", description=__doc__).parse_args()
    # only this needs matplotlib
    from benchmarks.pictures import draw

    reports = saved_reports()
    PAGE.write_text(with_results(PAGE.read_text(encoding="utf-8"), rendered(reports)), encoding="utf-8")
    section = scaling.rendered(scaling.saved_reports())
    scaling.PAGE.write_text(with_results(scaling.PAGE.read_text(encoding="utf-8"), section), encoding="utf-8")
    text = SHORT_PAGE.read_text(encoding="utf-8")
    SHORT_PAGE.write_text(with_results(text, summary(reports)), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    pictures = {picture_of(report): report for report in reports}
    for path in set(PICTURES.glob("*.svg")) - set(pictures):
        path.unlink()
    for path, report in pictures.items():
        draw(report, path)
        print(f"Wrote {path}")


if __name__ == "__main__":
    main()
