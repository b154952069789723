"""Updates of torch optimizers made by ONNX Runtime, against torch's own."""

from __future__ import annotations

import copy
import functools
import math
import re

import pytest
import torch
from hooked import hook
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_ort import optim as own
from lightning_ort.errors import MismatchError, UnsupportedError
from lightning_ort.optim.rules import Adam
from lightning_ort.optim.torch_optim import NeedsTorch

CASES = {
    "sgd": (optim.SGD, {"lr": 0.1, "weight_decay": 0.05}),
    "sgd-momentum": (optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    "sgd-nesterov": (optim.SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.05}),
    "adam-fused": (optim.Adam, {"lr": 0.01, "fused": True}),
    "adam-amsgrad": (optim.Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.8, 0.9)}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "adamw-amsgrad": (optim.AdamW, {"lr": 0.01, "amsgrad": True, "foreach": True}),
    "adamax": (optim.Adamax, {"lr": 0.01, "weight_decay": 0.05}),
    "nadam": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.05}),
    "nadam-decoupled": (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.05}),
    "radam-decoupled": (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "rmsprop": (optim.RMSprop, {"lr": 0.003, "weight_decay": 0.05}),
    "rmsprop-centered": (optim.RMSprop, {"lr": 0.001, "alpha": 0.9, "centered": True, "momentum": 0.5}),
    "adagrad": (optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "initial_accumulator_value": 0.1, "weight_decay": 0.05}),
    "adadelta": (optim.Adadelta, {"lr": 0.5, "weight_decay": 0.05}),
    "lamb": (own.Lamb, {"lr": 0.02, "weight_decay": 0.1, "ratio_max": 3.0}),
    "lamb-clipped": (own.Lamb, {"lr": 0.02, "max_norm": 0.2, "bias_correction": False}),
    "own-adamw": (own.AdamW, {"lr": 0.01, "weight_decay": 0.1, "decay_after": True, "max_norm": 0.3}),
}
MAXIMIZING = [name for name, (kind, _) in CASES.items() if kind not in (own.Lamb, own.AdamW)]
REACH = {torch.float32: 1e-5, torch.float64: 1e-10}


def network(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 2)).to(dtype)


