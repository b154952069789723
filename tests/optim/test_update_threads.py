"""Updates by torch's fused kernels on fewer threads."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from torch import nn, optim
from torch.utils.data import DataLoader

from lightning_ort.optim.rules import FusedAdam
from lightning_ort.optim.threads import UpdateThreads, may_take_fewer
from lightning_ort.optim.torch_optim import HookedOptimizers, StepHook
from lightning_ort.report import OptimizerReport
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = pytest.mark.stock_only


class Clock:
    """Updates take ``one`` seconds on one thread and ``many`` on several."""

    def __init__(self, one, many):
        self.now, self.one, self.many = 0.0, one, many

    def __call__(self):
        self.now += self.one if torch.get_num_threads() == 1 else self.many
        return self.now


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("one", "many", "stays"), [(1.0, 2.0, 1), (2.0, 1.0, 2), (1.0, 1.0, 2)])
def test_what_is_faster_stays(one, many, stays):
    threads = UpdateThreads(Clock(one, many))
    used, told = [], []
    for _ in range(30):
        threads.begin()
        used.append(torch.get_num_threads())
        told.append(threads.end())
        assert torch.get_num_threads() == 2
    assert used[:4] == [1, 2, 1, 2]
    assert set(used[20:]) == {stays}
    assert sum(told) == (stays == 1)
    assert threads.milliseconds is not None


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("before", "after", "stays"), [(0.0, 0.0, 1), (1.5, 0.0, 2), (0.5, 0.4, 1)])
def test_what_one_thread_takes_around_it_counts(before, after, stays):
    """Of an update of 1 second on one thread, and 2 on all; what comes after it is on the clock of both."""
    threads, used = UpdateThreads(Clock(1.0, 2.0)), []
    for _ in range(30):
        threads.begin(before)
        used.append(torch.get_num_threads())
        threads.end(after)
    assert set(used[20:]) == {stays}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("one", "many", "stays"),
    [
        ((1.0, 5.0), (2.0, 5.0), 1),
        ((1.0, 6.5), (2.0, 5.0), 2),  # what comes after it waits for the other thread
        ((1.0, 100.0), (2.0, 100.0), 2),  # no step is faster by a share that counts
        ((1.9, 4.0), (2.0, 5.0), 2),  # steps differ, but not for the update's sake
    ],
)
def test_it_is_the_step_that_has_to_be_faster(one, many, stays):
    """Each way is the seconds of an update, and of what comes after it."""
    now, used = 0.0, []
    threads = UpdateThreads(lambda: now)
    for _ in range(30):
        threads.begin()
        used.append(torch.get_num_threads())
        update, rest = one if used[-1] == 1 else many
        now += update
        threads.end()
        now += rest
    assert used[:4] == [1, 2, 1, 2]
    assert set(used[20:]) == {stays}


def test_one_thread_leaves_nothing_to_find_out():
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        optimizer = optim.AdamW(nn.Linear(3, 2).parameters(), fused=True)
        report = OptimizerReport("AdamW")
        hook = StepHook(
            optimizer, "auto", RuntimeConfig(), verify=True, refuse=False, report=report, announce=lambda text: None
        )
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        for _ in range(3):
            optimizer.step()
        assert hook.idle and report.in_torch == 3
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.usefixtures("two_threads")
def test_an_update_that_raises_gives_the_threads_back():
    threads = UpdateThreads(Clock(1.0, 2.0))
    threads.begin()
    assert torch.get_num_threads() == 1
    threads.begin()  # the next one, without an end
    threads.end()
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("door", ["automatic", "manual", "fabric"])
def test_a_step_of_torch_that_raises_gives_the_threads_back(door, monkeypatch):
    """Torch's own fused step refuses a sparse gradient; it calls no hook then."""

    class Net(LightningModule):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(10, 4, sparse=True)
            self.automatic_optimization = door == "automatic"

        def forward(self, batch):
            return self.words(batch.long()).sum()

        def training_step(self, batch, batch_idx):
            loss = self(batch)
            if door == "automatic":
                return loss
            self.manual_backward(loss)
            self.optimizers().step()
            return None

        def configure_optimizers(self):
            return optim.Adam(self.parameters(), fused=True)

    monkeypatch.setattr("lightning_ort.optim.threads.UpdateThreads.stay", False)
    module, batch = Net(), torch.arange(4.0)
    if door == "fabric":
        fabric = Fabric(accelerator="cpu", strategy="ort")
        net, optimizer = fabric.setup(module, module.configure_optimizers())
        fabric.backward(net(batch))
        with pytest.raises(RuntimeError, match="sparse"):
            optimizer.step()
    else:
        flags = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(strategy="ort", accelerator="cpu", max_steps=1, enable_model_summary=False, **flags)
        threads_of_teardown = []
        monkeypatch.setattr(
            HookedOptimizers, "remove", lambda self: threads_of_teardown.append(torch.get_num_threads())
        )
        with pytest.raises(RuntimeError, match="sparse"):
            trainer.fit(module, DataLoader(batch, batch_size=4))
        assert set(threads_of_teardown) == {2}
    assert torch.get_num_threads() == 2


