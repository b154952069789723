"""What this package asks of an execution provider."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import onnxruntime
import torch

if TYPE_CHECKING:
    from lightning_ort.runtime.providers.cuda import Queue

__all__ = ["Provider"]


class Provider:
    """An execution provider that needs nothing but its name. Those that need more are subclasses, one file each.

    Args:
        name: as ONNX Runtime spells it.

    Attributes:
        device_type: type of the torch devices whose memory its kernels read and write.
        reads_in_place: whether its kernels read memory of the CPU where it is. Of others, ONNX Runtime copies inputs
            when they are bound. ``False`` of providers that nothing is known of.
        memory_limit_option: its option that limits the memory it takes, in bytes; empty if there is none.
        frugal_options: its options by which memory is not taken ahead of need.
        in_16_bits: whether products and convolutions of 16-bit numbers are computed as such, and not in float32.
        has_convolution_gradients: whether it has kernels for gradients of convolutions (and for bfloat16 ones).
    """

    device_type: ClassVar[str] = "cpu"
    reads_in_place: ClassVar[bool] = False
    memory_limit_option: ClassVar[str] = ""
    frugal_options: ClassVar[Mapping[str, str]] = {}
    in_16_bits: ClassVar[bool] = False
    has_convolution_gradients: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def large_convolution(self) -> float:
        """Operations of a convolution from which torch's kernels are faster than those of this provider."""
        return math.inf

    def check(self, given: Mapping[str, str]) -> None:
        """Raise a ProviderError for options that it would not heed."""

    def options(self, device: torch.device, given: Mapping[str, str], native: Mapping[str, str]) -> dict[str, str]:
        """Options for tensors on ``device``; what the user has ``given`` stays.

        Args:
            device: where parameters and batches are.
            given: by the user.
            native: options of the provider that belongs to the device.

        Raises:
            ProviderError: the user's options do not go with the device.
        """
        return dict(given)

    def options_in_bfloat16(self, given: Mapping[str, str]) -> dict[str, str] | None:
        """Options with which float32 graphs are computed in bfloat16, or ``None`` where nothing is faster for that."""
        return None

    def prepare(self, options: onnxruntime.SessionOptions) -> None:
        """Set what sessions on its devices need, before the user's own options are set."""

    def starting(self, options: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        """Around the making of a session with these options of the provider."""
        return contextlib.nullcontext()

    def queue(self, device: torch.device, options: Mapping[str, str]) -> Queue | None:
        """How runs are put in order with torch's work on ``device``; ``None`` where they are when they return."""
        return None

    def on_cpu(self, session: onnxruntime.InferenceSession) -> tuple[str, ...] | None:
        """Types of the operators that the CPU executes in its place, one entry per node; ``None`` if unknown."""
        return ()

    def why_missing(self) -> str:
        """Why there are no tensors on its devices that it could reach; empty if there are."""
        return ""

    def why_not_started(self) -> str:
        """What is known to keep it from starting, where it is built in; empty if nothing is."""
        return ""
