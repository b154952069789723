"""The report as a page: the template beside this file, filled in."""

from __future__ import annotations

import datetime
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from lightning_ort._version import __version__
from lightning_ort.files.writing import write_file
from lightning_ort.report import words
from lightning_ort.report.account import GraphReport, OptimizerReport, StepReport
from lightning_ort.report.figures import Figures
from lightning_ort.report.ranks import over_ranks
from lightning_ort.report.timeline import Interval
from lightning_ort.validation import path as checked_path

if TYPE_CHECKING:
    from lightning_ort.report.report import Report

__all__ = ["fragment", "save"]

_SHORTEST = 1e-3
"""share of a call below which turns are drawn together with their neighbours: less than a pixel"""


def save(report: Report, path: str | os.PathLike[str]) -> Path:
    """See :meth:`Report.save`."""
    target = Path(checked_path("path", path))
    if target.suffix.lower() != ".html":
        suffix = f"ends in {target.suffix!r}" if target.suffix else "has no suffix"
        raise ValueError(
            f"path={str(path)!r} {suffix}, but a report is saved as a page: expected a name such as report.html. "
            "print(report) gives it as text."
        )
    saved = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M")
    text = _template("page.html").render(report=_view(report), version=__version__, saved=saved)
    with write_file(target, replace=True) as stream:
        stream.write(text.encode())
    return target


def fragment(report: Report) -> str:
    """What a notebook shows: the page without what is around it."""
    return _template("fragment.html").render(report=_view(report))


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.filters["seconds"] = lambda value: _together(words.seconds(value))
    environment.filters["together"] = _together
    return environment.get_template(name)


def _breakable(text: str) -> Markup:
    """``text`` that a narrow page breaks where a path or a name ends, and not inside of a word."""
    parts = re.split(r"(?<=\w[/\\,:;=(\[])(?=\S)|(?<=[^\W\d]\.)(?=[^\W\d])", text)
    return Markup("<wbr>").join(escape(part) for part in parts)


def _together(text: str) -> str:
    """``text`` whose numbers stay on a line with their unit."""
    return re.sub(r"(?<=\d) (?=(?:s|ms|µs)\b)", "\u00a0", text)


def _view(report: Report) -> dict[str, Any]:
    """All that the template shows, as text and numbers."""
    return {
        "steps": [{**_step(step), "ranks": list(over_ranks(report, step.name))} for step in report.values()],
        "optimizers": [_optimizer(o) for o in report.optimizers if o.in_ort or o.in_torch],
        "where": words.WHERE,
        "help": words.PAGE,
    }


def _step(step: StepReport) -> dict[str, Any]:
    figures = step.figures()
    return {
        "name": step.name,
        "facts": list(_facts(step, figures)),
        "unknown": words.unknown(step) if figures is None else "",
        "figures": figures and _figures(figures),
        "graphs": [_graph(i, graph, figures) for i, graph in enumerate(step.each_graph, 1)],
        "recompilations": step.recompilations,
        "breaks": [b for b in step.graph_breaks if not b.expected],
        "expected": words.expected_breaks(step),
        "in_torch": step.in_torch,
        "choices": [*words.turns(step), *words.by_choice(step)],
    }


def _facts(step: StepReport, figures: Figures | None) -> Iterable[tuple[str, str]]:
    yield "calls", f"{step.calls:,}"
    yield "graphs", str(step.graphs)
    yield "a call takes", "unknown" if figures is None else words.seconds(figures.seconds)
    in_torch = None if figures is None else figures.seconds_in_torch
    yield "in torch alone", "unknown" if in_torch is None else f"about {words.seconds(in_torch)}"
    yield "compiling took", words.seconds(step.compile_seconds)
    yield "paid back", "unknown" if figures is None else words.pays_from(figures)


def _figures(figures: Figures) -> dict[str, Any]:
    total = figures.call.seconds
    return {
        "timed": figures.timed,
        "graphs": len(figures.call.graphs),
        "measured": figures.seconds_in_torch is not None,
        "shares": [
            (where, words.WHERE[where], f"{share:.0%}", words.seconds(share * figures.seconds))
            for where, share in figures.shares.items()
        ],
        "turns": [
            (turn.where, f"{100 * turn.seconds / total:.3f}", _title(turn))
            for turn in _drawn(figures.call.intervals, total)
        ],
        "phases": [
            (phase.what, f"{100 * phase.begin / total:.3f}", f"{100 * phase.seconds / total:.3f}", phase.seconds)
            for phase in sorted(figures.call.phases, key=lambda p: (p.begin, -p.end))
        ],
        "seconds": total,
    }


def _drawn(turns: Iterable[Interval], total: float) -> list[Interval]:
    """``turns``, the shortest of them as a part of the one before."""
    drawn: list[Interval] = []
    for turn in turns:
        if drawn and turn.seconds < _SHORTEST * total:
            drawn[-1] = Interval(drawn[-1].where, drawn[-1].what, drawn[-1].begin, turn.end, drawn[-1].graph)
        else:
            drawn.append(turn)
    return drawn


def _title(turn: Interval) -> str:
    what = {"piece": "a graph", "graph": "around a graph's run"}.get(turn.what, turn.what)
    if turn.what == "graph" and turn.where == "torch":
        what = "a graph"
    return f"{words.WHERE[turn.where]}{what and f', {what}'}: {words.seconds(turn.seconds)}"


def _graph(number: int, graph: GraphReport, figures: Figures | None) -> dict[str, Any]:
    runs = [] if figures is None else [run for run in figures.call.graphs if run.graph is graph]
    ort, torch = graph.segments
    pieces = f"in {ort + torch} pieces, {torch} of them in torch" if torch else ""
    kind = {"forward": "outputs; gradients have a graph of their own", "backward": "gradients"}.get(
        graph.part, "outputs and gradients" if graph.gradients else "outputs"
    )
    return {
        "number": number,
        "where": "onnxruntime" if graph.executor.startswith("onnxruntime") else "torch",
        "executor": words.EXECUTORS[graph.executor] + (" (as without a graph)" if graph.executor == "eager" else ""),
        "pieces": pieces,
        "why": graph.why,
        "kind": kind,
        "calls": graph.calls,
        "begins": graph.begins,
        "ends": "" if graph.ends == graph.begins else graph.ends,
        # Dynamo's own name for what has none in the code
        "inputs": [("" if name.startswith("___stack") else name, shape) for name, shape in graph.inputs.items()],
        "weights": graph.weights,
        "elements": f"{graph.elements:,}",
        "took": words.seconds(sum(run.seconds for run in runs)) if runs else "",
        "measured": words.measured(graph.measured) or ("with its outputs" if graph.speed else "nothing"),
    }


def _optimizer(optimizer: OptimizerReport) -> dict[str, Any]:
    return {
        "name": optimizer.name,
        "in_ort": f"{optimizer.in_ort:,}",
        "in_torch": f"{optimizer.in_torch:,}",
        "graphs": optimizer.graphs,
        "compiling": words.seconds(optimizer.compile_seconds) if optimizer.graphs else "nothing",
        "reasons": list(dict.fromkeys(r.reason for r in optimizer.reasons)),
    }
