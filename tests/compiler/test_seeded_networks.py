"""The check beside random networks: right graphs pass it whatever their rounding, wrong ones do not.

``LIGHTNING_ORT_TEST_NETWORKS`` is the number of networks, each of which is checked with several weights and batches.
"""

from __future__ import annotations

import os
import random
import types

import pytest
import torch
import torch.nn.functional as F
from seeded_networks import Problem
from torch import fx, nn

from lightning_ort import MismatchError, verification
from lightning_ort.compiler import ORTBackend, compilation, first_run, rounding
from lightning_ort.compiler.lowering.registry import LOWERINGS
from lightning_ort.compiler.plan import Plan
from lightning_ort.compiler.rounding import RoundingNoise
from lightning_ort.verification import Results, find_mismatch, has_nan, varied

pytestmark = pytest.mark.stock_only

NETWORKS = int(os.environ.get("LIGHTNING_ORT_TEST_NETWORKS", "5"))
DRAWS = 6
# gradients of biases in front of batch norms, which are zero but for the rounding of a mean and of like entries
FOUND = [595, 452]
aten = torch.ops.aten


@pytest.mark.parametrize("seed", [*range(NETWORKS), *(seed for seed in FOUND if seed >= NETWORKS)])
def test_no_false_alarm(monkeypatch, seed):
    """Neither an error nor a doubt, after which the results would be torch's."""
    found = []
    right = first_run.find_mismatch
    monkeypatch.setattr(first_run, "find_mismatch", lambda *a, **k: found.append(right(*a, **k)) or found[-1])
    monkeypatch.setattr(first_run.FirstRun, "is_due", lambda self, executable: True)
    problem = Problem(seed)
    step = torch.compile(problem.step, backend=ORTBackend())
    for number in range(DRAWS):
        if number:
            problem.draw_again(number)
        step(*problem.batch).backward()
    # a network may be more than one graph
    assert len(found) >= DRAWS and set(found) == {None}, problem.description


# -- wrong graphs ---------------------------------------------------------------------------------------------------


def _real(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1


def _adds_alike(node: fx.Node) -> bool:
    terms = [a for a in node.args[:2] if isinstance(a, fx.Node)]
    return _real(node) and len(terms) == 2 and all(a.meta["val"].shape == node.meta["val"].shape for a in terms)


def _replace(graph: fx.Graph, node: fx.Node, target, *more) -> None:
    with graph.inserting_after(node):
        other = graph.call_function(target, (node, *more))
    other.meta = dict(node.meta)
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)


def _spoil(traced, how: str, draw: random.Random) -> bool:
    """Make one operator of a traced graph wrong; whether there is one to make wrong."""
    graph = traced.module.graph
    calls = [n for n in graph.nodes if n.op == "call_function" and n.users]
    results = {n for n in (*traced.outputs, *traced.gradients.values(), *traced.updates.values()) if n is not None}
    if how in ("scale", "sign"):
        nodes = [n for n in calls if _real(n) and n not in results]
    elif how == "term":
        nodes = [n for n in calls if n.target is aten.add.Tensor and n not in results and _adds_alike(n)]
    else:
        nodes = [n for n in calls if n.target is aten.where.self and _real(n)]
    if not nodes:
        return False
    node = draw.choice(nodes)
    if how == "scale":
        _replace(graph, node, aten.mul.Tensor, 1.001)
    elif how == "sign":
        _replace(graph, node, aten.neg.default)
    elif how == "term":
        node.replace_all_uses_with(draw.choice(node.args[:2]))
    else:
        node.args = (node.args[0], node.args[2], node.args[1])
    traced.module.recompile()
    return True


def _effect(got, wanted) -> float:
    """Largest difference as a share of the largest entry of its tensor (and a little of that of its group)."""
    worst = 0.0
    for kind in ("outputs", "gradients", "updates"):
        ours, theirs = getattr(got, kind), getattr(wanted, kind)
        floats = {i: t for i, t in theirs.items() if t.is_floating_point() and i in ours}
        scale = max((verification.largest(t) for t in floats.values()), default=0.0)
        for i, t in floats.items():
            off = verification.largest(ours[i] - t)
            worst = max(worst, off / max(verification.largest(t) + 1e-2 * scale, 1e-30))
    return worst


