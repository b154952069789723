"""What a session on a GPU asks of ONNX Runtime and of torch, recorded by stand-ins for both: there is no GPU here."""

from __future__ import annotations

import contextlib
import ctypes

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch
from modules import Regressor, curve
from parity import fit, step_report

from lightning_ort.errors import ProviderError
from lightning_ort.runtime.arena import share_arena
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers import cuda, resolve
from lightning_ort.runtime.providers.cpu import CPU as ON_CPU

CUDA, CPU, TENSORRT = "CUDAExecutionProvider", "CPUExecutionProvider", "TensorrtExecutionProvider"
WITHOUT_WAITING = "disable_synchronize_execution_providers"
MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 20]>
    agraph (float[3] x, float[3] y) => (float[3] z) { z = Sub(x, y) }"""
).SerializeToString()
RealSession = onnxruntime.InferenceSession


def has_entry(options, name):
    try:
        return options.get_run_config_entry(name) == "1"
    except RuntimeError:  # none of that name
        return False


class OnGPU(torch.Tensor):
    """A tensor of the CPU that says to be elsewhere."""

    @property
    def device(self):
        return torch.device("cuda", self.index)


def on_gpu(values, index=0):
    tensor = torch.tensor(values).as_subclass(OnGPU)
    tensor.index = index
    return tensor


class Stream:
    def __init__(self, address, machine):
        self.cuda_stream, self.events = address, machine.events

    def wait_stream(self, other):
        self.events.append((self.cuda_stream, "waits for", other.cuda_stream))


class Binding:
    """Records what is bound where, and binds it on the CPU, where it is."""

    def __init__(self, session):
        self.bound, self.real = session.machine.bound, session.real.io_binding()

    def bind_input(self, name, device, index, element, shape, address):
        self.bound.append((name, device, index, element, tuple(shape), address))
        self.real.bind_input(name, "cpu", 0, element, shape, address)

    def bind_output(self, name, device, index=0, element=None, shape=None, address=None):
        self.bound.append((name, device, index, element, None if shape is None else tuple(shape), address))
        if address is None:
            self.real.bind_output(name, "cpu")
        else:
            self.real.bind_output(name, "cpu", 0, element, shape, address)

    def copy_outputs_to_cpu(self):
        return self.real.copy_outputs_to_cpu()


class Machine:
    """A machine with two GPUs. Sessions compute on the CPU; ``events`` has in order what a GPU would be told.

    Attributes:
        current: torch's current stream; 0 is the address of its default stream.
        assigned: what ONNX Runtime says to have assigned to which provider; ``None`` if it does not tell.
        starts: whether its provider starts.
    """

    def __init__(self, monkeypatch):
        self.events, self.bound, self.made, self.assigned, self.starts = [], [], [], {CUDA: ["Sub"]}, True
        self.current = Stream(0, self)
        machine = self

        class Session:
            def __init__(self, model, options, providers, **kwargs):
                self.machine, self.real = machine, RealSession(model, providers=[CPU])
                machine.made.append((options, dict(providers), kwargs))
                self.get_inputs, self.get_outputs = self.real.get_inputs, self.real.get_outputs
                self.get_session_options = self.real.get_session_options
                if machine.starts == "error":
                    raise RuntimeError("CUDA failure 35: CUDA driver version is insufficient")

            def get_providers(self):
                return [CUDA, CPU] if self.machine.starts else [CPU]

            def disable_fallback(self):
                pass

            def io_binding(self):
                return Binding(self)

            def run_with_iobinding(self, binding, options=None):
                waits = not has_entry(options, WITHOUT_WAITING)
                machine.events.append("run and wait" if waits else "run")
                self.real.run_with_iobinding(binding.real)

        class Node:
            def __init__(self, op_type):
                self.op_type = op_type

        class Part:
            def __init__(self, ep_name, types):
                self.ep_name, self.get_nodes = ep_name, lambda: list(map(Node, types))

        self.Session = Session
        Session.get_provider_graph_assignment_info = lambda self: [Part(*item) for item in machine.assigned.items()]
        monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(0x1000 + device, self))
        monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: Stream(address, self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "device", self.on_device)

    @contextlib.contextmanager
    def on_device(self, index):
        self.events.append(f"device {index}")
        try:
            yield
        finally:
            self.events.append("device back")

    def run(self, index=0, config=None, **tensors):
        """``x - y`` in a session of its own; returns the session and what happened in the run."""
        session = SessionFactory(config, torch.device("cuda", index)).session(MODEL, same_shapes=True)
        inputs = [tensors.get("x", on_gpu([1.0, 2.0, 3.0], index)), tensors.get("y", on_gpu([3.0, 2.0, 2.0], index))]
        z = tensors.get("z", on_gpu([0.0, 0.0, 0.0], index))
        self.events.clear()
        self.bound.clear()
        session.run(inputs, [z])
        assert z.tolist() == [-2.0, 0.0, 1.0]
        self.tensors = [*inputs, z]  # what is bound must live
        return session, list(self.events)


@pytest.fixture
def machine(monkeypatch):
    cuda._stream.cache_clear()
    share_arena(onnxruntime.SessionOptions())  # has a session of its own, which is not for this machine
    yield Machine(monkeypatch)
    cuda._stream.cache_clear()


@pytest.mark.parametrize("index", [0, 1])
def test_a_session_gets_its_device_and_a_stream_and_all_is_bound_where_it_is(machine, index):
    machine.run(index)

    ((options, providers, kwargs),) = machine.made
    assert providers == {
        CUDA: {
            **({"device_id": "1"} if index else {}),
            "user_compute_stream": str(0x1000 + index),
            "use_tf32": "0",
            "cudnn_conv_algo_search": "HEURISTIC",
            "arena_extend_strategy": "kSameAsRequested",
        }
    }
    assert kwargs["enable_fallback"] == 0
    assert options.get_session_config_entry("session.record_ep_graph_assignment_info") == "1"
    assert not options.use_deterministic_compute
    assert machine.bound == [
        (name, "cuda", index, np.float32, (3,), address)
        for name, address in zip("xyz", [t.data_ptr() for t in machine.tensors], strict=True)
    ]


def test_a_run_is_put_between_what_torch_has_queued_and_what_it_queues_next(machine):
    _, events = machine.run()

    ordered = ["device 0", (0x1000, "waits for", 0), "run and wait", (0, "waits for", 0x1000), "device back"]
    assert events == ordered


def test_torch_may_change_its_stream_between_runs(machine):
    session, _ = machine.run()
    machine.current = Stream(0x77, machine)
    machine.events.clear()
    machine.bound.clear()
    session.run_again()

    assert machine.events[1:-1] == [(0x1000, "waits for", 0x77), "run and wait", (0x77, "waits for", 0x1000)]
    assert machine.bound == []


def test_on_the_stream_of_the_session_nothing_waits(machine):
    session, _ = machine.run(config=RuntimeConfig([CUDA], {CUDA: {"user_compute_stream": "119"}}))
    machine.current = Stream(119, machine)
    machine.events.clear()
    session.run_again()

    assert machine.events == ["device 0", "run and wait", "device back"]


def test_torch_waits_also_after_an_error(machine):
    session, _ = machine.run()
    machine.events.clear()
    with pytest.raises(Exception, match="invalid dimensions for input: x"):
        session.run([on_gpu([1.0, 2.0]), on_gpu([1.0, 2.0, 3.0, 4.0, 5.0])], [on_gpu([0.0] * 7)])

    assert machine.events[-2:] == [(0, "waits for", 0x1000), "device back"]


def test_memory_of_the_cpu_is_bound_as_such(machine):
    session, events = machine.run(y=torch.tensor([3.0, 2.0, 2.0]))
    assert sorted(entry[:3] for entry in machine.bound) == [("x", "cuda", 0), ("y", "cpu", 0), ("z", "cuda", 0)]
    assert "run and wait" in events
    machine.events.clear()
    session.run_again()
    assert "run and wait" in machine.events
    _, events = machine.run(z=torch.zeros(3))
    assert "run and wait" in events
    assert [entry[:3] for entry in machine.bound] == [("x", "cuda", 0), ("y", "cuda", 0), ("z", "cpu", 0)]


@pytest.fixture
def copying(monkeypatch):
    """What is on the CPU is copied when it is bound, as ONNX Runtime does for a GPU."""
    plain = Binding.bind_input

    def bind_input(self, name, device, *args):
        if device == "cpu":
            *others, shape, address = args
            copy = torch.empty(shape)
            ctypes.memmove(copy.data_ptr(), address, copy.nbytes)
            self.copies = [*getattr(self, "copies", []), copy]
            args = *others, shape, copy.data_ptr()
        plain(self, name, device, *args)

    monkeypatch.setattr(Binding, "bind_input", bind_input)


@pytest.mark.usefixtures("copying")
def test_memory_of_the_cpu_is_read_anew_at_each_run(machine):
    y = torch.tensor([3.0, 2.0, 2.0])
    session, _ = machine.run(y=y)
    x, _, z = machine.tensors
    y.zero_()
    session.run([x, y], [z])
    assert z.tolist() == [1.0, 2.0, 3.0]
    y.fill_(1.0)
    session.run_again()
    assert z.tolist() == [0.0, 1.0, 2.0]
    there = on_gpu([1.0, 1.0, 2.0])
    session.run([x, there], [z])
    y.fill_(7.0)
    session.run_again()
    assert z.tolist() == [0.0, 1.0, 1.0]


@pytest.mark.usefixtures("copying", "machine")
def test_a_provider_of_a_gpu_for_tensors_of_the_cpu_reads_them_anew():
    """Weights that are updated in place are where they were."""
    session = SessionFactory(RuntimeConfig([CUDA]), torch.device("cpu")).session(MODEL, same_shapes=True)
    x, y, z = torch.ones(3), torch.zeros(3), torch.zeros(3)
    for step in range(3):
        session.run([x, y], [z])
        assert z.tolist() == [1.0 - step] * 3
        y += 1
    again = session.repeat()
    again()
    assert z.tolist() == [-2.0] * 3
    y += 1
    again()
    assert z.tolist() == [-3.0] * 3


@pytest.mark.parametrize("assigned", [{CUDA: ["Sub"], CPU: ["Shape", "Gather"]}, None])
def test_what_the_cpu_has_or_may_have_a_part_in_is_told(machine, monkeypatch, assigned):
    machine.assigned = assigned
    if assigned is None:
        monkeypatch.delattr(machine.Session, "get_provider_graph_assignment_info")
    session, events = machine.run()

    assert session.on_cpu == (None if assigned is None else ("Shape", "Gather"))
    assert "run and wait" in events


def test_with_session_options_of_the_user_it_is_not_told(machine, monkeypatch):
    monkeypatch.setattr(
        machine.Session,
        "get_provider_graph_assignment_info",
        lambda self: self.real.get_provider_graph_assignment_info(),
    )
    session, events = machine.run(config=RuntimeConfig(session_options=onnxruntime.SessionOptions()))

    assert session.on_cpu is None
    assert "run and wait" in events


def test_results_of_unknown_shapes(machine):
    session, _ = machine.run()
    machine.events.clear()
    (z,) = session.run_unbound([on_gpu([1.0, 2.0, 3.0]), on_gpu([3.0, 2.0, 2.0])])

    assert z.tolist() == [-2.0, 0.0, 1.0]
    assert "run and wait" in machine.events


@pytest.mark.parametrize("how", ["legacy", "general", "of products"])
def test_precision_and_kernels_are_chosen_as_in_torch(machine, monkeypatch, how):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    matmul, deterministic = torch.backends.cuda.matmul, torch.are_deterministic_algorithms_enabled()
    before = matmul.fp32_precision, torch.backends.fp32_precision
    try:
        if how == "legacy":
            torch.set_float32_matmul_precision("high")
        elif how == "general":
            torch.backends.fp32_precision = "tf32"
        else:
            matmul.fp32_precision = "tf32"
        torch.use_deterministic_algorithms(True)
        machine.run()
    finally:
        if how == "legacy":
            torch.set_float32_matmul_precision("highest")
        matmul.fp32_precision, torch.backends.fp32_precision = before
        torch.use_deterministic_algorithms(deterministic)

    ((options, providers, _),) = machine.made
    assert providers[CUDA]["use_tf32"] == "1"
    assert providers[CUDA]["cudnn_conv_algo_search"] == "EXHAUSTIVE"
    assert options.use_deterministic_compute


@pytest.mark.usefixtures("machine")
def test_options_of_the_user_stay():
    mine = {"use_tf32": "1", "gpu_mem_limit": "1000", "user_compute_stream": "77", "device_id": 0}
    ((provider, options),) = resolve(torch.device("cuda", 0), [CUDA], {CUDA: mine})

    assert provider.name == CUDA
    assert {k: options[k] for k in mine} == {k: str(v) for k, v in mine.items()}
    assert options["arena_extend_strategy"] == "kSameAsRequested"


@pytest.mark.usefixtures("machine")
def test_the_present_device_is_taken_where_none_is_named():
    ((_, options),) = resolve(torch.device("cuda"))

    assert options["device_id"] == "1"
    assert options["user_compute_stream"] == str(0x1001)


@pytest.mark.usefixtures("machine")
def test_tensorrt_queues_on_the_same_stream():
    (_, first), (_, second) = resolve(torch.device("cuda", 0), [TENSORRT, CUDA])

    assert first == {"user_compute_stream": str(0x1000)}
    assert second["user_compute_stream"] == first["user_compute_stream"]


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_id": "1"}, "device_id='1' for CUDAExecutionProvider, but the tensors are on cuda:0"),
        ({"user_compute_stream": "0"}, "takes that for none given"),
    ],
)
def test_options_that_would_lead_astray_are_refused(options, message):
    with pytest.raises(ProviderError, match=message):
        resolve(torch.device("cuda", 0), [CUDA], [options])


def test_a_provider_that_does_not_start_is_named_with_what_is_known_of_it(machine, monkeypatch):
    machine.starts = False
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ProviderError, match=r"CUDAExecutionProvider .* could not start: this torch .* without CUDA"):
        machine.run()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(onnxruntime, "cuda_version", "13.0", raising=False)
    with pytest.raises(ProviderError, match=r"built for CUDA 13\.0, and finds only the libraries of CUDA 12\.8"):
        machine.run()
    machine.starts = "error"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProviderError, match=r"does not start: CUDA failure 35.*torch sees no GPU either"):
        machine.run()


def test_sessions_of_the_cpu_have_no_part_in_this(machine):
    machine.starts = False
    session = SessionFactory().session(MODEL)
    z = torch.zeros(3)
    session.run([torch.ones(3), torch.zeros(3)], [z])

    assert z.tolist() == [1, 1, 1]
    assert machine.events == ["run and wait"]
    assert session.on_cpu == ()


def test_the_report_tells_what_the_cpu_executes(monkeypatch):
    monkeypatch.setattr(type(ON_CPU), "on_cpu", lambda self, session: ("Shape", "Gather", "Shape"))
    run = fit(Regressor, curve, strategy="ort", max_steps=2)

    assert step_report(run.trainer, "training_step").on_cpu == {"Shape": 2, "Gather": 1}
    assert "on the CPU: Shape (2), Gather (1): ONNX Runtime has no kernel" in str(run.trainer.strategy.report())
