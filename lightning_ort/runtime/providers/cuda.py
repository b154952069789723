"""ONNX Runtime beside torch on one GPU: the settings of its provider, and its place in the order of torch's streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping

import onnxruntime
import torch
from onnxruntime.capi import _pybind_state

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.providers.cpu import CPU
from lightning_ort.runtime.providers.provider import Provider

__all__ = ["CUDA", "OnGPU", "Queue"]

_WHO_RUNS_WHAT = "session.record_ep_graph_assignment_info"


class OnGPU(Provider):
    """A provider with kernels for NVIDIA's GPUs."""

    device_type = "cuda"
    in_16_bits = True
    has_convolution_gradients = False

    @property
    def large_convolution(self) -> float:
        """An estimate, not measured: without kernels for gradients, each image is copied once per pixel of a filter."""
        return 1e9


class _CUDA(OnGPU):
    memory_limit_option = "gpu_mem_limit"
    # the default takes twice as much memory each time, of which torch's allocator wants a share as well
    frugal_options = {"arena_extend_strategy": "kSameAsRequested"}  # noqa: RUF012

    def options(self, device: torch.device, given: Mapping[str, str], native: Mapping[str, str]) -> dict[str, str]:
        """Precision, the search for convolution kernels and the use of memory are those of torch in this process.

        Raises:
            ProviderError: the user's options name another device, or no stream.
        """
        index = _index(device)
        if given.get("device_id", str(index)) != str(index):
            raise ProviderError(
                f"provider_options has device_id={given['device_id']!r} for {self.name}, but the tensors are on "
                f"cuda:{index}. Leave it out, and choose the device by the Trainer's devices=[...]."
            )
        if given.get("user_compute_stream") in ("0", ""):
            raise ProviderError(
                "provider_options has user_compute_stream='0': ONNX Runtime takes that for none given, and would not "
                "wait for torch. Leave it out, or give the address of a stream other than the default one."
            )
        ours = {
            # the default is left out: given any, ONNX Runtime 1.30 and later warn of each session
            **({"device_id": str(index)} if index else {}),
            # on one stream for each device, so that whatever is taken from and given back to the arena stays in order
            "user_compute_stream": str(_stream(index).cuda_stream),
            # by default ONNX Runtime rounds the factors of products to 10 bits, torch does not
            "use_tf32": "1" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "0",
            # by default every convolution is tried with all of cuDNN's kernels first, at each new shape
            "cudnn_conv_algo_search": "EXHAUSTIVE" if torch.backends.cudnn.benchmark else "HEURISTIC",
            **self.frugal_options,
        }
        return {**ours, **given}

    def prepare(self, options: onnxruntime.SessionOptions) -> None:
        options.use_deterministic_compute = torch.are_deterministic_algorithms_enabled()
        if hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
            options.add_session_config_entry(_WHO_RUNS_WHAT, "1")

    def starting(self, options: Mapping[str, str]) -> contextlib.AbstractContextManager[None]:
        # a session of CUDA changes the thread's current device
        return torch.cuda.device(int(options.get("device_id", "0")))

    def on_cpu(self, session: onnxruntime.InferenceSession) -> tuple[str, ...] | None:
        try:
            parts = session.get_provider_graph_assignment_info()
        except (AttributeError, _pybind_state.Fail):  # too old, or not asked for in the user's own session options
            return None
        return tuple(node.op_type for part in parts if part.ep_name == CPU.name for node in part.get_nodes())

    def queue(self, device: torch.device, options: Mapping[str, str]) -> Queue:
        return Queue(device, options)

    def why_missing(self) -> str:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if self.name not in onnxruntime.get_available_providers():
            return "this ONNX Runtime is built without CUDA"
        return ""

    def why_not_started(self) -> str:
        theirs, ours = getattr(onnxruntime, "cuda_version", ""), torch.version.cuda
        if ours is None:
            return f"this torch ({torch.__version__}) is built without CUDA, so that its libraries are missing"
        if theirs and theirs.partition(".")[0] != ours.partition(".")[0]:
            return (
                f"this ONNX Runtime ({onnxruntime.__version__}) is built for CUDA {theirs}, and finds only the "
                f"libraries of CUDA {ours} that torch {torch.__version__} brings: install a torch for CUDA {theirs}, "
                f"or an onnxruntime-gpu for CUDA {ours}"
            )
        if not torch.cuda.is_available():
            return "torch sees no GPU either, or no driver for it"
        return ""


CUDA = _CUDA("CUDAExecutionProvider")


class Queue:
    """Puts the runs of sessions behind what torch has queued, and what torch queues afterwards behind them.

    ONNX Runtime is told its stream when a session is made, and takes the address 0, which torch's default stream has,
    for none: it would make a stream of its own, which waits for nothing. So it gets a stream from torch that is used
    for nothing else, and at each run events make it and torch's current stream, whichever that is, wait for each other.

    Args:
        device: a CUDA device.
        options: the options of the CUDA provider of the sessions.
    """

    def __init__(self, device: torch.device, options: Mapping[str, str]) -> None:
        self._index, address = _index(device), int(options["user_compute_stream"])
        ours = _stream(self._index)
        self._stream = ours if ours.cuda_stream == address else torch.cuda.ExternalStream(address, device=self._index)

    @contextlib.contextmanager
    def in_order(self) -> Iterator[None]:
        """Around a run; also puts back torch's current device, which ONNX Runtime changes to its own."""
        with torch.cuda.device(self._index):
            current = torch.cuda.current_stream(self._index)
            apart = current.cuda_stream != self._stream.cuda_stream
            if apart:
                self._stream.wait_stream(current)
            try:
                yield
            finally:
                if apart:
                    current.wait_stream(self._stream)


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=index)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
