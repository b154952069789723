"""Graphs that torch runs with images laid out as its convolutions like them: the same numbers, and nobody can tell."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from parity import assert_same_outcome, fit
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort.compiler import ORTBackend, contest
from lightning_ort.compiler.executors import channels_last
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = pytest.mark.stock_only

LAST = "torch-channels-last"


def compiled(function, placement=LAST):
    graphs = []
    # where errors are asked for, nothing is measured
    on_unsupported = "error" if placement == LAST else "torch"
    backend = ORTBackend(RuntimeConfig(placement=placement), on_graph=graphs.append, on_unsupported=on_unsupported)
    return torch.compile(function, backend=backend), graphs


class UNet(nn.Module):
    """Down and up again, with what networks for images have: skips, groups, dropout, attention over places."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.down, self.group = nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2), nn.GroupNorm(4, 32)
        self.depthwise, self.drop = nn.Conv2d(32, 32, 3, padding=1, groups=32), nn.Dropout2d(0.3)
        self.query, self.up = nn.Linear(32, 32), nn.ConvTranspose2d(32, 16, 2, 2)
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, x):
        skip = F.relu(self.norm(self.first(x)))
        h = F.silu(self.group(self.down(F.dropout(skip, 0.2))))
        h = h + self.drop(self.depthwise(h))
        places = h.flatten(2).transpose(1, 2)
        places = F.scaled_dot_product_attention(self.query(places), places, places)
        h = h + places.transpose(1, 2).view(h.shape)
        h = F.interpolate(F.avg_pool2d(h, 2), scale_factor=2, mode="bilinear")
        return self.last(torch.cat([self.up(h), skip], 1))


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv3d(2, 8, 3, bias=False), nn.BatchNorm3d(8), nn.Conv3d(8, 4, 1)

    def forward(self, x):
        return self.last(F.max_pool3d(F.relu(self.norm(self.first(x))), 2))


class ManyWeights(nn.Module):
    """Its second convolution has more weights than images, and keeps the usual layout."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 48, 3, padding=1), nn.Conv2d(48, 64, 3, padding=1)

    def forward(self, x):
        return self.second(F.max_pool2d(F.relu(self.first(x)), 8))


class Grey(nn.Module):
    """One channel at first, then ones that are no vectors of torch's normalizations."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.second, self.group = nn.Conv2d(12, 20, 3), nn.GroupNorm(4, 20)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return F.adaptive_avg_pool2d(F.relu(self.group(self.second(h))), 1).flatten(1)


NETWORKS = {
    "grey": (Grey, lambda n: torch.randn(n, 1, 16, 16)),
    "unet": (UNet, lambda n: torch.randn(n, 3, 16, 16)),
    "volumes": (Volumes, lambda n: torch.randn(n, 2, 8, 8, 8)),
    "many weights": (ManyWeights, lambda n: torch.randn(n, 3, 16, 16)),
}


@pytest.mark.parametrize(
    ("name", "autocast", "users"),
    [
        *((n, False, False) for n in NETWORKS),
        ("unet", True, False),
        ("unet", False, True),
        ("many weights", True, False),
    ],
)
def test_as_eager(name, autocast, users):
    """Losses, gradients, buffers, random numbers, and the layout of all that is given out; of a user's layout, too."""
    make, data = NETWORKS[name]
    torch.manual_seed(0)
    ours = make()
    if users:
        ours = ours.to(memory_format=torch.channels_last)
    eager = copy.deepcopy(ours)
    exact = copy.deepcopy(ours).double()

    def step_of(module):
        def step(x):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = module(x)
            return y.float().square().mean() if y.dtype != torch.float64 else y.square().mean(), y

        return step

    step, graphs = compiled(step_of(ours))
    for i, batch in enumerate((6, 4, 5)):
        x = data(batch)
        found, states = [], []
        for module, function in ((ours, step), (eager, step_of(eager)), (exact, step_of(exact))):
            torch.manual_seed(i)
            module.zero_grad()
            found.append(function(x.double() if module is exact else x))
            states.append(torch.get_rng_state())
            found[-1][0].backward()
        assert torch.equal(states[0], states[1])
        assert found[0][1].stride() == found[1][1].stride() and found[0][1].dtype == found[1][1].dtype
        rows = [[y.detach(), *[p.grad for p in m.parameters()], *m.buffers()]
                for (_, y), m in zip(found, (ours, eager, exact), strict=True)]  # fmt: skip
        for a, b, true in zip(*rows, strict=True):
            assert a.stride() == b.stride()
            largest = true.abs().max()
            # of 16 bits, as far from the truth as eager is
            allowed = 3 * (b - true).abs().max() + 1e-2 * largest if autocast else 2e-5 * largest
            assert (a - true).abs().max() <= allowed
    assert {g.executor for g in graphs} == {LAST}


