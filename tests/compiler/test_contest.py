"""Graphs that run where it was measured that they take less time."""

from __future__ import annotations

import json
import math
import os
import weakref
from functools import partial
from unittest.mock import Mock

import onnxruntime
import psutil
import pytest
import torch
import torch.nn.functional as F
from networks import MLP
from parity import assert_same_outcome, fit
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.cli import main
from lightning_ort.compiler import ORTBackend, compilation, contest, region
from lightning_ort.compiler.choice import Choice
from lightning_ort.compiler.contest import MEMORY, Key, race
from lightning_ort.compiler.functional_graph import Untraceable
from lightning_ort.compiler.global_state import GlobalState
from lightning_ort.compiler.loss_scale import LossScaling
from lightning_ort.compiler.trace_cache import TRACES
from lightning_ort.environment import has_cpp_compiler
from lightning_ort.errors import UnsupportedError
from lightning_ort.files.cache import Cache
from lightning_ort.report import StepReport, words
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.memory import release_free_memory

pytestmark = pytest.mark.usefixtures("measuring")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


def steps(function, module, batches):
    """What a training leaves, by plain SGD."""
    results = []
    for x in batches:
        module.zero_grad()
        loss = function(module, x)
        loss.backward()
        results += [loss.detach(), *[p.grad.clone() for p in module.parameters()]]
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.1 * p.grad
    return [*results, *module.state_dict().values(), torch.get_rng_state()]


def loss_of(module, x):
    return F.cross_entropy(module(x), torch.arange(len(x)) % 3)


def several(module, x):
    """A step whose gradients arrive at two outputs."""
    y = module(x)
    return y.square().mean(), y.sin().sum()


def trained(function, batches, *, graphs=None, **options):
    torch.manual_seed(1)
    module = Network()
    backend = ORTBackend(RuntimeConfig(), on_graph=(graphs if graphs is not None else []).append, **options)
    torch.manual_seed(2)
    return steps(torch.compile(function, backend=backend), module, batches)


def eager(function, batches):
    torch.manual_seed(1)
    module = Network()
    torch.manual_seed(2)
    return steps(function, module, batches)


BATCHES = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize(("seconds", "executor"), [(1.0, "torch"), (1.96, "onnxruntime"), (3.0, "onnxruntime")])
def test_the_faster_one_is_taken(races, seconds, executor):
    table, seen = races
    table["torch"] = seconds
    graphs = []
    got, wanted = trained(loss_of, BATCHES, graphs=graphs), eager(loss_of, BATCHES)
    assert [g.executor for g in graphs] == [executor]
    assert graphs[0].milliseconds == {"onnxruntime": 2.0, "torch": seconds, "eager": 2.0}
    assert seen == [["eager", "onnxruntime"], ["eager", "onnxruntime", "torch"]]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(
            a, b, rtol=0 if executor == "torch" else 1e-4, atol=0 if executor == "torch" else 1e-5
        )


def threads_of(graph):
    return [s.inner.get_session_options().intra_op_num_threads for s in graph.plan.sessions]


def wide(function):
    """What a training of a network leaves that is large enough for two threads; the graphs."""
    graphs = []
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
    backend = ORTBackend(RuntimeConfig(), on_graph=graphs.append)
    compiled = torch.compile(function, backend=backend) if function is not None else loss_of
    return steps(compiled, module, [x.repeat(20, 1) for x in BATCHES]), graphs


