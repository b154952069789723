"""Sentences that the text of a report and its page share."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_ort.report.account import GraphBreak, StepReport
from lightning_ort.report.figures import Figures
from lightning_ort.report.timeline import Where

__all__ = [
    "EXECUTORS", "PAGE", "WHERE", "by_choice", "choices", "counted", "expected_breaks", "measured", "pays_from",
    "seconds", "shares", "step_time", "turns", "unknown",
]  # fmt: skip

PAGE = "docs/report.md"
"""where this is explained"""

EXECUTORS = {
    "onnxruntime": "ONNX Runtime",
    "onnxruntime-one-thread": "ONNX Runtime on one thread",
    "torch": "torch",
    "torch-channels-last": "torch (channels last)",
    "inductor": "inductor",
    "eager": "eager",
}

WHERE: Mapping[Where, str] = {"onnxruntime": "ONNX Runtime", "torch": "torch", "python": "Python and the rest"}

_EXPECTED = {
    "manual optimization": "gradients and updates are asked for between two graphs. Nothing is wrong",
    "metrics": "their values are plain Python. metric.update(...) and self.log(name, metric) break no graph",
    "calls of Lightning": "these are plain Python. Nothing is wrong",
    "copies of modules and metrics": "copying is plain Python. Nothing is wrong",
}


def seconds(value: float) -> str:
    """A time with three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {unit}" if value < 1000 else f"{value:.0f} s"
    return f"{value / 1e-6:.2g} µs"


def counted(number: int, thing: str) -> str:
    """``1 graph``, ``2 graphs``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def shares(figures: Figures) -> str:
    """Who has how much of a step."""
    return ", ".join(f"{WHERE[where]} {share:.0%}" for where, share in figures.shares.items())


def unknown(step: StepReport) -> str:
    """Why there are no figures."""
    return step.timing.not_timed or "calls that compile, compare or measure are not timed, and there were no others"


def pays_from(figures: Figures) -> str:
    """When compiling is paid back."""
    if figures.pays_from is None:
        return "unknown"
    return "never" if math.isinf(figures.pays_from) else f"from call {figures.pays_from:,} on"


def step_time(step: StepReport) -> str:
    """What a call costs, in one line."""
    figures = step.figures()
    if figures is None:
        return f"time: unknown: {unknown(step)}"
    text = f"time: {seconds(figures.seconds)} a call ({shares(figures)})"
    if figures.seconds_in_torch is None:
        return f"{text}; in torch alone: unknown, its graphs were not measured beside torch"
    text += f"; in torch alone about {seconds(figures.seconds_in_torch)}"
    if figures.pays_from is not None and math.isinf(figures.pays_from):
        return f"{text}, which is not longer: {seconds(step.compile_seconds)} of compiling are never paid back"
    return f"{text}; {seconds(step.compile_seconds)} of compiling are paid back {pays_from(figures)}"


def choices(step: StepReport) -> list[str]:
    """Who runs its graphs, and what was measured."""
    lines = []
    if step.graphs_in_torch:
        why = "measured to be faster there" if step.measured else "as placement asks for"
        lines.append(f"in torch by choice: {step.graphs_in_torch} of {step.graphs} graphs ({why})")
    # sizes that are alike share a measurement
    lines += dict.fromkeys(f"measured: {measured(times)}" for times in step.measured)
    lines += dict.fromkeys(f"not measured: {not_measured(graph.failed)}" for graph in step.each_graph if graph.failed)
    return lines


def turns(step: StepReport) -> list[str]:
    """Whether its calls are made in graphs, and why."""
    if calls := step.recompiled_calls:
        return [f"the step is called as it is, because it was compiled anew in {calls} calls nearly in a row"]
    if not step.turns:
        return []
    in_graphs, as_it_is = (seconds(1e-3 * step.turns[who]) for who in ("graphs", "eager"))
    what = "the step is called as it is, which is faster" if step.as_it_is else "the step is called in graphs"
    return [f"in turns: {what}: {in_graphs} in graphs, {as_it_is} as it is"]


def measured(times: Mapping[str, float]) -> str:
    """What a run takes by executor, of milliseconds."""
    return ", ".join(f"{EXECUTORS[executor]} {seconds(1e-3 * t)}" for executor, t in times.items())


def not_measured(failed: Mapping[str, str]) -> str:
    """Executors that could not take part, and why."""
    return ", ".join(f"{EXECUTORS[executor]} ({why})" for executor, why in failed.items())


def by_choice(step: StepReport) -> list[str]:
    """Operators that are elsewhere than their graph, or wider."""
    lines = [
        f"in torch by choice: {what}, {_times(count)}: its kernel is faster than ONNX Runtime's, or chooses "
        "among equals as eager does (placement='onnxruntime' keeps the former there)"
        for what, count in step.preferred.items()
    ]
    if step.on_cpu:
        listed = ", ".join(f"{what} ({count})" for what, count in step.on_cpu.items())
        lines.append(
            f"on the CPU: {listed}: ONNX Runtime has no kernel for them on the GPU, or counts them as part of "
            "a shape. What they read and give is copied, and each run is waited for."
        )
    if step.widened:
        lines.append(
            f"16 bits: {step.widened} operators compute in float32 and round their results, because ONNX Runtime "
            "has no 16-bit kernels for them here. That is right, but slower than precision='32-true'."
        )
    return lines


def _times(count: int) -> str:
    return f"{count} times" if count > 1 else "in one place"


def expected_breaks(step: StepReport) -> list[tuple[str, list[GraphBreak]]]:
    """Breaks that are as they should be, by what asks for them: a sentence, and the breaks."""
    groups: dict[str, list[GraphBreak]] = {}
    for each in step.graph_breaks:
        if each.expected:
            groups.setdefault(each.expected, []).append(each)
    return [(f"by {name}: {_EXPECTED.get(name, 'nothing is wrong')}", breaks) for name, breaks in groups.items()]
