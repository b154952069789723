"""Calls of a step in turns, in graphs and as it is: the results are the same, and the faster way stays."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from modules import CLASSES, FEATURES, ByHand, table
from parity import assert_same_outcome, assert_same_state, fit, needs_ort, quiet, state_of, step_report
from torch import nn
from torch.utils.data import DataLoader

from lightning_ort import ORTPrecision, ORTStrategy
from lightning_ort.compiler import contest
from lightning_ort.lightning import turns
from lightning_ort.lightning.turns import Turns
from lightning_ort.report import GraphBreak, StepReport
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = [needs_ort, pytest.mark.stock_only]


class Classifier(LightningModule):
    """Dropout, batch norm, and values that are logged: what a call of another kind could disturb."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, CLASSES)
        )

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(ByHand, Classifier):
    pass


@pytest.fixture
def takes(measuring, monkeypatch):
    """Have a call in graphs, and one as it is, take so many milliseconds, whatever the clock says."""

    def decide(in_graphs, as_it_is):
        usual = turns.usual

        def pretended(row):
            assert len(row) >= 6 and usual(row) > 0
            pretended.times.reverse()
            return pretended.times[0] / 1e3

        pretended.times = [as_it_is, in_graphs]  # asked for by turns, in graphs first
        monkeypatch.setattr(turns, "usual", pretended)
        monkeypatch.setattr(turns, "_SURE", 1)
        monkeypatch.setattr(turns, "_CYCLES", 1)
        monkeypatch.setattr(turns, "_LASTING", 0.0)
        monkeypatch.setattr(turns, "_LONG", float("inf"))  # as all calls may be on a busy machine
        monkeypatch.setattr(
            contest, "race", lambda runs, **limits: {name: float(name != "onnxruntime") for name in runs}
        )

    return decide


def trained(make=Classifier, *, strategy=None, **flags):
    strategy = strategy or ORTStrategy(print_report=False)
    return fit(make, table, table, strategy=strategy, **{"max_epochs": 12, "max_steps": -1} | flags)


@pytest.mark.parametrize("make", [Classifier, Manual])
@pytest.mark.parametrize(("times", "as_it_is"), [((2.0, 1.0), True), ((1.0, 2.0), False), ((1.0, 1.0), False)])
def test_the_faster_way_stays(make, times, as_it_is, takes):
    takes(*times)
    run = trained(make)
    assert_same_outcome(trained(make, strategy="auto"), run)
    for name in ("training_step", "validation_step"):
        step = step_report(run.trainer, name)
        assert (dict(step.turns), step.as_it_is) == ({"graphs": times[0], "eager": times[1]}, as_it_is)
        assert step.calls == (72 if name == "training_step" else 74)  # 2 of them before the training
        assert step.all_in_ort is not as_it_is
        text = re.sub(r"\s+", " ", str(run.trainer.strategy.report()))
        assert ("the step is called as it is, which is faster: 2 ms in graphs, 1 ms as it is" in text) is as_it_is
        assert ("the step is called in graphs: 1 ms in graphs" in text) is not as_it_is
        # calls that are timed are of the one kind that stays
        runs = [len(call.graphs) for call in step.timing.calls]
        assert runs and all((found > 0) is not as_it_is for found in runs)


def test_accumulated_and_clipped(takes):
    takes(2.0, 1.0)
    flags = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    run = trained(**flags)
    assert_same_outcome(trained(strategy="auto", **flags), run)
    assert step_report(run.trainer, "training_step").as_it_is


def test_what_is_known_is_not_measured_again(takes, monkeypatch):
    takes(2.0, 1.0)
    trained()
    monkeypatch.setattr(turns, "usual", None)
    step = step_report(trained(max_epochs=5).trainer, "training_step")
    assert (dict(step.turns), step.as_it_is, step.calls) == ({"graphs": 2.0, "eager": 1.0}, True, 30)