class Layouts(TorchDispatchMode):
    """Notes which operators read images with the channels last, and which do not."""

    def __init__(self):
        super().__init__()
        self.last, self.usual = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in args[:2]:
            if isinstance(x, torch.Tensor) and x.dim() == 4 and min(x.shape) > 1:
                (self.last if x.stride(1) == 1 else self.usual).add(func._opname)
        return func(*args, **(kwargs or {}))


def test_images_lie_as_it_is_fast(monkeypatch):
    """What convolutions give goes on with its channels last, but for normalizations of odd numbers of channels."""
    net = Grey()
    step, graphs = compiled(lambda x: net(x).square().mean())
    x, inputs = torch.randn(4, 1, 16, 16), []
    step(x).backward()
    run = graphs[0].run
    monkeypatch.setattr(graphs[0], "run", lambda args: inputs.append(args) or run(args))
    step(x).backward()
    with Layouts() as seen:  # Dynamo leaves alone what runs in a mode
        run(inputs[0])
    last = {"convolution", "convolution_backward", "max_pool2d_with_indices", "relu", "threshold_backward"}
    norms = {"_native_batch_norm_legit_functional", "native_batch_norm_backward"}
    norms |= {"native_group_norm", "native_group_norm_backward"}
    assert last <= seen.last and norms <= seen.usual
    assert not seen.usual & (last - {"convolution", "convolution_backward"})  # these read weights as well
    assert not seen.last & norms


def test_a_group_norm_behind_what_is_not_trained():
    """Its kernel takes a process down where channels lie last and the gradient of the image is not asked for."""

    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.norm = nn.Conv2d(3, 32, 3).requires_grad_(False), nn.GroupNorm(4, 32)
            self.last = nn.Conv2d(32, 32, 3)

        def forward(self, x):
            return self.last(self.norm(self.frozen(x))).square().mean()

    torch.manual_seed(0)
    net, x = Tuned(), torch.randn(4, 3, 20, 20)
    function, graphs = compiled(net)
    loss = function(x)
    trained = [p for p in net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, trained)
    expected = torch.autograd.grad(net(x), trained)
    assert [g.executor for g in graphs] == [LAST]
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-5)


@torch.library.custom_op("tests_of_channels_last::row_sums", mutates_args=())
def row_sums(x: torch.Tensor) -> torch.Tensor:
    """As code in C would, it reads entries as they follow one another in memory."""
    flat = x.as_strided((x.numel(),), (1,), x.storage_offset())
    return flat.view(-1, x.shape[-1]).sum(1)


@row_sums.register_fake
def _(x):
    return x.new_empty(x.numel() // x.shape[-1])


def test_operators_of_users_get_what_eager_gives_them():
    net, x = nn.Conv2d(3, 16, 3), torch.randn(8, 3, 40, 40)
    with torch.no_grad():
        function, graphs = compiled(lambda x: row_sums(net(x).relu()), "fastest")
        torch.testing.assert_close(function(x), row_sums(net(x).relu()), rtol=1e-4, atol=1e-4)
        assert LAST not in graphs[0].milliseconds
        function, graphs = compiled(lambda x: row_sums(net(x).relu()))
        torch.testing.assert_close(function(x), row_sums(net(x).relu()), rtol=1e-4, atol=1e-4)


def test_gradients_of_several_outputs():
    """What the backward graph reads of the forward graph keeps its layout between them."""
    ours = UNet()
    eager = copy.deepcopy(ours)
    x = torch.randn(4, 3, 16, 16)

    def step_of(module):
        def step(x):
            out = module(x)
            return out, out.exp().mean((2, 3))

        return step

    step, graphs = compiled(step_of(ours))
    leaves = []
    for _ in range(2):
        for module, function in ((ours, step), (eager, step_of(eager))):
            module.zero_grad()
            leaf = x.clone().requires_grad_()
            torch.manual_seed(3)
            a, b = function(leaf)
            (a.square().sum() + 2 * b.mean()).backward()
            leaves.append(leaf.grad)
        for p, q in zip([*ours.parameters(), leaves[-2]], [*eager.parameters(), leaves[-1]], strict=True):
            left, right = (t if t.grad is None else t.grad for t in (p, q))
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))
    assert [g.executor for g in graphs] == [LAST] * 2


