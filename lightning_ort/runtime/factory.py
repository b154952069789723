"""Where sessions come from: providers, their options and those of sessions, resolved once and handed on."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import onnxruntime
import torch
from onnxruntime.capi import _pybind_state

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.config import Placement, RuntimeConfig
from lightning_ort.runtime.providers import check_available, native_to, resolve
from lightning_ort.runtime.providers.cpu import CPU
from lightning_ort.runtime.providers.provider import Provider
from lightning_ort.runtime.session import OrtSession
from lightning_ort.validation import shown

__all__ = ["SessionFactory", "factory_of"]

# The first crashes the creation of some sessions of ONNX Runtime 1.19: 1 / n times a cast value, the gradient of a
# weighted mean. The second refuses bounds that are neither float32 nor float16, and the session with them.
_NEVER = ["DivMulFusion", "FuseReluClip"]
# The first keeps the factor of a product as a float, also where the matrices are doubles; the second makes an operator
# that ONNX Runtime 1.19 has no double kernel for; the third takes what is 0 or 1 as a float for nothing to be computed.
_NOT_FOR_DOUBLES = ["MatMulScaleFusion", "MatmulTransposeFusion", "NoopElimination"]
# It moves a factor behind a sum, which then no longer overflows as its terms would have.
_NOT_FOR_EXTREMES = ["MatMulScaleFusion"]
# It would keep a value for its second use where the graph computes it again.
_WOULD_KEEP = ["CommonSubexpressionElimination"]

_OPTIMIZER = re.compile(r"onnxruntime/core/optimizer/(?:\w+/)*(\w+)\.cc")
"""where an exception says that it comes from"""

_log = logging.getLogger(__name__)


class SessionFactory:
    """Makes sessions for tensors on one device.

    What torch is set to when a factory is made (threads, TF32, deterministic algorithms) holds for all its sessions.

    Args:
        config: what the user asked for.
        device: what computes; inputs and outputs live there or on the CPU.

    Raises:
        ProviderError: this ONNX Runtime lacks a provider that was asked for, none is for the device, or the options do
            not match.
        TypeError, ValueError: see :meth:`RuntimeConfig.make_session_options`.

    Attributes:
        providers: names of the execution providers to their options, in order of preference.
        provider: the one whose kernels count where operators are placed: the first that works on the device's memory.
    """

    providers: Mapping[str, Mapping[str, str]]
    provider: Provider

    def __init__(self, config: RuntimeConfig | None = None, device: torch.device | None = None) -> None:
        self.config = RuntimeConfig() if config is None else config
        self.device = torch.device("cpu") if device is None else device
        self._native = native_to(self.device)
        resolved = resolve(self.device, self.config.providers, self.config.provider_options)
        self._chosen = dict(resolved)
        self.providers = {provider.name: options for provider, options in resolved}
        first, *_ = self._chosen
        reaching = [p for p in self._chosen if p.device_type == self.device.type]
        if first not in reaching:  # on the CPU, it works on copies elsewhere
            first = Provider(first.name) if self._native is CPU else reaching[0]
        self.provider = first
        self._queue = self._native.queue(self.device, self.providers.get(self._native.name, {}))
        self._threads = torch.get_num_threads()
        self._make_options()

    def _make_options(self) -> None:
        """For graphs on all threads, and for those that one is enough for."""
        made = [self.config.make_session_options(threads=n, device=self.device) for n in (self._threads, 1)]
        self._options, self._small_options = made

    @property
    def placement(self) -> Placement:
        """Who may run what."""
        return self.config.placement

    @property
    def is_watched(self) -> bool:
        """Whether somebody looks at the sessions."""
        return self.config.on_session is not None

    def session_options(self, *, small: bool = False) -> onnxruntime.SessionOptions:
        """Options of the sessions; ``small`` are graphs of too little work for a second thread."""
        return self._small_options if small else self._options

    @property
    def only_cpu(self) -> bool:
        """Whether ONNX Runtime's own kernels for the CPU run all operators of a session."""
        return [provider.name for provider in self._chosen] == [CPU.name]

    def in_one_thread(self, *, small: bool = False) -> bool:
        """Whether one thread of the CPU runs all operators of a session."""
        options = self.session_options(small=small)
        alone = getattr(options, "use_per_session_threads", True)  # ONNX Runtime 1.19 has no other threads
        return self.only_cpu and alone and options.intra_op_num_threads == 1

    @property
    def may_take_one_thread(self) -> bool:
        """Whether :meth:`on_one_thread` makes a difference, and the user has not set the number of threads."""
        return self.in_one_thread(small=True) and not self.in_one_thread()

    def on_one_thread(self) -> SessionFactory:
        """The same with the options of small graphs for all."""
        made = copy.copy(self)
        made._options, made._threads = self._small_options, 1
        return made

    def with_options(self, **values: Any) -> SessionFactory:
        """The same with further session options, for sessions that nobody watches.

        ``onnxruntime.SessionOptions`` of the user cannot be copied; of them, the number of threads is kept.
        """
        given = self.config.session_options
        if isinstance(given, onnxruntime.SessionOptions):
            given = {"intra_op_num_threads": given.intra_op_num_threads}
        made = copy.copy(self)
        made.config = dataclasses.replace(self.config, session_options={**(given or {}), **values}, on_session=None)
        made._make_options()
        return made

    def as_written(self) -> SessionFactory:
        """The same without graph optimization."""
        return self.with_options(graph_optimization_level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL)

    def in_bfloat16(self) -> SessionFactory | None:
        """The same for graphs that may compute in bfloat16, or ``None`` if the provider has no kernels for that."""
        first, *_ = self._chosen
        options = first.options_in_bfloat16(self._chosen[first])
        if options is None:
            return None
        made = copy.copy(self)
        made._chosen = {**self._chosen, first: options}
        made.providers = {provider.name: values for provider, values in made._chosen.items()}
        return made

    def session(
        self,
        model: bytes,
        *,
        double: bool = False,
        small: bool = False,
        repeats: bool = False,
        extreme: bool = False,
        same_shapes: bool = False,
        places: Mapping[str, str] | None = None,
    ) -> OrtSession:
        """Make a session for one graph.

        Args:
            model: the serialized ONNX model.
            double: the graph computes in float64.
            small: the graph is too little work for a second thread.
            repeats: the graph computes values twice on purpose.
            extreme: the graph multiplies by a constant by which tensors may overflow.
            same_shapes: the caller passes tensors of the same shapes at each run.
            places: descriptions of nodes for errors about values, see
                :func:`~lightning_ort.runtime.value_errors.refusal`.

        Raises:
            ProviderError: the session did not get a provider that was asked for.
            onnxruntime errors: the model is not accepted.
        """
        disabled = _NEVER + (_NOT_FOR_DOUBLES if double else []) + (_WOULD_KEEP if repeats else [])
        disabled += _NOT_FOR_EXTREMES if extreme else []
        inner = self._optimized(model, disabled, small=small)
        got = inner.get_providers()
        lost = [provider for provider in self._chosen if provider.name not in got]
        if lost:
            why = "; ".join(filter(None, [provider.why_not_started() for provider in lost]))
            raise ProviderError(
                f"ONNX Runtime did not give the session {', '.join(p.name for p in lost)} (it has {', '.join(got)}): "
                f"the provider is built in, but could not start{': ' + why if why else ''}. Its own message is in "
                "ONNX Runtime's log (session_options={'log_severity_level': 0})."
            )
        on_cpu = self._native.on_cpu(inner)
        session = OrtSession(
            inner,
            self.device,
            queue=self._queue,
            on_cpu=on_cpu,
            in_place=all(provider.reads_in_place for provider in self._chosen),
            same_shapes=same_shapes,
            places=places,
        )
        if self.config.on_session is not None:
            self.config.on_session(session, model)
        return session

    def _optimized(self, model: bytes, disabled: Sequence[str], *, small: bool) -> onnxruntime.InferenceSession:
        """Where one of ONNX Runtime's optimizers fails at a graph, that runs as it is written."""
        try:
            return self._inner(model, self.session_options(small=small), disabled)
        except (_pybind_state.Fail, _pybind_state.RuntimeException) as error:
            found = _OPTIMIZER.search(str(error))
            if found is None:
                raise
            _log.info("ONNX Runtime's %s fails at a graph, which runs without optimization: %s", found[1], error)
            return self._inner(model, self.as_written().session_options(small=small), disabled)

    def _inner(
        self, model: bytes, options: onnxruntime.SessionOptions, disabled: Sequence[str]
    ) -> onnxruntime.InferenceSession:
        try:
            with self._native.starting(self.providers.get(self._native.name, {})):
                return onnxruntime.InferenceSession(
                    model,
                    options,
                    providers=[(name, dict(values)) for name, values in self.providers.items()],
                    disabled_optimizers=disabled,
                    enable_fallback=0,
                )
        except (RuntimeError, ValueError) as error:
            # errors about the model are exceptions of ONNX Runtime's own
            first, *_ = self._chosen
            why = first.why_not_started()
            raise ProviderError(f"{first.name} does not start: {error}{' (' + why + ')' if why else ''}") from error


def factory_of(providers: Sequence[Any] | None, provider_options: Any, session_options: Any) -> SessionFactory:
    """A factory from the arguments of an ``onnxruntime.InferenceSession``, once all of them are known to be heeded.

    Raises:
        ProviderError, TypeError, ValueError: see :class:`SessionFactory` and :meth:`RuntimeConfig.check`.
    """
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