def test_a_step_that_is_other_by_then(takes):
    """A callback that freezes a layer: what was measured before says nothing of the rest."""
    takes(2.0, 1.0)
    seen = []

    class Freezing(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 60:
                module.net[0].requires_grad_(False)

    class Looking(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            seen.append(step_report(trainer, "training_step").as_it_is)

    flags = {"max_epochs": 24, "max_steps": -1}
    run = fit(
        Classifier, table, strategy=ORTStrategy(print_report=False), callbacks=lambda: [Freezing(), Looking()], **flags
    )
    eager = fit(Classifier, table, strategy="auto", callbacks=lambda: [Freezing()], **flags)
    assert_same_state(state_of(eager.module), state_of(run.module))
    assert seen[59] and not seen[72] and seen[-1]


def test_a_further_fit_that_measures_nothing(takes, monkeypatch):
    """It is not told of its steps what the first one has found."""
    takes(2.0, 1.0)
    run = trained()
    assert step_report(run.trainer, "training_step").as_it_is
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "0")
    run.trainer.fit_loop.max_epochs += 2
    with quiet():
        run.trainer.fit(run.module, table())
    step = step_report(run.trainer, "training_step")
    assert step.calls == 84
    assert not step.turns and not step.as_it_is and step.all_in_ort


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": {"placement": "onnxruntime"}},
        {"strategy": {"on_unsupported": "error"}},
        {"plugins": ORTPrecision("16-mixed")},
        {"deterministic": True},
    ],
    ids=["placement", "no torch", "scaled losses", "deterministic"],
)
def test_where_nothing_is_measured(flags, takes):
    takes(2.0, 1.0)
    strategy = ORTStrategy(print_report=False, **flags.pop("strategy", {}))
    try:
        step = step_report(trained(strategy=strategy, **flags).trainer, "training_step")
    finally:
        torch.use_deterministic_algorithms(False)
    assert not step.turns and not step.as_it_is


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
def test_a_module_that_torch_has_compiled(takes):
    """What a Trainer has put in the place of its methods is torch's compiler."""
    takes(2.0, 1.0)
    run = fit(
        lambda: torch.compile(Classifier()),
        table,
        strategy=ORTStrategy(print_report=False),
        max_epochs=12,
        max_steps=-1,
    )
    assert not step_report(run.trainer, "training_step").turns


# -- who has the next call ---------------------------------------------------------------------------------------------


