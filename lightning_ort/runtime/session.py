"""An ONNX Runtime session that reads and writes torch memory in place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.memory import address_of
from lightning_ort.runtime.providers import choose_providers
from lightning_ort.runtime.providers.cuda import CUDA, Queue, why_not_started
from lightning_ort.runtime.providers.openvino import bind_bfloat16
from lightning_ort.runtime.tensors import NUMPY
from lightning_ort.runtime.value_errors import refusal

__all__ = ["OrtSession"]

# sets of addresses remembered per session: gradients of the last step are alive while the next are written
_BINDINGS = 4
# Crashes the creation of some sessions of ONNX Runtime 1.19: 1 / n times a cast value, the gradient of a weighted mean.
_NEVER = ["DivMulFusion"]
# The first keeps the factor of a product as a float, also where the matrices are doubles; the second makes an operator
# that ONNX Runtime 1.19 has no double kernel for.
_NOT_FOR_DOUBLES = ["MatMulScaleFusion", "MatmulTransposeFusion"]
# It would keep a value for its second use where the graph computes it again.
_WOULD_KEEP = ["CommonSubexpressionElimination"]


class _Binding:
    """One IOBinding and the addresses it holds."""

    __slots__ = ("inputs", "io", "on_host", "outputs")

    def __init__(self, io: onnxruntime.IOBinding, n_inputs: int, n_outputs: int) -> None:
        self.io, self.on_host = io, False
        self.inputs: list[Any] = [None] * n_inputs
        self.outputs: list[Any] = [None] * n_outputs


class OrtSession:
    """A session for one graph, run on tensors that are bound by address.

    Args:
        model: the serialized ONNX model.
        config: providers and options.
        device: what computes; inputs and outputs live there or on the CPU.
        double: the graph computes in float64.
        small: the graph is too little work for a second thread.
        repeats: the graph computes values twice on purpose.
        same_shapes: the caller passes tensors of the same shapes at each run.
        places: descriptions of nodes for errors about values, see :func:`~lightning_ort.runtime.value_errors.refusal`.

    Raises:
        ProviderError: the session did not get a provider that was asked for.
        onnxruntime errors: the model is not accepted.

    Attributes:
        inner: ONNX Runtime's own object, for what it tells of itself.
        on_cpu: types of the operators of a session on a GPU that the CPU executes, one entry per node; ONNX Runtime
            copies what they read and give. ``None`` where it does not tell: before 1.24, and with the user's own
            ``SessionOptions``, unless they ask for it.
    """

    def __init__(
        self,
        model: bytes,
        config: RuntimeConfig,
        device: torch.device,
        *,
        double: bool = False,
        small: bool = False,
        repeats: bool = False,
        same_shapes: bool = False,
        places: Mapping[str, str] | None = None,
    ) -> None:
        wanted = choose_providers(device, config.providers, config.provider_options)
        disabled = _NEVER + (_NOT_FOR_DOUBLES if double else []) + (_WOULD_KEEP if repeats else [])
        options = config.make_session_options(threads=1 if small else None, device=device)
        self.inner = _session(model, options, wanted, disabled)
        got = self.inner.get_providers()
        lost = [name for name, _ in wanted if name not in got]
        if lost:
            why = "; ".join(filter(None, map(why_not_started, lost)))
            raise ProviderError(
                f"ONNX Runtime did not give the session {', '.join(lost)} (it has {', '.join(got)}): the provider is "
                f"built in, but could not start{': ' + why if why else ''}. Its own message is in ONNX Runtime's log "
                "(session_options={'log_severity_level': 0})."
            )
        self._queue = Queue(device, dict(wanted)[CUDA]) if device.type == "cuda" else None
        self.on_cpu = _on_cpu(self.inner) if device.type == "cuda" else ()
        # what the CPU has a part in must be waited for: its buffers would be used again while copies are under way
        self._waiting = _run_options()
        alone = self.on_cpu == ()
        self._at_once = _run_options(disable_synchronize_execution_providers="1") if alone else self._waiting
        self._device = (device.type, device.index or 0)
        self._inputs = [i.name for i in self.inner.get_inputs()]
        self._outputs = [o.name for o in self.inner.get_outputs()]
        self._place: Callable[[torch.Tensor], Any] = torch.Tensor.data_ptr if same_shapes else _address_and_shape
        self._places = places or {}
        self._bindings: dict[int, _Binding] = {}
        self._latest: _Binding | None = None
        if config.on_session is not None:
            config.on_session(self, model)

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Compute ``outputs`` from ``inputs``, both in the order of the graph; outputs must be contiguous.

        Raises:
            RefusedValueError: an operator does not take the values that it was given.
            onnxruntime errors: anything else.
        """
        last = outputs[-1].data_ptr()
        binding = self._bindings.get(last)
        if binding is None:
            if len(self._bindings) == _BINDINGS:
                del self._bindings[next(iter(self._bindings))]
            binding = _Binding(self.inner.io_binding(), len(self._inputs), len(self._outputs))
            self._bindings[last] = binding
        # Re-binding costs more than the rest of a small step, so only what has moved is bound again.
        place_of, bound = self._place, binding.inputs
        copies = []  # alive until the run has ended
        for i, tensor in enumerate(inputs):
            if not tensor.is_contiguous():
                tensor = tensor.contiguous()
                copies.append(tensor)
            place = place_of(tensor)
            if place != bound[i]:
                binding.on_host |= self._bind(binding.io.bind_input, self._inputs[i], tensor)
                bound[i] = place
        bound = binding.outputs
        for i, tensor in enumerate(outputs):
            place = place_of(tensor)
            if place != bound[i]:
                binding.on_host |= self._bind(binding.io.bind_output, self._outputs[i], tensor)
                bound[i] = place
        self._latest = binding
        self._execute(binding.io, waiting=binding.on_host)

    def run_unbound(self, inputs: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """All outputs as arrays of their own memory, where their shapes are not known before."""
        binding = self.inner.io_binding()
        contiguous = [t.contiguous() for t in inputs]
        for name, tensor in zip(self._inputs, contiguous, strict=True):
            self._bind(binding.bind_input, name, tensor)
        for name in self._outputs:
            binding.bind_output(name, "cpu")
        self._execute(binding, waiting=True)
        return binding.copy_outputs_to_cpu()

    def run_again(self) -> None:
        """Like the last :meth:`run`, on the same memory, which must still be what it was."""
        assert self._latest is not None
        self._execute(self._latest.io, waiting=self._latest.on_host)

    def _execute(self, io: onnxruntime.IOBinding, *, waiting: bool) -> None:
        """Run; ``waiting`` for a GPU until it is done, because memory of the host takes part."""
        try:
            if self._queue is None:
                self.inner.run_with_iobinding(io, self._waiting)
                return
            with self._queue.in_order():
                self.inner.run_with_iobinding(io, self._waiting if waiting else self._at_once)
        except Exception as error:
            self.explain(error)

    def repeat(self) -> Callable[[], None]:
        """:meth:`run_again` as a function, for callers in whose loop each call counts; void after another run.

        What it raises is for :meth:`explain`.
        """
        assert self._latest is not None
        if self._queue is None:
            return functools.partial(self.inner.run_with_iobinding, self._latest.io, self._waiting)
        return self.run_again

    def explain(self, error: Exception) -> NoReturn:
        """Raise what ONNX Runtime raised, as a RefusedValueError if it is about values."""
        refused = refusal(error, self._places)
        if refused is None:
            raise error
        raise refused from error

    @property
    def has_run(self) -> bool:
        """Whether it has run at all."""
        return bool(self._bindings)

    def addresses(self) -> dict[str, int]:
        """Name of each input and output to where it was in the last run that bound other memory."""
        *_, binding = self._bindings.values()
        return {
            name: place[0] if isinstance(place, tuple) else place
            for names, places in ((self._inputs, binding.inputs), (self._outputs, binding.outputs))
            for name, place in zip(names, places, strict=True)
        }

    def _bind(self, bind: Any, name: str, tensor: torch.Tensor) -> bool:
        """Bind; whether it is memory of the CPU for a session on a GPU."""
        element, device, on_host = NUMPY.get(tensor.dtype), self._device, False
        if self._queue is not None and tensor.device.type == "cpu":
            device, on_host = ("cpu", 0), True
        if element is None:
            bind_bfloat16(bind, name, device, tensor)
        else:
            bind(name, *device, element, tuple(tensor.shape), address_of(tensor))
        return on_host


def _run_options(**entries: str) -> onnxruntime.RunOptions:
    """To be used for all runs, since each run without any makes some, for a microsecond."""
    options = onnxruntime.RunOptions()
    # no graph of GPU kernels is captured; ONNX Runtime 1.31 asks for this entry, and misses it for 30 microseconds
    options.add_run_config_entry("gpu_graph_id", "-1")
    for name, value in entries.items():
        options.add_run_config_entry(name, value)
    return options


def _session(
    model: bytes,
    options: onnxruntime.SessionOptions,
    providers: Sequence[tuple[str, Mapping[str, str]]],
    disabled: Sequence[str],
) -> onnxruntime.InferenceSession:
    first, _ = providers[0]
    # a session of CUDA changes the thread's current device
    index = next(
        (int(values["device_id"]) for name, values in providers if name == CUDA and "device_id" in values), None
    )
    try:
        with contextlib.nullcontext() if index is None else torch.cuda.device(index):
            return onnxruntime.InferenceSession(
                model,
                options,
                providers=[(name, dict(values)) for name, values in providers],
                disabled_optimizers=disabled,
                enable_fallback=0,
            )
    except (RuntimeError, ValueError) as error:
        # errors about the model are exceptions of ONNX Runtime's own
        why = why_not_started(first)
        raise ProviderError(f"{first} does not start: {error}{' (' + why + ')' if why else ''}") from error


def _on_cpu(session: onnxruntime.InferenceSession) -> tuple[str, ...] | None:
    try:
        parts = session.get_provider_graph_assignment_info()
    except (AttributeError, _pybind_state.Fail):  # too old, or not asked for in the user's own session options
        return None
    return tuple(node.op_type for part in parts if part.ep_name == "CPUExecutionProvider" for node in part.get_nodes())


def _address_and_shape(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    # an empty tensor has no address
    return tensor.data_ptr(), tensor.shape