@pytest.mark.usefixtures("two_threads")
def test_one_thread_where_that_is_faster(races):
    """A graph that is large enough for two threads is tried on one; both give the same numbers."""
    table, seen = races
    table |= {"onnxruntime-one-thread": 1.0, "torch": 1.5}
    (got, (graph,)), (wanted, _) = wide(loss_of), wide(None)
    assert graph.executor == "onnxruntime-one-thread"
    assert set(threads_of(graph)) == {1}
    assert graph.in_onnxruntime
    assert not graph.is_threaded
    assert seen[-1] == ["eager", "onnxruntime", "onnxruntime-one-thread", "torch"]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    # remembered
    torch._dynamo.reset()
    MEMORY.forget()
    seen.clear()
    _, (again,) = wide(loss_of)
    assert again.executor == "onnxruntime-one-thread"
    assert not seen


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_who_runs_it_on_one_thread_uses_the_trace_that_there_is(races, monkeypatch, mode):
    table, seen = races
    table["onnxruntime-one-thread"] = 1.0
    trace = Mock(wraps=compilation.trace)
    monkeypatch.setattr(compilation, "trace", trace)
    TRACES.clear()
    graphs = []
    module = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
    compiled = torch.compile(loss_of, backend=ORTBackend(RuntimeConfig(), on_graph=graphs.append))
    for x in BATCHES:
        with mode():
            compiled(module, x.repeat(20, 1))
    assert "onnxruntime-one-thread" in seen[-1]
    assert graphs[-1].executor == "onnxruntime-one-thread"
    # milliseconds in which a graph in torch could save too little
    assert [made.kwargs["native"] for made in trace.call_args_list] == [False]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    "config",
    [{"session_options": {"intra_op_num_threads": 2}}, {"placement": "onnxruntime"}],
    ids=["threads of the user's", "a fixed placement"],
)
def test_threads_that_are_not_to_be_chosen(races, config):
    table, _ = races
    table |= {"onnxruntime-one-thread": 0.1, "torch": 3.0}
    graphs = []
    torch.manual_seed(1)
    compiled = torch.compile(loss_of, backend=ORTBackend(RuntimeConfig(**config), on_graph=graphs.append))
    module = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))
    steps(compiled, module, [x.repeat(20, 1) for x in BATCHES])
    assert [g.executor for g in graphs] == ["onnxruntime"]
    assert set(threads_of(graphs[0])) == {2}


@pytest.mark.usefixtures("two_threads")
def test_small_graphs_have_one_thread_already(races):
    graphs = []
    races[0]["torch"] = 3.0
    trained(loss_of, BATCHES, graphs=graphs)
    assert races[1] == [["eager", "onnxruntime"], ["eager", "onnxruntime", "torch"]]
    assert threads_of(graphs[0]) == [1]


def test_a_race_leaves_no_trace(races):
    """Buffers are updated once, random numbers are those of one run, whoever wins."""
    table, _ = races
    for seconds in (1.0, 3.0):
        MEMORY.forget()
        Cache("choices").clear()
        torch._dynamo.reset()
        table["torch"] = seconds
        got, wanted = trained(loss_of, BATCHES), eager(loss_of, BATCHES)
        assert torch.equal(got[-1], wanted[-1])
        counts = [next(int(t) for t in left if t.dtype == torch.int64) for left in (got, wanted)]
        assert counts == [len(BATCHES)] * 2  # of batch normalization


@pytest.mark.parametrize(("eager", "made"), [(8.0, 1), (1.0, 2)])
def test_long_runs_that_are_far_behind_are_made_once(monkeypatch, eager, made):
    monkeypatch.setattr(contest, "_timed", lambda run: run())
    runs = []
    times = {"onnxruntime": 1.0, "eager": eager}
    assert race({name: lambda name=name: (runs.append(name), times[name])[1] for name in times}) == times
    assert runs.count("eager") == made


def test_torch_is_not_compiled_for_what_it_cannot_win(races):
    table, seen = races
    table["eager"] = 5.0
    graphs = []
    trained(loss_of, BATCHES, graphs=graphs)
    assert [g.executor for g in graphs] == ["onnxruntime"]
    assert seen == [["eager", "onnxruntime"]]
    assert sorted(graphs[0].milliseconds) == ["eager", "onnxruntime"]