@pytest.mark.parametrize(
    ("net", "shape", "after"),
    [
        (nn.Conv2d(3, 4, 3), (5, 3, 9, 9), lambda y: torch.as_strided(y, (2, 2), (5, 1)).sum()),
        (nn.Conv2d(3, 4, 3), (5, 3, 9, 9), lambda y: y.transpose(1, 2)),
        (nn.Conv1d(3, 4, 3), (5, 3, 9), torch.sum),
        (nn.Conv2d(3, 4, 3).double(), (5, 3, 9, 9), torch.sum),
        (nn.Conv2d(256, 256, 3), (1, 256, 3, 3), torch.sum),
    ],
    ids=["addresses", "a layout that shows", "one dimension", "float64", "many weights"],
)
def test_graphs_that_are_left_alone(net, shape, after):
    x = torch.randn(shape, dtype=next(net.parameters()).dtype)
    step, graphs = compiled(lambda x: after(net(x)))
    with torch.no_grad():
        got, want = step(x), after(net(x))
    assert torch.equal(got, want) and got.stride() == want.stride()
    assert [g.executor for g in graphs] == ["torch"]


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize(("milliseconds", "executor"), [(0.5, LAST), (1.5, "torch")])
def test_takes_part_where_there_are_images(races, milliseconds, executor):
    """What is measured decides, and is remembered by its name; networks without images do without."""
    table, seen = races
    table |= {"onnxruntime": 3.0, LAST: milliseconds}
    net, other = UNet(), nn.Linear(4, 4)

    def loss(x):
        return F.max_pool2d(net(x), 2).square().mean()  # of which ONNX Runtime's graph has an operator of this package

    step, graphs = compiled(loss, placement="fastest")
    step(torch.randn(2, 3, 16, 16)).backward()
    assert seen[-1] == ["eager", "onnxruntime", "torch", LAST]
    assert [g.executor for g in graphs] == [executor]
    torch._dynamo.reset()
    contest.MEMORY.forget()
    again, graphs = compiled(loss, placement="fastest")
    again(torch.randn(2, 3, 16, 16)).backward()
    assert [g.executor for g in graphs] == [executor]
    assert len(seen) == 2
    compiled(lambda x: other(x).square().mean(), placement="fastest")[0](torch.randn(2, 4)).backward()
    assert LAST not in seen[-1]


@pytest.mark.usefixtures("measuring")
def test_smaller_batches_that_do_not_gain(monkeypatch):
    """What was measured holds for them, and the report says why another one runs them."""
    monkeypatch.setattr(contest, "race", lambda runs, **limits: {name: 1e-3 * (1 + (name != LAST)) for name in runs})
    net, graphs = nn.Conv2d(16, 16, 3), []
    backend = ORTBackend(RuntimeConfig(), on_graph=graphs.append)
    step = torch.compile(lambda x: net(x).square().mean(), backend=backend, dynamic=False)
    for batch in (8, 2):
        step(torch.randn(batch, 16, 8, 8)).backward()
    assert [g.executor for g in graphs] == [LAST, "torch"]
    assert [g.report.why for g in graphs] == [
        "it took the least time when they were measured side by side",
        "images in channels_last took the least time, and this graph has none that gain by it",
    ]


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize(("seconds", "tried"), [(0.1, False), (0.3, True)])
def test_long_runs_are_measured_less(monkeypatch, seconds, tried):
    """The usual layout takes about what eager takes: where the other one is faster than that, it is not tried."""
    net, made = UNet(), []
    monkeypatch.setattr(contest, "race", lambda runs, **limits: {"onnxruntime": 0.4, "eager": 0.2})
    monkeypatch.setattr(contest, "_alone", lambda run, expected: seconds)
    make = channels_last.TorchExecutable._compile
    monkeypatch.setattr(
        channels_last.TorchExecutable, "_compile", lambda self, *a: (made.append(self.executor), make(self, *a))[1]
    )
    step, _ = compiled(lambda x: net(x).square().mean(), placement="fastest")
    step(torch.randn(2, 3, 16, 16)).backward()
    assert made == ([LAST, "torch"] if tried else [LAST])


def test_fit():
    class Images(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = UNet()

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)

    data = TensorDataset(torch.randn(12, 3, 16, 16), torch.randn(12, 4, 16, 16))
    flags = {"max_steps": 6, "train": lambda: DataLoader(data, batch_size=4), "val": lambda: DataLoader(data, 5)}
    eager = fit(Images, strategy="auto", **flags)
    ours = fit(Images, strategy=ORTStrategy(placement=LAST, print_report=False), **flags)
    assert_same_outcome(eager, ours, 1e-4)
    assert "as placement asks for" in str(ours.trainer.strategy.report())
