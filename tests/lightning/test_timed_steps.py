"""What the report of a fit says of time: taken from a few of the calls, and wrong about none."""

from __future__ import annotations

import math
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import PyTorchProfiler
from modules import CLASSES, FEATURES, ByHand, table
from parity import assert_fit_parity, fit, needs_ort, quiet, step_report
from torch import nn

from lightning_ort import ORTStrategy
from lightning_ort.compiler import contest
from lightning_ort.compiler.contest import MEMORY
from lightning_ort.report import timeline

pytestmark = [needs_ort, pytest.mark.stock_only]


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(ByHand, Classifier):
    pass


@pytest.fixture
def races(monkeypatch, tmp_path):
    """Decide races by a table of milliseconds, not by a clock."""
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "1")
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(tmp_path / "cache"))
    MEMORY.forget()
    milliseconds = {"onnxruntime": 1.0, "torch": 1.5, "eager": 2.0}

    def pretend(runs, **limits):
        for run in runs.values():
            run()
        return {name: milliseconds[name] / 1e3 for name in runs}

    monkeypatch.setattr(contest, "race", pretend)
    yield milliseconds
    MEMORY.forget()


def trained(make=Classifier, **flags):
    strategy = ORTStrategy(print_report=False, **flags.pop("strategy", {}))
    run = fit(make, table, flags.pop("val", None), strategy=strategy, **{"max_epochs": 5} | flags)
    return step_report(run.trainer, "training_step"), run


def whats(call, where):
    return {i.what for i in call.intervals if i.where == where}


def test_a_fit(races):
    step, _ = trained(strategy={"optimizer": "torch"})
    figures = step.figures()
    calls = step.timing.calls
    usual = [c for c in calls if c.seconds <= 3 * median(c.seconds for c in calls)]
    # 3rd to 16th, 19th, 22nd, 25th and 28th, unless a session is made in one
    assert step.calls == 30 and 15 <= len(calls) <= 18 and figures.timed == len(usual)
    assert sum(figures.shares.values()) == pytest.approx(1.0)
    assert figures.shares["onnxruntime"] > 0 and figures.shares["torch"] > 0 and figures.shares["python"] > 0
    call = figures.call
    assert [p.what for p in call.phases] == ["training_step", "backward", "update"]
    assert whats(call, "onnxruntime") == {"piece"}
    assert whats(call, "torch") == {"random numbers", "backward", "update"}  # of the dropout
    (run,) = call.graphs
    (graph,) = step.each_graph
    assert run.graph is graph and (graph.executor, graph.speed, graph.gradients) == ("onnxruntime", 2.0, True)
    # as often as long in torch as it was measured to be, but by no more than the difference of that
    saved = sum(min(c.graphs[0].seconds, 1e-3) for c in usual) / len(usual)
    assert figures.seconds_in_torch == pytest.approx(figures.seconds + saved)
    assert figures.pays_from == math.ceil(step.compile_seconds / (figures.seconds_in_torch - figures.seconds))


def test_what_is_told_of_a_graph(races):
    step, _ = trained()
    (graph,) = step.each_graph
    assert (graph.weights, graph.elements, graph.calls, graph.segments) == (4, 8 * (FEATURES + 1) + 4 * 9, 5, (1, 0))
    assert graph.inputs == {"batch[0]": f"16 x {FEATURES} float32", "batch[1]": "16 int64"}
    assert graph.measured == {"onnxruntime": 1.0, "torch": 1.5, "eager": 2.0}
    assert graph.begins.endswith("return F.cross_entropy(self.net(batch[0]), batch[1])")
    assert "least time" in graph.why


@pytest.mark.parametrize(("eager", "executor"), [(0.5, "eager"), (1.0, "onnxruntime")])
def test_steps_that_are_no_faster(races, eager, executor):
    races["eager"] = eager
    step, run = trained()
    figures = step.figures()
    assert [g.executor for g in step.each_graph] == [executor]
    assert figures.seconds_in_torch == pytest.approx(figures.seconds) and figures.pays_from == math.inf
    assert "are never paid back" in str(run.trainer.strategy.report())
    assert (figures.shares["onnxruntime"] == 0) == (executor == "eager")


