"""What is resolved once and handed on, and which provider counts."""

from __future__ import annotations

import onnx.parser
import onnxruntime
import pytest
import torch
from modules import Regressor, curve
from parity import fit

from lightning_ort.errors import ProviderError
from lightning_ort.runtime import factory
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.providers import provider_named, reachable_device_type

CPU, CUDA, OTHER = "CPUExecutionProvider", "CUDAExecutionProvider", "XnnpackExecutionProvider"
MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 20]>
    agraph (float[3] x) => (float[3] y) { y = Neg(x) }"""
).SerializeToString()


@pytest.fixture
def resolved(monkeypatch):
    """What providers are looked up for."""
    calls, real = [], factory.resolve
    monkeypatch.setattr(factory, "resolve", lambda device, *rest: (calls.append(device), real(device, *rest))[1])
    return calls


def test_sessions_of_one_factory_resolve_nothing_anew(resolved):
    sessions = SessionFactory()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        made = [sessions.session(MODEL) for _ in range(3)] + [sessions.as_written().session(MODEL)]
    finally:
        torch.set_num_threads(threads)
    assert len(resolved) == 1
    assert {s.inner.get_session_options().intra_op_num_threads for s in made} == {threads}
    assert sessions.session(MODEL, small=True).inner.get_session_options().intra_op_num_threads == 1


def test_a_training_resolves_them_once_for_each_region_and_no_more_however_long_it_is(resolved):
    fit(Regressor, curve, strategy="ort", max_steps=2)
    short = len(resolved)
    resolved.clear()
    fit(Regressor, curve, strategy="ort", max_steps=6)
    assert len(resolved) == short <= 2


CLIPPED = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["" : 20]>
    agraph (double[3] x) => (double[3] y) <double low = {0.5}, double high = {2.0}>
    { a = Relu(x) y = Clip(a, low, high) }"""
).SerializeToString()


@pytest.mark.parametrize("never", [factory._NEVER, []])
def test_an_optimizer_that_fails_at_a_graph_does_not_keep_it_from_running(never, monkeypatch, capfd):
    """The second time, ONNX Runtime's FuseReluClip refuses bounds that are doubles."""
    monkeypatch.setattr(factory, "_NEVER", never)
    session = SessionFactory().session(CLIPPED, double=True)
    (got,) = session.inner.run(None, {"x": torch.tensor([-1.0, 1.0, 3.0], dtype=torch.float64).numpy()})
    assert got.tolist() == [0.5, 1.0, 2.0]
    level = session.inner.get_session_options().graph_optimization_level
    as_written = level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert as_written == (not never)
    assert ("FuseReluClip" in capfd.readouterr().err) == (not never)


@pytest.mark.parametrize(("given", "printed"), [(None, False), ({"log_severity_level": 2}, True)])
def test_what_a_run_raises_is_printed_for_those_who_ask_for_a_log(given, printed, capfd):
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 20]>
        agraph (float[3] x, int64[1] i) => (float[1] y) { y = Gather(x, i) }"""
    )
    session = SessionFactory(RuntimeConfig(session_options=given)).session(model.SerializeToString())
    with pytest.raises(IndexError):
        session.run([torch.ones(3), torch.tensor([7])], [torch.empty(1)])
    assert ("out of data bounds" in capfd.readouterr().err) == printed


def test_a_session_that_fails_otherwise_is_not_made_again(monkeypatch):
    calls = []
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **kwargs: calls.append(1) or _fail())
    with pytest.raises(onnxruntime.capi._pybind_state.Fail, match="protobuf"):
        SessionFactory().session(MODEL)
    assert len(calls) == 1


def _fail():
    raise onnxruntime.capi._pybind_state.Fail("protobuf parsing failed")


def test_options_on_top_leave_those_of_the_user():
    seen = []
    config = RuntimeConfig(session_options={"log_severity_level": 4}, on_session=lambda *made: seen.append(made))
    sessions = SessionFactory(config)
    written = sessions.as_written()
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert written.session_options().graph_optimization_level == level
    assert written.session_options(small=True).graph_optimization_level == level
    assert written.session_options().log_severity_level == 4
    assert sessions.session_options().graph_optimization_level != level
    written.session(MODEL)
    assert not seen and sessions.is_watched and not written.is_watched
    session = sessions.session(MODEL)
    assert seen == [(session, MODEL)]


def test_options_of_a_kind_are_given_by_name():
    """As a configuration file has them."""
    names = {"graph_optimization_level": "ORT_ENABLE_BASIC", "execution_mode": "ORT_PARALLEL"}
    made = RuntimeConfig(session_options=names).make_session_options()
    assert made.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    assert made.execution_mode == onnxruntime.ExecutionMode.ORT_PARALLEL
    for value, error in (("ORT_NONE", ValueError), (0, TypeError), ([1], TypeError)):
        with pytest.raises(error, match=r"'execution_mode'\]=.*: expected ORT_SEQUENTIAL, ORT_PARALLEL, or Execution"):
            RuntimeConfig(session_options={"execution_mode": value}).make_session_options()


def test_options_object_of_the_user_is_taken_as_it_is():
    own = onnxruntime.SessionOptions()
    sessions = SessionFactory(RuntimeConfig(session_options=own))
    assert sessions.session_options() is own and sessions.session_options(small=True) is own


@pytest.mark.parametrize(
    ("providers", "name", "known"),
    [
        (None, CPU, True),
        ([CPU, OTHER], CPU, True),
        ([OTHER, CPU], OTHER, False),
        ([CUDA, CPU], CUDA, False),  # on copies of tensors of the CPU
    ],
)
def test_the_first_provider_decides_where_operators_are_placed(monkeypatch, providers, name, known):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, OTHER, CPU])
    provider = SessionFactory(RuntimeConfig(providers)).provider
    assert provider.name == name
    assert (provider is provider_named(name)) is known
    assert (provider.large_convolution < float("inf")) is known
    assert not provider.in_16_bits and provider.has_convolution_gradients


def test_a_device_without_a_provider_is_refused():
    with pytest.raises(ProviderError, match=r"cannot reach tensors on device 'meta'.*accelerator='cpu' or 'cuda'"):
        SessionFactory(device=torch.device("meta"))


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("seen", [True, False])
def test_the_device_that_both_reach(monkeypatch, built, seen):
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU] if built else [CPU])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    assert reachable_device_type() == ("cuda" if built and seen else "cpu")