class Run:
    """A small training with two groups, a schedule of learning rates and (if there are) momenta, and accumulation."""

    def __init__(self, name, dtype, ort, sign=1.0):
        kind, settings = CASES[name]
        self.net, self.sign = network(dtype), sign
        groups = [{"params": self.net[0].parameters()}, {"params": self.net[2].parameters(), "lr": settings["lr"] / 2}]
        if "weight_decay" in settings:
            groups[1]["weight_decay"] = 0.0
        self.optimizer = kind(groups, **settings, **({"maximize": True} if sign < 0 else {}))
        highest = [group["lr"] for group in self.optimizer.param_groups]
        momenta = "betas" in settings or settings.get("momentum", 0) > 0
        self.scheduler = optim.lr_scheduler.OneCycleLR(
            self.optimizer, highest, total_steps=60, cycle_momentum=momenta and "nesterov" not in settings
        )
        self.report = hook(self.optimizer)[1] if ort else None

    def steps(self, start, stop):
        dtype = self.net[0].weight.dtype
        for k in range(start, stop):
            generator = torch.Generator().manual_seed(k)
            x = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64).to(dtype)
            for part in x:
                target = torch.stack([part.sum(-1).sin(), part[:, 0]], -1)
                (self.sign * 0.5 * nn.functional.mse_loss(self.net(part), target)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def states(self):
        return copy.deepcopy((self.net.state_dict(), self.optimizer.state_dict(), self.scheduler.state_dict()))

    def load(self, states):
        for target, state in zip((self.net, self.optimizer, self.scheduler), states, strict=True):
            target.load_state_dict(state)
        return self


def assert_same(run, reference, dtype):
    for (name, got), wanted in zip(run.net.named_parameters(), reference.net.parameters(), strict=True):
        off = (got - wanted).abs().max() / wanted.abs().max()
        assert off <= REACH[dtype], f"{name} is {off:.2g} off"
    ours, theirs = run.optimizer.state_dict(), reference.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == list(theirs["state"])
    for number, state in theirs["state"].items():
        assert list(ours["state"][number]) == list(state)
        for key, value in state.items():
            got = ours["state"][number][key]
            assert (got.shape, got.stride()) == (value.shape, value.stride())
            # torch casts it like a moment when it is loaded
            assert got.dtype == value.dtype or key == "mu_product"
            if key == "step":
                assert torch.equal(got, value)
            # which torch rounds to float32 until then
            reach = 1e-6 if key == "mu_product" else 100 * REACH[dtype]
            assert (got - value).abs().max() <= reach * value.abs().max(), key


@pytest.mark.parametrize("dtype", REACH, ids=["float32", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_weights_and_states_are_torchs(name, dtype):
    reference = Run(name, dtype, ort=False).steps(0, 25)
    middle = reference.states()
    whole = Run(name, dtype, ort=True).steps(0, 25)
    # from torch to ONNX Runtime and the other way round
    resumed = Run(name, dtype, ort=True).load(middle)
    back = Run(name, dtype, ort=False).load(whole.states())
    for run in (reference, whole, resumed, back):
        run.steps(25, 50)
    for run in (whole, resumed, back):
        assert_same(run, reference, dtype)
    assert (whole.report.in_ort, whole.report.in_torch, whole.report.graphs) == (50, 0, 1)
    assert (resumed.report.in_ort, resumed.report.graphs, resumed.report.reasons) == (25, 1, [])


@pytest.mark.parametrize("name", MAXIMIZING)
def test_maximize(name):
    """To maximize the negative is to minimize, with the penalty on the same side."""
    runs = [Run(name, torch.float64, ort, sign=-1.0).steps(0, 20) for ort in (False, True)]
    assert_same(runs[1], runs[0], torch.float64)
    assert runs[1].report.in_ort == 20


def pair(make, *modules):
    """Two equal modules with an optimizer each, of which the first is hooked."""
    ours = modules[0] if modules else network()
    theirs = copy.deepcopy(ours)
    optimizers = make(ours.parameters()), make(theirs.parameters())
    return ours, theirs, *optimizers, hook(optimizers[0])[1]


def give_gradients(ours, theirs, *, skip=()):
    for k, (a, b) in enumerate(zip(ours.parameters(), theirs.parameters(), strict=True)):
        a.grad = b.grad = None
        if k not in skip:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()


def assert_close(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Adam(p, 0.01),
        lambda p: optim.SGD(p, 0.01, momentum=0.9),
        lambda p: optim.NAdam(p, 0.01),
        lambda p: optim.Adagrad(p, 0.01),
    ],
    ids=["adam", "momentum", "nadam", "adagrad"],
)
def test_parameters_with_gradients_come_and_go(make):
    module = network()
    module.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    ours, theirs, a, b, report = pair(make, module)
    for step in range(8):
        give_gradients(ours, theirs, skip=[(), (3,), (3, 4), (3,)][step // 2])
        if step == 3:
            more = nn.Parameter(torch.randn(5)), nn.Parameter(torch.zeros(5))
            more[1].data.copy_(more[0])
            for optimizer, p in zip((a, b), more, strict=True):
                optimizer.add_param_group({"params": [p], "lr": 0.5})
        if step > 3:
            more[0].grad = more[1].grad = torch.randn(5)
        a.step()
        b.step()
        assert_close(ours, theirs)
    torch.testing.assert_close(more[0], more[1])
    assert report.in_ort == 8 and not report.reasons
    assert [len(s) for s in a.state_dict()["state"].values()] == [len(s) for s in b.state_dict()["state"].values()]
    assert all(torch.equal(a.state[p].get("step", torch.zeros(())), b.state[q].get("step", torch.zeros(())))
               for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))  # fmt: skip


def test_nothing_to_update():
    ours, theirs, a, b, report = pair(optim.Adam)
    a.step()
    assert a.state_dict()["state"] == {} and report.graphs == 0
    give_gradients(ours, theirs)
    a.step()
    b.step()
    assert_close(ours, theirs)


def test_memory_may_move_and_states_be_replaced():
    conv = nn.Conv2d(3, 4, 3)
    ours, theirs, a, b, report = pair(lambda p: optim.AdamW(p, 0.01), conv)
    for step in range(8):
        give_gradients(ours, theirs)
        if step == 2:  # the same parameter objects with other memory, states that lie otherwise
            ours.to(memory_format=torch.channels_last)
        if step == 4:
            a.load_state_dict(copy.deepcopy(b.state_dict()))
        if step == 6:
            ours.weight.data = ours.weight.data.clone(memory_format=torch.contiguous_format)
        a.step()
        b.step()
        assert_close(ours, theirs)
    assert report.in_ort == 8 and report.graphs == 1


def test_other_types_are_compiled_anew():
    ours, theirs, a, b, report = pair(lambda p: optim.SGD(p, 0.1, momentum=0.9))
    for step in range(4):
        if step == 2:
            for net, optimizer in ((ours, a), (theirs, b)):
                net.double()
                optimizer.load_state_dict(optimizer.state_dict())
        give_gradients(ours, theirs)
        a.step()
        b.step()
        assert_close(ours, theirs)
    assert (report.in_ort, report.graphs) == (4, 2)


class Unusual(optim.Adam):
    """A subclass may override whatever it likes."""

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(0.1 * p.grad)


class Centralized(optim.Adam):
    """Torch's ``step`` on gradients whose rows have no mean."""

    def _init_group(self, group, *lists):
        for p in group["params"]:
            if p.ndim > 1:
                p.grad = p.grad - p.grad.mean(1, keepdim=True)
        return super()._init_group(group, *lists)


def sparse():
    return nn.Embedding(6, 4, sparse=True), lambda net: net(torch.tensor([1, 3])).square().sum()


def dense(dtype=torch.float32):
    net = network(dtype)
    return net, lambda net: (net(torch.ones(3, 4, dtype=dtype)) ** 2).sum().abs()


def differing_groups(p):
    p = list(p)
    return own.AdamW([{"params": p[:2], "decay_after": True}, {"params": p[2:]}], max_norm=1.0)


IN_TORCH = {
    "lbfgs": (dense, lambda p: optim.LBFGS(p, 0.1, max_iter=2), "torch.optim.lbfgs.LBFGS is not known to"),
    "subclass": (dense, lambda p: Unusual(p), "Unusual is not known to lightning_ort, which has SGD, Adam, AdamW,"),
    "part of the step": (dense, lambda p: Centralized(p), "Centralized is not known to lightning_ort, which has SGD,"),
    "sparse": (sparse, lambda p: optim.SGD(p, 0.1), "a gradient is torch.sparse_coo"),
    "half": (
        lambda: dense(torch.bfloat16),
        lambda p: optim.AdamW(p, 0.1),
        "a parameter is torch.bfloat16 (9, 4) on cpu; ONNX Runtime updates dense ones of float32 and float64",
    ),
    "complex": (lambda: dense(torch.complex64), lambda p: optim.Adam(p, 0.1), "a parameter is torch.complex64"),
    "groups-that-differ": (dense, differing_groups, "its groups differ in what they compute, and are clipped"),
}


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("name", IN_TORCH)
def test_what_is_left_to_torch(name):
    problem, make, reason = IN_TORCH[name]
    (ours, loss), (theirs, _) = problem(), problem()
    theirs.load_state_dict(ours.state_dict())
    a, b = make(ours.parameters()), make(theirs.parameters())
    report = hook(a)[1]
    for _ in range(3):
        for net, optimizer in ((ours, a), (theirs, b)):

            def closure(net=net, optimizer=optimizer):
                optimizer.zero_grad()
                value = loss(net)
                value.backward()
                return value

            optimizer.step(closure)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q)
    assert (report.in_ort, report.in_torch, report.graphs) == (0, 3, 0)
    assert len(report.reasons) == 1 and reason in report.reasons[0].reason


@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize("name", IN_TORCH)
def test_what_is_left_to_torch_may_be_refused(name):
    problem, make, reason = IN_TORCH[name]
    net, loss = problem()
    before = copy.deepcopy(net.state_dict())
    optimizer = make(net.parameters())
    states = str(optimizer.state_dict())
    loss(net).backward()

    def hook_and_step():
        hook(optimizer, refuse=True)
        optimizer.step()

    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        hook_and_step()
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert str(optimizer.state_dict()) == states


SETTINGS = {
    "capturable": (lambda p: optim.Adam(p, capturable=True), "capturable=True"),
    "differentiable": (lambda p: optim.Adam(p, differentiable=True), "differentiable=True"),
    "lr": (lambda p: optim.SGD(p, torch.tensor(0.1, requires_grad=True)), "lr is a tensor that requires a gradient"),
    "twice": (lambda p: optim.SGD([*p, *p], 0.1), "a parameter occurs twice"),
    "float32 for float64": (
        lambda p: optim.AdamW(p, torch.tensor(0.01)),
        "lr is a tensor of torch.float32, in which torch computes with it for float64",
    ),
}


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_left_to_torch(name):
    make, reason = SETTINGS[name]
    p = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = make([p])
    stepper = hook(optimizer)[0]._stepper
    p.grad = torch.ones_like(p)
    with pytest.raises(NeedsTorch, match=reason):
        stepper.step()
    assert torch.equal(p, torch.ones_like(p)) and not optimizer.state


def test_a_rate_that_is_a_tensor_is_as_exact_as_torchs():
    """In float64, whether the tensor is of fewer bits, as torch.tensor(0.01) is, or not."""
    for dtype in (torch.float32, torch.float64):
        rate = torch.tensor(0.01, dtype=dtype)
        ours, theirs, a, b, report = pair(functools.partial(optim.AdamW, lr=rate))
        for net in (ours, theirs):
            net.double()
        for _ in range(3):
            give_gradients(ours, theirs)
            a.step()
            b.step()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-12, atol=0)
        assert (report.in_torch, report.in_ort) == ((3, 0) if dtype == torch.float32 else (0, 3))


def test_other_states_than_expected_are_left_to_torch():
    ours, theirs, a, b, report = pair(lambda p: optim.Adam(p, 0.01))
    for step in range(3):
        give_gradients(ours, theirs)
        for optimizer in (a, b):
            if step == 1:  # kept in other types, for whatever reason
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"].double()
            if step == 2:
                for state in optimizer.state.values():
                    state["exp_avg"] = state["exp_avg"].float()
        if step == 1:
            for optimizer in (a, b):
                with pytest.raises(RuntimeError, match="dtype"):
                    optimizer.step()
        else:
            a.step()
            b.step()
        assert_close(ours, theirs)
    assert "state 'exp_avg' of a parameter of torch.float32 (9, 4) on cpu is torch.float64" in report.reasons[0].reason


def test_parameters_that_share_memory_are_left_to_torch():
    ours, theirs, a, b, report = pair(lambda p: optim.SGD(p, 0.1))
    for net in (ours, theirs):
        net[2].bias.data = net[0].bias.data[:2]
    give_gradients(ours, theirs)
    a.step()
    b.step()
    assert_close(ours, theirs)
    assert report.in_torch == 1 and "share memory" in report.reasons[0].reason


def test_the_scale_of_a_grad_scaler_is_left_to_torch():
    ours, theirs, a, b, report = pair(lambda p: optim.SGD(p, 0.1, fused=True))
    for net, optimizer in ((ours, a), (theirs, b)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(net(torch.ones(3, 4)).sum()).backward()
        scaler.step(optimizer)
    assert_close(ours, theirs)
    assert "GradScaler" in report.reasons[0].reason


def test_no_setting_is_compiled_in():
    ours, theirs, a, b, report = pair(lambda p: optim.AdamW(p, 0.01, weight_decay=0.1))
    for step in range(6):
        give_gradients(ours, theirs)
        for optimizer in (a, b):
            group = optimizer.param_groups[0]
            group.update(lr=0.01 * step, betas=(0.5 + 0.05 * step, 0.99), eps=1e-3 / (step + 1))
            group["weight_decay"] = 0.1 * step
            group["maximize"] = step % 2 == 1
        a.step()
        b.step()
        assert_close(ours, theirs)
    assert report.graphs <= 2  # with and without weight decay


def test_settings_may_be_tensors():
    def make(p):
        return optim.Adam(p, torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.9)))

    ours, theirs, a, b, report = pair(make)
    for _ in range(3):
        give_gradients(ours, theirs)
        a.step()
        b.step()
    assert_close(ours, theirs)
    assert report.in_ort == 3