@pytest.mark.parametrize("executor", ["torch", "onnxruntime"])
def test_gradients_at_several_outputs(races, executor):
    """Forward and backward are taken together."""
    table, seen = races
    table["torch"] = 1.0 if executor == "torch" else 3.0
    graphs = []
    backend = ORTBackend(RuntimeConfig(), on_graph=graphs.append)
    compiled = torch.compile(several, backend=backend)

    def results(function):
        torch.manual_seed(1)
        module = Network()
        return steps(lambda m, x: sum(function(m, x)), module, BATCHES)

    got, wanted = results(compiled), results(several)
    assert [g.executor for g in graphs] == [executor] * 2
    assert seen == [["eager", "onnxruntime"], ["eager", "onnxruntime", "torch"]]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_without_gradients(races):
    table, _ = races
    table |= {"onnxruntime": 0.02, "torch": 0.01, "eager": 0.02}
    module, graphs = Network().eval(), []
    compiled = torch.compile(module, backend=ORTBackend(RuntimeConfig(), on_graph=graphs.append))
    with torch.no_grad():
        assert torch.equal(compiled(BATCHES[0]), module(BATCHES[0]))
    assert [g.executor for g in graphs] == ["torch"]


def test_open_sizes(races):
    """A graph that was measured at one size runs at others, and what was measured holds for them."""
    table, seen = races
    table["torch"] = 1.0
    batches = [torch.randn(n, 4) for n in (6, 5, 9, 2, 7)]
    graphs = []
    got, wanted = trained(loss_of, batches, graphs=graphs), eager(loss_of, batches)
    assert {g.executor for g in graphs} == {"torch"}
    assert len(seen) == 2
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_larger_data_are_measured_again(races):
    _, seen = races
    trained(loss_of, [torch.randn(6, 4)])
    torch._dynamo.reset()
    trained(loss_of, [torch.randn(12, 4)])
    assert len(seen) == 2
    torch._dynamo.reset()
    trained(loss_of, [torch.randn(25, 4)])
    assert len(seen) == 4


def test_choices_are_remembered(races):
    """By the process, and by a file for others: those measure nothing, and their results are the same bit for bit."""
    table, seen = races
    table["torch"] = 1.0
    first = trained(loss_of, BATCHES)
    table["torch"] = 3.0
    for _ in range(2):
        torch._dynamo.reset()
        graphs = []
        again = trained(loss_of, BATCHES, graphs=graphs)
        assert [g.executor for g in graphs] == ["torch"]
        assert graphs[0].milliseconds == {"onnxruntime": 2.0, "torch": 1.0, "eager": 2.0}
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        MEMORY.forget()
    assert len(seen) == 2


def test_what_was_chosen_but_cannot_be_compiled(races, monkeypatch):
    """A choice for other sizes, say, that torch cannot trace: ONNX Runtime runs it, and not eager."""
    trained(loss_of, BATCHES[:1])
    MEMORY.forget()
    torch._dynamo.reset()

    def untraceable(*args, **kwargs):
        raise Untraceable("it fits some sizes only")

    monkeypatch.setattr(compilation, "TorchExecutable", untraceable)
    graphs, fallbacks = [], []
    trained(loss_of, BATCHES[:1], graphs=graphs, on_fallback=fallbacks.append)
    assert [g.executor for g in graphs] == ["onnxruntime"]
    assert not fallbacks and not graphs[0].milliseconds


def _changed(**values):
    return lambda text: json.dumps({**json.loads(text), **values})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[" * 5000,
        lambda text: "[1]",
        lambda text: '"x"',
        _changed(version="0.0.0"),
        _changed(executor="abacus"),
        _changed(executor=["torch"]),
        _changed(milliseconds=None),
        _changed(milliseconds={"abacus": 1.0, "torch": 2.0}),
        _changed(milliseconds={"torch": "fast"}),
        _changed(milliseconds={"torch": float("nan")}),
    ],
)
def test_damaged_entries_are_as_none(races, damage):
    _, seen = races
    trained(loss_of, BATCHES[:1])
    (entry,) = Cache("choices").entries()
    with open(entry.path, encoding="utf-8") as file:
        text = file.read()
    with open(entry.path, "w", encoding="utf-8") as file:
        file.write(damage(text))
    MEMORY.forget()
    torch._dynamo.reset()
    trained(loss_of, BATCHES[:1])
    assert len(seen) == 4