class Calls:
    """A step function in which a clock of its own passes."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch, in_graphs=1.0, as_it_is=2.0):
        self.step, self.now, self.compilations = StepReport("training_step", graphs=1), 0.0, 1
        self.seconds = {False: in_graphs / 1e3, True: as_it_is / 1e3}
        self.rest = {False: 0.0, True: 0.0}  # from there to the next call
        self.turns = Turns(self.step, lambda: ["a step"], RuntimeConfig(), phases=2, device=self.device)
        monkeypatch.setattr(turns, "perf_counter", lambda: self.now)

    def call(self, size=64, state=0, phases=2):
        as_it_is = self.turns.rest or self.turns.next(((torch.empty(size), 0), {}), self.compilations, state)
        self.turns.calls += 1
        for _ in range(phases):
            self.compute(self.seconds[as_it_is] / 2)
            self.turns.note()
        self.compute(self.rest[as_it_is])
        return as_it_is

    def compute(self, seconds):
        self.now += seconds

    def until_decided(self, **arguments):
        made = []
        while not self.turns.decided:
            made.append(self.call(**arguments))
            assert len(made) < 1000
        return made


class CallsOfAGPU(Calls):
    """Python goes on after 10 microseconds."""

    device, queued, waits = torch.device("cuda"), 0.0, 0

    def __init__(self, monkeypatch, *milliseconds):
        super().__init__(monkeypatch, *milliseconds)
        monkeypatch.setattr(turns, "wait_for", self.wait)
        monkeypatch.setattr(contest, "_gpu", lambda device: [f"the GPU {device}"])

    def compute(self, seconds):
        if seconds:
            self.now += 1e-5
            self.queued += seconds - 1e-5

    def wait(self, device):
        assert device == self.device
        self.waits += 1
        self.now += self.queued
        self.queued = 0.0


@pytest.fixture
def calls(measuring, monkeypatch):
    """Graphs take 4 ms, the step as it is takes 8."""
    return Calls(monkeypatch, 4.0, 8.0)


ROWS = [False] * 8 + [True] * 16 + [False] * 8


def test_calls_in_rows(calls):
    made = calls.until_decided()
    assert made == [False] * 16 + ROWS * 2 + [False]
    assert dict(calls.step.turns) == {"graphs": 4.0, "eager": 8.0}


@pytest.mark.parametrize(("in_graphs", "cycles"), [(1.0, 6), (0.1, 12)])
def test_short_calls_are_measured_for_longer(in_graphs, cycles, measuring, monkeypatch):
    """A quarter of a second, where that is not too many calls."""
    made = Calls(monkeypatch, in_graphs, 2 * in_graphs).until_decided()
    assert made == [False] * 16 + ROWS * cycles + [False]


@pytest.mark.parametrize(("as_it_is", "wins"), [(3.92, True), (3.8, True), (4.0, False), (4.08, False)])
def test_what_is_close_is_measured_for_longer(as_it_is, wins, measuring, monkeypatch):
    """Of two that are alike graphs stay."""
    made = Calls(monkeypatch, 4.0, as_it_is).until_decided()
    assert made == [False] * 16 + ROWS * 5 + [wins]


@pytest.mark.parametrize("in_torch", [0, 1])
@pytest.mark.parametrize(("as_it_is", "wins"), [(0.99, True), (1.01, False)])
def test_graphs_have_no_margin(as_it_is, wins, in_torch, measuring, monkeypatch):
    calls = Calls(monkeypatch, 1.0, as_it_is)
    calls.step.graphs_in_torch = in_torch
    assert calls.until_decided()[-1] is wins


@pytest.mark.parametrize(("in_graphs", "as_it_is", "wins"), [(3.0, 1.0, True), (1.0, 3.0, False), (1.0, 1.0, False)])
def test_what_follows_a_call_counts(in_graphs, as_it_is, wins, calls):
    """An update, say, that waits for threads which were not in use."""
    calls.seconds = {False: 4e-3, True: 5e-3}
    calls.rest = {False: in_graphs / 1e3, True: as_it_is / 1e3}
    assert calls.until_decided()[-1] is wins
    assert dict(calls.step.turns) == pytest.approx({"graphs": 4.0 + in_graphs, "eager": 5.0 + as_it_is})


def test_a_compilation_begins_the_rows_anew(calls):
    for _ in range(30):
        calls.call()
    calls.compilations += 1
    assert calls.until_decided() == [True] * 2 + [False] * 16 + ROWS * 2 + [False]


def test_what_is_compiled_anew_at_nearly_each_call_is_called_as_it_is(calls):
    made = []
    while not calls.turns.decided:
        made.append(calls.call())
        calls.compilations += len(made) != 2
    assert made == [False] * 6 + [True]
    assert (calls.step.as_it_is, calls.step.recompiled_calls, dict(calls.step.turns)) == (True, 5, {})
    assert all(calls.call() for _ in range(17))
    assert not calls.call(size=1000)  # is another matter
    assert (calls.step.as_it_is, calls.step.recompiled_calls) == (False, 0)


def test_what_is_compiled_anew_at_each_second_call_stays(calls):
    for i in range(100):
        assert not calls.call()
        calls.compilations += i % 2
    assert not calls.turns.decided


def test_processes_agree_on_what_is_compiled_too_often(measuring, monkeypatch):
    """One of two has data of ever new sizes; they look where both do."""
    calls = Calls(monkeypatch)
    calls.turns._means = lambda facts: [(fact + other) / 2 for fact, other in zip(facts, asked.pop(0), strict=True)]
    asked = [[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    assert calls.until_decided() == [False] * 8 + [True]
    assert calls.step.as_it_is


class Boxes(LightningModule):
    """As many boxes as there are in each image, which are a size of their own where there is but one."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(FEATURES, CLASSES)

    def training_step(self, batch, batch_idx):
        boxes, labels = batch
        return F.cross_entropy(torch.stack([self.net(b).amax(0) for b in boxes]), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def boxes():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 3, (80,), generator=generator).tolist()
    rows = [(torch.randn(1 + n, FEATURES, generator=generator), n) for n in counts]
    return DataLoader(
        rows, batch_size=5, collate_fn=lambda some: ([x for x, _ in some], torch.tensor([n for _, n in some]))
    )


