"""What other processes report that train together with this one, in short."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from lightning_ort.report.words import WHERE, seconds

if TYPE_CHECKING:
    from lightning_ort.report.report import Report

__all__ = ["RankStep", "from_text", "over_ranks", "to_text"]


@dataclasses.dataclass(frozen=True)
class RankStep:
    """Account of one step function on one rank, in numbers; see :class:`~lightning_ort.StepReport`.

    Attributes:
        calls: how often it was called.
        graphs: compiled for it.
        graphs_in_torch: those of them that torch runs whole.
        recompiled: how often.
        graph_breaks: how many places.
        in_torch: how many things torch ran because ONNX Runtime could not.
        compile_seconds: spent compiling and measuring.
        seconds: of a call; ``None`` where none was timed.
        shares: of those seconds, by who had them.
    """

    calls: int
    graphs: int
    graphs_in_torch: int
    recompiled: int
    graph_breaks: int
    in_torch: int
    compile_seconds: float
    seconds: float | None
    shares: Mapping[str, float]


_COMPARED = {
    "calls": "calls",
    "graphs": "graphs",
    "graphs_in_torch": "graphs in torch by choice",
    "recompiled": "times compiled again",
    "graph_breaks": "graph breaks",
    "in_torch": "in torch",
}
"""numbers that should be the same on all ranks, in words"""


def _in_short(report: Report) -> dict[str, RankStep]:
    found = {}
    for name, step in report.items():
        figures = step.figures()
        found[name] = RankStep(
            step.calls,
            step.graphs,
            step.graphs_in_torch,
            len(step.recompilations),
            len(step.graph_breaks),
            len(step.in_torch),
            step.compile_seconds,
            None if figures is None else figures.seconds,
            {} if figures is None else {str(where): share for where, share in figures.shares.items()},
        )
    return found


def to_text(report: Report) -> str:
    """What one rank tells the others of its report."""
    return json.dumps({name: dataclasses.asdict(step) for name, step in _in_short(report).items()})


def from_text(text: str) -> dict[str, RankStep]:
    """What :func:`to_text` of another rank says: step function name to account."""
    return {name: RankStep(**step) for name, step in json.loads(text).items()}


def over_ranks(report: Report, name: str) -> Iterator[str]:
    """Lines on step function ``name``: where other ranks differ from this one, and which is the slowest."""
    if len(report.ranks) < 2:
        return
    mine = _in_short(report)[name]
    told = {rank: steps.get(name) for rank, steps in report.ranks.items() if steps is not None}
    silent = [str(rank) for rank, steps in report.ranks.items() if steps is None]
    same = [rank for rank, step in told.items() if step is not None and not list(_differences(step, mine))]
    if len(same) == len(report.ranks):
        yield f"ranks: {len(same)}, with the same graphs, graph breaks and operators in torch"
    else:
        yield f"ranks: {len(report.ranks)}, of which {len(same)} are known to be alike"
    for rank, step in told.items():
        if step is None:
            yield f"rank {rank}: it was not called there"
        elif differences := ", ".join(_differences(step, mine)):
            yield f"rank {rank}: {differences}"
    if silent:
        yield f"rank {', '.join(silent)}: no account has come"
    timed = {rank: step for rank, step in told.items() if step is not None and step.seconds is not None}
    if len(timed) > 1:
        slow, fast = (choose(timed, key=lambda rank: timed[rank].seconds or 0.0) for choose in (max, min))
        yield f"slowest: {_time(slow, timed[slow])}; fastest: {_time(fast, timed[fast])}"


def _differences(step: RankStep, other: RankStep) -> Iterator[str]:
    for field, words in _COMPARED.items():
        value, expected = getattr(step, field), getattr(other, field)
        if value != expected:
            yield f"{words} {value} instead of {expected}"


def _time(rank: int, step: RankStep) -> str:
    shares = ", ".join(f"{words} {step.shares[where]:.0%}" for where, words in WHERE.items() if where in step.shares)
    return f"rank {rank} with {seconds(step.seconds or 0.0)} a call ({shares})"