def test_a_folder_that_cannot_be_written_to(races, monkeypatch, tmp_path):
    file = tmp_path / "a file"
    file.write_text("")
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_DIR", str(file / "cache"))
    graphs = []
    trained(loss_of, BATCHES, graphs=graphs)
    assert [g.executor for g in graphs] == ["torch"]


def test_the_cache_keeps_its_size(monkeypatch):
    """Of all kinds together, a small file being what a disk has for it."""
    cache, other = Cache("choices"), Cache("sizes")
    other.write("older", {})
    os.utime(other.folder / "older.json", (0, 0))
    foreign = cache.folder.parent / "settings" / "mine.json"  # the user's, in a folder that holds more than the cache
    foreign.parent.mkdir()
    foreign.write_text("{}")
    os.utime(foreign, (0, 0))
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_SIZE", str(5 * 4096))
    for i in range(10):
        cache.write(f"entry{i}", {"text": "x" * 60})
        os.utime(cache.folder / f"entry{i}.json", (i, i))
    assert sorted(entry.name for entry in cache.entries()) == [f"entry{i}.json" for i in range(5, 10)]
    assert cache.read("entry9") is not None and other.read("older") is None
    assert foreign.exists()
    monkeypatch.setenv("LIGHTNING_ORT_CACHE_SIZE", "0")
    cache.write("more", {})
    assert cache.read("more") is None


def test_what_sessions_are_told_is_a_part_of_what_is_remembered():
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    options = [onnxruntime.SessionOptions() for _ in range(3)]
    options[1].intra_op_num_threads = 2
    mapping = {"intra_op_num_threads": 2}
    keys = [
        Key.of(graph, [torch.ones(2)], "", GlobalState.present(), RuntimeConfig(session_options=o))
        for o in (*options, mapping, None)
    ]
    assert keys[0] == keys[2]
    assert len({key.sizes for key in keys}) == 4


def test_the_command(races, capsys):
    trained(loss_of, BATCHES)
    assert main(["cache"]) == 0
    assert "choices (who runs a graph fastest): 1, " in capsys.readouterr().out
    assert main(["cache", "--clear"]) == 0
    assert "choices: 1 removed" in capsys.readouterr().out
    assert list(Cache("choices").entries()) == []


def test_what_measures_nothing(races, monkeypatch):
    _, seen = races
    for config in (
        RuntimeConfig(placement="onnxruntime"),
        RuntimeConfig(placement="torch"),
        RuntimeConfig(measure=False),
    ):
        torch._dynamo.reset()
        steps(torch.compile(loss_of, backend=ORTBackend(config)), Network(), BATCHES)
    torch.use_deterministic_algorithms(True)
    try:
        torch._dynamo.reset()
        trained(loss_of, BATCHES)
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "0")
    torch._dynamo.reset()
    trained(loss_of, BATCHES)
    assert not seen


def test_what_is_missing_is_refused_whatever_was_measured(races):
    """A process that knows that torch is the faster one refuses what ONNX Runtime lacks, as the first one did."""
    x = torch.rand(6)

    def run(on_unsupported):
        torch._dynamo.reset()
        backend = ORTBackend(RuntimeConfig(), on_unsupported=on_unsupported)
        return torch.compile(lambda x: torch.special.gammainc(x, x).exp(), backend=backend)(x)

    _, seen = races
    assert torch.equal(run("torch"), torch.special.gammainc(x, x).exp())
    assert seen
    with pytest.raises(UnsupportedError, match="gammainc"):
        run("error")


