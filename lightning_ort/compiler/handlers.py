"""Calls that may fail for their values, in a ``try`` of the user's.

A graph runs as a whole, outside of the ``try``, whose handler would never be reached.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
from collections.abc import Iterator

from torch import fx
from torch.linalg import LinAlgError

from lightning_ort.compiler import distributions
from lightning_ort.compiler.plan import Fallback
from lightning_ort.compiler.user_errors import frames_in
from lightning_ort.environment import LIBRARIES

__all__ = ["LeftToPython", "handled_call"]

_RAISED: dict[type[Exception], str] = {
    LinAlgError: "cholesky cholesky_inverse eig eigh eigvals eigvalsh inv inverse lstsq lu_factor lu_solve "
    "matrix_power multinomial pinv solve svd svdvals tensorinv tensorsolve",
    IndexError: "cross_entropy embedding embedding_bag gather index_select nll_loss one_hot scatter take "
    "take_along_dim",
    AssertionError: "_assert_async",
}
"""Exception to the names of what raises it for values. What fails for sizes or types Dynamo meets itself."""
_BY_NAME = {name: kind for kind, names in _RAISED.items() for name in names.split()}


class LeftToPython(Exception):
    """The step that is being called must be made as it is; nothing of it has run."""


def handled_call(graph: fx.GraphModule) -> Fallback | None:
    """The first call of Dynamo's ``graph`` that may raise for its values where the user's own function handles it."""
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        raised = _BY_NAME.get(name.removeprefix("linalg_")) if node.op.startswith("call") else None
        if raised is None:
            continue
        frames = frames_in(node.meta.get("stack_trace") or "")
        own = [(file, line) for file, line, _ in frames if not file.startswith(LIBRARIES)]
        if not own:
            continue
        if frames[-1][0] == distributions.__file__:
            raised = ValueError
        # around a function that calls it, a handler of anything may be there for other errors, as of memory
        if _is_handled(*own[-1], raised) or any(_is_handled(*frame, raised, by_name=True) for frame in own[:-1]):
            return Fallback(
                "the step as a whole",
                "a `try` around this call may have to handle what it raises, which a graph would raise later",
                f"{own[-1][0]}:{own[-1][1]}: {linecache.getline(*own[-1]).strip()}",
            )
    return None


def _is_handled(file: str, line: int, raised: type[Exception], *, by_name: bool = False) -> bool:
    around = _handlers(file, "".join(linecache.getlines(file)))
    found = [names for first, last, names in around if first <= line <= last]
    return any(_catches(names, raised, by_name) for names in found)


@functools.lru_cache(maxsize=64)
def _handlers(file: str, source: str) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """First and last lines of the bodies of all ``try``, and the names of what is handled there."""
    try:
        return tuple(_bodies(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return ()


def _bodies(tree: ast.AST) -> Iterator[tuple[int, int, tuple[str, ...]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Try):
            types = [
                kind for h in node.handlers for kind in (h.type.elts if isinstance(h.type, ast.Tuple) else [h.type])
            ]
            names = tuple(str(getattr(kind, "attr", getattr(kind, "id", ""))) for kind in types)
            yield node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno, names


def _catches(names: tuple[str, ...], raised: type[Exception], by_name: bool) -> bool:
    """Whether one of the exceptions of those names is ``raised``, or may be: one that is not Python's may be any."""
    kinds = [LinAlgError if name == "LinAlgError" else getattr(builtins, name, Exception) for name in names]
    if by_name:
        return raised in kinds
    return any(isinstance(kind, type) and issubclass(raised, kind) for kind in kinds)
