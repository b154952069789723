"""How the loss scale moves: settings of ``torch.amp.GradScaler``, or a scaler object of ORTTrainer's kind."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from lightning_ort.validation import number, single

__all__ = ["GradScalerRule", "ScaleRule", "ScaledStep", "StepScalerRule", "scale_rule"]


@dataclasses.dataclass(frozen=True)
class ScaledStep:
    """What ``update`` of a loss scaler is told of a step.

    Attributes:
        all_finite: whether all gradients of the step are finite.
        optimization_step: how many updates were made before it.
        step: how many steps were made before it, skipped ones too.
    """

    all_finite: bool
    optimization_step: int
    step: int


class ScaleRule(Protocol):
    """The loss scale and how it moves."""

    @property
    def scale(self) -> float:
        """The present factor."""

    def update(self, info: ScaledStep) -> None:
        """Move the factor after a step."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""

    def summary(self) -> dict[str, Any]:
        """What a checkpoint tells a scaler of any kind: ``kind``, ``loss_scale``, ``stable_steps`` and ``state``.

        ``stable_steps`` is the number of finite steps since the scale changed, ``state`` is for a scaler of that kind.
        """

    def resume(self, summary: Mapping[str, Any]) -> None:
        """Go on from a summary: all of it if the kind is the same, else the scale and the steps since it changed."""


class GradScalerRule:
    """The rule of ``torch.amp.GradScaler``, without its passes over the gradients.

    Args:
        scaler: whose settings are taken and whose state is kept up to date.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._state = scaler.state_dict()

    @property
    def scale(self) -> float:
        return self._state["scale"]

    def update(self, info: ScaledStep) -> None:
        """Multiply by the backoff factor after a step that is not finite, by the growth factor after enough others."""
        state = self._state
        stable = state["_growth_tracker"] + 1 if info.all_finite else 0
        if not info.all_finite:
            state["scale"] *= state["backoff_factor"]
        elif stable == state["growth_interval"]:
            stable, grown = 0, state["scale"] * state["growth_factor"]
            if grown <= torch.finfo(torch.float32).max:
                state["scale"] = grown
        state["_growth_tracker"] = stable
        self.scaler.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = [k for k in self._state if k not in state]
        if missing:
            raise RuntimeError(
                f"the checkpoint's loss scaler has no {', '.join(missing)} (it has {', '.join(state) or 'nothing'}): "
                "it was written with another kind of scaler. Resume with that kind."
            )
        self._state = {k: state[k] for k in self._state}
        self.scaler.load_state_dict(self._state)

    def summary(self) -> dict[str, Any]:
        scale, stable = self._state["scale"], self._state["_growth_tracker"]
        return {"kind": "GradScaler", "loss_scale": scale, "stable_steps": stable, "state": self.state_dict()}

    def resume(self, summary: Mapping[str, Any]) -> None:
        changed = {"scale": float(summary["loss_scale"]), "_growth_tracker": int(summary["stable_steps"])}
        # a window that is shorter here may be full already
        changed["_growth_tracker"] = min(changed["_growth_tracker"], self._state["growth_interval"] - 1)
        self.load_state_dict(summary["state"] if summary["kind"] == "GradScaler" else self._state | changed)


class StepScalerRule:
    """A scaler with ``loss_scale`` and ``update(info)``, such as ``lightning_ort.amp.DynamicLossScaler``.

    Args:
        scaler: the object; a checkpoint keeps what its ``state_dict`` gives, if it has ``load_state_dict`` as well, or
            else its attributes that are numbers.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    @property
    def scale(self) -> float:
        return float(self.scaler.loss_scale)

    def update(self, info: ScaledStep) -> None:
        self.scaler.update(info)

    def state_dict(self) -> dict[str, Any]:
        kept = self.scaler.state_dict() if self._has_own_state else self._numbers()
        return {"loss_scale": self.scale, "scaler": kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        kept = state.get("scaler", {})
        if self._has_own_state:
            self.scaler.load_state_dict(kept)
        else:
            known = self._numbers()
            unknown = [k for k in kept if k not in known]
            if unknown or "loss_scale" not in state:
                raise RuntimeError(
                    f"the checkpoint's loss scaler has {', '.join(unknown) or 'no loss_scale'}, unlike a "
                    f"{type(self.scaler).__name__}: it was written with another kind of scaler. Resume with that kind."
                )
            vars(self.scaler).update(kept)
        if self.scale != state["loss_scale"]:
            raise RuntimeError(
                f"{type(self.scaler).__name__} was given back its state of a checkpoint, but its loss_scale is "
                f"{self.scale:g} and not {state['loss_scale']:g}: give it state_dict() and load_state_dict(state), or "
                "keep what it counts in attributes that are numbers."
            )

    def summary(self) -> dict[str, Any]:
        state = self.state_dict()
        stable = int(getattr(self.scaler, "_stable_steps_count", 0))
        kind = type(self.scaler).__name__
        return {"kind": kind, "loss_scale": self.scale, "stable_steps": stable, "state": state["scaler"]}

    def resume(self, summary: Mapping[str, Any]) -> None:
        if summary["kind"] == type(self.scaler).__name__:
            self.load_state_dict({"loss_scale": summary["loss_scale"], "scaler": summary["state"]})
            return
        self.scaler.loss_scale = float(summary["loss_scale"])
        if hasattr(self.scaler, "_stable_steps_count"):
            self.scaler._stable_steps_count = int(summary["stable_steps"])

    @property
    def _has_own_state(self) -> bool:
        return hasattr(self.scaler, "state_dict") and hasattr(self.scaler, "load_state_dict")

    def _numbers(self) -> dict[str, Any]:
        """Attributes, private ones too, that are numbers."""
        return {k: v for k, v in getattr(self.scaler, "__dict__", {}).items() if isinstance(v, (bool, int, float))}


def scale_rule(scaler: Any) -> ScaleRule | None:
    """The rule of a user's scaler; ``None`` for a ``GradScaler`` that is disabled.

    Raises:
        TypeError: it is no scaler, or its scale no number.
        ValueError: its scale is not positive, or infinite.
    """
    rule = _rule(scaler)
    if rule is not None:
        if isinstance(rule, StepScalerRule):
            number("loss_scale of the scaler", single(scaler.loss_scale), above=0)
        else:
            number("scale of the scaler", rule.scale, above=0)
    return rule


def _rule(scaler: Any) -> ScaleRule | None:
    if scaler is None:
        return GradScalerRule(torch.amp.GradScaler("cpu"))
    if isinstance(scaler, torch.amp.GradScaler):
        return GradScalerRule(scaler) if scaler.is_enabled() else None
    if hasattr(scaler, "loss_scale") and callable(getattr(scaler, "update", None)):
        return StepScalerRule(scaler)
    raise TypeError(
        f"scaler={scaler!r}: expected a torch.amp.GradScaler, a lightning_ort.amp.LossScaler, or an object with "
        "loss_scale and update(info)."
    )
