"""Sessions on the CPU have their values in one arena, which is emptied when they are gone or memory is asked for."""

from __future__ import annotations

import gc

import onnxruntime
import psutil
import pytest
import torch
from onnx import TensorProto, helper

from lightning_ort.runtime import arena, heap
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.memory import release_free_memory

_NUMBERS = 16 << 20  # of 64 MiB
_ENTRY = "session.use_env_allocators"


def _model() -> bytes:
    """Two values of the size of the input between operators."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", ["n"]), ("y", [])))
    nodes = [
        helper.make_node("Abs", ["x"], ["a"]),
        helper.make_node("Sqrt", ["a"], ["b"]),
        helper.make_node("ReduceSum", ["b"], ["y"], keepdims=0),
    ]
    graph = helper.make_graph(nodes, "sum", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def _resident() -> int:
    """MiB that the process holds."""
    return psutil.Process().memory_info().rss >> 20


def _run(session, x) -> None:
    y = torch.empty(())
    session.run([x], [y])
    assert y == pytest.approx(x.numel() * 2.0)


@pytest.fixture
def sessions():
    """In a process that keeps nothing of what it frees, as it would while something in it is still being trained."""
    gc.collect()
    if heap._Heap.keeps:
        heap._give_back()
    return SessionFactory(RuntimeConfig())


def test_sessions_share_one_arena(sessions):
    x = torch.full([_NUMBERS], 4.0)
    made = [sessions.session(_model()) for _ in range(6)]
    release_free_memory()
    before = _resident()
    _run(made[0], x)
    one = _resident() - before
    for session in made:
        _run(session, x)
    assert one >= 60
    assert _resident() - before < one + 60
    release_free_memory()
    assert _resident() - before < 20
    _run(made[0], x)


def test_what_a_session_has_held_is_given_back_with_it(sessions):
    x = torch.full([_NUMBERS], 4.0)
    session = sessions.session(_model())
    release_free_memory()
    before = _resident()
    _run(session, x)
    held = _resident() - before
    del session
    gc.collect()
    assert held - (_resident() - before) >= 60


@pytest.mark.parametrize(("given", "shared"), [({}, "1"), ({_ENTRY: "0"}, "0")])
def test_the_user_decides(given, shared):
    options = SessionFactory(RuntimeConfig(session_options=given)).session_options()
    assert options.get_session_config_entry(_ENTRY) == shared


def test_after_a_fork_nothing_is_touched_before_a_session_is_made(sessions, monkeypatch):
    monkeypatch.setattr(arena, "_inherited", [])
    before = arena._releasing()
    arena._begin_anew()
    release_free_memory()
    assert arena._inherited == [before] and not arena._releasing.cache_info().currsize
    _run(SessionFactory(RuntimeConfig()).session(_model()), torch.full([8], 4.0))
    assert arena._releasing() is not before


@pytest.mark.parametrize("kept", [True, False])
def test_memory_is_given_back_where_it_is_kept(kept):
    """Without an arena there is nothing to give back."""
    factory = SessionFactory(RuntimeConfig(session_options={"enable_cpu_mem_arena": kept}))
    if not kept:
        with pytest.raises(RuntimeError, match=_ENTRY):
            factory.session_options().get_session_config_entry(_ENTRY)
    session, x = factory.session(_model()), torch.full([8], 4.0)
    for _ in range(2):
        release_free_memory()
        _run(session, x)


def test_the_users_own_options_are_left_alone():
    own = onnxruntime.SessionOptions()
    SessionFactory(RuntimeConfig(session_options=own))
    with pytest.raises(RuntimeError, match=_ENTRY):
        own.get_session_config_entry(_ENTRY)
