"""AdamW and Lamb as ORTTrainer has them, for torch: two moments, and gradients clipped within the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ort.validation import flag, is_number, number, single

__all__ = ["AdamLike", "AdamW", "Lamb"]

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class AdamLike(Optimizer):
    """An optimizer with the states of ``torch.optim.Adam``: ``step``, ``exp_avg`` and ``exp_avg_sq``.

    Args:
        params: parameters, or groups of them, as ``torch.optim`` takes them.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: keeps the division finite.
        weight_decay: share of the weight that joins the step, or is taken away, times ``lr``.
        bias_correction: correct the moments for having started at zero.
        max_norm: the gradients of a group are divided by ``norm / max_norm`` where ``norm``, that of all gradients
            of the optimizer, is larger.
        **settings: further ones of a subclass.

    Raises:
        TypeError: a setting of another type.
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        max_norm: float,
        **settings: Any,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            # learning rates may be tensors, as those of torch's optimizers
            number(name, single(value), low=0)
        if is_number(max_norm) and max_norm <= 0:
            raise ValueError(f"max_norm={max_norm!r}: expected one above 0.")
        number("max_norm", max_norm, above=0, infinite=True)
        if not isinstance(betas, Sequence) or len(betas) != 2 or not all(is_number(b) and 0 <= b < 1 for b in betas):
            raise ValueError(f"betas={betas!r}: expected two numbers in [0, 1).")
        for name, value in (("bias_correction", bias_correction), *settings.items()):
            if name in ("bias_correction", "decay_after"):
                flag(name, value)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction,
            "max_norm": max_norm, **settings,
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss and its gradients first.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: a gradient is sparse, or a parameter complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # looked at once: ONNX Runtime may have made the update while the closure ran, and left nothing to do
        groups = [*self.param_groups]
        given = [p for group in groups for p in group["params"] if p.grad is not None]
        for p in given:
            if p.grad.is_sparse or p.is_complex():
                raise RuntimeError(f"{type(self).__name__} has no sparse gradients and no complex parameters.")
        norm = self._norm([p.grad for p in given], groups)
        for group in groups:
            longer = norm is not None and norm > group["max_norm"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    double = torch.get_default_dtype() == torch.float64
                    state["step"] = torch.zeros((), dtype=torch.float64 if double else torch.float32)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                gradient = p.grad * (group["max_norm"] / norm).to(p.dtype) if longer and norm is not None else p.grad
                state["exp_avg"].lerp_(gradient, 1 - group["betas"][0])
                state["exp_avg_sq"].mul_(group["betas"][1]).addcmul_(gradient, gradient, value=1 - group["betas"][1])
                self._apply(p, state, group)
        return loss

    @property
    def clips_together(self) -> bool:
        """Whether the update of a parameter depends on the norm of all gradients."""
        return not all(math.isinf(group["max_norm"]) for group in self.param_groups)

    @staticmethod
    def _norm(gradients: list[Tensor], groups: list[dict[str, Any]]) -> Tensor | None:
        """Of all gradients together; ``None`` where no group is clipped by it."""
        if not gradients or all(math.isinf(group["max_norm"]) for group in groups):
            return None
        return torch.stack([torch.linalg.vector_norm(g).to(gradients[0].device) for g in gradients]).norm()

    @staticmethod
    def _corrections(state: dict[str, Any], group: dict[str, Any]) -> tuple[float, float]:
        """What the first moment, and the root of the second, are to be divided by."""
        if not group["bias_correction"]:
            return 1.0, 1.0
        count = float(state["step"])
        return 1 - group["betas"][0] ** count, math.sqrt(1 - group["betas"][1] ** count)

    def _apply(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Change ``p`` by its moments."""
        raise NotImplementedError


class AdamW(AdamLike):
    """``torch.optim.AdamW`` with three more settings; each at its default, it computes the same.

    Args:
        params: parameters, or groups of them, as ``torch.optim`` takes them.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: keeps the division finite.
        weight_decay: share of the weight that is taken away, times ``lr``.
        bias_correction: correct the moments for having started at zero.
        decay_after: take the weight decay from the new weight, and add ``eps`` to the root of the second moment before
            its correction: the AdamW of Hugging Face's first transformers.
        max_norm: the gradients of a group are divided by ``norm / max_norm`` where ``norm``, that of all gradients
            of the optimizer, is larger.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        bias_correction: bool = True,
        decay_after: bool = False,
        max_norm: float = math.inf,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, max_norm, decay_after=decay_after)

    def _apply(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = self._corrections(state, group)
        lr, kept = float(group["lr"]), 1 - float(group["lr"]) * group["weight_decay"]
        if group["decay_after"]:
            p.addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(group["eps"]), value=-lr * second / first)
            p.mul_(kept)
        else:
            root = state["exp_avg_sq"].sqrt().div_(second).add_(group["eps"])
            p.mul_(kept).addcdiv_(state["exp_avg"], root, value=-lr / first)


# LightningCLI looks for the AdamW of `--optimizer=AdamW` among all optimizers, by this name, and refuses to choose
# between two; it passes over private ones. By its path, `lightning_ort.optim.AdamW`, it finds this one all the same.
AdamW.__qualname__ = "_AdamW"
_AdamW = AdamW  # where pickle looks for it


class Lamb(AdamLike):
    """LAMB (You et al., "Large batch optimization for deep learning", 2020): Adam's direction, with a step per tensor
    in proportion to the length of the weight.

    Args:
        params: parameters, or groups of them, as ``torch.optim`` takes them.
        lr: learning rate.
        betas: decay of the first and the second moment.
        eps: keeps the division finite.
        weight_decay: share of the weight that is a part of the direction.
        bias_correction: correct the moments for having started at zero.
        ratio_min: smallest trust ratio, the length of the weight divided by that of the direction.
        ratio_max: largest trust ratio. Where one of the two lengths is 0, the ratio is 1.
        max_norm: the gradients of a group are divided by ``norm / max_norm`` where ``norm``, that of all gradients
            of the optimizer, is larger.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        max_norm: float = math.inf,
    ) -> None:
        number("ratio_min", ratio_min, infinite=True)
        number("ratio_max", ratio_max, infinite=True)
        if ratio_min == math.inf or ratio_max == -math.inf:
            raise ValueError(f"ratio_min={ratio_min!r}, ratio_max={ratio_max!r}: expected room for a finite ratio.")
        if not ratio_min <= ratio_max:
            raise ValueError(f"ratio_min={ratio_min!r} is larger than ratio_max={ratio_max!r}.")
        ratios = {"ratio_min": ratio_min, "ratio_max": ratio_max}
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction, max_norm, **ratios)

    def _apply(self, p: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        first, second = self._corrections(state, group)
        root = state["exp_avg_sq"].sqrt().div_(second).add_(group["eps"])
        direction = (state["exp_avg"] / root).div_(first).add_(p, alpha=group["weight_decay"])
        length, reach = torch.linalg.vector_norm(p), torch.linalg.vector_norm(direction)
        ratio = (length / reach).clamp(group["ratio_min"], group["ratio_max"])
        ratio = torch.where((length > 0) & (reach > 0), ratio, torch.ones_like(ratio))
        p.sub_(direction * (float(group["lr"]) * ratio))
