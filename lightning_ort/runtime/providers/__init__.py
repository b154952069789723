"""Which execution providers a session shall have."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.providers.cuda import CUDA, default_options
from lightning_ort.validation import is_number, shown

__all__ = ["check_available", "choose_providers", "gives", "has_training_kernels", "has_vector_where"]

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


@functools.cache
def has_vector_where() -> bool:
    """Whether the CPU kernel of ``Where`` takes several elements at a time.

    Of 100,000 numbers of random sign, ONNX Runtime 1.19 and 1.20 choose in 380 µs, 1.22 to 1.31 in 60, as long as a
    comparison and a product take them.
    """
    return tuple(int(n) for n in onnxruntime.__version__.split(".")[:2]) >= (1, 22)


@functools.cache
def gives(op_type: str, number: float, expected: float, *, double: bool = False) -> bool:
    """Whether the kernel of an operator of one argument makes ``expected`` of ``number``, in float32 or in float64.

    ONNX Runtime 1.19 makes NaN of the root of infinity, 1 of the error function of NaN, and a little more than 0 of the
    exponential of -inf in float64.
    """
    dtype, element = (np.float64, TensorProto.DOUBLE) if double else (np.float32, TensorProto.FLOAT)
    x, y = (helper.make_tensor_value_info(name, element, [16]) for name in ("x", "y"))
    session = _session(helper.make_node(op_type, ["x"], ["y"]), [x], y)
    (result,) = session.run(None, {"x": np.full(16, number, dtype)})
    return bool(np.array_equal(result, np.full(16, expected, dtype), equal_nan=True))


@functools.cache
def has_training_kernels() -> bool:
    """Whether this build has the operators of gradients (``onnxruntime-training``), which stock builds lack."""
    y, dy, dx = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("y", "dy", "dx"))
    node = helper.make_node("ReluGrad", ["dy", "y"], ["dx"], domain="com.microsoft")
    try:
        _session(node, [dy, y], dx)
    except Exception:  # its errors have no common class; each of them means no
        return False
    return True


def _session(node: onnx.NodeProto, inputs: list[onnx.ValueInfoProto], output: onnx.ValueInfoProto) -> Any:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "probe", inputs, [output]), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
