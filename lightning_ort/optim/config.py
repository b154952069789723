"""Which optimizer, with which hyper-parameters, for which weights."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ort.optim.optimizers import AdamW, Lamb
from lightning_ort.validation import is_number, names, number, require, shown

__all__ = ["AdamConfig", "LambConfig", "SGDConfig", "check_names", "torch_optimizer"]

Group = Mapping[str, Any]

_GROUP = (
    "Each dict inside 'params' must contain a {'params' : [model parameter names]} entry and additional entries for "
    "custom hyper parameter values"
)


class ArgumentError(AssertionError, TypeError, ValueError):
    """A hyper-parameter of another type: the original raised one or another of these, depending on the argument."""


class _OptimizerConfig:
    """What all optimizers have: a name, hyper-parameters, and groups of weights with other hyper-parameters.

    Args:
        name: of the optimizer, as it stands in checkpoints.
        params: groups, each ``{"params": [weight names], hyper-parameter: value, ...}``. A weight in several groups
            takes the values of the last.
        defaults: hyper-parameter name to value; ``lr`` is among them.

    Attributes:
        lr: base learning rate; may be changed between steps.
        params: the groups, each with a value of every hyper-parameter.

    Raises:
        AssertionError: an argument is not as described; also a ``TypeError`` and a ``ValueError`` where a
            hyper-parameter is no number.
    """

    def __init__(self, name: str, params: Sequence[Group], defaults: Mapping[str, Any]) -> None:
        require(isinstance(name, str), f"'name' must be a string, not {shown(name)}")
        require(name in _NAMES, f"'name' must be one of {', '.join(map(repr, _NAMES))}, not {name!r}")
        require(isinstance(params, list), f"'params' must be a list, not {shown(params)}")
        require(isinstance(defaults, Mapping) and "lr" in defaults, "'defaults' must be a dict with an 'lr' entry")
        self.defaults = {key: _checked(key, value) for key, value in defaults.items()}
        self.name, self.lr = name, self.defaults["lr"]
        self._groups: list[dict[str, Any]] = []
        for group in params:
            if not isinstance(group, Mapping):
                kind = type(group).__name__
                raise ArgumentError(f"{_GROUP}; got {shown(group)} (argument of type {kind!r} is not a dict)")
            require("params" in group and len(group) > 1, _GROUP)
            require(isinstance(group["params"], list), f"{_GROUP}; its 'params' are {shown(group['params'])}")
            names("'params' of a group", group["params"])
            for key in group:
                require(key != "lr", "'lr' is not supported inside params")
                if key != "params":
                    require(_key(key) in defaults, f"'params' has {key} hyper parameter not present at 'defaults'")
            values = {_key(k): _checked(k, v) for k, v in group.items() if k != "params"}
            self._groups.append({"params": list(group["params"]), **values})
        # as in the original, each group has a value of every hyper-parameter
        self.params = [{**self.defaults, **group} for group in self._groups]

    def hyper_parameters(self, weight: str) -> dict[str, Any]:
        """All of them but ``lr``, as they hold for the weight of that name."""
        found = {key: value for key, value in self.defaults.items() if key != "lr"}
        for group in self._groups:
            if weight in group["params"]:
                found |= {key: value for key, value in group.items() if key != "params"}
        return found

    def torch_optimizer(self, module: nn.Module) -> Optimizer:
        """The same as a torch optimizer, for ``configure_optimizers``; see :func:`torch_optimizer`."""
        return torch_optimizer(self, module)

    def __repr__(self) -> str:
        groups = f", {len(self.params)} groups" if self.params else ""
        return f"{type(self).__name__}(lr={self.lr}{groups})"


def _key(name: str) -> str:
    # the documented argument cannot be called by the name that the optimizer gives it
    return "lambda" if name == "lambda_coef" else name


_NAMES = ("AdamOptimizer", "LambOptimizer", "SGDOptimizer")
_NUMBERS = {"lr", "alpha", "beta", "lambda", "lambda_coef", "epsilon"}


def _checked(name: str, value: Any) -> Any:
    """A hyper-parameter of that name, as it is kept: numbers are floats.

    Raises:
        ArgumentError: it is no number.
        AssertionError: it is out of range, or no bool where one is expected.
    """
    if name in _NUMBERS:
        return _number(name, value, "a positive number", low=0, below=1 if name in ("alpha", "beta") else None)
    if name == "max_norm_clip":
        require(not (is_number(value) and value == 0), "'max_norm_clip' must not be 0")
        return _number(name, value, "a positive number, or inf for no clipping", above=0, infinite=True)
    if name == "do_bias_correction":
        require(isinstance(value, bool), f"'do_bias_correction' must be a boolean, not {shown(value)}")
    elif name == "weight_decay_mode":
        mode = isinstance(value, AdamConfig.DecayMode)
        require(mode, f"'weight_decay_mode' must be a AdamConfig.DecayMode, not {shown(value)}")
    elif name in ("ratio_min", "ratio_max"):
        require(isinstance(value, float) and value == value, f"'{name}' must be a valid float, not {shown(value)}")
    elif not isinstance(value, (bool, enum.Enum)):  # of a configuration of the user's own
        return _number(name, value, "a number", infinite=True)
    return value


def _number(name: str, value: Any, expected: str, **bounds: Any) -> float:
    message = f"'{'lambda_coef' if name == 'lambda' else name}' must be {expected}, not {shown(value)}"
    try:
        return number(name, value, **bounds)
    except ValueError as error:
        limits = str(error).partition("expected ")[2]
        raise AssertionError(f"{message}; expected {limits}") from None
    except TypeError:
        words = ""
        try:
            value >= 0  # noqa: B015
        except TypeError as error:
            # what Python says of it is what the original said
            words = f" ({error})"
        raise ArgumentError(f"{message}{words}. Optimizer attributes must be either float or int.") from None


class SGDConfig(_OptimizerConfig):
    """Stochastic gradient descent: ``w -= lr * gradient``, without momentum, decay or clipping.

    Args:
        params: must be empty.
        lr: learning rate.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(self, params: Sequence[Group] = (), lr: float = 0.001) -> None:
        empty = isinstance(params, (list, tuple)) and not params
        require(empty, "'params' must be an empty list for SGD optimizer")
        super().__init__("SGDOptimizer", [], {"lr": lr})


