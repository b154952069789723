"""What AdamW and Lamb of this package have in common: two moments, and gradients clipped within the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AdamLike"]

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
        for name, value, valid in (
            ("lr", lr, lr >= 0),
            ("betas", betas, all(0 <= b < 1 for b in betas)),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("max_norm", max_norm, max_norm > 0),
        ):
            if not valid:
                expected = "two numbers in [0, 1)" if name == "betas" else "a number from 0"
                raise ValueError(f"{name}={value!r}: expected {expected if name != 'max_norm' else 'one above 0'}.")
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
