"""What a TrainingSession tells of itself."""

from __future__ import annotations

from typing import Any

import onnxruntime

from lightning_ort.onnx_training.graph import TrainingGraph

__all__ = ["SessionInfo"]


class SessionInfo:
    """Inputs, outputs, providers, profiling and fallback, with the methods of ``onnxruntime.InferenceSession``."""

    _signature: onnxruntime.InferenceSession
    _train: TrainingGraph
    _fallback: bool

    def get_inputs(self) -> list[Any]:
        """The inputs of a run as ``NodeArg``: those of the model that are no initializers, and the learning rate."""
        return self._signature.get_inputs()

    def get_outputs(self) -> list[Any]:
        """The outputs of a training run as ``NodeArg``."""
        return self._signature.get_outputs()

    def get_overridable_initializers(self) -> list[Any]:
        """None: weights live in the session and are changed by :meth:`load_state`."""
        return self._signature.get_overridable_initializers()

    def get_modelmeta(self) -> Any:
        """The metadata of the forward model."""
        return self._signature.get_modelmeta()

    def get_session_options(self) -> onnxruntime.SessionOptions:
        """Options of the session that computes the gradients."""
        return self._inner().get_session_options()

    def get_providers(self) -> list[str]:
        """Registered execution providers."""
        return self._inner().get_providers()

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Options of the registered execution providers."""
        return self._inner().get_provider_options()

    def get_profiling_start_time_ns(self) -> int:
        """When profiling started, comparable to ``time.monotonic_ns()``."""
        return self._inner().get_profiling_start_time_ns()

    def end_profiling(self) -> str:
        """Name of the file with the profile, if ``sess_options.enable_profiling`` was set."""
        return self._inner().end_profiling()

    def disable_fallback(self) -> None:
        """Let an execution provider's failure be an error."""
        self._fallback = False

    def enable_fallback(self) -> None:
        """Go on with the CPU's provider after another one has failed, with a warning; the default."""
        self._fallback = True

    def _inner(self) -> onnxruntime.InferenceSession:
        return self._train.session