def spoiled(monkeypatch, seed: int, how: str) -> tuple[float, bool] | None:
    """The effect of a wrong operator on the results of a network, and whether it was refused."""
    effects = []
    compared, traced = first_run.find_mismatch, compilation.trace

    def spy(got, wanted, *more, **options):
        effects.append(_effect(got, wanted))
        return compared(got, wanted, *more, **options)

    done = []

    def wrong(*args, **options):
        result = traced(*args, **options)
        done.append(_spoil(result, how, random.Random(seed)))
        return result

    monkeypatch.setattr(first_run, "find_mismatch", spy)
    monkeypatch.setattr(compilation, "trace", wrong)
    problem = Problem(seed)
    try:
        torch.compile(problem.step, backend=ORTBackend())(*problem.batch)
        refused = False
    except MismatchError:
        refused = True
    return (effects[0], refused) if all(done) and not problem.half else None


@pytest.mark.parametrize(("seed", "how"), [(0, "scale")])
def test_a_wrong_operator_is_refused(monkeypatch, seed, how):
    effect, refused = spoiled(monkeypatch, seed, how)
    assert effect > 3e-4 and refused


# -- one difference that does not recur -----------------------------------------------------------------------------


class Batches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x):
        return self.net(x)


def _wrong_runs(monkeypatch, wrong: set[int]) -> list[int]:
    """Have the runs of graphs with these numbers give wrong results; the list grows with each run."""
    runs, right = [], Plan.run

    def run(self, inputs, outputs):
        right(self, inputs, outputs)
        if len(runs) in wrong:
            for tensor in outputs:
                tensor.copy_(tensor * 1.01)
        runs.append(len(runs))

    monkeypatch.setattr(Plan, "run", run)
    return runs


def _states(module: nn.Module) -> list[torch.Tensor]:
    return [*(t.clone() for t in module.state_dict().values()), *(p.grad.clone() for p in module.parameters())]


@pytest.mark.parametrize("pair", [False, True], ids=["loss", "outputs"])
def test_an_accident_takes_torchs_results(monkeypatch, pair):
    """The loss, gradients and buffers of that step are torch's, and the next step is checked again."""
    module = Batches()
    runs = _wrong_runs(monkeypatch, {0})

    def step(x):
        y = module(x)
        return y if pair else y.square().mean()

    compiled = torch.compile(step, backend=ORTBackend())
    x = torch.randn(8, 6)
    start = {n: t.clone() for n, t in module.state_dict().items()}
    got = compiled(x)
    got.sum().backward()
    after = _states(module)
    module.load_state_dict(start)
    module.zero_grad()
    wanted = step(x)
    wanted.sum().backward()
    assert torch.equal(got, wanted)
    assert all(torch.equal(a, b) for a, b in zip(after, _states(module), strict=True))
    checked = len(runs)
    compiled(x)
    assert len(runs) == checked + 1
    monkeypatch.setattr(first_run, "find_mismatch", lambda *args, **options: pytest.fail("checked once more"))
    compiled(x)


def test_a_second_accident_is_refused(monkeypatch):
    module = Batches()
    compiled = torch.compile(lambda x: module(x).square().mean(), backend=ORTBackend())
    runs = _wrong_runs(monkeypatch, {0, 3})  # runs 1 and 2 look whether other weights make a difference
    compiled(torch.randn(8, 6))
    assert len(runs) == 3
    before = [t.clone() for t in module.state_dict().values()]
    with pytest.raises(MismatchError, match=r"differs between ONNX Runtime and torch"):
        compiled(torch.randn(8, 6))
    assert all(torch.equal(a, b) for a, b in zip(before, module.state_dict().values(), strict=True))