def test_data_that_are_refused_decide_nothing(races):
    """The user's error is the one that there is without measuring, and the next batch is measured."""
    _, seen = races
    module, graphs = nn.Embedding(5, 3), []
    backend = ORTBackend(RuntimeConfig(), on_graph=graphs.append)
    compiled = torch.compile(lambda x: module(x).square().mean(), backend=backend)
    with pytest.raises(IndexError):
        compiled(torch.tensor([1, 7]))
    assert not graphs
    compiled(torch.tensor([1, 4])).backward()
    assert len(graphs) == 1 and seen


def test_torch_that_fails_loses(races, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(compilation, "TorchExecutable", broken)
    graphs = []
    trained(loss_of, BATCHES, graphs=graphs)
    assert [g.executor for g in graphs] == ["onnxruntime"]
    assert graphs[0].report.failed["torch"] == "broken"
    step = StepReport("training_step", each_graph=[graphs[0].report])
    assert "not measured: torch (broken)" in words.choices(step)


@pytest.mark.parametrize("executor", ["torch", "onnxruntime"])
def test_fit(races, executor):
    table, _ = races
    table["torch"] = 1.0 if executor == "torch" else 3.0
    data = partial(DataLoader, TensorDataset(torch.randn(40, 48), torch.randint(10, (40,))), batch_size=8)
    strategy = ORTStrategy(print_report=False)
    ours, theirs = (fit(MLP, data, strategy=s, max_steps=6) for s in (strategy, "auto"))
    assert_same_outcome(theirs, ours)
    report = ours.trainer.strategy.report()
    assert report["training_step"].graphs_in_torch == (executor == "torch")
    assert report["training_step"].measured
    assert "measured: ONNX Runtime 2 ms, torch" in str(report)


@pytest.mark.parametrize("function", [loss_of, lambda m, x: sum(several(m, x)), lambda m, x: several(m, x)[0]])
def test_eager_is_the_fastest(races, function):
    """What no graph beats stays eager's, bit for bit, and the next process compiles nothing for it."""
    table, seen = races
    table["eager"] = 0.5
    wanted = eager(function, BATCHES)
    for races_so_far in (2, 2):
        torch._dynamo.reset()
        graphs = []
        got = trained(function, BATCHES, graphs=graphs)
        assert [g.executor for g in graphs] == ["eager"]
        assert graphs[0].milliseconds["eager"] == 0.5
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
        assert len(seen) == races_so_far
        MEMORY.forget()


def test_eager_and_a_scaled_loss(races):
    """Scaling is the graph's business, so eager does not take part."""
    table, _ = races
    table["eager"] = 0.5
    graphs = []
    trained(loss_of, BATCHES, graphs=graphs, scaling=LossScaling(2.0**10))
    assert [g.executor for g in graphs] == ["torch"]
    assert "eager" not in graphs[0].milliseconds


def test_fit_in_eager(races):
    table, _ = races
    table["eager"] = 0.5
    data = partial(DataLoader, TensorDataset(torch.randn(40, 48), torch.randint(10, (40,))), batch_size=8)
    ours, theirs = (fit(MLP, data, strategy=s, max_steps=6) for s in (ORTStrategy(print_report=False), "auto"))
    assert_same_outcome(theirs, ours)
    step = ours.trainer.strategy.report()["training_step"]
    assert (step.graphs, step.graphs_in_torch, step.all_in_ort) == (1, 1, False)


@pytest.mark.stock_only
@pytest.mark.skipif(not has_cpp_compiler(), reason="needs a C++ compiler")
@pytest.mark.parametrize("placement", ["inductor", "fastest+inductor"])
def test_inductor(races, placement):
    """Compiled to C++: forced, and the fastest of three; with draws, a buffer that changes, open sizes."""
    table, seen = races
    table["inductor"] = 0.5

    def step(m, x):
        m.count.add_(x.mean())
        return (F.dropout(x, 0.5) * m.weight).tanh().mean() + m.count

    def results(function):
        torch.manual_seed(0)
        m = nn.Module()
        m.weight = nn.Parameter(torch.randn(4))
        m.register_buffer("count", torch.zeros(()))
        return steps(function, m, [torch.randn(n, 4) for n in (6, 5, 7)])

    graphs = []
    backend = ORTBackend(RuntimeConfig(placement=placement), on_graph=graphs.append)
    got, wanted = results(torch.compile(step, backend=backend)), results(step)
    assert {g.executor for g in graphs} == {"inductor"}
    assert seen == (
        [] if placement == "inductor" else [["eager", "onnxruntime"], ["eager", "inductor", "onnxruntime", "torch"]]
    )
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_inductor_needs_a_compiler(monkeypatch):
    monkeypatch.setattr("lightning_ort.runtime.config.has_cpp_compiler", lambda: False)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler"):
        ORTStrategy(placement="fastest+inductor")


def test_race_runs_in_turns_and_forgets_the_first(monkeypatch):
    now, order = [0.0], []
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])

    def run(name, first, later):
        now[0] += later if name in order else first
        order.append(name)

    seconds = race({"a": partial(run, "a", 0.04, 0.01), "b": partial(run, "b", 0.001, 0.02)})
    assert seconds == {"a": pytest.approx(0.01), "b": pytest.approx(0.02)}
    assert order == ["a", "b"] * (len(order) // 2) and len(order) >= 8


def test_a_race_of_long_runs_keeps_little_in_memory(monkeypatch):
    """One after the other, few times, and what each holds is given back before the next."""
    now, order = [0.0], []
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])

    monkeypatch.setattr(contest, "release_free_memory", lambda: order.append("released"))

    def run(name, seconds):
        now[0] += seconds
        order.append(name)

    runs = {"a": partial(run, "a", 1.0), "b": partial(run, "b", 1.5)}
    assert race(runs) == {"a": 1.0, "b": 1.5}
    assert order == ["a", "a", "released", "b", "b", "released"]
    order.clear()
    race({"a": partial(run, "a", 0.2), "b": partial(run, "b", 0.1)})
    assert order == ["a", "a", "a", "released", "b", "b", "b", "released"]
    order.clear()
    runs = {"a": partial(run, "a", 5.0), "b": partial(run, "b", 6.0)}
    assert race(runs) == {"a": 5.0, "b": 6.0}
    assert order == ["a", "a", "released", "b", "released"]


