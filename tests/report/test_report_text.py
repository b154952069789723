"""What a report says when it is printed or looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ort.report import GraphBreak, GraphReport, Report, words
from lightning_ort.report.timeline import TimedCall

pytestmark = pytest.mark.stock_only


@pytest.fixture
def report():
    found = Report()
    step = found.step("training_step")
    step.calls, step.graphs, step.compile_seconds = 1200, 2, 1.5
    step.each_graph = [GraphReport("onnxruntime", speed=1.5, gain=1.0)]
    step.graph_breaks = [
        GraphBreak("metrics are plain Python", "model.py:9: self.metric(y)", "metrics"),
        GraphBreak("manual_backward is plain Python", "model.py:5: self.manual_backward(a)", "manual optimization"),
        GraphBreak("which way Python goes depends on the values of a tensor", "model.py:7: if y > 0:", "", "Dynamo: x"),
        GraphBreak("manual_backward is plain Python", "model.py:6: self.manual_backward(b)", "manual optimization"),
    ]
    return found


def time(report: Report, seconds: float, graph: float) -> None:
    """Have a call been timed."""
    step = report["training_step"]
    entries = (("onnxruntime", "graph", 0.0, graph, step.each_graph[0]),)
    step.timing.calls.append(TimedCall(0.0, seconds, entries, (("python", step.name, 0.0, seconds, None),)))


def test_lines_and_names_are_printed_as_they_are(report):
    step = report["training_step"]
    step.graph_breaks = [GraphBreak("a value is [bold]asked[/bold] for", "model.py:100: x = y.item()")]
    step.name = "[red]:100:[/red]"
    assert "a value is [bold]asked[/bold] for (model.py:100: x = y.item())" in str(report)
    assert "│ [red]:100:[/red] │" in str(report)


def test_repr_is_short():
    assert repr(Report()) == "<Report of no step yet>"


def test_repr_names_the_steps(report):
    assert repr(report) == "<Report training_step: 1200 calls, 2 graphs>"
    report["training_step"].graphs = 1
    assert repr(report) == "<Report training_step: 1200 calls, 1 graph>"


def test_time_and_break_even(report):
    time(report, 1e-3, 4e-4)
    assert (
        "time: 1 ms a call (ONNX Runtime 40%, torch 0%, Python and the rest 60%); in torch alone about 1.2 ms; 1.5 s "
        "of compiling are paid back from call 7,500 on"
    ) in str(report)


def test_compiling_that_is_never_paid_back(report):
    report["training_step"].each_graph[0].speed = 1.0
    time(report, 1e-3, 4e-4)
    assert "1.5 s of compiling are never paid back" in str(report)


def test_what_is_not_known_is_said(report):
    assert "time: unknown: calls that compile" in str(report)
    report["training_step"].each_graph[0].speed = None
    time(report, 1e-3, 4e-4)
    assert "in torch alone: unknown, its graphs were not measured beside torch" in str(report)
    assert "paid back" not in str(report)


def test_expected_breaks_are_grouped_after_those_to_act_on(report):
    lines = [line.strip() for line in str(report).splitlines()]
    (other,) = [i for i, line in enumerate(lines) if "which way Python goes" in line]
    (manual,) = [i for i, line in enumerate(lines) if line.startswith("expected graph breaks, by manual optimization:")]
    (metrics,) = [i for i, line in enumerate(lines) if line.startswith("expected graph breaks, by metrics:")]
    assert lines[other].endswith("(model.py:7: if y > 0:). Dynamo: x")
    assert other < metrics < manual
    assert [line[:31] for line in lines[manual + 1 : manual + 3]] == ["graph break: manual_backward is"] * 2
    assert lines[-1] == "docs/report.md#graph-breaks-that-are-expected says what can be done"


def test_nothing_is_cut(report):
    long = "a reason of many words " * 30 + "with an end"
    report["training_step"].graph_breaks[2] = GraphBreak(long, "model.py:7: x", "", "")
    assert long in str(report)


def test_where_it_points_to_is_there():
    page = Path(__file__).parents[2] / words.PAGE
    assert "## Graph breaks that are expected" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("value", "text"), [(1.5, "1.5 s"), (0.0123, "12.3 ms"), (2.5e-4, "250 µs"), (0.0, "0 µs"), (7200.0, "7200 s")]
)
def test_times_have_three_digits(value, text):
    assert words.seconds(value) == text
