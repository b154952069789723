"""Which optimizer, with which hyper-parameters, for which weights."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["AdamConfig", "LambConfig", "SGDConfig"]

Group = Mapping[str, Any]

_GROUP = (
    "Each dict inside 'params' must contain a {'params' : [model parameter names]} entry and additional entries for "
    "custom hyper parameter values"
)


def _require(condition: bool, message: str) -> None:
    # not an assert statement, which python -O leaves out
    if not condition:
        raise AssertionError(message)


class _OptimizerConfig:
    """What all optimizers have: a name, hyper-parameters, and groups of weights with other hyper-parameters.

    Args:
        name: of the optimizer, as it stands in checkpoints.
        params: groups, each ``{"params": [weight names], hyper-parameter: value, ...}``. A weight in several groups
            takes the values of the last.
        defaults: hyper-parameter name to value; ``lr`` is among them.

    Attributes:
        lr: base learning rate; may be changed between steps.
    """

    def __init__(self, name: str, params: Sequence[Group], defaults: Mapping[str, Any]) -> None:
        _require(isinstance(name, str) and name != "", "'name' must be a string")
        _require(isinstance(params, list), "'params' must be a list")
        _require(isinstance(defaults, Mapping) and "lr" in defaults, "'defaults' must be a dict with an 'lr' entry")
        _require(defaults["lr"] >= 0, "'lr' must be a positive number")
        for group in params:
            _require("params" in group and len(group) > 1, _GROUP)
            _require(isinstance(group["params"], list), _GROUP)
            for key in group:
                _require(key != "lr", "'lr' is not supported inside params")
                if key != "params":
                    _require(_key(key) in defaults, f"'params' has {key} hyper parameter not present at 'defaults'")
        self.name, self.lr = name, float(defaults["lr"])
        self.defaults = {key: _value(value) for key, value in defaults.items()}
        self.params = [
            {"params": list(group["params"]), **{_key(k): _value(v) for k, v in group.items() if k != "params"}}
            for group in params
        ]

    def hyper_parameters(self, weight: str) -> dict[str, Any]:
        """All of them but ``lr``, as they hold for the weight of that name."""
        found = {key: value for key, value in self.defaults.items() if key != "lr"}
        for group in self.params:
            if weight in group["params"]:
                found |= {key: value for key, value in group.items() if key != "params"}
        return found

    def torch_optimizer(self, module: nn.Module) -> Optimizer:
        """The same as a torch optimizer, for ``configure_optimizers``; see :func:`.conversion.torch_optimizer`."""
        from lightning_ort.optim.conversion import torch_optimizer

        return torch_optimizer(self, module)

    def __repr__(self) -> str:
        groups = f", {len(self.params)} groups" if self.params else ""
        return f"{type(self).__name__}(lr={self.lr}{groups})"


def _key(name: str) -> str:
    # the documented argument cannot be called by the name that the optimizer gives it
    return "lambda" if name == "lambda_coef" else name


def _value(value: Any) -> Any:
    if isinstance(value, (bool, enum.Enum)):
        return value
    if isinstance(value, (int, float)):
        return float(value)
    raise ValueError(f"Optimizer attributes must be either float or int, not {value!r}.")


class SGDConfig(_OptimizerConfig):
    """Stochastic gradient descent: ``w -= lr * gradient``, without momentum, decay or clipping.

    Args:
        params: must be empty.
        lr: learning rate.

    Raises:
        AssertionError: an argument is not as described.
    """

    def __init__(self, params: Sequence[Group] = (), lr: float = 0.001) -> None:
        _require(len(params) == 0, "'params' must be an empty list for SGD optimizer")
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
        AssertionError: an argument is not as described.
        ValueError: a hyper-parameter is no number.
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
        _check(lr, alpha, beta, lambda_coef, epsilon, max_norm_clip, do_bias_correction)
        _require(
            isinstance(weight_decay_mode, AdamConfig.DecayMode), "'weight_decay_mode' must be a AdamConfig.DecayMode"
        )
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
        AssertionError: an argument is not as described.
        ValueError: a hyper-parameter is no number.
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
        _check(lr, alpha, beta, lambda_coef, epsilon, max_norm_clip, do_bias_correction)
        _require(isinstance(ratio_min, float), "'ratio_min' must be a valid float")
        _require(isinstance(ratio_max, float), "'ratio_max' must be a valid float")
        defaults = {
            "lr": lr, "alpha": alpha, "beta": beta, "lambda": lambda_coef, "ratio_min": ratio_min,
            "ratio_max": ratio_max, "epsilon": epsilon, "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }  # fmt: skip
        super().__init__("LambOptimizer", [] if params is None else params, defaults)
        self.alpha, self.beta, self.lambda_coef, self.epsilon = alpha, beta, lambda_coef, epsilon
        self.ratio_min, self.ratio_max = ratio_min, ratio_max
        self.max_norm_clip, self.do_bias_correction = max_norm_clip, do_bias_correction


def _check(lr: Any, *numbers: Any) -> None:
    alpha, beta, lambda_coef, epsilon, max_norm_clip, do_bias_correction = numbers
    _require(lr >= 0, "'lr' must be a positive number")
    for name, value in {"alpha": alpha, "beta": beta, "lambda_coef": lambda_coef, "epsilon": epsilon}.items():
        if not isinstance(value, str):
            _require(value >= 0, f"'{name}' must be a positive number")
    _require(max_norm_clip != 0, "'max_norm_clip' must not be 0")
    _require(isinstance(do_bias_correction, bool), "'do_bias_correction' must be a boolean")
