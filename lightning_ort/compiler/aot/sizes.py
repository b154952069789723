"""Sizes of inputs that vary: names, and sums, products and whole quotients of names."""

from __future__ import annotations

import ast
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch

if TYPE_CHECKING:
    from lightning_ort.compiler.aot.inputs import InputInfo

__all__ = ["Size", "bound", "independent", "mismatch", "settled", "size_text", "value_of", "varying"]

Size = int | str
"""a number, or the name of a size that varies, or what such a size is: ``"2*batch"``"""

_OPERATIONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def varying(infos: Iterable[InputInfo]) -> list[str]:
    """The names in the shapes of inputs, in order."""
    return list(dict.fromkeys(s for info in infos for s in info.shape if isinstance(s, str)))


def independent(infos: Iterable[InputInfo]) -> list[str]:
    """The names that are no expressions of other ones."""
    names = varying(infos)
    return [n for n in names if value_of(n, dict.fromkeys(names, 1)) is None]


def bound(infos: Iterable[InputInfo], sizes: Mapping[str, Size]) -> list[InputInfo]:
    """``infos`` with ``sizes`` in the place of their names."""
    return [
        dataclasses.replace(i, shape=tuple(sizes.get(s, s) if isinstance(s, str) else s for s in i.shape))
        for i in infos
    ]


def settled(infos: Sequence[InputInfo], sizes: Mapping[str, int]) -> list[InputInfo]:
    """``infos`` with numbers for what a symbol cannot stand for at ``sizes``: 0, 1, and a size that another one has.

    Args:
        sizes: of the names that are no expressions of others.
    """
    first = {size: name for name, size in reversed(list(sizes.items()))}
    fixed: dict[str, Size] = {name: size for name, size in sizes.items() if size < 2 or first[size] != name}
    if fixed:
        fixed |= {name: value_of(name, sizes) for name in varying(infos) if name not in sizes}
    return bound(infos, fixed)


def mismatch(infos: Sequence[InputInfo], shapes: Sequence[Sequence[int]]) -> str | None:
    """What is wrong with the ``shapes`` of inputs that were declared as ``infos``; ``None`` if nothing is."""
    known: dict[str, int] = {}
    for info, shape in zip(infos, shapes, strict=True):
        for name, size in zip(info.shape, shape, strict=False):
            if isinstance(name, str):
                known.setdefault(name, size)
    wanted: dict[str, int] = {}
    for info, shape in zip(infos, shapes, strict=True):
        for s in info.shape:
            if isinstance(s, str) and s not in wanted:
                size = value_of(s, known)
                wanted[s] = known[s] if size is None and s in known else -1 if size is None else size
        expected = [wanted[s] if isinstance(s, str) else s for s in info.shape]
        if list(shape) != expected:
            names = [s for s in dict.fromkeys(info.shape) if isinstance(s, str) and wanted[s] >= 0]
            where = ", ".join(f"{s} is {wanted[s]}" for s in names)
            repeated = any(s == 1 and isinstance(d, str) for s, d in zip(shape, info.shape, strict=False))
            return (
                f"Input {info.name!r} has shape {tuple(shape)}; expected {list(info.shape)}"
                f"{', where ' + where if where else ''}."
                f"{' A size of 1 that stands for many is to be declared as the number 1.' if repeated else ''}"
            )
    return None


def value_of(size: str, known: Mapping[str, Any]) -> Any:
    """The value of an expression of names, ``None`` if it is a name or has a name that is not ``known``."""
    if size.isidentifier():
        return None
    compute = _compiled(size, tuple(known))
    return None if compute is None else compute(known)


@functools.lru_cache(256)
def _compiled(size: str, names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Any] | None:
    """From sizes by name to the value of an expression; ``None`` if ``size`` is none of some of ``names``."""
    others = sorted((n for n in names if n != size), key=len, reverse=True)
    if not others:
        return None
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"_{len(numbers)}")

    text = re.sub("|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in others), number, size)
    try:
        tree = ast.parse(text, mode="eval").body
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not numbers or not used <= set(numbers.values()):
        return None
    by_symbol = {symbol: name for name, symbol in numbers.items()}

    def value(node: ast.AST, sizes: Mapping[str, Any]) -> Any:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value(node.left, sizes), value(node.right, sizes))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand, sizes)
        if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 1 << 40:
            return node.value
        if isinstance(node, ast.Name):
            return sizes[by_symbol[node.id]]
        raise ValueError

    def compute(sizes: Mapping[str, Any]) -> Any:
        try:
            return value(tree, sizes)
        except (ValueError, ZeroDivisionError, RecursionError):
            return None

    return compute


def size_text(size: torch.SymInt | sympy.Expr | int, names: Mapping[str, str]) -> Size:
    """A symbolic size in the names of the inputs; ``names`` are by symbol."""
    if isinstance(size, int):
        return size
    text = str(size)
    if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
        text = text[1:-1]
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), text)