class AdamConfig(_OptimizerConfig):
    """Adam with decoupled weight decay.

    Args:
        params: groups of weights with other hyper-parameters.
        lr: learning rate.
        alpha: decay of the first moment (torch's beta1).
        beta: decay of the second moment (torch's beta2).
        lambda_coef: weight decay; in a group, ``lambda`` is understood as well.
        epsilon: keeps the division finite.
        max_norm_clip: clip to this norm of all gradients; needs ``utils.grad_norm_clip``, which is on by default.
        do_bias_correction: correct the moments for having started at zero.
        weight_decay_mode: when the decay is applied.

    Raises:
        AssertionError: see the base class.
    """

    class DecayMode(enum.IntEnum):
        """Weight decay from the old weight (torch's AdamW), or from the new one (and another use of epsilon)."""

        BEFORE_WEIGHT_UPDATE = 0
        AFTER_WEIGHT_UPDATE = 1

    def __init__(
        self,
        params: Sequence[Group] | None = None,
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        epsilon: float = 1e-8,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = True,
        weight_decay_mode: AdamConfig.DecayMode = DecayMode.BEFORE_WEIGHT_UPDATE,
    ) -> None:
        defaults = {
            "lr": lr, "alpha": alpha, "beta": beta, "lambda": lambda_coef, "epsilon": epsilon,
            "max_norm_clip": max_norm_clip, "do_bias_correction": do_bias_correction,
            "weight_decay_mode": weight_decay_mode,
        }  # fmt: skip
        super().__init__("AdamOptimizer", [] if params is None else params, defaults)
        self.alpha, self.beta, self.lambda_coef, self.epsilon = alpha, beta, lambda_coef, epsilon
        self.max_norm_clip, self.do_bias_correction = max_norm_clip, do_bias_correction
        self.weight_decay_mode = weight_decay_mode


