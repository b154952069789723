"""An ONNX Runtime session that reads and writes torch memory in place."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.arena import release_arena
from lightning_ort.runtime.memory import address_of
from lightning_ort.runtime.providers.cuda import Queue
from lightning_ort.runtime.tensors import NUMPY, ONNX
from lightning_ort.runtime.value_errors import refusal

__all__ = ["OrtSession"]

# sets of addresses remembered per session: gradients of the last step are alive while the next are written
_BINDINGS = 4


class _Binding:
    """One IOBinding and the addresses it holds.

    Attributes:
        copied: inputs in memory of the CPU that are read elsewhere: ONNX Runtime copies them when they are bound, and
            not when it runs.
    """

    __slots__ = ("copied", "inputs", "io", "outputs")

    def __init__(self, io: onnxruntime.IOBinding, n_inputs: int, n_outputs: int) -> None:
        self.io = io
        self.copied: dict[str, torch.Tensor] = {}
        self.inputs: list[Any] = [None] * n_inputs
        self.outputs: list[Any] = [None] * n_outputs


class OrtSession:
    """A session for one graph, run on tensors that are bound by address.

    :meth:`run` is for whoever knows the shapes of the results. :meth:`run_again` repeats that on the same memory, for
    updates; :meth:`repeat` gives it as a function, for steps of so small graphs that each call counts.
    :meth:`run_unbound` is for results whose shapes depend on values.

    Args:
        inner: ONNX Runtime's own object.
        device: what computes; inputs and outputs live there or on the CPU.
        queue: puts runs in order with torch's work on the device; ``None`` on the CPU.
        on_cpu: see below.
        in_place: whether all of its operators read memory of the CPU where it is.
        same_shapes: the caller passes tensors of the same shapes at each run.
        places: descriptions of nodes for errors about values, see :func:`~lightning_ort.runtime.value_errors.refusal`.

    Attributes:
        inner: for what it tells of itself.
        input_names: of the inputs that it wants, in the order of the graph. Before 1.20 ONNX Runtime leaves out those
            that nothing reads.
        on_cpu: types of the operators of a session on a GPU that the CPU executes, one entry per node; ONNX Runtime
            copies what they read and give. ``None`` where it does not tell: before 1.24, and with the user's own
            ``SessionOptions``, unless they ask for it.
    """

    def __init__(
        self,
        inner: onnxruntime.InferenceSession,
        device: torch.device,
        *,
        queue: Queue | None = None,
        on_cpu: tuple[str, ...] | None = (),
        in_place: bool = True,
        same_shapes: bool = False,
        places: Mapping[str, str] | None = None,
    ) -> None:
        self.inner, self.on_cpu, self._queue, self._in_place = inner, on_cpu, queue, in_place
        self._run_options = _run_options(inner)
        self._device = (device.type, device.index or 0)
        self._inputs = self.input_names = [i.name for i in self.inner.get_inputs()]
        self._outputs = [o.name for o in self.inner.get_outputs()]
        self._place: Callable[[torch.Tensor], Any] = torch.Tensor.data_ptr if same_shapes else _address_and_shape
        self._places = places or {}
        self._bindings: dict[int, _Binding] = {}
        self._latest: _Binding | None = None
        # its own arena would go with it; the common one keeps what its values have been in
        weakref.finalize(self, release_arena).atexit = False

    def run(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Compute ``outputs`` from ``inputs``, which are those of ``input_names``; outputs must be contiguous.

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
        if not all(map(_is_contiguous, inputs)):
            inputs = [x.contiguous() for x in inputs]  # alive until the run has ended
        io = binding.io
        for tensors, bound, bind, names in (
            (inputs, binding.inputs, io.bind_input, self._inputs),
            (outputs, binding.outputs, io.bind_output, self._outputs),
        ):
            places = list(map(self._place, tensors))
            if places != bound:
                for i, place in enumerate(places):
                    if place != bound[i]:
                        if self._in_place:
                            self._bind(bind, names[i], tensors[i])
                        else:
                            self._bind_elsewhere(binding, bind, names[i], tensors[i])
                        bound[i] = place
        self._latest = binding
        self._execute(binding)

    def run_unbound(self, inputs: Sequence[torch.Tensor]) -> list[np.ndarray]:
        """All outputs as arrays of their own memory, where their shapes are not known before."""
        binding = _Binding(self.inner.io_binding(), 0, 0)
        contiguous = [t.contiguous() for t in inputs]
        for name, tensor in zip(self._inputs, contiguous, strict=True):
            self._bind(binding.io.bind_input, name, tensor)
        for name in self._outputs:
            binding.io.bind_output(name, "cpu")
        self._execute(binding)
        return binding.io.copy_outputs_to_cpu()

    def run_again(self) -> None:
        """Like the last :meth:`run`, on the same memory, which must still be what it was."""
        assert self._latest is not None
        self._execute(self._latest)

    def _execute(self, binding: _Binding) -> None:
        """Run, until it is done.

        On a GPU the host could go on at once. But memory of the host that kernels read is freed only by a run that is
        waited for; if there is any when the session ends, so does the process.
        """
        try:
            if self._in_place:
                self.inner.run_with_iobinding(binding.io, self._run_options)
                return
            with contextlib.nullcontext() if self._queue is None else self._queue.in_order():
                for name, tensor in binding.copied.items():
                    self._bind(binding.io.bind_input, name, tensor)
                self.inner.run_with_iobinding(binding.io, self._run_options)
        except Exception as error:
            self.explain(error)

    def repeat(self) -> Callable[[], None]:
        """:meth:`run_again` as a function, for callers in whose loop each call counts; void after another run.

        What it raises is for :meth:`explain`.
        """
        assert self._latest is not None
        if self._in_place:
            return functools.partial(self.inner.run_with_iobinding, self._latest.io, self._run_options)
        return self.run_again

    def explain(self, error: Exception) -> NoReturn:
        """Raise what ONNX Runtime raised, as a RefusedValueError if it is about values."""
        refused = refusal(error, self._places)
        if refused is None:
            raise error
        raise refused from error

    @property
    def is_threaded(self) -> bool:
        """Whether operators of it run on several threads of the CPU."""
        return self.inner.get_session_options().intra_op_num_threads != 1

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

    def _bind_elsewhere(self, binding: _Binding, bind: Any, name: str, tensor: torch.Tensor) -> None:
        """Bind, or note an input that is to be bound before each run."""
        binding.copied.pop(name, None)
        if tensor.device.type == "cpu" and bind == binding.io.bind_input:
            binding.copied[name] = tensor
        else:
            self._bind(bind, name, tensor)

    def _bind(self, bind: Any, name: str, tensor: torch.Tensor) -> None:
        element = NUMPY.get(tensor.dtype)
        device = ("cpu", 0) if self._queue is not None and tensor.device.type == "cpu" else self._device
        if element is None:
            _bind_bfloat16(bind, name, device, tensor)
        else:
            bind(name, *device, element, tuple(tensor.shape), address_of(tensor))


def _run_options(session: onnxruntime.InferenceSession) -> onnxruntime.RunOptions:
    """To be used for all runs, since each run without any makes some, for a microsecond."""
    options = onnxruntime.RunOptions()
    if session.get_session_options().log_severity_level == 3:
        # errors alone: a run's are raised, and would be printed as well
        options.log_severity_level = 4
    # no graph of GPU kernels is captured; ONNX Runtime 1.31 asks for this entry, and misses it for 30 microseconds
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


_is_contiguous = torch.Tensor.is_contiguous


def _address_and_shape(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    # an empty tensor has no address
    return tensor.data_ptr(), tensor.shape


def _bind_bfloat16(bind: Any, name: str, device: tuple[str, int], tensor: torch.Tensor) -> None:
    """Bind a contiguous tensor of bfloat16, which numpy has no type for, by address.

    Args:
        bind: ``bind_input`` or ``bind_output`` of an ``onnxruntime.IOBinding``.
        name: of the graph's input or output.
        device: type and index, as ONNX Runtime has them.
        tensor: what is bound.

    Raises:
        ProviderError: this ONNX Runtime takes bfloat16 in no way.
    """
    try:
        bind(name, *device, int(ONNX[torch.bfloat16]), tuple(tensor.shape), address_of(tensor))
    except RuntimeError:
        # before 1.20 only numpy's types were known, and no other way is public
        by_value = getattr(bind.__self__, f"{bind.__name__.replace('bind_', 'bind_ortvalue_')}")
        by_value(name, _ort_value(tensor))


def _ort_value(tensor: torch.Tensor) -> onnxruntime.OrtValue:
    """``tensor`` as ONNX Runtime's own kind of tensor, in the same memory."""
    make = getattr(_pybind_state.OrtValue, "from_dlpack", None)
    if make is None:
        raise ProviderError(
            f"ONNX Runtime {onnxruntime.__version__} cannot be given bfloat16 tensors: expected one with DLPack (the "
            "training builds have it) or 1.20 and later. Install one of these, or use precision='16-mixed'."
        )
    if tensor.device.type == "cpu" and tensor.numel():
        # bound by address like all others, without a hold on the memory: nobody could tell when it is free again
        memory = (ctypes.c_char * (2 * tensor.numel())).from_address(tensor.data_ptr())
        tensor = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    return onnxruntime.OrtValue(make(torch.utils.dlpack.to_dlpack(tensor.detach()), False))
