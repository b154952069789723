"""Which execution providers a session shall have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
import torch

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.cuda import CUDA, default_options

__all__ = ["check_available", "choose_providers"]

_FOR_DEVICE = {"cpu": "CPUExecutionProvider", "cuda": CUDA}
# they queue on streams too, which are to be the same
_BESIDE_CUDA = {"TensorrtExecutionProvider", "NvTensorRTRTXExecutionProvider"}


def choose_providers(
    device: torch.device,
    providers: Sequence[str] | None = None,
    provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None = None,
) -> list[tuple[str, dict[str, str]]]:
    """Providers with their options, in order of preference, for tensors that live on ``device``.

    Args:
        device: where parameters and batches are.
        providers: names as ONNX Runtime spells them; by default the one that belongs to the device.
        provider_options: one mapping per provider, in the same order, or a mapping from provider name.

    Raises:
        ProviderError: this ONNX Runtime lacks one of them, there is none for the device, or the options do not match.
    """
    if device.type not in _FOR_DEVICE:
        raise ProviderError(
            f"ONNX Runtime cannot reach tensors on device {str(device)!r}. Use accelerator='cpu' or 'cuda'."
        )
    native = _FOR_DEVICE[device.type]
    names = [native] if providers is None else list(providers)
    options = check_available(names, provider_options)
    if device.type == "cuda" and native not in names:
        raise ProviderError(
            f"providers={names!r} cannot reach tensors on {str(device)!r}; {native} must be among them."
        )
    if device.type == "cuda":
        options[native] = default_options(device, options[native])
        for name in _BESIDE_CUDA & options.keys():
            for key in ("device_id", "user_compute_stream"):
                options[name].setdefault(key, options[native][key])
    return [(name, options[name]) for name in names]


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
    if providers is None:
        if provider_options:
            raise ProviderError("provider_options was given without providers. Name the providers they belong to.")
        return {}
    names = list(providers)
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
    unknown = [n for n in given if n not in names]
    if unknown:
        raise ProviderError(f"provider_options names {', '.join(unknown)}, but the providers are {', '.join(names)}.")
    return {name: {str(k): str(v) for k, v in given.get(name, {}).items()} for name in names}
