"""Memory for values between operators on the CPU: one arena of ONNX Runtime's for the sessions of all graphs.

By itself each session has an arena of its own, which keeps what its largest run has needed for as long as it lives. A
plan of forty segments would keep that forty times, though one runs at a time.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from lightning_ort.runtime.providers.cpu import session_of_node

__all__ = ["release_arena", "share_arena"]

_SHARED = "session.use_env_allocators"
_BY_DEFAULT = -1


def share_arena(options: onnxruntime.SessionOptions) -> None:
    """Have the sessions that are made with ``options`` take their memory from the common arena."""
    _releasing()
    options.add_session_config_entry(_SHARED, "1")


def release_arena() -> None:
    """Give the memory of the common arena that no value is in back to the system."""
    if _releasing.cache_info().currsize:
        _releasing()()


@functools.cache
def _releasing() -> Callable[[], object]:
    """Make the arena; what is returned releases it. An arena gives back memory at the end of a run, and only then."""
    place = onnxruntime.OrtMemoryInfo(
        "Cpu", onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, onnxruntime.OrtMemType.DEFAULT
    )
    with contextlib.suppress(RuntimeError):  # the process has one that somebody else has made: it serves as well
        onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg(0, *[_BY_DEFAULT] * 3))
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y"))
    options, run_options = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    options.intra_op_num_threads, options.log_severity_level, run_options.log_severity_level = 1, 4, 4
    options.add_session_config_entry(_SHARED, "1")
    run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    session, number = session_of_node(helper.make_node("Neg", ["x"], ["y"]), [x], y, options), np.zeros(1, np.float32)
    release = functools.partial(session.run, None, {"x": number}, run_options)
    release()  # the piece that an arena takes first is never given back: that is this one, of a megabyte
    return release


_inherited: list[object] = []


def _begin_anew() -> None:
    """In a child of a fork, leave the arena alone until a session of its own is made.

    A thread of the parent's, which is not there, may have been in it; nor may what releases it end, which frees memory.
    """
    if _releasing.cache_info().currsize:
        _inherited.append(_releasing())
        _releasing.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
