"""Optimizer configurations, learning rate schedules and loss scalers."""

from __future__ import annotations

import math
import re

import pytest

from lightning_ort import TrainStepInfo, amp, optim
from lightning_ort.optim import AdamConfig, LambConfig, SGDConfig, lr_scheduler

WRONG = [
    (
        lambda: SGDConfig(params=[{"params": ["w"], "lr": 1.0}]),
        AssertionError,
        "'params' must be an empty list for SGD",
    ),
    (lambda: AdamConfig(lr=-1.0), AssertionError, "'lr' must be a positive number"),
    (lambda: AdamConfig(lr="1"), TypeError, "'>=' not supported between instances of 'str' and 'int'"),
    (lambda: AdamConfig([{"params": ["w"], "lr": 1.0}]), AssertionError, "'lr' is not supported inside params"),
    (lambda: AdamConfig([{"alpha": 1.0}]), AssertionError, "Each dict inside 'params' must contain a {'params'"),
    (lambda: AdamConfig([{"params": ["w"]}]), AssertionError, "Each dict inside 'params' must contain a {'params'"),
    (
        lambda: AdamConfig([{"params": ["w"], "foo": 1.0}]),
        AssertionError,
        "'params' has foo hyper parameter not present at 'defaults'",
    ),
    (lambda: AdamConfig([1]), TypeError, "argument of type 'int' is not "),
    (lambda: AdamConfig({"params": ["w"]}), AssertionError, "'params' must be a list"),
    (lambda: AdamConfig(max_norm_clip=0), AssertionError, "'max_norm_clip' must not be 0"),
    (lambda: AdamConfig(do_bias_correction=1), AssertionError, "'do_bias_correction' must be a boolean"),
    (lambda: AdamConfig(weight_decay_mode=1), AssertionError, "'weight_decay_mode' must be a AdamConfig.DecayMode"),
    (lambda: LambConfig(ratio_min=1), AssertionError, "'ratio_min' must be a valid float"),
    (lambda: AdamConfig(betas=(1, 2)), TypeError, "got an unexpected keyword argument 'betas'"),
    (lambda: AdamConfig(lr=None), AssertionError, "'lr' must be a positive number, not None"),
    (
        lambda: AdamConfig(lr=math.inf),
        AssertionError,
        "'lr' must be a positive number, not inf; expected a number from 0 that is",
    ),
    (lambda: LambConfig(lr=math.nan), AssertionError, "'lr' must be a positive number, not nan"),
    (lambda: SGDConfig(None), AssertionError, "'params' must be an empty list for SGD"),
    (lambda: AdamConfig(beta=1), AssertionError, "'beta' must be a positive number, not 1; expected a number from 0"),
    (lambda: AdamConfig(max_norm_clip=-1), AssertionError, "'max_norm_clip' must be a positive number, or inf"),
    (lambda: AdamConfig(max_norm_clip=math.nan), AssertionError, "'max_norm_clip' must be a positive number, or inf"),
    (lambda: AdamConfig(lambda_coef=[]), AssertionError, "'lambda_coef' must be a positive number, not []"),
    (lambda: AdamConfig([{"params": [3], "alpha": 0.5}]), TypeError, "'params' of a group holds 3"),
    (lambda: AdamConfig([{"params": ["w"], "epsilon": None}]), AssertionError, "'epsilon' must be a positive number"),
    (lambda: LambConfig(ratio_min=2.0, ratio_max=1.0), AssertionError, "'ratio_min' (2.0) must not be above"),
    (lambda: LambConfig(ratio_max=math.nan), AssertionError, "'ratio_max' must be a valid float, not nan"),
    (lambda: optim._OptimizerConfig("Foo", [], {"lr": 0.1}), AssertionError, "'name' must be one of 'AdamOptimizer'"),
    (lambda: lr_scheduler.CosineWarmupLRScheduler(9, math.inf), AssertionError, "cycles must be a positive float"),
    (lambda: amp.LossScaler(math.inf), AssertionError, "'loss_scale' must be a positive float, and finite"),
    (lambda: amp.DynamicLossScaler(min_loss_scale=None), AssertionError, "'min_loss_scale' must be a positive float"),
    (lambda: amp.DynamicLossScaler(loss_scale=True), AssertionError, "'loss_scale' must be a positive float"),
    (lambda: AdamConfig(alpha="1"), ValueError, "Optimizer attributes must be either float or int"),
    (
        lambda: lr_scheduler.ConstantWarmupLRScheduler(0),
        AssertionError,
        "total_steps must be a strict positive number",
    ),
    (lambda: lr_scheduler.ConstantWarmupLRScheduler(9, 1.0), AssertionError, "warmup must be a float between"),
    (lambda: lr_scheduler.ConstantWarmupLRScheduler(9, 0), AssertionError, "warmup must be a float between"),
    (lambda: lr_scheduler.ConstantWarmupLRScheduler(9, -0.1), AssertionError, "warmup must be a float between"),
    (lambda: lr_scheduler.CosineWarmupLRScheduler(9, cycles=1), AssertionError, "cycles must be a positive float"),
    (lambda: lr_scheduler.PolyWarmupLRScheduler(9, power=1), AssertionError, "power must be a positive float"),
    (
        lambda: lr_scheduler.PolyWarmupLRScheduler(9, degree=1.0),
        TypeError,
        "got an unexpected keyword argument 'degree'",
    ),
    (lambda: lr_scheduler.LinearWarmupLRScheduler(), TypeError, "missing 1 required positional argument"),
    (lambda: amp.LossScaler(1), AssertionError, "'loss_scale' must be a positive float"),
    (lambda: amp.LossScaler(1.0).update(TrainStepInfo(SGDConfig())), NotImplementedError, None),
    (lambda: TrainStepInfo(None), AssertionError, "'optimizer_config' must be an optimizer config"),
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG, ids=[f"{m}-{i}" for i, (_, _, m) in enumerate(WRONG)])
def test_wrong_arguments(make, kind, message):
    with pytest.raises(kind, match=message and re.escape(message)):
        make()