def trained(kind, hooked, steps=25, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(67, 129), nn.Tanh(), nn.Linear(129, 3))  # no sizes that are whole vectors
    optimizer = kind(net.parameters(), lr=0.01, fused=True, **settings)
    report = OptimizerReport("of the test")
    if hooked:
        hook = StepHook(
            optimizer, "auto", RuntimeConfig(), verify=True, refuse=False, report=report, announce=lambda text: None
        )
        if hooked == "fewer":
            hook._threads._clock = Clock(1.0, 2.0)
    x = torch.randn(32, 67)

    def closure():
        assert torch.get_num_threads() == 2
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(steps)]
    assert torch.get_num_threads() == 2
    return losses, net.state_dict(), report


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (optim.AdamW, {"weight_decay": 0.1}),
        (optim.Adam, {"amsgrad": True}),
        (optim.SGD, {"momentum": 0.9}),
        (optim.Adagrad, {}),
    ],
)
def test_threads_change_no_bit(kind, settings):
    losses, weights, _ = trained(kind, None, **settings)
    others, found, report = trained(kind, "fewer", **settings)
    assert losses == others
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    assert any("faster on one thread" in entry.reason for entry in report.reasons)


@pytest.mark.usefixtures("two_threads")
def test_nothing_is_left_to_do():
    """From then on a step costs no more than the count of it, until there is another group."""
    layers = nn.ModuleList(nn.Linear(67, 129) for _ in range(2))
    optimizer, report = optim.AdamW(layers[0].parameters(), fused=True), OptimizerReport("AdamW")
    hook = StepHook(
        optimizer, "auto", RuntimeConfig(), verify=True, refuse=False, report=report, announce=lambda text: None
    )
    hook._threads._clock = Clock(2.0, 1.0)
    idle = []
    for step in range(60):
        if step == 50:
            optimizer.add_param_group({"params": list(layers[1].parameters())})
        before = [p.detach().clone() for p in layers.parameters()]
        for p in layers.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        moved = [not torch.equal(a, b) for a, b in zip(before, layers.parameters(), strict=True)]
        assert moved == [True, True, step >= 50, step >= 50]
        idle.append(hook.idle)
        if step in (45, 50):
            optimizer.register_step_pre_hook(lambda *args: None)
    assert not idle[0] and idle[49] and idle[59]
    assert report.in_torch == 60
    assert hook._chosen_for == 2


@pytest.mark.usefixtures("two_threads")
def test_trainers_of_plain_modules_take_fewer():
    """ORTTrainer's Adam, which calls torch's kernel itself; the weights are those of all threads, to the bit."""
    weights = []
    for clock in (Clock(1.0, 2.0), Clock(2.0, 1.0)):
        torch.manual_seed(0)
        params = [torch.randn(67, 129), torch.randn(5)]
        update = FusedAdam(params, [[torch.zeros_like(p), torch.zeros_like(p)] for p in params], [0, 0])
        update._threads._clock = clock
        for count in range(1, 30):
            update.set_coefficients(0, (0.01, 0.9, 0.99, 1e-8, 0.1, count))
            assert update.run([p.sin() for p in params])
        assert update._threads.milliseconds is not None
        assert torch.get_num_threads() == 2
        weights.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_who_may_take_fewer():
    p = [nn.Parameter(torch.ones(3))]
    assert may_take_fewer(optim.AdamW(p, fused=True))
    assert not may_take_fewer(optim.AdamW(p))
    assert not may_take_fewer(optim.SGD(p, lr=0.1, foreach=True))
    mixed = optim.AdamW([{"params": p}, {"params": [nn.Parameter(torch.ones(2))], "fused": True}])
    assert not may_take_fewer(mixed)
