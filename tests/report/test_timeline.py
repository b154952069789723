"""Who had each moment of a call, and what follows from that."""

from __future__ import annotations

import copy
import math
import pickle

import pytest

from lightning_ort.report import GraphReport, StepReport, timeline
from lightning_ort.report.timeline import TimedCall

pytestmark = pytest.mark.stock_only


class Clock:
    """Stands for the real one: each look at it advances it to the next time of a list."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timeline, "perf_counter", lambda: self.now)

    def at(self, seconds: float) -> float:
        self.now = 100.0 + seconds
        return self.now


@pytest.fixture
def clock(monkeypatch):
    timeline.close()
    yield Clock(monkeypatch)
    timeline.close()


def due(calls: int = 3) -> StepReport:
    """A step function whose present call is timed."""
    step = StepReport("training_step", calls=calls)
    step.timing.due = calls
    return step


def timed(entries, seconds: float = 10.0) -> TimedCall:
    return TimedCall(0.0, seconds, tuple(entries), (("python", "training_step", 0.0, seconds, None),))


def test_each_moment_belongs_to_the_innermost_turn():
    call = timed(
        [
            ("torch", "random numbers", 1.0, 2.0, None),
            ("onnxruntime", "piece", 2.0, 4.0, None),
            ("torch", "piece", 4.0, 4.5, None),
            ("python", "graph", 1.0, 5.0, None),
            ("torch", "backward", 6.0, 9.0, None),
            ("onnxruntime", "piece", 7.0, 8.0, None),
        ]
    )
    found = [(i.where, i.what, i.begin, i.end) for i in call.intervals]
    assert found == [
        ("python", "", 0.0, 1.0),
        ("torch", "random numbers", 1.0, 2.0),
        ("onnxruntime", "piece", 2.0, 4.0),
        ("torch", "piece", 4.0, 4.5),
        ("python", "graph", 4.5, 5.0),
        ("python", "", 5.0, 6.0),
        ("torch", "backward", 6.0, 7.0),
        ("onnxruntime", "piece", 7.0, 8.0),
        ("torch", "backward", 8.0, 9.0),
        ("python", "", 9.0, 10.0),
    ]
    assert call.shares == {"onnxruntime": 3.0, "torch": 3.5, "python": 3.5}


def test_turns_that_overlap_or_outlast_the_call_are_counted_once():
    call = timed(
        [("torch", "a", 1.0, 4.0, None), ("onnxruntime", "b", 3.0, 6.0, None), ("torch", "c", 9.0, 12.0, None)]
    )
    assert sum(call.shares.values()) == pytest.approx(10.0)
    assert [i.end for i in call.intervals] == [i.begin for i in call.intervals[1:]] + [10.0]
    assert call.shares["torch"] == 3.0 and call.shares["onnxruntime"] == 1.0


def test_what_belongs_to_a_graph_is_known_by_it():
    graph = GraphReport("onnxruntime")
    call = timed([("onnxruntime", "piece", 2.0, 4.0, None), ("python", "graph", 1.0, 5.0, graph)])
    assert [i.graph for i in call.intervals] == [None, graph, graph, graph, None]
    assert [(run.graph, run.seconds) for run in call.graphs] == [(graph, 4.0)]


def test_a_call_is_kept_with_its_backward_and_its_update(clock):
    step = due()
    timeline.begin(step, "cpu")
    clock.at(2)
    timeline.present.leave("training_step")
    clock.at(3)
    timeline.backward_begins()
    clock.at(5)
    timeline.backward_ends()
    clock.at(8)
    timeline.update_ends(clock.now - 9)  # an optimizer's step calls the step function
    clock.at(50)  # the loader
    step.calls += 1
    step.timing.due = 1000
    timeline.begin(step, "cpu")
    (call,) = step.timing.calls
    assert timeline.present is None
    assert call.seconds == 8.0 and [p.what for p in call.phases] == ["training_step", "backward", "update"]
    assert call.shares == {"onnxruntime": 0.0, "torch": 5.0, "python": 3.0}


def test_an_update_in_onnxruntime_is_not_torchs(clock):
    step = due()
    timeline.begin(step, "cpu")
    timeline.present.leave("training_step")
    began = clock.at(2)
    clock.at(5)
    timeline.present.add("onnxruntime", "update", began)
    clock.at(6)
    timeline.update_ends(began - 2)
    timeline.close()
    assert step.timing.calls[0].shares == {"onnxruntime": 3.0, "torch": 0.0, "python": 3.0}


@pytest.mark.parametrize("spoiled", ["compiled", "raised"])
def test_a_call_unlike_others_is_left_out(clock, spoiled):
    step = due()
    timeline.begin(step, "cpu")
    if spoiled == "compiled":
        timeline.spoil()
        timeline.present.leave("training_step")
    timeline.close()
    assert not step.timing.calls and step.figures() is None


def test_which_calls_are_timed(clock):
    step, numbers = StepReport("training_step"), []
    for step.calls in range(1, 10_001):
        if timeline.present is not None or step.calls >= step.timing.due:
            timeline.begin(step, "cpu")
            if timeline.present is not None:
                numbers.append(step.calls)
                timeline.present.leave("training_step")
    assert numbers[:14] == [*range(3, 17)]
    assert len(numbers) < 80 and len(step.timing.calls) == 32
    # accumulated gradients have an update in one of four calls: all kinds of them have their turn
    assert len({number % 4 for number in numbers[-32:]}) == 4


def test_nothing_is_timed_on_a_gpu(clock):
    step = due()
    timeline.begin(step, "cuda")
    assert timeline.present is None and step.calls < step.timing.due
    assert "GPU" in step.timing.not_timed


def calls_of(graph: GraphReport | None, seconds: list[float], inside: float = 4.0) -> StepReport:
    """A step function whose calls took so long, with one graph of ``inside`` seconds."""
    step = StepReport("training_step", calls=100, compile_seconds=30.0)
    for each in seconds:
        step.timing.calls.append(timed([("onnxruntime", "graph", 1.0, 1.0 + inside, graph)], each))
    return step


def test_figures():
    step = calls_of(GraphReport("onnxruntime", speed=1.5, gain=9.0), [10.0, 11.0, 12.0])
    figures = step.figures()
    assert figures.timed == 3 and figures.seconds == 11.0
    assert figures.shares == {"onnxruntime": pytest.approx(4 / 11), "torch": 0.0, "python": pytest.approx(7 / 11)}
    assert figures.seconds_in_torch == pytest.approx(13.0) and figures.speed == pytest.approx(13 / 11)
    assert figures.pays_from == 15
    assert figures.call.seconds == 11.0


def test_an_estimate_is_not_larger_than_what_was_measured():
    step = calls_of(GraphReport("onnxruntime", speed=1.5, gain=0.5), [10.0, 11.0, 12.0])
    assert step.figures().seconds_in_torch == pytest.approx(11.5) and step.figures().pays_from == 60


@pytest.mark.parametrize(("as_it_is", "in_torch", "pays_from"), [(False, 12.0, 30), (True, 11.0, math.inf)])
def test_what_calls_in_turns_have_shown_counts(as_it_is, in_torch, pays_from):
    step = calls_of(GraphReport("onnxruntime", speed=1.5, gain=9.0), [10.0, 11.0, 12.0])
    step.turns, step.as_it_is = {"graphs": 10_000.0, "eager": 11_000.0}, as_it_is
    assert step.figures().seconds_in_torch == pytest.approx(in_torch) and step.figures().pays_from == pays_from


def test_a_call_that_something_else_disturbed_does_not_count():
    step = calls_of(GraphReport("onnxruntime", speed=1.0, gain=0.0), [10.0] * 5 + [31.0])
    assert step.figures().seconds == 10.0 and step.figures().timed == 5


@pytest.mark.parametrize(("speed", "pays_from"), [(1.0, math.inf), (0.98, math.inf), (None, None)])
def test_compiling_that_is_never_paid_back_or_nobody_knows(speed, pays_from):
    figures = calls_of(GraphReport("torch", speed=speed, gain=speed and 9 * (speed - 1)), [10.0]).figures()
    assert figures.pays_from == pays_from
    assert (figures.seconds_in_torch is None) == (speed is None)


def test_a_call_without_graphs_takes_as_long_in_torch():
    step = StepReport("validation_step", compile_seconds=1.0)
    step.timing.calls.append(timed([]))
    figures = step.figures()
    assert (figures.seconds, figures.seconds_in_torch, figures.pays_from) == (10.0, 10.0, math.inf)


def test_reports_can_be_copied_and_pickled():
    step = calls_of(GraphReport("onnxruntime", speed=1.5, gain=9.0), [10.0])
    for other in (copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
        assert other.figures().seconds_in_torch == step.figures().seconds_in_torch
