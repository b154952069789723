"""The report of a strategy, as text, in a notebook and as a page."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_ort.report.account import GraphBreak, OptimizerReport, StepReport
from lightning_ort.report.ranks import RankStep, over_ranks
from lightning_ort.report.words import PAGE, by_choice, choices, counted, expected_breaks, step_time, turns

__all__ = ["Report"]


class Report(Mapping[str, StepReport]):
    """Step function name to its :class:`StepReport`; ``str(report)`` is a table, a notebook shows a page.

    Attributes:
        optimizers: in order of their appearance.
        ranks: on rank 0 of several processes, rank to the accounts of its step functions, of this one too, as they were
            at the end of the last fit, validation, test or prediction; ``None`` for one from which nothing has come.
            Empty elsewhere.
    """

    def __init__(self) -> None:
        self._steps: dict[str, StepReport] = {}
        self.optimizers: list[OptimizerReport] = []
        self.ranks: dict[int, dict[str, RankStep] | None] = {}

    def __getitem__(self, name: str) -> StepReport:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, name: str) -> StepReport:
        """The account of ``name``, opened if need be."""
        step = self._steps.get(name)
        if step is None:
            step = self._steps[name] = StepReport(name)
        return step

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a page to look at in a browser: who had each moment of a step, its graphs, and why they run there.

        The page is one file, which loads nothing. It is complete when it appears, and takes the place of another one.

        Args:
            path: of the file, ``.html``, in a folder that exists.

        Returns:
            The path.

        Raises:
            ValueError: ``path`` ends otherwise.
            FileNotFoundError: its folder does not exist.
            OSError: it cannot be written; what there was is as it was.
        """
        # what makes the page is of no use in a training
        from lightning_ort.report.page import save

        return save(self, path)

    def __repr__(self) -> str:
        steps = ", ".join(
            f"{s.name}: {counted(s.calls, 'call')}, {counted(s.graphs, 'graph')}" for s in self._steps.values()
        )
        return f"<{type(self).__name__} {steps or 'of no step yet'}>"

    def _repr_html_(self) -> str:
        from lightning_ort.report.page import fragment

        return fragment(self)

    def __str__(self) -> str:
        optimizers = [o for o in self.optimizers if o.in_ort or o.in_torch]
        if not self._steps and not optimizers:
            return "No step has run in ONNX Runtime yet."
        buffer = io.StringIO()
        console = Console(file=buffer, width=100, color_system=None, markup=False, emoji=False)  # ":100:" is a line

        def say(line: str) -> None:
            console.print(line, highlight=False, soft_wrap=True)

        table = Table(title="Steps in ONNX Runtime", title_justify="left")
        table.add_column("step")
        for column in ("calls", "graphs", "recompiled", "breaks", "in torch", "compiling"):
            table.add_column(column, justify="right")
        for s in self._steps.values():
            table.add_row(
                s.name, str(s.calls), str(s.graphs), str(len(s.recompilations)), str(len(s.graph_breaks)),
                str(len(s.in_torch)), f"{s.compile_seconds:.1f} s",
            )  # fmt: skip
        console.print(table)
        for s in self._steps.values():
            say(f"{s.name}:")
            for line in (*_details(s), *over_ranks(self, s.name)):
                say(f"  {line}")
        if any(o.in_ort for o in optimizers):
            console.print(_table_of(optimizers))
        for line in dict.fromkeys(f"{r.what} in torch: {r.reason}" for o in optimizers for r in o.reasons):
            say(line)
        return buffer.getvalue().rstrip()


def _details(step: StepReport) -> Iterator[str]:
    yield step_time(step)
    yield from (f"compiled again: {reason}" for reason in step.recompilations)
    yield from (_break(b) for b in step.graph_breaks if not b.expected)
    yield from (f"in torch: {t.what}: {t.reason}{_at(t.source)}" for t in step.in_torch)
    yield from choices(step)
    yield from turns(step)
    yield from by_choice(step)
    groups = expected_breaks(step)
    for sentence, breaks in groups:
        yield f"expected graph breaks, {sentence}"
        yield from (f"  {_break(b)}" for b in breaks)
    if groups:
        yield f"  {PAGE}#graph-breaks-that-are-expected says what can be done"


def _break(graph_break: GraphBreak) -> str:
    text = f"graph break: {graph_break.reason}{_at(graph_break.source)}"
    return f"{text}. {graph_break.dynamo}" if graph_break.dynamo else text


def _table_of(optimizers: Sequence[OptimizerReport]) -> Table:
    table = Table(title="Optimizer updates", title_justify="left")
    table.add_column("optimizer")
    for column in ("in ONNX Runtime", "in torch", "graphs", "compiling"):
        table.add_column(column, justify="right")
    for o in optimizers:
        table.add_row(o.name, str(o.in_ort), str(o.in_torch), str(o.graphs), f"{o.compile_seconds:.1f} s")
    return table


def _at(source: str) -> str:
    return f" ({source})" if source else ""
