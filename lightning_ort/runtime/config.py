"""How sessions are made."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args

import onnxruntime
import torch
from onnx import TensorProto, helper

from lightning_ort.environment import has_cpp_compiler
from lightning_ort.errors import ProviderError
from lightning_ort.runtime.arena import share_arena
from lightning_ort.runtime.providers import check_available, native_to, provider_named
from lightning_ort.runtime.providers.cpu import CPU
from lightning_ort.validation import choice, flag, number, shown, whole

if TYPE_CHECKING:
    from lightning_ort.runtime.session import OrtSession

__all__ = ["Placement", "RuntimeConfig"]

Placement = Literal["fastest", "fastest+inductor", "onnxruntime", "torch", "torch-channels-last", "inductor"]


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """How sessions are made.

    Attributes:
        providers: names of execution providers in order of preference; ``None`` takes the one of the device.
        provider_options: one mapping per provider, or a mapping from provider name to options.
        session_options: an ``onnxruntime.SessionOptions``, or a mapping from its attribute names (such as
            ``intra_op_num_threads``) and configuration keys (such as ``session.intra_op.allow_spinning``) to values.
        placement: ``"fastest"`` runs each graph where it takes less time, in ONNX Runtime or in torch;
            ``"fastest+inductor"`` has inductor take part, which takes long to compile and needs a C++ compiler;
            ``"onnxruntime"`` leaves to torch only the operators that ONNX Runtime cannot run; ``"torch"``,
            ``"torch-channels-last"`` and ``"inductor"`` run all of them, natively, with images in that memory format,
            or compiled to C++.
        measure: for ``"fastest"``, run graphs of the CPU in ONNX Runtime and in torch to see where they take less time;
            otherwise rules of the graph alone move operators to torch whose kernels there are the faster ones.
        on_session: called with each session and its serialized model, for debugging.
    """

    providers: Sequence[str] | None = None
    provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None = None
    session_options: onnxruntime.SessionOptions | Mapping[str, Any] | None = None
    placement: Placement = "fastest"
    on_session: Callable[[OrtSession, bytes], None] | None = None
    measure: bool = True

    @property
    def by_speed(self) -> bool:
        """Whether what is faster elsewhere may run there."""
        return self.placement.startswith("fastest")

    def make_session_options(
        self, *, threads: int | None = None, device: torch.device | None = None
    ) -> onnxruntime.SessionOptions:
        """Defaults of this package, overridden by what the user set.

        Args:
            threads: for the operators of one graph; by default as many as torch has.
            device: where it is executed; by default the CPU.

        Raises:
            TypeError: they are neither a SessionOptions nor a mapping, or a value is of another type.
            ValueError: an attribute that SessionOptions does not have, or a value out of range.
        """
        if isinstance(self.session_options, onnxruntime.SessionOptions):
            return self.session_options
        if not (self.session_options is None or isinstance(self.session_options, Mapping)):
            raise TypeError(
                f"session_options={shown(self.session_options)}: expected an onnxruntime.SessionOptions, or a mapping "
                "of its attributes and configuration keys to values."
            )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads or torch.get_num_threads()
        # one allocation for all activations of a training graph doubles its peak memory and gains no time
        options.enable_mem_pattern = False
        # nodes run in the order in which autograd wrote them, which frees activations as early as eager does
        options.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
        # ONNX Runtime's idle threads would spin on the cores that torch's optimizer needs
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if device is not None:
            native_to(device).prepare(options)
        given = self.session_options or {}
        if (device is None or device.type == "cpu") and given.get("enable_cpu_mem_arena", True):
            share_arena(options)
        for key, value in given.items():
            _set(options, key, value)
        return options

    def check(self) -> None:
        """Raise for settings that no session would take, or that none would heed, before there is a graph.

        A session of one node is made where there are settings that only ONNX Runtime knows.

        Raises:
            ProviderError: a provider that this ONNX Runtime lacks, or options that it does not have.
            TypeError, ValueError: a session option of another type, out of range, or unknown.
        """
        choice("placement", self.placement, get_args(Placement))
        if "inductor" in self.placement and not has_cpp_compiler():
            raise ValueError(
                f"placement={self.placement!r} needs a C++ compiler, and there is none: install g++ (apt install g++), "
                "or name one by the environment variable CXX."
            )
        options = check_available(self.providers, self.provider_options)
        for name, given in options.items():
            provider_named(name).check(given)
        made = self.make_session_options()
        _check_ranges(made)
        providers = [(name, dict(values)) for name, values in options.items() if values]
        if not providers and self.session_options is None:
            return
        try:
            _probe(self._quiet(), providers)
        except Exception as error:
            self._blame(error, providers)

    def _quiet(self, key: str | None = None) -> onnxruntime.SessionOptions:
        """Options for a session that writes no file and no line; with ``key`` alone of what the user set."""
        if isinstance(self.session_options, onnxruntime.SessionOptions):
            if self.session_options.enable_profiling or self.session_options.optimized_model_filepath:
                return _silenced(onnxruntime.SessionOptions())  # it cannot be copied
            return self.session_options
        given = self.session_options or {}
        only = given if key is None else {key: given[key]}
        return _silenced(dataclasses.replace(self, session_options=only).make_session_options())

    def _blame(self, error: Exception, providers: Sequence[tuple[str, dict[str, str]]]) -> NoReturn:
        """Name the setting with which no session can be made."""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        try:
            _probe(self._quiet(), [])
        except Exception:
            for key in self.session_options if isinstance(self.session_options, Mapping) else ():
                try:
                    _probe(self._quiet(key), [])
                except Exception:
                    value = shown(self.session_options[key])  # type: ignore[index]
                    raise ValueError(
                        f"session_options[{key!r}]={value} is refused by ONNX Runtime: {reason}"
                    ) from error
            raise ValueError(f"session_options are refused by ONNX Runtime: {reason}") from error
        listed = ", ".join(f"{name}: {values}" for name, values in providers)
        raise ProviderError(f"provider_options are refused by ONNX Runtime ({listed}): {reason}") from error


_THREADS = ("intra_op_num_threads", "inter_op_num_threads")
_RANGES = {**dict.fromkeys(_THREADS, (0, 4096)), "log_severity_level": (-1, 4), "log_verbosity_level": (0, 1000)}


def _set(options: onnxruntime.SessionOptions, key: Any, value: Any) -> None:
    """Set an attribute or a configuration key.

    Raises:
        TypeError, ValueError: see :meth:`RuntimeConfig.make_session_options`.
    """
    name = f"session_options[{key!r}]"
    if not isinstance(key, str):
        raise TypeError(f"session_options has the key {shown(key)}: expected names of attributes, which are strings.")
    if "." in key:
        if isinstance(value, bool):
            value = int(value)
        if not isinstance(value, str):
            number(name, value)
        try:
            options.add_session_config_entry(key, str(value))
        except RuntimeError as error:
            raise ValueError(f"{name}={shown(value)} is refused by ONNX Runtime: {error}") from error
        return
    known = [a for a in dir(options) if not a.startswith("_") and not callable(getattr(options, a))]
    if key not in known:
        raise ValueError(f"session_options has no {key!r}. Attributes: {', '.join(known)}; other keys contain a dot.")
    present = getattr(options, key)
    members = getattr(type(present), "__members__", None)
    if members is not None and not isinstance(value, type(present)):  # by its name, as a YAML file has it
        if not isinstance(value, str) or value not in members:
            expected = f"{name}={shown(value)}: expected {', '.join(members)}, or {type(present).__name__} itself."
            raise ValueError(expected) if isinstance(value, str) else TypeError(expected)
        value = members[value]
    if isinstance(present, bool):
        flag(name, value)
    elif key in _RANGES:
        low, high = _RANGES[key]
        whole(name, value, low=low, high=high)
    elif not isinstance(value, type(present)) and not (isinstance(present, str) and isinstance(value, os.PathLike)):
        raise TypeError(f"{name}={shown(value)}: expected a {type(present).__name__}.")
    written = key in ("optimized_model_filepath", "profile_file_prefix") and value
    # a profile would be left out without a word
    if written and not os.path.isdir(os.path.dirname(os.fspath(value)) or "."):
        raise ValueError(f"{name}={shown(value)}: the folder does not exist.")
    setattr(options, key, value)


def _check_ranges(options: onnxruntime.SessionOptions) -> None:
    for key, (low, high) in _RANGES.items():
        whole(f"session_options.{key}", getattr(options, key), low=low, high=high)


def _silenced(options: onnxruntime.SessionOptions) -> onnxruntime.SessionOptions:
    options.enable_profiling, options.optimized_model_filepath, options.log_severity_level = False, "", 4
    return options


def _probe(options: onnxruntime.SessionOptions, providers: Sequence[tuple[str, dict[str, str]]]) -> None:
    """Make a session of one node."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    chosen: list[Any] = [*providers, CPU.name]
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=chosen, enable_fallback=0)
