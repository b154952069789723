"""Which execution providers a session shall have. One file per provider; nothing outside of here names one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnxruntime
import torch

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.providers.cpu import CPU
from lightning_ort.runtime.providers.cuda import CUDA
from lightning_ort.runtime.providers.openvino import OPENVINO
from lightning_ort.runtime.providers.provider import Provider
from lightning_ort.runtime.providers.tensorrt import TENSORRT, TENSORRT_RTX
from lightning_ort.validation import is_number, shown

__all__ = ["check_available", "native_to", "provider_named", "reachable_device_type", "resolve"]

_PROVIDERS = {provider.name: provider for provider in (CPU, CUDA, TENSORRT, TENSORRT_RTX, OPENVINO)}
_NATIVE: dict[str, Provider] = {"cpu": CPU, "cuda": CUDA}
"""by the type of the torch devices that belong to it"""


def provider_named(name: str) -> Provider:
    """What is known of the provider ``name``, which may be nothing."""
    return _PROVIDERS.get(name) or Provider(name)


def native_to(device: torch.device) -> Provider:
    """The provider that belongs to ``device``.

    Raises:
        ProviderError: there is none.
    """
    if device.type not in _NATIVE:
        raise ProviderError(
            f"ONNX Runtime cannot reach tensors on device {str(device)!r}. Use accelerator='cpu' or 'cuda'."
        )
    return _NATIVE[device.type]


def reachable_device_type() -> str:
    """The type of device that torch and ONNX Runtime both reach here: ``"cuda"``, else ``"cpu"``."""
    return next(kind for kind, provider in reversed(_NATIVE.items()) if not provider.why_missing())


def resolve(
    device: torch.device,
    providers: Sequence[str] | None = None,
    provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None = None,
) -> list[tuple[Provider, dict[str, str]]]:
    """Providers with their options, in order of preference, for tensors that live on ``device``.

    Args:
        device: where parameters and batches are.
        providers: names as ONNX Runtime spells them; by default the one that belongs to the device.
        provider_options: one mapping per provider, in the same order, or a mapping from provider name.

    Raises:
        ProviderError: this ONNX Runtime lacks one of them, there is none for the device, or the options do not match.
    """
    native = native_to(device)
    names = [native.name] if providers is None else list(providers)
    given = check_available(names, provider_options)
    if native is not CPU and native.name not in names:
        raise ProviderError(
            f"providers={names!r} cannot reach tensors on {str(device)!r}; {native.name} must be among them."
        )
    own = native.options(device, given.get(native.name, {}), {})
    chosen = []
    for provider in map(provider_named, names):
        options = own if provider is native else given[provider.name]
        if provider is not native and provider.device_type == device.type:
            options = provider.options(device, options, own)
        chosen.append((provider, options))
    return chosen


def check_available(
    providers: Sequence[str] | None,
    provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, dict[str, str]]:
    """Provider name to its options; ``None`` for ``providers`` leaves the choice open and checks nothing.

    Raises:
        ProviderError: this ONNX Runtime lacks one of them, or the options do not match.
    """
    if isinstance(providers, str):
        raise ProviderError(f"providers={providers!r} is one name. Give a list of names: providers=[{providers!r}].")
    if provider_options is not None and (
        isinstance(provider_options, (str, bytes)) or not isinstance(provider_options, (Mapping, Sequence))
    ):
        raise ProviderError(
            f"provider_options={shown(provider_options)}: expected one mapping per provider, or a mapping from "
            "provider name to options."
        )
    if providers is None:
        if provider_options:
            raise ProviderError("provider_options was given without providers. Name the providers they belong to.")
        return {}
    if isinstance(providers, Mapping) or not isinstance(providers, Iterable):
        raise ProviderError(f"providers={shown(providers)}: expected a list of names.")
    names = list(providers)
    for name in names:
        if not isinstance(name, str):
            pair = " Options go into provider_options." if isinstance(name, tuple) else ""
            raise ProviderError(f"providers holds {shown(name)}: expected names of execution providers.{pair}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ProviderError(f"providers={names!r} names {', '.join(twice)} twice.")
    if not names:
        raise ProviderError("providers=[] names no execution provider. Leave it out, or name at least one.")
    available = onnxruntime.get_available_providers()
    missing = [n for n in names if n not in available]
    if missing:
        raise ProviderError(
            f"providers={names!r}: this ONNX Runtime ({onnxruntime.__version__}) has no {', '.join(missing)}. "
            f"It has {', '.join(available)}. Choose among these or install the build that has it."
        )
    return _options(names, provider_options)


def _options(
    names: Sequence[str], given: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None
) -> dict[str, dict[str, str]]:
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        if len(given) != len(names):
            raise ProviderError(
                f"provider_options has {len(given)} entries for {len(names)} providers ({', '.join(names)}). "
                "Give one mapping per provider, in the same order, or a mapping from provider name to options."
            )
        given = dict(zip(names, given, strict=True))
    unknown = [str(n) for n in given if n not in names]
    if unknown:
        raise ProviderError(f"provider_options names {', '.join(unknown)}, but the providers are {', '.join(names)}.")
    return {name: _as_strings(name, given.get(name, {})) for name in names}


def _as_strings(provider: str, given: Any) -> dict[str, str]:
    """Options of one provider, whose values are strings to ONNX Runtime."""
    if not isinstance(given, Mapping):
        raise ProviderError(f"provider_options of {provider} are {shown(given)}: expected a mapping of its options.")
    for key, value in given.items():
        if not isinstance(key, str):
            raise ProviderError(f"provider_options of {provider} have the key {shown(key)}: expected strings.")
        if not isinstance(value, (str, bool)) and not (is_number(value) and abs(value) != float("inf")):
            raise ProviderError(
                f"provider_options of {provider} have {key!r}: {shown(value)}; expected a string or a finite number."
            )
    return {key: str(value) for key, value in given.items()}