def test_a_diverged_run_goes_on():
    """torch's own kernels disagree about the gradient of hardtanh at NaN; the next run is no other."""
    graphs = []
    module = nn.Linear(6, 1).double()

    def step(x):
        hidden = module(x).mean()
        torch._dynamo.graph_break()
        return F.hardtanh(hidden) + hidden

    compiled = torch.compile(step, backend=ORTBackend(on_graph=graphs.append))
    for _ in range(4):
        loss = compiled(torch.full((8, 6), torch.nan, dtype=torch.float64))
        loss.backward()
        assert loss.isnan() and all(p.grad.isnan().all() for p in [module.weight])
    assert len(graphs) == 2
    # and a graph that is wrong for numbers is refused all the same
    assert has_nan([torch.tensor([1.0, torch.nan])], [0]) and not has_nan([torch.ones(2)], [0])
    (other,) = varied([torch.tensor([2.0, torch.nan])], [0], 0)
    assert 1.9 < other[0] < 2.1 and other[1].abs() <= 1


def test_infinities_that_spread_are_not_judged(monkeypatch):
    """Products with zeros make NaN of more of them than torch's kernels: torch's results count until all are finite."""
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.AvgPool2d(3, 1), nn.Upsample(size=(5, 7), mode="bilinear"))
    weight = nn.Parameter(torch.rand(6, 6))

    def step(x):
        return net(x * weight).square().mean()

    compiled = torch.compile(step, backend=ORTBackend())
    for infinite in (True, True, False):
        x = torch.randn(2, 1, 6, 6)
        if infinite:
            x[0, 0, 2, 5] = torch.inf
        got, wanted = ((loss, *torch.autograd.grad(loss, weight)) for loss in (compiled(x), step(x)))
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
    assert got[1].isfinite().all()
    monkeypatch.setattr(first_run, "find_mismatch", lambda *args, **options: pytest.fail("checked once more"))
    compiled(x)


@pytest.mark.parametrize(
    ("got", "wanted", "spread"),
    [
        ([torch.nan, torch.nan], [1.0, torch.inf], True),
        ([2.0, torch.inf], [1.0, torch.inf], False),
        ([1.0, 0.0], [1.0, torch.inf], False),
        ([torch.nan, torch.nan], [1.0, 1.0], False),
    ],
    ids=["spread", "another number", "hidden", "of finite ones"],
)
def test_what_spreads(got, wanted, spread):
    class Referee:
        def evaluate(self, dtype=None, noise=None):
            return results[1]

    results = [Results({0: torch.tensor(values)}, {}, {}) for values in (got, wanted)]
    mismatch = find_mismatch(*results, {}, Referee())
    assert mismatch.spread == spread


@pytest.mark.parametrize(("exact", "right"), [(torch.nan, True), (1.0, False)], ids=["of the graph", "of the samples"])
def test_rounding_that_ends_in_nan_excuses_no_other(exact, right):
    """Unless what is exact has it too: then it is torch that was lucky."""

    class Referee:
        def evaluate(self, dtype=None, noise=None):
            return Results({0: torch.tensor([1.0, torch.nan if dtype is None else exact])}, {}, {})

    got, wanted = (Results({0: torch.tensor([1.0, last])}, {}, {}) for last in (torch.nan, 1.0))
    assert (find_mismatch(got, wanted, {}, Referee()) is None) == right


# -- what is compared, and how it is called -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("update", "message"),
    [(False, r"^the gradient of net\.3\.weight differs"), (True, r"^the new value of net\.1\.running_mean differs")],
    ids=["gradient", "buffer"],
)
def test_the_message_names_what_the_user_knows(monkeypatch, update, message):
    """Also a buffer that batch normalization changes without a new version of the tensor."""

    class Step(Batches):
        def step(self, x):
            return self(x).square().mean()

    module, traced = Step(), compilation.trace

    def wrong(*args, **options):
        result = traced(*args, **options)
        chosen = result.updates if update else result.gradients
        # num_batches_tracked comes first among the buffers
        number = next(i for i, n in chosen.items() if n.meta["val"].shape == ((16,) if update else (4, 16)))
        with result.module.graph.inserting_after(chosen[number]):
            node = result.module.graph.call_function(aten.mul.Tensor, (chosen[number], 1.01))
        node.meta = dict(chosen[number].meta)
        output = result.module.graph.output_node()
        output.replace_input_with(chosen[number], node)
        chosen[number] = node
        result.module.recompile()
        return result

    monkeypatch.setattr(compilation, "trace", wrong)
    with pytest.raises(MismatchError, match=message):
        torch.compile(module.step, backend=ORTBackend())(torch.randn(8, 6) + 1)