def test_too_many_graphs():
    ours, theirs, a, b, report = pair(lambda p: optim.SGD(p, 0.1), nn.ParameterList([torch.ones(2) for _ in range(18)]))
    for k in range(18):
        give_gradients(ours, theirs, skip=set(range(18)) - {k})
        a.step()
        b.step()
    give_gradients(ours, theirs, skip=set(range(18)) - {3})
    a.step()
    b.step()
    assert_close(ours, theirs)
    assert (report.in_ort, report.in_torch, report.graphs) == (17, 2, 16)
    assert "it has had 16 graphs" in report.reasons[0].reason


def counting(step, trace):
    def mine():
        trace.append("mine")
        return step()

    return mine


@pytest.fixture
def all_steps():
    """Optimizers in the order of their steps, as a hook for all of them sees it."""
    seen = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    yield seen
    handle.remove()


def test_hooks_closures_and_schedulers_stay(all_steps):
    """What others see of ``step``: their hooks, the optimizer as it is, the closure's result."""
    ours, theirs, a, b, report = pair(lambda p: optim.Adam(p, 0.1))
    give_gradients(ours, theirs)
    seen = {a: [], b: []}
    for optimizer, trace in seen.items():

        def look(o, args, kwargs, trace=trace):
            weight = o.param_groups[0]["params"][0]
            trace.append((len(o.param_groups), round(weight.sum().item(), 4), weight.grad.sum().item()))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        assert optimizer.step(lambda: 3.5) == 3.5
        assert optimizer.step(closure=torch.is_grad_enabled) is True
        assert optimizer.step() is None
        scheduler.step()  # would warn if the scheduler had not counted a step
        optimizer.step = counting(optimizer.step, trace)
        optimizer.step()
    assert seen[a] == seen[b] and len(seen[a]) == 9
    assert all_steps == [a] * 4 + [b] * 4
    # the hook that came later would have looked at an update that is made
    assert (report.in_ort, report.in_torch) == (3, 1) and type(a.param_groups) is list