def test_defaults_and_names():
    adam, lamb, sgd = AdamConfig(), LambConfig(), SGDConfig()
    assert [c.name for c in (adam, lamb, sgd)] == ["AdamOptimizer", "LambOptimizer", "SGDOptimizer"]
    assert (adam.lr, adam.alpha, adam.beta, adam.lambda_coef, adam.epsilon) == (0.001, 0.9, 0.999, 0.0, 1e-8)
    assert (adam.max_norm_clip, adam.do_bias_correction) == (1.0, True)
    assert adam.weight_decay_mode is AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE
    assert (lamb.epsilon, lamb.do_bias_correction) == (1e-6, False)
    assert (lamb.ratio_min, lamb.ratio_max) == (-math.inf, math.inf)
    assert adam.defaults["lambda"] == 0.0


def test_groups_override_defaults_and_are_not_changed():
    groups = [{"params": ["a", "b"], "lambda_coef": 1}, {"params": ["b"], "alpha": 0.5}]
    config = AdamConfig(groups, alpha=0.7)
    assert config.hyper_parameters("a")["lambda"] == 1.0 and config.hyper_parameters("a")["alpha"] == 0.7
    # the later group holds
    assert config.hyper_parameters("b")["alpha"] == 0.5 and config.hyper_parameters("b")["lambda"] == 1.0
    assert config.hyper_parameters("c")["lambda"] == 0.0
    assert groups == [{"params": ["a", "b"], "lambda_coef": 1}, {"params": ["b"], "alpha": 0.5}]


def test_groups_hold_all_hyper_parameters():
    (group,) = AdamConfig([{"params": ["a"], "alpha": 0.5}], lambda_coef=0.1).params
    assert group == {**AdamConfig(lambda_coef=0.1).defaults, "params": ["a"], "alpha": 0.5} and group["lambda"] == 0.1


class Broken(lr_scheduler._LRScheduler):
    """Gives what it is told."""

    def __init__(self, rates):
        super().__init__()
        self.rates = rates

    def get_lr(self, train_step_info):
        return self.rates