@pytest.mark.parametrize(
    ("placement", "why"), [("onnxruntime", "placement='onnxruntime'"), ("torch", "placement='torch'"),
                           ("fastest", "LIGHTNING_ORT_MEASURE=0")],
)  # fmt: skip
def test_what_nobody_measured_is_unknown(placement, why):
    step, run = trained(strategy={"placement": placement, "optimizer": "torch"})
    figures = step.figures()
    assert figures.seconds_in_torch is None and figures.pays_from is None and figures.speed is None
    assert (figures.shares["onnxruntime"] == 0) == (placement == "torch")
    assert "in torch alone: unknown" in str(run.trainer.strategy.report())
    assert why in step.each_graph[0].why


def test_manual_optimization_is_timed_within_its_step():
    step, _ = trained(Manual, strategy={"optimizer": "ort"})
    call = step.figures().call
    assert [p.what for p in call.phases] == ["backward", "update", "training_step"]
    assert "update" in whats(call, "onnxruntime") and "update" not in whats(call, "torch")
    assert call.phases[-1].seconds == call.seconds
    assert {b.expected for b in step.graph_breaks} == {"manual optimization", "calls of Lightning"}


def test_accumulated_gradients_and_validation():
    step, run = trained(accumulate_grad_batches=3, val=table, max_epochs=4, strategy={"optimizer": "torch"})
    phases = [[p.what for p in c.phases] for c in step.timing.calls]
    assert ["training_step", "backward"] in phases and ["training_step", "backward", "update"] in phases
    validation = step_report(run.trainer, "validation_step")
    assert validation.timing.calls
    assert all([p.what for p in c.phases] == ["validation_step"] for c in validation.timing.calls)
    assert not validation.figures().call.graphs[0].graph.gradients
    assert timeline.present is None, "it is over"


def test_calls_that_compile_are_not_among_them():
    class Changing(Classifier):
        def training_step(self, batch, batch_idx):
            scale = 2.0 if batch_idx < 4 else 3.0
            return scale * super().training_step(batch, batch_idx)

    step, _ = trained(Changing, max_epochs=2)
    assert len(step.recompilations) == 2 and len(step.each_graph) == step.graphs == 3
    runs = [c.graphs[0].graph for c in step.timing.calls]
    # 3rd to 12th but the 5th, which compiled the last graph; that one ran in the 6th, 11th and 12th
    assert len(runs) == 9 and [i for i, graph in enumerate(runs) if graph is step.each_graph[2]] == [2, 7, 8]


def test_a_step_that_is_left_to_torch_is_torchs():
    class Left(Classifier):
        def training_step(self, batch, batch_idx):
            noise = torch.bernoulli(torch.sigmoid(batch[0]))
            return F.cross_entropy(self.net(batch[0] * noise), batch[1])

    step, _ = trained(Left, strategy={"optimizer": "torch"})
    assert step.graphs == 0 and step.in_torch
    figures = step.figures()
    assert figures.shares["onnxruntime"] == 0 and "operators" in whats(figures.call, "torch")
    assert figures.seconds_in_torch == figures.seconds and figures.pays_from == math.inf


def test_timing_changes_no_result(monkeypatch):
    monkeypatch.setattr(timeline, "_FIRST", 1)
    assert_fit_parity(Classifier, table, table)


def test_the_strategy_is_written_by_its_arguments():
    assert repr(ORTStrategy()) == "ORTStrategy()"
    strategy = ORTStrategy(
        placement="torch", session_options={"intra_op_num_threads": 2}, optimizer="ort", verify=False
    )
    assert repr(strategy) == (
        "ORTStrategy(session_options={'intra_op_num_threads': 2}, placement='torch', verify=False, optimizer='ort')"
    )
    strategy = ORTStrategy(shard_optimizer=True, start_method="spawn", find_unused_parameters=True)
    assert repr(strategy) == ("ORTStrategy(start_method='spawn', shard_optimizer=True, find_unused_parameters=True)")


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_profiler_and_more_compilations_than_dynamo_makes(tmp_path):
    """What is one too many has no name in Dynamo's records."""
    for _ in range(4):
        profiler = PyTorchProfiler(dirpath=tmp_path, export_to_chrome=False)
        with quiet():
            trainer = Trainer(
                strategy=ORTStrategy(print_report=False), profiler=profiler, limit_predict_batches=2, logger=False,
                enable_progress_bar=False,
            )  # fmt: skip
            assert len(trainer.predict(BoringModel())) == 2
