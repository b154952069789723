"""Errors of torch inside of a region, raised where the user's code made the call."""

from __future__ import annotations

import ast
import linecache
import re
import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from lightning_ort.compiler import distributions
from lightning_ort.compiler.dynamo import OpenResults
from lightning_ort.compiler.global_state import GlobalState, drawing_as_traced
from lightning_ort.compiler.reference import ForkedRNG
from lightning_ort.errors import CompilationError, RefusedValueError

__all__ = ["Frames", "Located", "behind", "frames_in"]

Frames = Sequence[tuple[str, int, str]]
"""File, line and function of calls, outermost first."""

_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (\S+)$', re.MULTILINE)


class Located:
    """Executes a region; its errors have the lines of the user's code in their traceback.

    A region runs as a whole, in Python's eyes on the first line of the step. If it fails for the values or types that
    it was given, torch fails at one call of it in the same way, which is found by making the calls one by one.

    Args:
        graph: Dynamo's graph.
        run: executes it.
        device: what computes.
    """

    def __init__(self, graph: fx.GraphModule, run: Callable[..., Any], device: torch.device) -> None:
        self._graph, self._run, self._device = graph, run, device
        self._global_state = GlobalState.present()
        self._open: OpenResults | None = OpenResults(graph)  # until it has run once: then what follows is compiled

    def __call__(self, *args: Any) -> Any:
        try:
            results = self._run(*args)
            if self._open is not None:
                self._open.mark(results)
                self._open = None
            return results
        except CompilationError:
            raise  # not the user's
        except Exception as error:
            located = self._located(error, args)
            if located is None:
                raise
        raise located from located.__cause__

    @torch.compiler.disable
    def _located(self, error: Exception, args: Sequence[Any]) -> Exception | None:
        """``error``, or torch's of the same call, with the user's frames; ``None`` if torch raises none."""
        calls = _OneByOne(self._graph)
        drawing = drawing_as_traced(self._graph, self._device)
        try:
            with torch.inference_mode(False), ForkedRNG(self._device), self._global_state.applied(), drawing:
                calls.run(*[_copy(x) for x in args])
        except Exception as found:
            found_error = found
        else:
            return None
        node = calls.at
        if node is None:
            return None
        frames = frames_in(node.meta.get("stack_trace") or "")
        message = str(node.args[1]) if node.target is torch._assert_async and len(node.args) > 1 else ""
        if message and frames and frames[-1][0] == distributions.__file__:
            found_error = ValueError(message)
        elif node.target is torch._assert_async and _is_assert_statement(frames):
            # the message that Dynamo gives to an assertion that has none
            found_error = AssertionError() if message in ("", "assertion error") else AssertionError(message)
            if isinstance(error, RefusedValueError):
                found_error.__cause__ = error
        elif isinstance(error, RefusedValueError):
            found_error = error
        elif type(found_error) is not type(error):
            return None
        found_error.__context__ = None
        return found_error.with_traceback(behind(frames))


class _OneByOne(fx.Interpreter):
    """Makes the calls of a graph, and remembers the last."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False
        self.at: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        self.at = n
        return super().run_node(n)


def _copy(x: Any) -> Any:
    """A tensor of its own that a call may change as it could the original."""
    if not isinstance(x, torch.Tensor):
        return x
    own = x.detach().clone()
    return own.requires_grad_() if x.requires_grad and x.is_leaf else own


def frames_in(trace: str) -> Frames:
    """The calls of a traceback that was printed."""
    return [(match[1], int(match[2]), match[3]) for match in _FRAME.finditer(trace)]


def _is_assert_statement(frames: Frames) -> bool:
    return bool(frames) and "assert " in linecache.getline(*frames[-1][:2])


def behind(frames: Frames, then: types.TracebackType | None = None) -> types.TracebackType | None:
    """A traceback through frames that do not exist, which goes on with ``then``."""
    traceback = then
    for file, line, function in reversed(frames):
        try:
            exec(compile(_raising_in(line), file, "exec").replace(co_name=function), {})
        except ValueError as error:
            raised = cast(types.TracebackType, error.__traceback__)
        while raised.tb_next is not None:
            raised = raised.tb_next
        # notebooks look at the instruction: it has to be one of the code's
        traceback = types.TracebackType(traceback, raised.tb_frame, raised.tb_lasti, line)
    return traceback


def _raising_in(line: int) -> ast.Module:
    """A statement that raises in ``line``, without columns to be marked there."""
    tree = ast.parse("raise ValueError")
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno = node.end_lineno = line
            node.col_offset = node.end_col_offset = -1
    return tree