def test_noise_leaves_what_is_exact():
    """Counts, masks and choices stay as they are; what cancels does not stay zero."""
    x, counts = torch.randn(64, 3), torch.arange(6.0)
    state = torch.get_rng_state()
    with RoundingNoise(0, torch.device("cpu")):
        assert torch.equal(counts.sum() / 2, torch.tensor(7.5)) and torch.equal(x.relu(), x.clamp(min=0))
        off = (x * 1.7 - torch.addcmul(torch.zeros(64, 3), x, torch.tensor(1.7))).abs().max()
        assert 1e-7 < off < 1e-5 and (x - x.mean(0)).sum(0).abs().max() < 1e-3
        copy = x.clone()
        copy.mul_(1.7)
        assert 0 < (copy - x.double() * 1.7).abs().max() < 1e-5
    assert torch.equal(state, torch.get_rng_state())


def test_noise_of_factors_of_10_bits(monkeypatch):
    """Where a GPU multiplies so, eager is off by as much itself: by default in convolutions."""
    factors = [types.SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)]
    assert rounding._of_tf32("convolution", factors) == 8192
    assert rounding._of_tf32("mm", factors) == 1
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"
        assert rounding._of_tf32("convolution_backward", factors) == 1
        assert rounding._of_tf32("bmm", factors) == 8192
        assert rounding._of_tf32("add", factors) == rounding._of_tf32("mm", [torch.ones(1)]) == 1
        factors[0].dtype = torch.float64
        assert rounding._of_tf32("mm", factors) == 1
    finally:
        matmul.fp32_precision, conv.fp32_precision = before

    x, w = torch.randn(4, 8, 10, 10), torch.randn(6, 8, 3, 3)
    exact = F.conv2d(x, w)
    off = []
    for times in (1.0, 8192.0):
        monkeypatch.setattr(rounding, "_of_tf32", lambda *_, times=times: times)
        with RoundingNoise(0, torch.device("cpu")):
            off.append(verification.largest(F.conv2d(x, w) - exact) / verification.largest(exact))
    assert off[0] < 1e-5 and 1e-4 < off[1] < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["batch", "layer", "group", "instance"])
def test_noise_of_a_mean_is_shared(name, dtype):
    """What is centred, and its gradient, have sums that are zero but for the rounding of their means."""
    normalize, dims = {
        "batch": (lambda x: F.batch_norm(x, None, None, training=True), (0, 2, 3)),
        "layer": (lambda x: F.layer_norm(x, x.shape[2:]), (2, 3)),
        "group": (lambda x: F.group_norm(x, 3), (2, 3, 4)),
        "instance": (F.instance_norm, (2, 3)),
    }[name]
    x, weight = torch.randn(2, 4, 6, 24, 24, dtype=dtype)
    x.requires_grad_()
    with RoundingNoise(0, torch.device("cpu")):
        y = normalize(x)
        (gradient,) = torch.autograd.grad((y * weight).sum(), x)
    eps, count = torch.finfo(dtype).eps, x.numel() // (12 if name == "group" else 6 if name == "batch" else 24)
    for centred in (y, gradient):
        sums = (centred.detach().view(4, 3, 2, 24, 24) if name == "group" else centred.detach()).sum(dims)
        # the root of the count times the noise of an entry would be below the first
        assert 0.3 * count * eps < sums.abs().max() < 300 * count * eps


@pytest.mark.parametrize(("size", "off"), [(1, 1), (8, 1), (1000, 9)])
def test_where_nothing_is_rounded_no_entry_may_be_another(monkeypatch, size, off):
    """Among numbers that are, some may: two candidates that are equal but for rounding."""

    def wrong(g, node, x):
        return g.op("Xor", g.op("Not", g.value(x)), g.constant([i < off for i in range(size)], torch.bool))

    monkeypatch.setitem(LOWERINGS, torch.ops.aten.logical_not.default, wrong)
    options = {"placement": "onnxruntime"}
    step = torch.compile(lambda x: x.logical_not(), backend="lightning_ort", options=options)
    with pytest.raises(MismatchError, match=f"{off} of {size} entries"):
        step(torch.zeros(size, dtype=torch.bool))
