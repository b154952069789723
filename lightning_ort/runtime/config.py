"""How sessions are made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import onnxruntime
import torch

from lightning_ort.runtime.bfloat16 import options_for_bfloat16

if TYPE_CHECKING:
    from lightning_ort.runtime.session import OrtSession

__all__ = ["Placement", "RuntimeConfig"]

Placement = Literal["fastest", "onnxruntime"]

_WHO_RUNS_WHAT = "session.record_ep_graph_assignment_info"


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """How sessions are made.

    Attributes:
        providers: names of execution providers in order of preference; ``None`` takes the one of the device.
        provider_options: one mapping per provider, or a mapping from provider name to options.
        session_options: an ``onnxruntime.SessionOptions``, or a mapping from its attribute names (such as
            ``intra_op_num_threads``) and configuration keys (such as ``session.intra_op.allow_spinning``) to values.
        placement: ``"fastest"`` lets operators run in torch whose kernels there are the faster ones,
            ``"onnxruntime"`` only those that ONNX Runtime cannot run.
        on_session: called with each session and its serialized model, for debugging.
    """

    providers: Sequence[str] | None = None
    provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None = None
    session_options: onnxruntime.SessionOptions | Mapping[str, Any] | None = None
    placement: Placement = "fastest"
    on_session: Callable[[OrtSession, bytes], None] | None = None

    def in_bfloat16(self) -> RuntimeConfig | None:
        """The same for graphs that may compute in bfloat16, or ``None`` if no provider here has kernels for that."""
        options = options_for_bfloat16(self.providers, self.provider_options)
        return None if options is None else dataclasses.replace(self, provider_options=options)

    def make_session_options(
        self, *, threads: int | None = None, device: torch.device | None = None
    ) -> onnxruntime.SessionOptions:
        """Defaults of this package, overridden by what the user set.

        Args:
            threads: for the operators of one graph; by default as many as torch has.
            device: where it is executed; by default the CPU.

        Raises:
            ValueError: an attribute that SessionOptions does not have.
        """
        if isinstance(self.session_options, onnxruntime.SessionOptions):
            return self.session_options
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or torch.get_num_threads()
        # one allocation for all activations of a training graph doubles its peak memory and gains no time
        options.enable_mem_pattern = False
        # nodes run in the order in which autograd wrote them, which frees activations as early as eager does
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        # ONNX Runtime's idle threads would spin on the cores that torch's optimizer needs
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if device is not None and device.type == "cuda":
            options.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
            if _tells_who_runs_what():
                options.add_session_config_entry(_WHO_RUNS_WHAT, "1")
        for key, value in (self.session_options or {}).items():
            if "." in key:
                options.add_session_config_entry(key, str(value))
            elif hasattr(options, key):
                setattr(options, key, value)
            else:
                known = ", ".join(
                    a for a in dir(options) if not a.startswith("_") and not callable(getattr(options, a))
                )
                raise ValueError(f"session_options has no {key!r}. Attributes: {known}; other keys contain a dot.")
        return options


def _tells_who_runs_what() -> bool:
    return hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info")
