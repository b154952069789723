"""The loss functions that have a name, and what their targets look like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["Loss", "loss_function", "target_name"]

Loss = Callable[..., Tensor]
"""From the results of a model and the targets to a scalar."""

_NAMED: dict[str, Callable[[], nn.Module]] = {
    "MSELoss": nn.MSELoss,
    "CrossEntropyLoss": nn.CrossEntropyLoss,
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss,
    "L1Loss": nn.L1Loss,
}


def loss_function(loss: Any) -> Loss | None:
    """``loss`` itself, the function of a name such as ``"MSELoss"`` or of a member of ONNX Runtime's ``LossType``.

    Raises:
        ValueError: an unknown name.
        TypeError: something that cannot be called.
    """
    if loss is None:
        return None
    name = loss if isinstance(loss, str) else getattr(loss, "name", None)
    if isinstance(name, str) and not isinstance(loss, nn.Module) and not callable(loss):
        if name not in _NAMED:
            raise ValueError(f"loss={loss!r}: expected one of {', '.join(_NAMED)}, or a function.")
        return _NAMED[name]()
    block = any(base.__module__.startswith("onnxruntime.") for base in type(loss).__mro__)
    if not callable(loss) or isinstance(loss, type) or block:
        raise TypeError(
            f"loss={loss!r} is no loss function; expected one of {', '.join(_NAMED)}, or a function of torch tensors "
            "(instead of an onnxblock write it in torch, or leave it out with an ONNX model that gives the loss first)."
        )
    return loss


def target_name(loss: Any) -> str:
    """What the input for the targets is called where nobody says: as in ONNX Runtime's artifacts."""
    return "labels" if isinstance(loss, nn.CrossEntropyLoss) else "target"