class LambConfig(_OptimizerConfig):
    """LAMB: Adam's direction with one step size per weight tensor.

    Args:
        params: groups of weights with other hyper-parameters (not of the last three below).
        lr: learning rate.
        alpha: decay of the first moment.
        beta: decay of the second moment.
        lambda_coef: weight decay, part of the direction.
        ratio_min: smallest trust ratio.
        ratio_max: largest trust ratio.
        epsilon: keeps the division finite.
        max_norm_clip: clip to this norm of all gradients; needs ``utils.grad_norm_clip``, which is on by default.
        do_bias_correction: correct the moments for having started at zero.

    Raises:
        AssertionError: see the base class.
    """

    def __init__(
        self,
        params: Sequence[Group] | None = None,
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -float("inf"),
        ratio_max: float = float("inf"),
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "alpha": alpha, "beta": beta, "lambda": lambda_coef, "ratio_min": ratio_min,
            "ratio_max": ratio_max, "epsilon": epsilon, "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }  # fmt: skip
        super().__init__("LambOptimizer", [] if params is None else params, defaults)
        self.alpha, self.beta, self.lambda_coef, self.epsilon = alpha, beta, lambda_coef, epsilon
        require(ratio_min < math.inf and ratio_max > -math.inf, "'ratio_min' and 'ratio_max' must leave a finite ratio")
        require(ratio_min <= ratio_max, f"'ratio_min' ({ratio_min}) must not be above 'ratio_max' ({ratio_max})")
        self.ratio_min, self.ratio_max = ratio_min, ratio_max
        self.max_norm_clip, self.do_bias_correction = max_norm_clip, do_bias_correction


_TORCH = {
    "lambda": "weight_decay",
    "epsilon": "eps",
    "max_norm_clip": "max_norm",
    "do_bias_correction": "bias_correction",
}


def check_names(config: _OptimizerConfig, known: Mapping[str, Any], model: str) -> None:
    """Raise if ``config`` is of another class, or has a group with a weight that is not among the ``known`` ones.

    Raises:
        ValueError: so it is.
    """
    if not isinstance(config, (AdamConfig, LambConfig, SGDConfig)):
        raise ValueError(f"{type(config).__name__} is none of AdamConfig, LambConfig and SGDConfig.")
    missing = [name for group in config.params for name in group["params"] if name not in known]
    if missing:
        raise ValueError(
            f"{missing} in a group of the optimizer are no weights of {model}. Its weights are {', '.join(known)}."
        )


def torch_optimizer(config: _OptimizerConfig, module: nn.Module) -> Optimizer:
    """A torch optimizer of all parameters of ``module`` that computes what ``config`` says.

    ``torch.optim.SGD`` or ``torch.optim.AdamW``; where the latter cannot do it, :class:`~lightning_ort.optim.AdamW`;
    :class:`~lightning_ort.optim.Lamb`. Gradients are clipped within its step if ``max_norm_clip`` is finite (the
    default is 1.0).

    Args:
        config: an ``AdamConfig``, ``LambConfig`` or ``SGDConfig``.
        module: names of its parameters are those in the groups of ``config``.

    Raises:
        ValueError: another class, or a group names a weight that ``module`` does not have.
    """
    named = dict(module.named_parameters())
    check_names(config, named, type(module).__name__)
    members: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    for name, p in named.items():
        members.setdefault(tuple(config.hyper_parameters(name).items()), []).append(p)
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(list(named.values()), lr=config.lr)
    groups = [{"params": params, **_settings(dict(key))} for key, params in members.items()]
    if isinstance(config, LambConfig):
        return Lamb(groups, lr=config.lr)
    if all(g["bias_correction"] and not g["decay_after"] and math.isinf(g["max_norm"]) for g in groups):
        for g in groups:
            for key in ("bias_correction", "decay_after", "max_norm"):
                del g[key]
        return torch.optim.AdamW(groups, lr=config.lr)
    return AdamW(groups, lr=config.lr)


def _settings(hyper: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a config under the names that torch gives them."""
    found: dict[str, Any] = {"betas": (hyper["alpha"], hyper["beta"])}
    for key, value in hyper.items():
        if key == "weight_decay_mode":
            found["decay_after"] = value is AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        elif key not in ("alpha", "beta"):
            found[_TORCH.get(key, key)] = value
    return found
