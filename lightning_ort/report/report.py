"""What ran where: graphs, recompilations, graph breaks and operators that stayed in torch, per step function."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from lightning_ort.report.account import OptimizerReport, StepReport

__all__ = ["Report"]


_NAMES = {"onnxruntime": "ONNX Runtime", "torch": "torch", "inductor": "inductor", "eager": "eager"}


class Report(Mapping[str, StepReport]):
    """Step function name to its :class:`StepReport`; ``str(report)`` is a table.

    Attributes:
        optimizers: in order of their appearance.
    """

    def __init__(self) -> None:
        self._steps: dict[str, StepReport] = {}
        self.optimizers: list[OptimizerReport] = []

    def __getitem__(self, name: str) -> StepReport:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def step(self, name: str) -> StepReport:
        """The account of ``name``, opened if need be."""
        return self._steps.setdefault(name, StepReport(name))

    def __str__(self) -> str:
        optimizers = [o for o in self.optimizers if o.in_ort or o.in_torch]
        if not self._steps and not optimizers:
            return "No step has run in ONNX Runtime yet."
        buffer = io.StringIO()
        console = Console(file=buffer, width=100, color_system=None)
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
            details = [f"compiled again: {reason}" for reason in s.recompilations]
            details += [f"graph break: {b.reason}{_at(b.source)}" for b in s.graph_breaks]
            details += [f"in torch: {t.what}: {t.reason}{_at(t.source)}" for t in s.in_torch]
            if s.graphs_in_torch:
                why = "measured to be faster there" if s.measured else "as placement asks for"
                details.append(f"in torch by choice: {s.graphs_in_torch} of {s.graphs} graphs ({why})")
            # sizes that are alike share a measurement
            details += dict.fromkeys(
                f"measured: {', '.join(f'{_NAMES[executor]} {t:.3g} ms' for executor, t in times.items())}"
                for times in s.measured
            )
            details += [
                f"in torch by choice: {what}, {count} times: its kernel is faster than ONNX Runtime's, or chooses "
                "among equals as eager does (placement='onnxruntime' keeps it there)"
                for what, count in s.preferred.items()
            ]
            if s.on_cpu:
                listed = ", ".join(f"{what} ({count})" for what, count in s.on_cpu.items())
                details.append(
                    f"on the CPU: {listed}: ONNX Runtime has no kernel for them on the GPU, or counts them as part of "
                    "a shape. What they read and give is copied, and each run is waited for."
                )
            if s.widened:
                details.append(
                    f"16 bits: {s.widened} operators compute in float32 and round their results, because ONNX Runtime "
                    "has no 16-bit kernels for them here. That is right, but slower than precision='32-true'."
                )
            if details:
                console.print(f"{s.name}:", markup=False, highlight=False)
            for line in details:
                console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        if any(o.in_ort for o in optimizers):
            console.print(_table_of(optimizers))
        for line in dict.fromkeys(f"{r.what} in torch: {r.reason}" for o in optimizers for r in o.reasons):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return buffer.getvalue().rstrip()


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