def test_a_contest_of_long_runs(monkeypatch):
    """ONNX Runtime runs twice, and gives back its memory before eager and torch run."""
    now, order = [0.0], []
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(contest, "release_free_memory", lambda: order.append("released"))

    def run(unit):
        now[0] += {"ort": 3.0, "native": 1.0, "eager": 2.0}[unit]
        order.append(unit)

    key = contest.Key("graph", "sizes", 1, "program")
    race = contest.Contest(key, {"torch": lambda: "native"}, torch.device("cpu"))
    found = race.settle("ort", run, partial(run, "eager"))
    assert found == ("native", Choice("torch", {"onnxruntime": 3000.0, "eager": 2000.0, "torch": 1000.0}))
    assert order == ["ort", "ort", "released", "eager", "released", "native", "native", "released"]


@pytest.mark.parametrize(
    ("calls", "eager_counts", "tried"),
    [(100, True, False), (200, True, True), (100, False, True), (math.inf, True, True)],
)
def test_a_graph_in_torch_that_could_save_too_little(calls, eager_counts, tried, monkeypatch):
    """Without gradients it has eager's kernels, and saves some microseconds at each call: 3% is what a choice takes."""
    now, order = [0.0], []
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])

    def run(unit):
        now[0] += {"ort": 0.025, "native": 0.015, "eager": 0.02}[unit]
        order.append(unit)

    key = contest.Key(f"graph {calls} {eager_counts}", "sizes", 1, "program")
    race = contest.Contest(key, {"torch": lambda: "native"}, torch.device("cpu"))
    unit, choice = race.settle("ort", run, partial(run, "eager"), eager_counts=eager_counts, calls=calls)
    assert ("native" in order) == tried
    assert unit == ("native" if tried else None)
    assert choice.executor == ("torch" if tried else "eager")


