"""Adam by the kernel of ``torch.optim.AdamW(fused=True)``."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ort.optim.rules.adam import Adam
from lightning_ort.optim.rules.rule import Rule
from lightning_ort.optim.threads import UpdateThreads

if TYPE_CHECKING:
    from lightning_ort.runtime.config import Placement

__all__ = ["FusedAdam"]


class FusedAdam:
    """Does in one pass what an :class:`~lightning_ort.optim.update.Update` by the rule :class:`Adam` does.

    ONNX Runtime has no kernel that reads a gradient and writes all that depends on it; its operators pass over the
    memory a dozen times, which takes three to five times as long.

    Args:
        params: contiguous tensors of float32 or float64, all on the CPU or all on one GPU.
        states: per parameter its two moments.
        groups: per parameter the number of its group.
        clip: clip by the norm of all gradients.
        guard: change nothing if a gradient is not finite.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        groups: Sequence[int],
        *,
        clip: bool = False,
        guard: bool = False,
    ) -> None:
        self._clip, self._guard = clip, guard
        self._members = [[i for i, g in enumerate(groups) if g == group] for group in range(max(groups) + 1)]
        self._params = [[params[i] for i in members] for members in self._members]
        self._moments = [[[states[i][k] for i in members] for members in self._members] for k in (0, 1)]
        counts = [torch.ones((), dtype=torch.float32, device=params[0].device) for _ in self._members]
        self._counts, self._set_count = counts, [_setter(count) for count in counts]
        self._numbers: list[Sequence[float]] = [()] * len(self._members)
        on_cpu = params[0].device.type == "cpu"
        self._threads: Any = UpdateThreads() if on_cpu else contextlib.nullcontext()

    @staticmethod
    def can_do(rule: Rule, params: Sequence[Tensor], placement: Placement) -> bool:
        """Whether there is such a kernel for these parameters, and the user lets torch do what it does faster."""
        return (
            placement != "onnxruntime"
            and isinstance(rule, Adam)
            and rule.decay != "after"
            and not rule.amsgrad
            and len({p.device for p in params}) == 1
            and all(p.device.type in ("cpu", "cuda") and p.is_contiguous() for p in params)
            and all(p.dtype in (torch.float32, torch.float64) for p in params)
        )

    @staticmethod
    def formula(
        alpha: float,
        beta: float,
        epsilon: float,
        weight_decay: float,
        *,
        bias_correction: bool,
        scaled_epsilon: bool,
    ) -> Callable[[float, int], tuple[float, ...]]:
        """Learning rate and number of the update to numbers for :meth:`set_coefficients`.

        The arguments are those of :meth:`Adam.numbers`.
        """
        if bias_correction and scaled_epsilon:
            return lambda lr, count: (lr, alpha, beta, epsilon, weight_decay, count)

        # after infinitely many updates there is nothing to correct, so what is to be corrected is so in the rate
        def corrected(lr: float, count: int) -> tuple[float, ...]:
            rate = lr * math.sqrt(1 - beta**count) / (1 - alpha**count) if bias_correction else lr
            return rate, alpha, beta, epsilon, weight_decay * lr / rate if rate else 0.0, math.inf

        return corrected

    def set_coefficients(self, group: int, numbers: Sequence[float]) -> None:
        """The settings of a group, as ``OptimizerSettings.fused_numbers`` gives them."""
        self._numbers[group] = numbers
        self._set_count[group](numbers[5])

    @torch.no_grad()
    def run(self, gradients: Sequence[Tensor], *, scale: float = 1.0, limits: Sequence[float] | None = None) -> bool:
        """Update everything; arguments and result as of :meth:`Update.run`. The gradients may be overwritten."""
        norm = None
        if self._clip or self._guard:
            norm = float(torch.nn.utils.get_total_norm(gradients))
            if self._guard and not math.isfinite(norm):
                return False
        with self._threads:
            for group, members in enumerate(self._members):
                factor = scale
                if self._clip and norm is not None and limits is not None and norm * scale > limits[group]:
                    factor = limits[group] / norm
                _update(*self._operands(group, [gradients[i] for i in members], factor), self._numbers[group])
        return True

    def bound_to(self, gradients: Sequence[Tensor]) -> Callable[[Sequence[float]], None]:
        """A function that updates everything by what ``gradients`` hold when it is called, sooner than :meth:`run`.

        Its argument are the numbers, the same for all groups. The gradients must stay where they are; nothing is
        clipped or guarded, and no parameter may require a gradient.
        """
        groups = [self._operands(g, [gradients[i] for i in members], 1.0) for g, members in enumerate(self._members)]
        operands, setters, threads = [tensors for tensors, _ in groups], self._set_count, self._threads

        def update(numbers: Sequence[float]) -> None:
            for set_count in setters:
                set_count(numbers[5])
            with threads:
                for tensors in operands:
                    _update(tensors, None, numbers)

        return update

    def _operands(self, group: int, gradients: list[Tensor], factor: float) -> tuple[list[list[Tensor]], Tensor | None]:
        """The kernel's lists of tensors, and what it divides gradients by."""
        params = self._params[group]
        contiguous = [g if g.is_contiguous() else g.contiguous() for g in gradients]
        divisor = None
        if factor != 1.0 and params[0].dtype == torch.float32:
            divisor = torch.full((), 1.0 / factor, dtype=torch.float32, device=params[0].device)
        elif factor != 1.0:  # the kernel takes a float32
            contiguous = [g * factor for g in contiguous]
        counts = [self._counts[group]] * len(params)
        return [params, contiguous, self._moments[0][group], self._moments[1][group], [], counts], divisor


def _setter(count: Tensor) -> Callable[[float], Any]:
    # through numpy it is written much sooner
    return count.fill_ if count.device.type != "cpu" else functools.partial(count.numpy().__setitem__, ())


def _update(tensors: list[list[Tensor]], divisor: Tensor | None, numbers: Sequence[float]) -> None:
    lr, alpha, beta, epsilon, weight_decay, _ = numbers
    # the function of torch.optim that calls this sorts the tensors first, for longer than small ones take
    torch._fused_adamw_(
        *tensors,
        lr=lr,
        beta1=alpha,
        beta2=beta,
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
    )