@pytest.mark.parametrize("rates", [None, [], 0.1, [0.1, 0.2], ["0.1"], [math.nan], [math.inf], [-1.0]])
def test_rates_that_are_none_are_refused(rates):
    schedule = Broken(rates)
    with pytest.raises((TypeError, ValueError), match=r"Broken.*expected"):
        schedule._step(TrainStepInfo(SGDConfig(lr=0.1)))
    with pytest.raises(AssertionError, match="must be computed by a training step"):
        schedule.get_last_lr()


def test_schedules_by_their_formulas():
    assert optim.PolyWarmupLRScheduler is lr_scheduler.PolyWarmupLRScheduler
    info = TrainStepInfo(SGDConfig(lr=0.1))
    total, warmup = 20, 0.23 * 20
    schedules = {
        lr_scheduler.ConstantWarmupLRScheduler(total, 0.23): lambda k: 0.1,
        lr_scheduler.CosineWarmupLRScheduler(total, warmup=0.23): lambda k: (
            0.1 * max(0, 0.5 * (1 + math.cos(math.pi * (k - warmup) / (total - warmup))))
        ),
        lr_scheduler.LinearWarmupLRScheduler(total, 0.23): lambda k: 0.1 * max(0, (total - k) / (total - warmup)),
        lr_scheduler.PolyWarmupLRScheduler(total, 0.01, 2.0, 0.23): lambda k: (
            0.01 if k > total else 0.09 * (1 - (k - warmup) / (total - warmup)) ** 2 + 0.01
        ),
    }
    for schedule, after in schedules.items():
        for k in range(24):
            info.optimization_step = k
            expected = 0.1 * k / warmup if k < warmup else after(k)
            assert schedule._step(info) == [pytest.approx(expected, rel=1e-12)]
            assert schedule.get_last_lr() == schedule._last_lr


def test_poly_end_above_the_base_is_refused_when_stepping():
    schedule = lr_scheduler.PolyWarmupLRScheduler(10, lr_end=1.0)
    with pytest.raises(AssertionError, match=r"lr_end \(1.0\) must be smaller than the base learning rate \(0.1\)"):
        schedule._step(TrainStepInfo(SGDConfig(lr=0.1)))


def test_last_rate_before_a_step_is_refused():
    with pytest.raises(AssertionError, match="must be computed by a training step"):
        lr_scheduler.ConstantWarmupLRScheduler(10).get_last_lr()


def test_dynamic_scale():
    scaler = amp.DynamicLossScaler(up_scale_window=3)
    info = TrainStepInfo(optim.SGDConfig())
    trace = []
    for finite in (True, True, True, True, False, False):
        info.all_finite = finite
        scaler.update(info)
        trace.append((scaler.loss_scale, scaler._stable_steps_count))
    assert trace == [(65536, 1), (65536, 2), (131072, 0), (131072, 1), (65536, 0), (32768, 0)]
    scaler.reset()
    assert (scaler.loss_scale, scaler._stable_steps_count) == (65536, 0)


def test_settings_of_a_scale_may_be_whole_numbers():
    scaler = amp.DynamicLossScaler(loss_scale=1 << 8, up_scale_window=1, min_loss_scale=5, max_loss_scale=512)
    info = TrainStepInfo(optim.SGDConfig())
    assert [scaler.update(info) for _ in range(2)] == [512.0, 512.0]
    assert all(isinstance(v, float) for v in (scaler.loss_scale, scaler.min_loss_scale, scaler.max_loss_scale))
    # as float32, which the factor is in a graph, 2 ** 128 would be infinite
    scaler = amp.DynamicLossScaler(loss_scale=2.0**127, up_scale_window=1, max_loss_scale=math.inf)
    assert scaler.update(info) == 2.0**127


def test_dynamic_scale_stays_in_its_limits():
    info = TrainStepInfo(optim.SGDConfig())
    scaler = amp.DynamicLossScaler(loss_scale=2.0, up_scale_window=1, min_loss_scale=1.0, max_loss_scale=4.0)
    assert [scaler.update(info) for _ in range(3)] == [4.0, 4.0, 4.0]
    info.all_finite = False
    assert [scaler.update(info) for _ in range(4)] == [2.0, 1.0, 1.0, 1.0]
    fixed = amp.DynamicLossScaler(automatic_update=False)
    assert fixed.update(info) == 65536.0