def test_boxes_of_ever_other_numbers(measuring):
    runs = [
        fit(Boxes, boxes, None, strategy=strategy, max_epochs=1, max_steps=-1)
        for strategy in ("auto", ORTStrategy(print_report=False))
    ]
    assert_same_outcome(*runs)
    step = step_report(runs[1].trainer, "training_step")
    assert (step.as_it_is, step.recompiled_calls, step.calls) == (True, 5, 16)
    assert len(step.recompilations) < 6
    assert "it was compiled anew in 5 calls nearly in a row" in re.sub(
        r"\s+", " ", str(runs[1].trainer.strategy.report())
    )


@pytest.mark.parametrize("slowed", [False, True])
def test_what_has_a_core_for_a_while_decides_nothing(slowed, calls):
    """Of the two, graphs take half the time."""
    right = calls.seconds[slowed]
    calls.seconds[slowed] = 4 * right
    for _ in range(16 + len(ROWS)):
        calls.call()
    calls.seconds[slowed] = right
    assert not calls.turns.decided
    assert calls.until_decided() == [*ROWS, False]
    assert dict(calls.step.turns) == {"graphs": 4.0, "eager": 8.0}


def test_calls_that_have_not_ended_do_not_count(calls):
    """Of a step that has no loss, or that has raised."""
    for _ in range(29):
        calls.call()
    calls.seconds[True] = 1e-9
    for _ in range(64):
        calls.call(phases=1)
    calls.seconds[True] = 8e-3
    calls.until_decided()
    assert not calls.step.as_it_is


def test_calls_of_one_size_are_compared(calls):
    """Of two sizes, of which the larger one has more calls: whichever call the rows begin with."""
    made = 0
    while not calls.turns.decided:
        is_large = made % 3 > 0
        # were they mixed up, graphs would be found to be faster
        calls.seconds = {False: 8e-3, True: 4e-3} if is_large else {False: 1e-5, True: 1.0}
        calls.call(size=128 if is_large else 64)
        made += 1
    assert dict(calls.step.turns) == {"graphs": 8.0, "eager": 4.0}
    assert made < 100


@pytest.mark.parametrize("as_it_is", [4.0, 16.0])
def test_what_a_gpu_still_computes_counts(as_it_is, measuring, monkeypatch):
    calls = CallsOfAGPU(monkeypatch, 8.0, as_it_is)
    made = calls.until_decided()
    assert made == [False] * 16 + ROWS * 2 + [as_it_is < 8.0]
    assert dict(calls.step.turns) == pytest.approx({"graphs": 8.0, "eager": as_it_is})
    assert calls.waits == 1 + 2 * len(ROWS)  # and for none of the others


def test_patience_ends(calls):
    made = []
    while not calls.turns.decided:
        made.append(calls.call(size=64 + len(made)))
    assert len(made) < 500 and not any(made[:16]) and sum(made) <= len(made) / 2
    assert not calls.call()
    assert not calls.step.turns and not calls.step.as_it_is


def test_long_calls_stay_in_graphs(measuring, monkeypatch):
    calls = Calls(monkeypatch, 30.0, 15.0)
    made = calls.until_decided()
    assert len(made) < 30 and not any(made)


def test_long_calls_of_many_graphs_are_compared(measuring, monkeypatch):
    calls = Calls(monkeypatch, 30.0, 15.0)
    calls.step.graph_breaks.append(GraphBreak("a list of lengths", "step.py:1"))
    assert calls.until_decided() == [False] * 16 + ROWS * 2 + [True]


def test_larger_data_are_measured_anew(measuring, monkeypatch):
    calls = Calls(monkeypatch, 2.0, 1.0)
    calls.until_decided()
    assert calls.call(size=128)
    calls.seconds = {False: 1e-3, True: 2e-3}
    assert [calls.call(size=129) for _ in range(8)][-1] is False
    assert not calls.step.as_it_is and not calls.turns.decided
    calls.until_decided(size=129)
    assert not calls.step.as_it_is
