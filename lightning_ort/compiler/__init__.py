"""From a step function to ONNX graphs: the backend for ``torch.compile``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ort.compiler.backend import ORTBackend

__all__ = ["ORTBackend"]


def __getattr__(name: str) -> Any:
    # the backend needs ONNX Runtime, whose absence shall be explained and not break the import of this package
    if name == "ORTBackend":
        from lightning_ort.compiler.backend import ORTBackend

        return ORTBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
