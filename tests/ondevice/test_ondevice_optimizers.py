"""The optimizers of artifacts, against torch.optim."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lightning_ort.optim
from lightning_ort.ondevice.optimizer_config import OptimizerConfig
from lightning_ort.optim.update import Update
from lightning_ort.runtime.factory import SessionFactory

CASES = {
    "adamw": (OptimizerConfig("AdamW", weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    "adamw_betas": (
        OptimizerConfig("AdamW", betas=(0.8, 0.9)),
        torch.optim.AdamW,
        {"weight_decay": 0, "betas": (0.8, 0.9)},
    ),
    "adam": (OptimizerConfig("Adam", eps=1e-4), torch.optim.Adam, {"eps": 1e-4}),
    "adam_decay": (OptimizerConfig("Adam", weight_decay=0.1), torch.optim.Adam, {"weight_decay": 0.1}),
    "sgd": (OptimizerConfig("SGD"), torch.optim.SGD, {}),
    "sgd_decay": (OptimizerConfig("SGD", weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (
        OptimizerConfig("SGD", momentum=0.9, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "nesterov": (
        OptimizerConfig("SGD", momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_updates_are_those_of_torch(name):
    config, kind, settings = CASES[name]
    torch.manual_seed(0)
    params = [torch.randn(5, 3), torch.randn(7)]
    twins = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = kind(twins, lr=0.1, **settings)
    states = [[torch.zeros_like(p) for _ in config.states] for p in params]
    update = Update(config.rule, params, states, [0, 0], SessionFactory())
    for count in range(1, 6):
        lr = 0.1 / count
        optimizer.param_groups[0]["lr"] = lr
        gradients = [torch.randn_like(p) for p in params]
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = 4 * gradient
        optimizer.step()
        update.set_coefficients(0, config.numbers(lr, count))
        update.run(gradients, scale=4.0)
    for got, expected in zip(params, twins, strict=True):
        torch.testing.assert_close(got, expected.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("AdamW", torch.optim.AdamW), ("Adam", torch.optim.Adam), ("Lamb", lightning_ort.optim.Lamb)],
)
def test_what_nobody_sets_is_what_it_is_in_torch(kind, optimizer):
    defaults = optimizer([torch.nn.Parameter(torch.ones(1))]).defaults
    config = OptimizerConfig(kind)
    assert (config.lr, config.betas, config.eps) == (defaults["lr"], defaults["betas"], defaults["eps"])
    assert OptimizerConfig(**dataclasses.asdict(config)) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "Adagrad"}, "'Adagrad'; expected one of AdamW, Adam, SGD, Lamb"),
        ({"kind": "SGD", "betas": (0.5, 0.9)}, "SGD has no such setting"),
        ({"kind": "Adam", "momentum": 0.9}, "Adam has no such setting"),
        ({"lr": -1.0}, "expected a number from 0"),
        ({"betas": (0.9, 1.0)}, "expected two numbers from 0 to below 1"),
        ({"clip_grad_norm": 0.0}, "expected a number above 0, or None"),
        ({"kind": "SGD", "nesterov": True}, "needs a momentum"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_impossible_numbers_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)
