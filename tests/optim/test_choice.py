"""``optimizer="auto"``: who makes the updates of a torch optimizer is measured."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from hooked import hook
from lightning.pytorch import LightningModule, Trainer
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import ORTStrategy
from lightning_ort import optim as own
from lightning_ort.compiler.contest import MEMORY
from lightning_ort.optim.torch_optim import choice
from lightning_ort.runtime.config import RuntimeConfig

# what torch's optimizers are, whoever else could make their updates
pytestmark = [pytest.mark.stock_only, pytest.mark.usefixtures("measuring")]

FUSED_CASES = {
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.05}),
    "adam-amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.9)}),
    "adam-maximize": (optim.Adam, {"lr": 0.01, "maximize": True}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "sgd": (optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "sgd-momentum": (optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": (optim.SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True, "maximize": True}),
    "adagrad": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
}


@pytest.fixture
def fastest(monkeypatch):
    """``fastest(name)``: measuring finds the candidate ``name`` to be it. What was measured is in the result."""
    measured = []

    def make(name):
        def pretend(runs):
            measured.append(sorted(runs))
            return {candidate: 1e-3 if candidate == name else 2e-3 for candidate in runs}

        monkeypatch.setattr(choice, "race", pretend)
        return measured

    return make


def hooked(optimizer):
    return hook(optimizer, "auto")


def network(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


def train(net, optimizer, steps=range(20)):
    for k in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        x = x.to(next(net.parameters()).dtype)
        optimizer.zero_grad()
        loss = (net(x) - x[:, :2].sin()).square().mean()
        (-loss if optimizer.param_groups[0].get("maximize") else loss).backward()
        optimizer.step()


def assert_close(got, wanted, share):
    for (name, a), b in zip(got.named_parameters(), wanted.parameters(), strict=True):
        assert (a - b).abs().max() <= share * b.abs().max(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", FUSED_CASES)
def test_the_fused_kernel_trains_as_what_was_written(case, dtype, fastest):
    measured = fastest("torch")
    kind, settings = FUSED_CASES[case]
    ours, theirs = network(dtype), network(dtype)
    a, b = (kind(net.parameters(), **copy.deepcopy(settings)) for net in (ours, theirs))
    called = []
    a.register_step_post_hook(lambda *args: called.append("after"))
    handle, report = hooked(a)
    for net, optimizer in ((ours, a), (theirs, b)):
        train(net, optimizer)
    assert measured == [["eager", "torch"]]
    assert called == ["after"] * 20
    reach = 1e-5 if dtype == torch.float32 else 1e-10
    assert_close(ours, theirs, reach)
    # nothing of it can be seen: settings and states are those of the optimizer as it was written
    mine, its = a.state_dict(), b.state_dict()
    assert mine["param_groups"] == its["param_groups"] and mine["param_groups"][0]["fused"] is None
    for number, state in its["state"].items():
        assert list(mine["state"][number]) == list(state)
        for name, value in state.items():
            got = mine["state"][number][name]
            assert (got is None) == (value is None)
            if value is not None:
                assert got.dtype == value.dtype
                torch.testing.assert_close(got, value, rtol=reach, atol=reach)
    assert report.in_torch == 20 and "it is made by its fused kernel" in report.reasons[0].reason
    # and a state goes on without it
    handle.remove()
    train(ours, a, range(20, 25))
    train(theirs, b, range(20, 25))
    assert_close(ours, theirs, reach)


@pytest.mark.parametrize("case", [case for case in FUSED_CASES if case != "adagrad"])
def test_the_kernel_is_called_without_what_torch_does_before_it(case, fastest, monkeypatch):
    fastest("torch")
    kind, settings = FUSED_CASES[case]
    ours, theirs = network(), network()
    a = kind(ours.parameters(), **copy.deepcopy(settings))
    b = kind(theirs.parameters(), **copy.deepcopy(settings), fused=True)
    hooked(a)
    sorted_tensors = []
    original = optim.Optimizer._group_tensors_by_device_and_dtype

    def counted(lists, *args, **kwargs):
        sorted_tensors.append(lists)
        return original(lists, *args, **kwargs)

    monkeypatch.setattr(optim.Optimizer, "_group_tensors_by_device_and_dtype", staticmethod(counted))
    for net, optimizer, expected in ((ours, a, 0), (theirs, b, 9)):
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        train(net, optimizer, [0])
        sorted_tensors.clear()
        for k in range(1, 10):
            schedule.step()
            train(net, optimizer, [k])
        assert len(sorted_tensors) == expected
    # bit for bit
    for x, y in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(x, y)
        assert all(torch.equal(a.state[x][name], value) for name, value in b.state[y].items() if value is not None)


class Kernels:
    """Counts the updates of real parameters for which torch was asked for its fused kernel."""

    def __init__(self, params, monkeypatch):
        self.fused, self.params = 0, list(params)
        original = torch._fused_adam_

        def counted(params, *args, **kwargs):
            self.fused += any(p is own for p in params for own in self.params)
            return original(params, *args, **kwargs)

        monkeypatch.setattr(torch, "_fused_adam_", counted)


@pytest.mark.parametrize(("setting", "value"), [("foreach", True), ("fused", False)])
def test_what_is_asked_for_later_is_obeyed(setting, value, fastest, monkeypatch):
    fastest("torch")
    net = network()
    hooked(optimizer := optim.Adam(net.parameters(), 0.01))
    kernels = Kernels(net.parameters(), monkeypatch)
    train(net, optimizer, range(3))
    assert kernels.fused == 3
    optimizer.param_groups[0][setting] = value
    train(net, optimizer, range(3, 6))
    assert kernels.fused == 3


def channels_last(weights):
    weights.data = weights.data.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("what", ["weights", "gradient", "expanded", "sparse", "later"])
def test_memory_that_the_fused_kernel_would_mix_up(what, fastest, monkeypatch):
    fastest("torch")
    kind = optim.SGD if what == "sparse" else optim.Adam
    weights = [nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0))) for _ in range(2)]
    optimizers = [kind([p], 0.1) for p in weights]
    hooked(optimizers[0])
    kernels = Kernels(weights, monkeypatch)
    for p, optimizer in zip(weights, optimizers, strict=True):
        for k in range(4):
            gradient = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(k))
            if what == "weights" or (what == "later" and k == 2):
                channels_last(p)
            if what == "gradient":
                gradient = gradient.to(memory_format=torch.channels_last)
            elif what == "expanded":
                gradient = gradient[:1, :1].expand(4, 3, 5, 5)
            elif what == "sparse":
                gradient = gradient.to_sparse(1)
            p.grad = gradient
            optimizer.step()
    assert kernels.fused == (2 if what == "later" else 0)
    torch.testing.assert_close(weights[0].detach(), weights[1].detach(), rtol=1e-5, atol=1e-6)


class Events:
    """What may happen to an optimizer, its parameters and states in the middle of a training."""

    @staticmethod
    def first_gradient_in_another_order(k, net, optimizer):
        if k == 0:
            for p in net.parameters():
                if p.dim() == 2:
                    p.grad = p.grad.t().contiguous().t()

    @staticmethod
    def a_later_gradient_in_another_order(k, net, optimizer):
        if k == 2:
            net[0].weight.grad = net[0].weight.grad.t().contiguous().t()

    @staticmethod
    def a_later_gradient_that_is_sparse(k, net, optimizer):
        if k == 2:
            net[0].weight.grad = net[0].weight.grad.to_sparse()

    @staticmethod
    def a_later_gradient_with_the_other_sign(k, net, optimizer):
        if k == 2:
            net[0].weight.grad = torch._neg_view(net[0].weight.grad)

    @staticmethod
    def states_in_another_order(k, net, optimizer):
        if k == 2:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.dim() == 2:
                        state[name] = value.t().contiguous().t()

    @staticmethod
    def memory_of_states_in_another_order(k, net, optimizer):
        if k == 2:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.dim() == 2:
                        value.data = value.data.t().contiguous().t()

    @staticmethod
    def memory_of_states_in_another_type(k, net, optimizer):
        if k == 2:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and name != "step":
                        value.data = value.data.double()

    @staticmethod
    def weights_in_other_memory(k, net, optimizer):
        if k >= 2:
            for p in net.parameters():
                p.data = p.data.clone()

    @staticmethod
    def one_counter(k, net, optimizer):
        if k == 2:
            steps = [state for state in optimizer.state.values() if "step" in state]
            for state in steps:
                state["step"] = steps[0]["step"]

    @staticmethod
    def counted_in_integers(k, net, optimizer):
        if k == 2:
            state = copy.deepcopy(optimizer.state_dict())
            for values in state["state"].values():
                if "step" in values:
                    values["step"] = values["step"].long()
            optimizer.load_state_dict(state)

    @staticmethod
    def first_gradients_later(k, net, optimizer):
        if k < 2:
            net[0].weight.grad = None

    @staticmethod
    def gradients_come_and_go(k, net, optimizer):
        net[k % 2 * 2].weight.grad = None

    @staticmethod
    def no_gradient_at_all(k, net, optimizer):
        if k == 2:
            optimizer.zero_grad()

    @staticmethod
    def a_state_is_loaded(k, net, optimizer):
        if k == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    @staticmethod
    def a_group_of_its_own(k, net, optimizer):
        if k == 2:
            moved = optimizer.param_groups[0]["params"].pop()
            state = optimizer.state.pop(moved, None)
            optimizer.add_param_group({"params": [moved], "lr": 0.3})
            if state is not None:
                optimizer.state[moved] = state

    @staticmethod
    def more_in_the_state(k, net, optimizer):
        if k == 2:
            optimizer.state["of the user"] = 1
            optimizer.state[net[0].weight]["note"] = "mine"

    @staticmethod
    def a_state_is_lost(k, net, optimizer):
        if k == 2:
            optimizer.state.pop(net[0].weight, None)

    @staticmethod
    def bfloat16(k, net, optimizer):
        if k == 2:
            gradients = [p.grad.bfloat16() for p in net.parameters()]
            net.bfloat16()
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient

    @staticmethod
    def double(k, net, optimizer):
        if k == 2:
            gradients = [p.grad.double() for p in net.parameters()]
            net.double()
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.grad = gradient

    @staticmethod
    def a_complex_one(k, net, optimizer):
        if k == 2:
            net.extra = nn.Parameter(torch.full((3,), 1 + 2j))
            net.extra.grad = torch.full((3,), 0.5 - 1j)
            optimizer.param_groups[0]["params"].append(net.extra)

    @staticmethod
    def reversed_signs(k, net, optimizer):
        if k == 2:
            net[0].weight.data = torch._neg_view(net[0].weight.data)

    @staticmethod
    def a_layer_that_is_lazy(k, net, optimizer):
        if k == 0:
            net.lazy = nn.LazyLinear(3)
            optimizer.param_groups[0]["params"] += list(net.lazy.parameters())

    @staticmethod
    def twice(k, net, optimizer):
        if k == 0:
            optimizer.param_groups[0]["params"].append(net[0].weight)

    @staticmethod
    def a_schedule(k, net, optimizer):
        group = optimizer.param_groups[0]
        group["lr"] *= 0.9
        if "betas" in group:
            group["betas"] = (group["betas"][0] * 0.9, group["betas"][1])
        if "momentum" in group:
            group["momentum"] *= 0.9

    @staticmethod
    def the_other_direction(k, net, optimizer):
        if k == 2:
            optimizer.param_groups[0]["maximize"] = "maximize" in optimizer.param_groups[0]

    @staticmethod
    def largest_moments(k, net, optimizer):
        if k == 2 and "amsgrad" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["amsgrad"] = True
            for state in optimizer.state.values():
                state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()

    @staticmethod
    def betas_that_are_tensors(k, net, optimizer):
        if k == 2 and "betas" in optimizer.param_groups[0]:
            optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), torch.tensor(0.99))

    @staticmethod
    def other_settings(k, net, optimizer):
        if k == 2:
            optimizer.param_groups[0].update(lr=torch.tensor(0.03), weight_decay=0.1)


KINDS = {
    "adam": lambda params: optim.Adam(params, 0.02),
    "adagrad": lambda params: optim.Adagrad(params, 0.05, lr_decay=0.1),
    "sgd": lambda params: optim.SGD(params, 0.05),
    "momentum": lambda params: optim.SGD(params, 0.05, momentum=0.9),
    "lamb": lambda params: own.Lamb(params, 0.02),
    "nadam": lambda params: optim.NAdam(params, 0.02),
}


def through(event, kind, hooks):
    """Parameters, or the kind of the error, after some updates of a network to which the event happens."""
    net = nn.Sequential(nn.Linear(6, 50), nn.Tanh(), nn.Linear(50, 4))
    for k, p in enumerate(net.parameters()):
        nn.init.normal_(p, generator=torch.Generator().manual_seed(k))
    optimizer = KINDS[kind](net.parameters())
    if hooks:
        hooked(optimizer)
    if event.__name__ in ("a_layer_that_is_lazy", "twice"):
        event(0, net, optimizer)
    for k in range(5):
        for n, p in enumerate(net[0:3].parameters()):
            generator = torch.Generator().manual_seed(10 * k + n)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if event.__name__ not in ("a_layer_that_is_lazy", "twice"):
            event(k, net, optimizer)
        groups = optimizer.param_groups
        try:
            optimizer.step()
        except (RuntimeError, TypeError, AttributeError) as error:
            return type(error)
        assert optimizer.param_groups is groups and all(g.get("fused") is None for g in groups)
    states = [v for p in net[0:3].parameters() for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v)]
    return [p.detach().clone() for p in net[0:3].parameters()] + [v.clone() for v in states]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("name", ["torch", "onnxruntime"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "event", [f for n, f in vars(Events).items() if n[0] != "_"], ids=lambda f: f.__func__.__name__
)
def test_what_may_happen_in_a_training(event, kind, name, fastest):
    fastest(name)
    event = event.__func__
    wanted, got = through(event, kind, False), through(event, kind, True)
    if isinstance(wanted, type):
        assert got is wanted
        return
    assert not isinstance(got, type), got
    for a, b in zip(got, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6)


class Scaled(optim.Adam):
    """A subclass that needs an attribute of its own, and whose way back from a file changes a setting."""

    def __init__(self, params, lr, scale):
        super().__init__(params, lr)
        self.scale = scale

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group["lr"] = 1e-6

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.scale += 1


def test_a_class_of_ones_own_is_not_measured(fastest):
    measured = fastest("torch")
    nets = network(), network()
    optimizers = [Scaled(net.parameters(), 0.01, 0.5) for net in nets]
    _, report = hooked(optimizers[0])
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer)
    assert not measured and "Scaled may do more" in report.reasons[0].reason
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def closures(net, optimizer, steps):
    for k in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(k))

        def closure(x=x):
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        yield closure


def wrapping(optimizer, seen):
    """A pre-hook that clips, and changes a setting, when the closure has run."""

    def pre(o, args, kwargs):
        closure = args[1] if len(args) > 1 else kwargs["closure"]

        def wrapped():
            loss = closure()
            seen.append((len(o.param_groups), o.param_groups[0].get("fused")))
            nn.utils.clip_grad_norm_([p for group in o.param_groups for p in group["params"]], 0.01)
            for group in o.param_groups:
                group["lr"] *= 0.9
            return loss

        return (args[0], wrapped), {}

    optimizer.register_step_pre_hook(pre)


@pytest.mark.parametrize(("kind", "name"), [(optim.Adam, "torch"), (own.Lamb, "onnxruntime")])
def test_a_hook_that_wraps_the_closure(kind, name, fastest):
    fastest(name)
    nets, seen = (network(), network()), []
    optimizers = [kind(net.parameters(), lr=0.05) for net in nets]
    _, report = hooked(optimizers[0])
    for net, optimizer in zip(nets, optimizers, strict=True):
        wrapping(optimizer, seen)
        for closure in closures(net, optimizer, 6):
            optimizer.step(closure)
    assert seen == [(1, None)] * 12
    assert_close(nets[0], nets[1], 1e-5)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
    [late] = [entry.reason for entry in report.reasons if "pre-hook" in entry.reason]
    assert late.endswith("was registered after that of this strategy, which comes last from now on")
    if name == "onnxruntime":
        assert (report.in_ort, report.in_torch) == (5, 1)


@pytest.mark.parametrize(("kind", "name"), [(optim.Adam, "torch"), (own.Lamb, "onnxruntime")])
def test_a_hook_that_calls_the_closure_again(kind, name, fastest):
    fastest(name)
    nets = network(), network()
    optimizers = [kind(net.parameters(), lr=0.05) for net in nets]
    hooked(optimizers[0])
    for net, optimizer in zip(nets, optimizers, strict=True):
        groups, losses = optimizer.param_groups, []
        optimizer.register_step_post_hook(lambda o, args, kwargs, losses=losses: losses.append(args[1]().item()))
        for closure in closures(net, optimizer, 4):
            optimizer.step(closure)
            assert optimizer.param_groups is groups
        assert len(losses) == 4
    assert_close(nets[0], nets[1], 1e-5)
    assert str(optimizers[0].state_dict()["param_groups"]) == str(optimizers[1].state_dict()["param_groups"])


@pytest.mark.parametrize("ended_by", ["the next step", "the end of the fit"])
def test_an_interrupt_before_the_loop(ended_by, fastest, monkeypatch):
    fastest("torch")
    net = network()
    hook, _ = hooked(optimizer := optim.Adam(net.parameters(), 0.01))
    train(net, optimizer, range(1))
    groups = optimizer.param_groups

    class Interrupting(choice.GroupsOfOneStep):
        def __iter__(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("lightning_ort.optim.torch_optim.hook.GroupsOfOneStep", Interrupting)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    if ended_by == "the next step":
        optimizer.step()
    else:
        hook.remove()
    assert optimizer.param_groups is groups


def test_later_groups_have_the_settings_that_they_would_have():
    """Measuring leaves the defaults of the class alone."""
    optimizer = own.Lamb(network().parameters(), 0.01)
    defaults = dict(optimizer.defaults)
    choice.choose(optimizer, RuntimeConfig())
    assert optimizer.defaults == defaults


def test_settings_that_are_tensors(fastest):
    measured = fastest("torch")
    hooked(optimizer := optim.Adam(network().parameters(), torch.tensor(0.01)))
    optimizer.step()
    assert measured == [["eager", "onnxruntime"]]


@pytest.mark.parametrize("fused", [True, False, None])
@pytest.mark.parametrize("foreach", [True, False, None])
def test_what_was_asked_for_stays(fused, foreach, fastest):
    if fused and foreach:
        pytest.skip("torch refuses it")
    measured = fastest("torch")
    net = network()
    _, report = hooked(optimizer := optim.Adam(net.parameters(), fused=fused, foreach=foreach))
    train(net, optimizer, range(2))
    if fused or foreach:
        assert not measured and f"{'fused' if fused else 'foreach'}=True was asked for" in report.reasons[0].reason
    elif fused is False:
        assert measured == [["eager", "onnxruntime"]]
    else:
        assert measured == [["eager", "torch"]]


@pytest.mark.parametrize("kind", [optim.RMSprop, own.Lamb, optim.Adamax])
@pytest.mark.parametrize("name", ["onnxruntime", "eager"])
def test_without_a_fused_kernel(kind, name, fastest):
    measured = fastest(name)
    nets = network(), network()
    optimizers = [kind(net.parameters(), lr=0.01) for net in nets]
    _, report = hooked(optimizers[0])
    for net, optimizer in zip(nets, optimizers, strict=True):
        train(net, optimizer)
    assert measured == [["eager", "onnxruntime"]]
    assert (report.in_ort, report.in_torch) == ((20, 0) if name == "onnxruntime" else (0, 20))
    assert_close(nets[0], nets[1], 1e-5)
    if name == "eager":
        assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))
        assert "2 ms in ONNX Runtime; it is made as written" in report.reasons[0].reason


def test_what_was_measured_is_remembered(fastest):
    measured = fastest("torch")
    for lr in (0.1, 0.01):
        hooked(optimizer := optim.Adam(network().parameters(), lr))
        optimizer.step()
    assert len(measured) == 1
    MEMORY.forget()  # as in another process
    hooked(optimizer := optim.Adam(network().parameters()))
    optimizer.step()
    assert len(measured) == 1
    hooked(optimizer := optim.Adam(network().parameters(), amsgrad=True))
    optimizer.step()
    hooked(optimizer := optim.Adam(nn.Linear(4, 5).parameters()))
    optimizer.step()
    assert len(measured) == 3


@pytest.mark.parametrize("why", ["deterministic", "off"])
def test_where_nothing_may_be_measured(why, fastest, monkeypatch):
    measured = fastest("torch")
    nets = network(), network()
    optimizers = [optim.Adam(net.parameters(), lr=0.01) for net in nets]
    _, report = hooked(optimizers[0])
    if why == "off":
        monkeypatch.setenv("LIGHTNING_ORT_MEASURE", "0")
    else:
        torch.use_deterministic_algorithms(True)
    try:
        for net, optimizer in zip(nets, optimizers, strict=True):
            train(net, optimizer, range(3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not measured and "nothing is measured here" in report.reasons[0].reason
    assert all(torch.equal(p, q) for p, q in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_other_devices_are_not_measured(fastest):
    measured = fastest("torch")
    _, report = hooked(optimizer := optim.Adam([nn.Parameter(torch.zeros(3, device="meta"))]))
    optimizer.step()
    assert not measured and "a device other than the CPU" in report.reasons[0].reason


def test_new_groups_and_states_are_looked_at(fastest, monkeypatch):
    measured = fastest("torch")
    net = network()
    kernels = Kernels(net.parameters(), monkeypatch)
    _, report = hooked(optimizer := optim.Adam(net[0].parameters(), 0.01))
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": net[2].parameters()})
    train(net, optimizer, range(2))
    assert len(measured) == 2 and kernels.fused == 2 + 4
    # counted in float64, which the kernel would read as float32
    state = copy.deepcopy(optimizer.state_dict())
    for values in state["state"].values():
        values["step"] = values["step"].double()
    optimizer.load_state_dict(state)
    twin = copy.deepcopy(net)
    plain = optim.Adam([{"params": twin[0].parameters()}, {"params": twin[2].parameters()}], 0.01)
    plain.load_state_dict(copy.deepcopy(state))
    train(net, optimizer, range(2))
    train(twin, plain, range(2))
    assert kernels.fused == 2 + 4
    assert_close(net, twin, 1e-5)
    assert report.in_ort + report.in_torch == 6


def test_a_kernel_that_computes_something_else_is_left_out(fastest, monkeypatch):
    measured = fastest("torch")
    monkeypatch.setattr(
        choice, "fused_groups", lambda groups: [{**g, "fused": True, "eps": 1.0, "lr": 1.05e-3} for g in groups]
    )
    _, report = hooked(optimizer := optim.Adam(network().parameters(), 1e-3))
    train(network(), optimizer, range(1))
    assert measured == [["eager"]] and "it is made as written" in report.reasons[0].reason


def test_measuring_leaves_everything(monkeypatch):
    """Neither weights, states, random numbers nor the hooks of all optimizers see it; it is real, and short."""
    net = network()
    optimizer = optim.Adam(net.parameters(), 0.01)
    train(net, optimizer, range(2))
    before = copy.deepcopy((net.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    called = []
    handle = register_optimizer_step_pre_hook(lambda *args: called.append(args))
    try:
        found, _ = choice.choose(optimizer, RuntimeConfig())
    finally:
        handle.remove()
    after = net.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    assert not called
    assert set(found.milliseconds) == {"eager", "torch"} and all(t > 0 for t in found.milliseconds.values())
    assert torch.equal(before[2], after[2]) and str(before[1]) == str(after[1])
    assert all(torch.equal(p, after[0][name]) for name, p in before[0].items())


def test_an_update_that_computes_something_else_is_told(monkeypatch):
    class Wrong(choice.OptimizerStepper):
        def step(self):
            raise ValueError("there is no such kernel\nat all")

    monkeypatch.setattr(choice, "OptimizerStepper", Wrong)
    hooked(optimizer := optim.NAdam(network().parameters(), 0.01))
    found, reason = choice.choose(optimizer, RuntimeConfig())
    assert found.executor == "eager" and set(found.milliseconds) == {"eager"}
    assert reason.endswith("; it is made as written; it cannot be made in ONNX Runtime: there is no such kernel")


@pytest.mark.parametrize("sizes", [[5_000_000], [3, 700_000, 700_000, 700_000, 5], [100_000] * 30, []])
def test_much_is_measured_by_a_sample(sizes):
    params = [nn.Parameter(torch.zeros(n)) for n in sizes]
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = optim.Adam([{"params": params}, {"params": [frozen], "lr": 1.0}])
    if not sizes:
        found, reason = choice.choose(optimizer, RuntimeConfig())
        assert found.executor == "eager" and "no parameters" in reason
        return
    twin = choice._twin(optimizer)
    drawn = [p for group in twin.param_groups for p in group["params"]]
    assert 0 < sum(p.numel() for p in drawn) <= choice._SAMPLE
    assert len(twin.param_groups) == 2 and optimizer.param_groups[0]["params"] == params


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return optim.AdamW(self.parameters(), 0.01)


def test_a_fit(fastest):
    fastest("torch")
    data = DataLoader(TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0))), 4)
    fitted = []
    ort = ORTStrategy(print_report=False)
    for strategy in ("auto", ort):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(
                strategy=strategy, accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False,
                enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
            )  # fmt: skip
            trainer.fit(module := Module(), data)
        fitted.append(module)
    assert_close(fitted[1], fitted[0], 1e-5)
    [report] = ort.report().optimizers
    assert report.in_torch == 10 and "by its fused kernel" in report.reasons[0].reason
