"""shard_optimizer=True: which optimizers are taken, and which are refused before or in their first step."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR

from lightning_ort.distributed.sharding import local_part, sharded
from lightning_ort.optim import AdamW, Lamb

pytestmark = pytest.mark.stock_only


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class OwnSearch(torch.optim.LBFGS):
    """Derived from one that needs all parameters."""


class TwoLosses(torch.optim.SGD):
    """Steps to where another gradient is, and goes on from there."""

    def step(self, closure):
        closure()
        super().step()
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (torch.optim.LBFGS, {}, "configure_optimizers returned LBFGS, whose line search"),
        (OwnSearch, {"max_iter": 1}, "configure_optimizers returned OwnSearch, whose line search"),
        (Lamb, {"max_norm": 1.0}, r"returned Lamb\(max_norm=1.0\), which clips by the norm of all gradients"),
        (AdamW, {"max_norm": 0.5}, r"returned AdamW\(max_norm=0.5\), which clips"),
    ],
)
def test_updates_that_need_all_parameters_are_refused(kind, settings, words):
    with pytest.raises(ValueError, match=words):
        sharded(kind(nn.Linear(2, 2).parameters(), **settings))


def test_a_second_loss_in_one_step_is_refused(alone):
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    optimizer = sharded(TwoLosses(module.parameters(), 0.1))

    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="a step of TwoLosses computes the loss more than once"):
        optimizer.step(closure)
    assert not torch.equal(module.weight, before)  # it was in its second loss


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Rprop, {}),
        (AdamW, {"max_norm": math.inf}),
        (Lamb, {}),
    ],
)
def test_updates_of_each_parameter_alone(kind, settings, alone):
    """With a closure and without, and with a scheduler that is made afterwards."""
    torch.manual_seed(0)
    module, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(module.state_dict())
    whole = kind(twin.parameters(), lr=0.1, **settings)
    parts = sharded(kind(module.parameters(), lr=0.1, **settings))
    assert type(local_part(parts)) is kind
    schedules = [StepLR(optimizer, 2) for optimizer in (parts, whole)]
    for i in range(4):
        for optimizer, net, schedule in zip((parts, whole), (module, twin), schedules, strict=True):

            def closure(optimizer=optimizer, net=net, shift=i):
                optimizer.zero_grad()
                loss = (net(torch.arange(3.0)) - shift).square().sum()
                loss.backward()
                return loss

            if i % 2:
                assert optimizer.step(closure) > 0
            else:
                closure()
                optimizer.step()
            schedule.step()
    for name, x in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], x, rtol=0, atol=0)


def test_hooks_of_steps_are_called(alone):
    module, calls = nn.Linear(3, 2), []
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    handle = optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append(len(o.param_groups[0]["params"])))
    parts = sharded(optimizer)
    module(torch.ones(1, 3)).sum().backward()
    parts.step()
    assert calls == ["before", 2]
    handle.remove()
    parts.step()
    assert calls == ["before", 2, "before"]


def _own_step(optimizer):
    optimizer.step = lambda closure=None: None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.register_state_dict_post_hook(lambda o, state: state), "SGD has hooks of state_dict, which"),
        (lambda o: o.register_load_state_dict_pre_hook(lambda o, state: state), "SGD has hooks of load_state_dict"),
        (_own_step, "another `step` in the place of SGD's own"),
    ],
)
def test_what_a_part_would_not_have_is_refused(change, words):
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1)
    change(optimizer)
    with pytest.raises(ValueError, match=words):
        sharded(optimizer)
