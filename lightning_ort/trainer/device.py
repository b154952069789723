"""Where an ORTTrainer computes, with which sessions, and with whom."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lightning_ort.distributed.processes import Processes, join
from lightning_ort.errors import ProviderError
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.providers import check_available, native_to
from lightning_ort.runtime.providers.cpu import CPU
from lightning_ort.trainer.options import ORTTrainerOptions

__all__ = ["choose_device", "join_processes", "runtime_config"]


def choose_device(options: ORTTrainerOptions) -> torch.device:
    """The device that ``device.id`` names; its default, ``"cuda"``, becomes the CPU where there is no such device.

    ``distributed.local_rank`` is the number of a device whose number is not given.

    Raises:
        ValueError: torch knows no such device, or ONNX Runtime cannot reach it.
        ProviderError: it is not to be had on this machine.
    """
    name = options.device.id
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"options['device.id'] = {name!r} is no device. Use 'cpu', 'cuda' or 'cuda:0'.") from None
    try:
        reason = native_to(device).why_missing()
    except ProviderError:
        raise ValueError(
            f"options['device.id'] = {name!r}: ONNX Runtime reaches 'cpu' and 'cuda' devices only."
        ) from None
    if device.type == "cpu":
        return device
    if not reason:
        return device if device.index is not None else torch.device("cuda", _number(options))
    if options._was_given("device.id"):
        raise ProviderError(f"options['device.id'] = {name!r}, but {reason}. Use 'cpu'.")
    warnings.warn(
        f"device.id is 'cuda' by default, but {reason}: training on the CPU. Give device.id='cpu' to say so.",
        UserWarning,
        stacklevel=4,
    )
    return torch.device("cpu")


def _number(options: ORTTrainerOptions) -> int:
    """Of a CUDA device."""
    if not options._was_given("distributed.local_rank"):
        return torch.cuda.current_device()
    rank, count = int(options.distributed.local_rank), torch.cuda.device_count()
    if rank >= count:
        raise ProviderError(
            f"options['distributed.local_rank'] = {rank}, but this machine has {count} CUDA devices, one for each "
            "process on it from 0. Start fewer processes, or give 'device.id'."
        )
    return rank


def join_processes(options: ORTTrainerOptions, device: torch.device) -> Processes | None:
    """The other processes of a training on several, or ``None``; errors and warnings as of ``join``."""
    asked = options.distributed
    return join(
        asked.world_rank,
        asked.world_size,
        asked.data_parallel_size,
        device,
        adasum=asked.enable_adasum,
        option="options['distributed.{}']",
    )


def runtime_config(options: ORTTrainerOptions, device: torch.device) -> RuntimeConfig:
    """Providers and session options as the options ask.

    Raises:
        ValueError: ``device.mem_limit`` on the CPU, where ONNX Runtime has no limit.
        ProviderError: a provider that this ONNX Runtime lacks.
    """
    native = native_to(device)
    given = options.provider_options
    # also says which of them are no mappings
    check_available(list(given) or None, given or None)
    providers = {name: dict(values) for name, values in given.items()}
    if native.name not in providers:
        # the first that has a kernel gets a node, and the CPU's has most of them
        own: dict[str, dict[str, Any]] = {native.name: {}}
        providers = own | providers if CPU.name in providers else providers | own
    limit = options.device.mem_limit
    if limit and not native.memory_limit_option:
        raise ValueError(
            f"options['device.mem_limit'] = {limit}: ONNX Runtime has a limit for CUDA devices only. Leave it out on "
            "the CPU."
        )
    if limit:
        providers[native.name][native.memory_limit_option] = str(limit)
    if options.utils.memory_efficient_gradient:
        providers[native.name] |= native.frugal_options
    check_available(list(providers), providers)
    measure = not options.debug.deterministic_compute
    return RuntimeConfig(list(providers), providers, _session_options(options), options.placement, measure=measure)


def _session_options(options: ORTTrainerOptions) -> Any:
    wanted: dict[str, Any] = {}
    if options.debug.deterministic_compute:
        wanted["use_deterministic_compute"] = True
    if options.utils.memory_efficient_gradient:
        # memory of activations goes back to the system after each run, and is not kept for the next
        wanted["enable_cpu_mem_arena"] = False
    given = options.session_options
    if given is None:
        return wanted
    for name, value in wanted.items():
        setattr(given, name, value)
    return given