def test_a_run_on_a_gpu_ends_when_the_gpu_is_done(monkeypatch):
    """Python is done at once with what takes the GPU the longest."""
    now, queued = [0.0], [0.0]
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])

    def wait(device):
        assert device == torch.device("cuda", 1)
        now[0], queued[0] = now[0] + queued[0], 0.0

    monkeypatch.setattr(torch.cuda, "synchronize", wait)

    def run(unit):
        now[0] += {"ort": 0.001, "native": 0.004, "eager": 0.003}[unit]
        queued[0] += {"ort": 0.019, "native": 0.004, "eager": 0.007}[unit]

    key = contest.Key("graph", "sizes", 1, "program")
    race = contest.Contest(key, {"torch": lambda: "native"}, torch.device("cuda", 1))
    assert race.settle("ort", run, partial(run, "eager")) == (
        "native",
        Choice("torch", {"onnxruntime": 20.0, "eager": 10.0, "torch": 8.0}),
    )


def test_a_machine_that_was_busy_for_a_while(monkeypatch):
    """Who was measured meanwhile is measured once more, as are those that it may be as fast as."""
    now, order = [0.0], []
    monkeypatch.setattr(contest.time, "perf_counter", lambda: now[0])

    def run(unit):
        busy = now[0] < 0.9
        now[0] += {"ort": 0.12, "native": 0.18, "eager": 0.3}[unit] * (1.5 + busy)
        order.append(unit)

    key = contest.Key("graph", "sizes", 1, "program")
    race = contest.Contest(key, {"torch": lambda: "native"}, torch.device("cpu"))
    found = race.settle("ort", run, partial(run, "eager"))
    assert found == ("ort", Choice("onnxruntime", {"onnxruntime": 180.0, "eager": 450.0, "torch": 270.0}))
    assert order == ["ort", "ort", "eager", "eager", "native", "native", "ort", "eager", "native"]


def test_released_memory():
    """What a graph's values have been in is given back, and it runs on as before."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(8)])
    backend = ORTBackend(RuntimeConfig(measure=False), verify=False)
    step = torch.compile(lambda x: net(x).square().mean(), backend=backend)
    x = torch.randn(8192, 512)  # 16 MiB a layer

    def resident():
        return psutil.Process().memory_info().rss >> 20

    first = step(x).item()
    held = resident()
    release_free_memory()
    assert held - resident() > 100
    assert step(x).item() == first


@pytest.mark.parametrize(("fastest", "left"), [("torch", ["torch"]), ("eager", [])])
def test_nothing_is_left_of_the_others_when_their_memory_is_given_back(races, monkeypatch, fastest, left):
    table, _ = races
    table[fastest] = 0.5
    made, alive = weakref.WeakSet(), []
    make = compilation.Compilation.make

    def watched(*args, **options):
        unit = make(*args, **options)
        made.add(unit)
        return unit

    monkeypatch.setattr(compilation.Compilation, "make", watched)
    monkeypatch.setattr(region, "release_free_memory", lambda: alive.append([unit.executor for unit in made]))
    trained(loss_of, BATCHES)
    assert alive == [left]


def test_choice():
    assert Choice.among({"onnxruntime": 1.0, "torch": 0.98}, "onnxruntime").executor == "onnxruntime"
    assert Choice.among({"onnxruntime": 1.0, "torch": 0.9}, "onnxruntime").executor == "torch"