def test_a_closure_that_fails_updates_nothing():
    ours, _, a, *_, report = pair(lambda p: optim.SGD(p, 0.1))
    before = [p.clone() for p in ours.parameters()]
    give_gradients(ours, ours)

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        a.step(closure)
    assert all(torch.equal(p, q) for p, q in zip(ours.parameters(), before, strict=True))
    assert report.in_ort == 0 and len(a.param_groups) == 1


def test_torch_updates_again_when_the_hook_is_removed():
    net = network()
    optimizer = optim.SGD(net.parameters(), 0.1)
    made, report = hook(optimizer)
    give_gradients(net, net)
    optimizer.step()
    made.remove()
    before = net[0].weight.clone()
    optimizer.step()
    torch.testing.assert_close(net[0].weight, before - 0.1 * net[0].weight.grad)
    assert report.in_ort == 1


def test_autograd_knows_of_the_update():
    net = network()
    optimizer = optim.SGD(net.parameters(), 0.1)
    report = hook(optimizer)[1]
    loss = net(torch.ones(2, 4)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    assert report.in_ort == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_wrong_counter_is_named(monkeypatch):
    fill = torch.Tensor.fill_
    monkeypatch.setattr(
        torch.Tensor, "fill_", lambda self, value: fill(self, value * 1.5 if self.dim() == 0 else value)
    )
    p = nn.Parameter(torch.ones(3))
    hook(optimizer := optim.NAdam([p], 0.1))
    p.grad = torch.ones(3)
    with pytest.raises(MismatchError, match="state 'mu_product' of parameter 0 of group 0"):
        optimizer.step()


@pytest.mark.parametrize("wrong", ["weight", "state"])
def test_a_wrong_first_update_is_found_and_taken_back(monkeypatch, wrong):
    ours, theirs, a, b, _ = pair(lambda p: optim.Adam(p, 1e-3, betas=(0.9, 0.99)))
    give_gradients(ours, theirs)
    a.step()
    b.step()
    right = Adam.formula

    def formula(self, param, *rest):
        new, *states = right(self, param, *rest)
        if wrong == "weight":
            return (param + 1.01 * (new - param), *states)
        return new, states[0], 1.01 * states[1]

    monkeypatch.setattr(Adam, "formula", formula)
    report = hook(c := copy.deepcopy(a))[1]
    for p, q in zip(c.param_groups[0]["params"], ours.parameters(), strict=True):
        p.grad = q.grad
    before = copy.deepcopy(c.state_dict()["state"]), [p.clone() for p in c.param_groups[0]["params"]]
    what = "the new value" if wrong == "weight" else "state 'exp_avg_sq'"
    message = rf"Adam: {what} of parameter 0 of group 0, shaped \(9, 4\), differs between ONNX Runtime and torch"
    with pytest.raises(MismatchError, match=message):
        c.step()
    assert str(c.state_dict()["state"]) == str(before[0])
    assert all(torch.equal(p, q) for p, q in zip(c.param_groups[0]["params"], before[1], strict=True))
    assert report.in_ort == 0


def test_rounding_is_no_mismatch():
    """A standard deviation that is zero in exact arithmetic: torch is as far off as ONNX Runtime."""
    ours, theirs, a, b, report = pair(lambda p: optim.RMSprop(p, 0.01, alpha=0.5, centered=True))
    gradients = [torch.randn_like(p) for p in ours.parameters()]
    for step in range(40):
        for net in (ours, theirs):
            for p, g in zip(net.parameters(), gradients, strict=True):
                p.grad = g.clone()
        b.step()
        if step == 38:
            ours.load_state_dict(theirs.state_dict())
            a.load_state_dict(copy.deepcopy(b.state_dict()))
    a.step()
    assert report.in_ort == 1


def test_values_that_are_not_finite():
    ours, theirs, a, b, report = pair(lambda p: optim.Adam(p, 0.01))
    for value in (1.0, math.inf, math.nan):
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            p.grad, q.grad = torch.full_like(p, value), torch.full_like(q, value)
        a.step()
        b.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.isnan(), q.isnan()) and p.isnan().all()
    assert report.in_ort == 3
