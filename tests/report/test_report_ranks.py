"""The report of rank 0 on the others: what they tell it, and where they differ."""

from __future__ import annotations

from lightning_ort.report import GraphBreak, Report
from lightning_ort.report.ranks import from_text, over_ranks, to_text


def told(calls: int = 10, graphs: int = 1, breaks: int = 0) -> Report:
    report = Report()
    step = report.step("training_step")
    step.calls, step.graphs, step.compile_seconds = calls, graphs, 0.5
    step.graph_breaks += [GraphBreak(f"because {n}", "net.py:1") for n in range(breaks)]
    return report


def merged(*others: Report | None) -> Report:
    report = told()
    texts = [to_text(report), *(None if other is None else to_text(other) for other in others)]
    report.ranks = {rank: None if text is None else from_text(text) for rank, text in enumerate(texts)}
    return report


def test_ranks_that_are_alike():
    report = merged(told(), told())
    assert list(over_ranks(report, "training_step")) == [
        "ranks: 3, with the same graphs, graph breaks and operators in torch"
    ]
    assert "ranks: 3, with the same graphs" in str(report)
    assert "ranks: 3, with the same graphs" in report._repr_html_()


def test_ranks_that_differ():
    other = told()
    del other._steps["training_step"]
    assert list(over_ranks(merged(told(calls=9, graphs=2, breaks=1), None, other), "training_step")) == [
        "ranks: 4, of which 1 are known to be alike",
        "rank 1: calls 9 instead of 10, graphs 2 instead of 1, graph breaks 1 instead of 0",
        "rank 3: it was not called there",
        "rank 2: no account has come",
    ]


def test_slowest_and_fastest(monkeypatch):
    slow = told()
    for report, seconds in ((slow, 0.004), (quick := told(), 0.002)):
        figures = type("Figures", (), {"seconds": seconds, "shares": {"onnxruntime": 0.75, "python": 0.25}})
        monkeypatch.setattr(report["training_step"], "figures", lambda found=figures: found, raising=False)
    quick.ranks = {0: from_text(to_text(quick)), 1: from_text(to_text(slow))}
    assert list(over_ranks(quick, "training_step"))[-1] == (
        "slowest: rank 1 with 4 ms a call (ONNX Runtime 75%, Python and the rest 25%); "
        "fastest: rank 0 with 2 ms a call (ONNX Runtime 75%, Python and the rest 25%)"
    )


def test_one_process_has_no_ranks():
    assert list(over_ranks(told(), "training_step")) == []
    assert "rank" not in str(told())
