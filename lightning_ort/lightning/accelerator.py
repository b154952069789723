"""Lightning's accelerator for whatever device ONNX Runtime reaches."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from lightning_ort.environment import require_onnxruntime
from lightning_ort.lightning_packages import Accelerator, MisconfigurationException, pl
from lightning_ort.validation import is_whole, shown

if TYPE_CHECKING:
    from lightning.fabric.accelerators.registry import _AcceleratorRegistry
    from lightning.fabric.utilities.types import _DEVICE

__all__ = ["ORTAccelerator"]


_MOST = 4096
"""devices of one machine, beyond which a number is a slip of the pen"""


class ORTAccelerator(Accelerator):
    """``Trainer(accelerator="ort", strategy="ort")``: CUDA where ONNX Runtime and torch both have it, else the CPU."""

    @override
    def setup_device(self, device: torch.device) -> None:
        _accelerator_of(device).setup_device(device)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """
        Raises:
            MisconfigurationException: the strategy is another than ``"ort"``, which would not run in ONNX Runtime.
        """
        from lightning_ort.lightning.strategy import ORTStrategy

        if not isinstance(trainer.strategy, ORTStrategy):
            raise MisconfigurationException(
                f"accelerator='ort' chooses a device for strategy='ort', but the strategy is "
                f"{type(trainer.strategy).__name__}, which would run in torch. Use Trainer(accelerator='ort', "
                "strategy='ort')."
            )
        _accelerator_of(trainer.strategy.root_device).setup(trainer)

    @override
    def teardown(self) -> None:
        if _kind() == "cuda":
            pl.accelerators.CUDAAccelerator().teardown()

    @override
    def get_device_stats(self, device: _DEVICE) -> dict[str, Any]:
        """Use of the device: torch's memory statistics on CUDA, load and memory (from psutil) on the CPU."""
        device = torch.device(device)
        return _accelerator_of(device).get_device_stats(device)

    @staticmethod
    @override
    def parse_devices(devices: int | str | Sequence[int]) -> list[int]:
        """Numbers of the devices that ``Trainer(devices=...)`` asks for.

        Raises:
            MisconfigurationException: there are fewer, or it is no number.
        """
        kind, given = _kind(), devices
        if isinstance(devices, str):
            listed = [part.strip() for part in devices.strip("[]").split(",") if part.strip()]
            if devices == "auto":
                devices = ORTAccelerator.auto_device_count()
            elif listed and all(part.lstrip("-").isdigit() for part in listed):
                devices = [int(n) for n in listed] if "," in devices or "[" in devices else int(listed[0])
            else:
                raise MisconfigurationException(f"devices={devices!r}: expected a number, a list of them, or 'auto'.")
        numbered = isinstance(devices, (list, tuple)) and all(is_whole(n) for n in devices)
        if not (is_whole(devices) or numbered):
            raise MisconfigurationException(f"devices={shown(given)}: expected a number, a list of them, or 'auto'.")
        there = ORTAccelerator.auto_device_count()
        if isinstance(devices, numbers.Integral):
            if int(devices) > _MOST:
                raise MisconfigurationException(
                    f"accelerator='ort' was given devices={given!r}: expected at most {_MOST} on one machine. Use "
                    "num_nodes for further machines."
                )
            # processes on the CPU are as many as asked for
            chosen = list(range(there if devices == -1 else int(devices)))
        else:
            chosen = list(devices)  # type: ignore[arg-type]  # a list, as was seen
        if kind == "cpu" and chosen and min(chosen) >= 0:
            return chosen
        if not chosen or any(n not in range(there) for n in chosen):
            what = "processes" if kind == "cpu" else f"GPUs; torch and ONNX Runtime both reach {there}"
            raise MisconfigurationException(
                f"accelerator='ort' was given devices={given!r}: expected a number of {what}. Use devices=1."
            )
        if len(set(chosen)) < len(chosen):
            raise MisconfigurationException(
                f"accelerator='ort' was given devices={given!r}: expected each GPU once: two processes would share "
                "its memory and wait for each other."
            )
        return chosen

    @staticmethod
    @override
    def get_parallel_devices(devices: Sequence[int]) -> list[torch.device]:
        return [torch.device("cpu") if _kind() == "cpu" else torch.device("cuda", n) for n in devices]

    @staticmethod
    @override
    def auto_device_count() -> int:
        """All GPUs, or one process on the CPU."""
        return torch.cuda.device_count() if _kind() == "cuda" else 1

    @staticmethod
    @override
    def is_available() -> bool:
        return True

    @staticmethod
    @override
    def name() -> str:
        return "ort"

    @classmethod
    @override
    def register_accelerators(cls, accelerator_registry: _AcceleratorRegistry) -> None:
        accelerator_registry.register(cls.name(), cls, description="the device that ONNX Runtime reaches")


def _kind() -> str:
    """The type of device, of those that ONNX Runtime has execution providers for, that torch has as well.

    Raises:
        OnnxRuntimeImportError: there is no usable ONNX Runtime.
    """
    require_onnxruntime()
    from lightning_ort.runtime.providers import reachable_device_type

    return reachable_device_type()


def _accelerator_of(device: torch.device) -> Accelerator:
    """Lightning's own accelerator for ``device``."""
    return pl.accelerators.CUDAAccelerator() if device.type == "cuda" else pl.accelerators.CPUAccelerator()
