"""Configurations and schedules as torch optimizers and schedulers, and back."""

from __future__ import annotations

import math
import re

import pytest
import torch
from lightning.pytorch import LightningModule
from modules import curve
from parity import make_trainer, quiet
from torch import nn

from lightning_ort import TrainStepInfo, optim
from lightning_ort.checkpoints.names import orttrainer_kind_of
from lightning_ort.ondevice.optimizer_config import config_of
from lightning_ort.optim import AdamConfig, LambConfig, SGDConfig, lr_scheduler
from lightning_ort.optim.torch_optim.stepper import why_not
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.trainer.optimizer import Optimizer

AFTER = AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
NO_CLIP = {"max_norm_clip": math.inf}
CONFIGS = {
    "sgd": (lambda: SGDConfig(lr=0.05), torch.optim.SGD),
    "adam": (lambda: AdamConfig(lr=0.02, lambda_coef=0.1, **NO_CLIP), torch.optim.AdamW),
    "adam-clipped": (lambda: AdamConfig([{"params": ["0.bias", "1.bias"], "max_norm_clip": 0.5}], 0.02), optim.AdamW),
    "adam-uncorrected": (lambda: AdamConfig(lr=0.02, do_bias_correction=False, **NO_CLIP), optim.AdamW),
    "adam-after": (
        lambda: AdamConfig(
            [{"params": ["0.weight"], "lambda": 0.3, "alpha": 0.8}],
            0.02,
            lambda_coef=0.01,
            epsilon=1e-3,
            weight_decay_mode=AFTER,
        ),
        optim.AdamW,
    ),
    "lamb": (lambda: LambConfig([{"params": ["1.weight"], "beta": 0.9}], 0.02, lambda_coef=0.1), optim.Lamb),
    "lamb-bounded": (
        lambda: LambConfig(lr=0.02, ratio_min=0.5, ratio_max=2.0, do_bias_correction=True, **NO_CLIP),
        optim.Lamb,
    ),
}


def network(dtype=torch.float32):
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_the_same_in_torch_as_in_onnx_runtime(name, dtype):
    config, kind = CONFIGS[name][0](), CONFIGS[name][1]
    ours, theirs = network(dtype), network(dtype)
    with torch.no_grad():
        ours[0].bias.zero_()  # LAMB has no ratio for it at first
    theirs.load_state_dict(ours.state_dict())
    optimizer = config.torch_optimizer(theirs)
    assert type(optimizer) is kind
    known = dict(ours.named_parameters())
    update = Optimizer(config, known, known, SessionFactory(), clip=True, guard=False)
    for step in range(20):
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.02 / (step + 1)
        update.step(0.02 / (step + 1), 1.0)
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        allowed = (2e-6 if dtype is torch.float32 else 1e-12) * b.detach().abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=allowed)
    back = optim.config_from_torch(optimizer, theirs)
    assert type(back) is type(config) and back.lr == 0.02 / 20
    if name != "sgd":
        assert {n: back.hyper_parameters(n) for n in known} == {n: config.hyper_parameters(n) for n in known}


def test_the_config_of_adam_computes_what_adam_does():
    for kind, settings in ((torch.optim.Adam, {}), (torch.optim.AdamW, {"weight_decay": 0.2, "fused": True})):
        ours, theirs = network(), network()
        ours.load_state_dict(theirs.state_dict())
        optimizer = kind(theirs.parameters(), lr=torch.tensor(0.02), betas=(0.8, 0.99), eps=1e-4, **settings)
        config = optim.config_from_torch(optimizer, theirs)
        known = dict(ours.named_parameters())
        update = Optimizer(config, known, known, SessionFactory(), clip=True, guard=False)
        for _ in range(5):
            for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            update.step(config.lr, 1.0)
            optimizer.step()
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


def test_groups_become_groups_and_come_back():
    net = network()
    decayed, plain = [net[0].weight, net[1].weight], [net[0].bias, net[1].bias]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)  # sets 0.05 for now
    config = optim.config_from_torch(optimizer, net)
    assert config.lr == 0.1 and config.params == [{**config.defaults, "params": ["0.bias", "1.bias"], "lambda": 0.0}]
    again = config.torch_optimizer(net)
    assert [[id(p) for p in g["params"]] for g in again.param_groups] == [list(map(id, g)) for g in (decayed, plain)]
    assert [g["weight_decay"] for g in again.param_groups] == [0.01, 0.0]


def failing():
    net, sgd, adam = network(), torch.optim.SGD, torch.optim.Adam
    p = list(net.parameters())
    yield net, sgd(p, 0.1, momentum=0.9), "torch.optim.SGD with momentum=0.9 (group 0) has no counterpart"
    yield net, sgd(p, 0.1, weight_decay=0.1), "with weight_decay=0.1 (group 0)"
    yield net, sgd(p, 0.1, maximize=True), "with maximize=True (group 0)"
    yield net, adam(p, amsgrad=True), "torch.optim.Adam with amsgrad=True"
    yield net, adam(p, weight_decay=0.1), "does not add it to the gradient"
    yield net, torch.optim.RMSprop(p), "torch.optim.RMSprop has no counterpart"
    yield net, type("Mine", (sgd,), {"step": lambda self, closure=None: None})(p, 0.1), "Mine has no counterpart"
    yield net, adam([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}]), "groups with lr=[0.1, 0.001]"
    yield net, adam(p[:3]), "1.bias of Sequential are not in the optimizer"
    yield net[0], adam(p), "a parameter that is none of Linear's"
    mixed = [{"params": p[:2], "decay_after": True}, {"params": p[2:]}]
    yield net, optim.AdamW(mixed), "weight_decay_mode is one for all"


