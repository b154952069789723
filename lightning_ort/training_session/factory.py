"""What makes the sessions of a TrainingSession, from the arguments of an ``onnxruntime.InferenceSession``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers import check_available
from lightning_ort.validation import shown

__all__ = ["factory_of"]


def factory_of(providers: Sequence[Any] | None, provider_options: Any, session_options: Any) -> SessionFactory:
    """What makes the sessions, after all that was given is known to be heeded."""
    config = RuntimeConfig(*_split(providers, provider_options), session_options)
    config.check()
    return SessionFactory(config)


def _split(providers: Sequence[Any] | None, options: Any) -> tuple[list[str] | None, Any]:
    """Names and options of providers that may be tuples of both."""
    if providers is None:
        return None, options
    if isinstance(providers, (str, bytes)) or not isinstance(providers, Sequence):
        check_available(providers, None)  # type: ignore[arg-type]  # which says what is wrong
    for p in providers:
        if isinstance(p, tuple) and not (len(p) == 2 and isinstance(p[1], Mapping)):
            raise ProviderError(f"providers holds {shown(p)}: expected names, or tuples of a name and its options.")
    found = [p[0] if isinstance(p, tuple) else p for p in providers]
    if any(isinstance(p, tuple) for p in providers):
        if options:
            raise ValueError("provider_options cannot be given together with options in providers.")
        options = [dict(p[1]) if isinstance(p, tuple) else {} for p in providers]
    return found, options
