"""Which optimizer a torch optimizer is, and what its states are called in each place."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import optim
from torch.optim import Optimizer

from lightning_ort.lightning_packages import everywhere
from lightning_ort.optim.optimizers import AdamW, Lamb
from lightning_ort.optim.settings import Kind

__all__ = [
    "KINDS_BY_CLASS", "ORTTRAINER_STATES", "ORT_TRAINING_STATES", "TORCH_STATES", "OddSetting", "kind_of",
    "known_class", "odd_setting", "unwrapped",
]  # fmt: skip

_KNOWN = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, AdamW, Lamb,
}  # fmt: skip

KINDS_BY_CLASS: dict[type[Optimizer], Kind] = {
    optim.AdamW: "AdamW", optim.Adam: "Adam", optim.SGD: "SGD", AdamW: "AdamW", Lamb: "Lamb",
}  # fmt: skip
"""Class of torch to the kind of :class:`~lightning_ort.optim.settings.OptimizerSettings` that updates like it."""

TORCH_STATES = {
    "moment_1": "exp_avg",
    "moment_2": "exp_avg_sq",
    "largest_2": "max_exp_avg_sq",
    "momentum": "momentum_buffer",
}
"""Name of a state in the rules of SGD, of Adam and of LAMB to torch's."""

ORTTRAINER_STATES = {"moment_1": "Moment_1", "moment_2": "Moment_2"}
"""The same to that in ORTTrainer and TrainingSession."""

ORT_TRAINING_STATES = {"moment_1": "momentum0", "moment_2": "momentum1"}
"""The same to that in the files of ONNX Runtime's own on-device training."""


_ODD: dict[str, Any] = {"amsgrad": False, "maximize": False, "dampening": 0}
"""Settings of torch's SGD, Adam and AdamW that no other API has, to what turns them off."""


class OddSetting(NamedTuple):
    """A setting of a group of a torch optimizer that has no counterpart.

    Attributes:
        name: of the setting.
        value: that it has.
        expected: that it would have to have.
        group: number of the group.
    """

    name: str
    value: Any
    expected: Any
    group: int


def odd_setting(optimizer: Optimizer, more: Mapping[str, Any] | None = None) -> OddSetting | None:
    """Return the first setting of ``optimizer`` that neither ORTTrainer, TrainingSession nor a device has, or ``None``.

    Args:
        optimizer: of a class in :data:`KINDS_BY_CLASS`.
        more: further settings that the API at hand does not have, to what turns them off.
    """
    for number, group in enumerate(optimizer.param_groups):
        for name, expected in (_ODD | dict(more or {})).items():
            idle = name == "dampening" and not group.get("momentum")
            if group.get(name, expected) != expected and not idle:
                return OddSetting(name, group[name], expected, number)
    return None


def unwrapped(optimizer: Any) -> Any:
    """Take an optimizer out of what Lightning hands to a module."""
    return optimizer.optimizer if isinstance(optimizer, everywhere("core.optimizer:LightningOptimizer")) else optimizer


def known_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class that says how ``optimizer`` updates: one of torch's or of this package's, or ``None``.

    A subclass counts as what it is derived from as long as it has no ``step`` of its own, and nothing of its own that a
    ``step`` calls, such as ``_init_group``: these could compute anything.
    """
    kind = type(optimizer)
    base = next((known for known in kind.__mro__ if known in _KNOWN), None)
    return base if base is not None and _parts_of_step(kind, base) == _parts_of_step(base, base) else None


def kind_of(optimizer: Optimizer) -> Kind | None:
    """Return the kind of settings that ``optimizer`` updates by, or ``None`` where there is none."""
    return KINDS_BY_CLASS.get(known_class(optimizer) or Optimizer)


def _parts_of_step(kind: type[Optimizer], base: type[Optimizer]) -> dict[str, Any]:
    """By name, the ``step`` of ``kind`` and what it has of the methods that ``base`` keeps to itself."""
    own = [name for name in dir(base) if name.startswith("_") and not name.startswith("__")]
    # torch wraps the `step` of each class that it makes an object of
    return {name: inspect.unwrap(inspect.getattr_static(kind, name)) for name in ("step", *own)}