def test_what_has_no_counterpart_is_named():
    for net, optimizer, message in failing():
        with pytest.raises(ValueError, match=re.escape(message)):
            optim.config_from_torch(optimizer, net)
    with pytest.raises(ValueError, match=r"\['w'\] in a group of the optimizer are no weights of Sequential"):
        AdamConfig([{"params": ["w"], "alpha": 0.5}]).torch_optimizer(network())
    with pytest.raises(ValueError, match="_OptimizerConfig is none of"):
        optim._OptimizerConfig("SGDOptimizer", [], {"lr": 0.1}).torch_optimizer(network())


def test_a_subclass_without_a_step_of_its_own_is_what_it_is_derived_from():
    net = network()
    mine = type("Mine", (torch.optim.SGD,), {})(net.parameters(), 0.1)
    assert optim.config_from_torch(mine, net).name == "SGDOptimizer"
    assert config_of(mine).kind == "SGD"
    assert orttrainer_kind_of(mine) == ("SGDOptimizer", "")
    assert why_not(mine) is None


def test_settings_without_counterpart_are_the_same_for_all():
    net = network()
    for odd in ({"maximize": True}, {"momentum": 0.9, "dampening": 0.5}):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, **odd)
        with pytest.raises(ValueError, match="has no counterpart"):
            optim.config_from_torch(optimizer, net)
        with pytest.raises(ValueError, match="artifacts have not"):
            config_of(optimizer)
        assert "no counterpart" in orttrainer_kind_of(optimizer)[1]
    idle = torch.optim.SGD(net.parameters(), 0.1, dampening=0.5)  # of a momentum that there is not
    assert optim.config_from_torch(idle, net).lr == config_of(idle).lr == 0.1
    assert orttrainer_kind_of(idle) == ("SGDOptimizer", "")


def test_frozen_weights_need_no_optimizer():
    net = network()
    net[1].requires_grad_(False)
    assert optim.config_from_torch(torch.optim.Adam(net[0].parameters()), net).params == []


def test_torch_optimizers_of_this_package_refuse_what_is_out_of_range():
    p = [nn.Parameter(torch.zeros(2))]
    for settings, message in (
        ({"lr": -1.0}, "lr=-1.0: expected a number from 0"),
        ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0): expected two numbers in [0, 1)"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"max_norm": 0.0}, "max_norm=0.0: expected one above 0"),
    ):
        for kind in (optim.Lamb, optim.AdamW):
            with pytest.raises(ValueError, match=re.escape(message)):
                kind(p, **settings)
    with pytest.raises(ValueError, match=r"ratio_min=2\.0 is larger than ratio_max=1\.0"):
        optim.Lamb(p, ratio_min=2.0, ratio_max=1.0)
    p[0].grad = torch.zeros(2).to_sparse()
    with pytest.raises(RuntimeError, match="Lamb has no sparse gradients"):
        optim.Lamb(p).step()


SCHEDULES = {
    "constant": lambda: lr_scheduler.ConstantWarmupLRScheduler(12, 0.3),
    "cosine": lambda: lr_scheduler.CosineWarmupLRScheduler(12, 0.5, 0.3),
    "linear": lambda: lr_scheduler.LinearWarmupLRScheduler(12, 0.3),
    "poly": lambda: lr_scheduler.PolyWarmupLRScheduler(12, 1e-3, 2.0, 0.3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_torch_schedulers(name):
    net, schedule = network(), SCHEDULES[name]()
    optimizer = torch.optim.SGD([{"params": net[0].parameters(), "lr": 0.1}, {"params": net[1].parameters()}], lr=0.2)
    scheduler = schedule.torch_scheduler(optimizer)
    for k in range(14):
        if k == 7:  # go on in another one
            state, scheduler = scheduler.state_dict(), schedule.torch_scheduler(torch.optim.SGD(optimizer.param_groups))
            assert set(state) <= {"base_lrs", "last_epoch", "_step_count", "_last_lr", "_is_initial",
                                  "_get_lr_called_within_step"}  # fmt: skip
            scheduler.load_state_dict(state)
            optimizer = scheduler.optimizer
            for group, lr in zip(optimizer.param_groups, state["_last_lr"], strict=True):
                group["lr"] = lr
        expected = [schedule.get_lr(TrainStepInfo(SGDConfig(lr=b), optimization_step=k))[0] for b in (0.1, 0.2)]
        assert [group["lr"] for group in optimizer.param_groups] == expected == scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()


def test_a_base_that_the_schedule_refuses():
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(AssertionError, match="lr_end"):
        lr_scheduler.PolyWarmupLRScheduler(10, lr_end=0.2).torch_scheduler(optimizer)


class Configured(LightningModule):
    """Takes its optimizer and schedule from configurations."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(12, 1)
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = AdamConfig(lr=0.1).torch_optimizer(self)
        schedule = lr_scheduler.LinearWarmupLRScheduler(self.trainer.estimated_stepping_batches, 0.25)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule.torch_scheduler(optimizer), "interval": "step"},
        }


def test_configure_optimizers():
    module = Configured()
    with quiet():
        make_trainer("auto", max_steps=8).fit(module, curve(64, 8))
    assert module.rates == pytest.approx([0.1 * x for x in (0, 1 / 2, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6)])
