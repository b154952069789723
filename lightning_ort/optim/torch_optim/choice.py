"""Who makes the updates of a torch optimizer soonest: measured on parameters of its sizes, and remembered."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ort.compiler.choice import Choice
from lightning_ort.compiler.contest import MEMORY, Key, measures, race
from lightning_ort.optim.kinds import known_class
from lightning_ort.optim.torch_optim.first_update import allowed
from lightning_ort.optim.torch_optim.fused import (
    FusedUpdate,
    GroupsOfOneStep,
    fused_groups,
    fused_kernel_fits,
    is_in_order,
    may_be_fused,
)
from lightning_ort.optim.torch_optim.stepper import OptimizerStepper
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.validation import first_line
from lightning_ort.verification import distance

__all__ = ["AS_WRITTEN", "FUSED", "ONNXRUNTIME", "choose"]

# the names of Choice
ONNXRUNTIME, FUSED, AS_WRITTEN = "onnxruntime", "torch", "eager"

_log = logging.getLogger(__name__)

_SAMPLE = 1 << 20
"""elements at most that are updated to measure, of as many tensors as that makes"""


def choose(optimizer: Optimizer, config: RuntimeConfig) -> tuple[Choice, str | None]:
    """Who is to make the updates of ``optimizer``, and why it is not ONNX Runtime.

    The choice names :data:`ONNXRUNTIME`, torch's :data:`FUSED` kernel, or torch :data:`AS_WRITTEN`: what is called
    without a flag, and by whoever has given one. Where nothing may be measured, it is as written.

    Args:
        optimizer: of a class that ONNX Runtime can update.
        config: how sessions are made.
    """
    groups = optimizer.param_groups
    params = _trained(optimizer)
    as_written = Choice(AS_WRITTEN, {})
    if any(p.device.type != "cpu" for p in params):
        return as_written, "nothing has been measured on a device other than the CPU"
    for flag in ("fused", "foreach"):
        if any(group.get(flag) for group in groups):
            return as_written, f"{flag}=True was asked for"
    if not params:
        return as_written, "it has no parameters that require a gradient"
    if type(optimizer) is not known_class(optimizer):
        return as_written, f"{type(optimizer).__name__} may do more than the class that it is made of"
    if not measures(config):
        return as_written, "nothing is measured here"
    candidates = [AS_WRITTEN, FUSED if _has_fused_kernel(optimizer) else ONNXRUNTIME]
    shapes = [[(tuple(p.shape), p.dtype) for p in group["params"] if _is_trained(p)] for group in groups]
    settings = [sorted((k, str(v)) for k, v in group.items() if isinstance(v, bool)) for group in groups]
    key = Key.of_update(type(optimizer), [shapes, settings, candidates], sum(p.numel() for p in params), config)
    choice = MEMORY.get(key)
    if choice is None or choice.executor not in candidates:
        seconds, failed = _measured(optimizer, candidates, config)
        choice = MEMORY.agreed(key, dataclasses.replace(Choice.among(seconds, AS_WRITTEN), failed=failed))
        MEMORY.put(key, choice)
    return choice, _reason(choice)


def _reason(choice: Choice) -> str | None:
    if choice.executor == ONNXRUNTIME:
        return None
    names = {FUSED: "by its fused kernel", AS_WRITTEN: "as written", ONNXRUNTIME: "in ONNX Runtime"}
    times = [f"{time:.2g} ms {names[name]}" for name, time in choice.milliseconds.items()]
    failed = "".join(f"; it cannot be made {names[name]}: {why}" for name, why in choice.failed.items())
    return f"an update was measured to take {', '.join(times)}; it is made {names[choice.executor]}{failed}"


def _has_fused_kernel(optimizer: Optimizer) -> bool:
    """Whether torch has a fused kernel on the CPU for the class, the settings and the parameters of ``optimizer``."""
    return all(may_be_fused(group) and all(map(is_in_order, group["params"])) for group in optimizer.param_groups)


def _measured(
    optimizer: Optimizer, candidates: Iterable[str], config: RuntimeConfig
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds of an update by each of ``candidates`` that can make one, and why the others cannot."""
    failed = {}
    twins = {name: _twin(optimizer) for name in candidates}
    runs = {name: _update(twin, name, config) for name, twin in twins.items()}
    with torch.no_grad():
        before = [p.clone() for p in _params(twins[AS_WRITTEN])]
        runs[AS_WRITTEN]()
        expected = [p.clone() for p in _params(twins[AS_WRITTEN])]
        for name in [name for name in runs if name != AS_WRITTEN]:
            try:
                runs[name]()
                refused = "" if _agree(_params(twins[name]), expected, before) else "it computes something else"
            except Exception as error:  # what cannot be seen from outside, and torch then does as it is written
                refused = first_line(error)
            if refused:
                _log.info("%s makes no updates of %s: %s", name, type(optimizer).__name__, refused)
                failed[name] = refused
                del runs[name]
        return race(runs), failed


def _trained(optimizer: Optimizer) -> list[Tensor]:
    return [p for p in _params(optimizer) if _is_trained(p)]


def _is_trained(p: Tensor) -> bool:
    return p.requires_grad and not is_lazy(p)


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _agree(found: Iterable[Tensor], expected: Iterable[Tensor], before: Iterable[Tensor]) -> bool:
    """Whether an update from ``before`` has come to what torch has come to."""
    return all(
        distance(got, wanted) <= allowed(wanted, wanted - old)
        for got, wanted, old in zip(found, expected, before, strict=True)
    )


def _update(twin: Optimizer, name: str, config: RuntimeConfig) -> Callable[[], object]:
    if name == ONNXRUNTIME:
        return OptimizerStepper(twin, config, verify=False).step
    # past the hooks that users have registered for all optimizers
    step = getattr(type(twin).step, "__wrapped__", type(twin).step)
    if name == AS_WRITTEN:
        return lambda: step(twin)
    groups, direct = twin.param_groups, FusedUpdate(twin)

    def fused() -> None:
        update = direct.ready()
        if update is not None:
            return update()
        if fused_kernel_fits(twin):
            twin.param_groups = GroupsOfOneStep(twin, fused_groups(groups))
        step(twin)

    return fused


def _twin(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same settings for new parameters of the same sizes, or of a sample of these."""
    generator = torch.Generator().manual_seed(0)
    params = _trained(optimizer)
    every = max(1, math.ceil(sum(p.numel() for p in params) / _SAMPLE))
    most = _SAMPLE // math.ceil(len(params) / every)
    position = itertools.count()

    def drawn(p: Tensor, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=p.dtype, generator=generator)

    def copies(params: Iterable[Tensor]) -> Iterator[Tensor]:
        for p in params:
            if _is_trained(p) and next(position) % every == 0:
                shape = tuple(p.shape) if every == 1 or p.numel() <= most else (most,)
                new = drawn(p, shape).requires_grad_()
                new.grad = drawn(p, shape)
                yield new

    # by none of its methods, which may be a user's
    twin = object.__new__(type(optimizer))
    twin.__dict__ |= vars(optimizer) | {"defaults": dict(optimizer.defaults)}
    twin.param_groups = [{**group, "params": list(copies(group["params"]))} for group in optimizer.param_groups]
    twin.state = defaultdict(dict)
    return twin
