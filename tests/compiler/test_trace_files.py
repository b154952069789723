"""Traces that a later process reads: the same numbers, and none where anything has changed or is damaged."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from modules import Classifier, TextClassifier, sentences, table
from parity import assert_same_state, fit, state_of
from torch import nn

from lightning_ort.compiler import ORTBackend, compilation
from lightning_ort.compiler.contest import MEMORY
from lightning_ort.compiler.trace_cache import TRACES, TraceKey
from lightning_ort.compiler.trace_files import encoded
from lightning_ort.files.cache import Cache
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = pytest.mark.stock_only


@pytest.fixture(autouse=True)
def folder(measuring, tmp_path):
    return tmp_path / "cache" / "traces"


@pytest.fixture
def made(monkeypatch):
    """The traces that are made."""
    found, trace = [], compilation.trace

    def counted(*args, **kwargs):
        found.append(trace(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(compilation, "trace", counted)
    return found


def as_a_later_process() -> None:
    torch._dynamo.reset()
    TRACES.clear()
    MEMORY.forget()


def results(function, *args, placement="onnxruntime", verify=False):
    """Results, gradients and the next random number, compiled as by a later process."""
    as_a_later_process()
    compiled = torch.compile(function, backend=ORTBackend(RuntimeConfig(placement=placement), verify=verify))
    torch.manual_seed(0)
    leaves = [a.detach().clone().requires_grad_(a.requires_grad) for a in args]
    found = compiled(*leaves)
    found = list(found) if isinstance(found, tuple) else [found]
    total = sum(r.sum() for r in found if r.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    return [*found, *[a.grad for a in leaves if a.grad is not None], torch.rand(1)]


def assert_equal(got, wanted) -> None:
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
CONSTANT = torch.tensor([1.0, -2.0, 3.0])


def changed(x):
    x = x.clone()
    x[:, 1] = 3
    return (x[:, ::2] * CONSTANT).cumsum(0).roll(1, 1).sum()


def asserted(x):
    torch._assert_async((x.square() >= 0).all(), "a square is not negative")
    return x.square().sum()


FUNCTIONS = {
    "layers": lambda x: F.dropout(F.gelu(F.layer_norm(x, (6,))), 0.4).square().mean(),
    "several": lambda x: (x.sin().sum(), (x * 2).cos(), x.detach() + 1),
    "evaluation": lambda x: x.detach().exp() / 3e-8,
    "infinite": lambda x: torch.where(x > 0, x, float("-inf")).softmax(-1).nan_to_num(0.5).sum(),
    "attention": lambda x: F.scaled_dot_product_attention(*3 * [x.view(1, 2, 2, 6)], is_causal=True).square().sum(),
    "changed": changed,
    "types": lambda x: (x.double().sum(), x.to(torch.bfloat16).float().mean(), (x > 0).sum()),
    "pooled": lambda x: F.max_pool2d(x.view(1, 1, 4, 6), 2).square().sum(),
    "asserted": asserted,
    "drawn": lambda x: (x * torch.rand_like(x) + torch.randn(6)).sum() + torch.randint(0, 9, (3,)).sum(),
}  # fmt: skip


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_later_process_reads_them(made, folder, name, placement):
    x = X.clone().requires_grad_()
    first = results(FUNCTIONS[name], x, placement=placement)
    count = len(made)
    assert count and len(list(folder.iterdir())) == count
    again = results(FUNCTIONS[name], x, placement=placement)
    assert len(made) == count
    assert_equal(again, first)


def test_open_sizes(made):
    def step(x):
        return F.pad(x, (0, 2)).flatten()[: x.shape[0] * 3 + 1].square().sum() / (x.shape[1] // 2 + 1)

    def of_three_sizes():
        as_a_later_process()
        compiled = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement="onnxruntime"), verify=False))
        found = []
        for rows in (4, 7, 5):
            x = torch.arange(rows * 6.0).reshape(rows, 6).requires_grad_()
            loss = compiled(x)
            found += [loss, *torch.autograd.grad(loss, x)]
        return found

    first = of_three_sizes()
    count = len(made)
    assert count == 2
    assert_equal(of_three_sizes(), first)
    assert len(made) == count


@pytest.mark.parametrize(("module", "data"), [(Classifier, table), (TextClassifier, sentences)])
def test_a_fit_in_a_later_process(made, module, data):
    states = []
    for _ in range(3):  # the second one has sizes open that the first has found to change
        as_a_later_process()
        seed_everything(0, verbose=False)
        states.append(state_of(fit(module, data, max_epochs=2).module))
        counts = len(made)
    assert_same_state(states[1], states[0], tolerance=1e-5)
    assert_same_state(states[2], states[1], tolerance=0)
    assert len(made) == counts


def test_a_change_is_another_trace(made):
    x = X.clone().requires_grad_()
    for number, factor in enumerate((1.5, 1.5 + 1e-15, -1.5), 1):
        (got, *_) = results(lambda x, f=factor: (x * f).sum(), x)
        assert len(made) == number
        torch.testing.assert_close(got, (x * factor).sum())


@torch.library.custom_op("tests_of_trace_files::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def test_operators_of_others_are_not_written(made, folder):
    for number in (1, 2):
        results(lambda x: twice(x).sum(), X)
        assert len(made) == number
    assert not folder.exists()


def test_a_composite_operator_leaves_torchs_operators_and_is_not_written(made, folder):
    """Of which nothing tells that its lines have changed."""
    for number, factor in enumerate((1.0, 3.0), 1):
        library = torch.library.Library("tests_of_trace_files", "FRAGMENT")
        library.define("scaled(Tensor x) -> Tensor")
        library.impl("scaled", lambda x, f=factor: x * f, "CompositeImplicitAutograd")
        (got, *_) = results(lambda x: torch.ops.tests_of_trace_files.scaled(x).sum(), X)
        torch.testing.assert_close(got, (X * factor).sum())
        assert len(made) == number
        library._destroy()
    assert not folder.exists()


def test_damaged_files_are_as_none(made, folder):
    x = X.clone().requires_grad_()
    first = results(FUNCTIONS["layers"], x)
    (file,) = folder.iterdir()
    content = file.read_bytes()
    generator = random.Random(0)
    for number in range(1, 25):
        position = generator.randrange(len(content))
        damaged = bytearray(content)
        damaged[position] ^= 1 << generator.randrange(8)
        file.write_bytes(damaged if number % 2 else content[:position])
        assert_equal(results(FUNCTIONS["layers"], x), first)
        assert len(made) == number + 1
        assert file.read_bytes() == content, "it is written again"


HOSTILE = {
    "another function": lambda t: t["nodes"][-2].__setitem__(2, "operator.attrgetter"),
    "another namespace": lambda t: t["nodes"][-2].__setitem__(2, "os.system.default"),
    "an attribute": lambda t: t["nodes"][-2].__setitem__(2, "aten.__class__.default"),
    "another operation": lambda t: t["nodes"][-2].__setitem__(0, "call_method"),
    "an argument with code": lambda t: t["nodes"][0].__setitem__(2, "x=print('called')"),
    "a name with code": lambda t: t["nodes"][-2].__setitem__(4, {"dict": [["x=print('called'), y", 1]]}),
    "an argument that is a word of Python": lambda t: t["nodes"][-2].__setitem__(4, {"dict": [["if", 1]]}),
    "a file": lambda t: t["nodes"][-2].__setitem__(2, "aten.from_file.default"),
    "a change in place": lambda t: t["nodes"][-2].__setitem__(2, "aten.copy_.default"),
    "a message": lambda t: t["nodes"][-2].__setitem__(2, "aten.warn.default"),
    "a size that is none": lambda t: t["tensors"].append('[[["x", ["FloorDiv", 1, 0]]], [1], 0, "float32", "cpu"]'),
    "no node": lambda t: t["nodes"][-1].__setitem__(3, {"node": 10_000}),
    "another kind": lambda t: t["nodes"][-1].__setitem__(3, {"dtype": "load"}),
    "fewer inputs": lambda t: t["results"].__setitem__("inputs", []),
    "nothing": lambda t: t.clear(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_files_of_others_call_nothing_else(made, folder, name):
    first = results(FUNCTIONS["layers"], X.clone().requires_grad_())
    (file,) = folder.iterdir()
    key, cache = file.stem, Cache("traces")
    entry = cache.read(key)
    content = json.loads(entry["trace"])
    HOSTILE[name](content)
    from lightning_ort.compiler import trace_cache

    text = json.dumps(content)
    cache.write(key, {"trace": text, "sum": trace_cache._sum(text)})
    assert_equal(results(FUNCTIONS["layers"], X.clone().requires_grad_()), first)
    assert len(made) == 2


def test_what_takes_no_part_in_learning(made, folder, monkeypatch):
    monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "0")
    for number in (1, 2):
        results(FUNCTIONS["several"], X)
        assert len(made) == number
    assert not folder.exists()


def test_names_are_those_of_torch():
    """A function that another process could not tell from one of that name has none."""
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.Tanh()))
    key = TraceKey.of(graph, [], compilation.GlobalState.present(), gradients=False)
    assert key is None  # modules are not compared
    graph = torch.fx.symbolic_trace(lambda x: torch.tanh(x) + x)
    assert TraceKey.of(graph, [], compilation.GlobalState.present(), gradients=False).name
    list(graph.graph.nodes)[1].target = type("Callable", (), {"__call__": lambda self, x: x, "__name__": "tanh"})()
    assert TraceKey.of(graph, [], compilation.GlobalState.present(), gradients=False) is None


def test_the_text_is_small(made):
    results(FUNCTIONS["attention"], X.clone().requires_grad_())
    assert len(json.dumps(encoded(made[0]))) < 60_000
