"""Dynamo's reasons in plain words: for graph breaks, for compiling again, and for leaving a function to Python; and
where it found what a graph reads."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

from torch import fx

from lightning_ort.report import GraphBreak
from lightning_ort.validation import first_line

__all__ = [
    "compiled_again",
    "function_name",
    "graph_break",
    "name_of_source",
    "source_line",
    "source_of",
    "user_frame",
    "why",
]

_MANUAL = "manual optimization"
_EXPECTED = (
    (
        r"(manual_backward|(un)?toggled?_optimizer|clip_gradients|configure_gradient_clipping|lr_scheduler_step)"
        r" is plain Python",
        _MANUAL,
    ),
    (r"updates are no part of a graph|`Optimizer\.zero_grad`", _MANUAL),
    (r"`optimizer_step` in mro .*weakref", _MANUAL),  # Lightning's optimizers hold the strategy by a weak reference
    (r"(all_gather|lr_schedulers|optimizers|print) is plain Python", "calls of Lightning"),
    (r"metrics are plain Python", "metrics"),
    (r"copies are no part of a graph", "copies of modules and metrics"),
)
"""What Dynamo, or this package, says of a break that is as it should be, and what asks for it."""

_PLAIN = (
    (r"generic_jump|[Dd]ata-dependent branching", "which way Python goes depends on the values of a tensor"),
    (r"Tensor\.(?:item|tolist)\b", "a tensor becomes a number of Python"),
    (r"`Tensor\.numpy\(\)`", "a tensor becomes an array of NumPy"),
    (r"torch\.from_numpy", "an array of NumPy becomes a tensor"),
    (r"`([\w.:]+)`'s output shape depends", "the size of a result depends on values ({})"),
    (r"builtin operator `(\w+)`", "{}() is called with what Dynamo cannot follow"),
    (r"builtin `(?:<unknown module>\.)?([\w.]*\w)\.?`", "{} is called, which Dynamo cannot look into"),
    (r"function `([\w.]+)` should not be traced", "{} is called, which is plain Python"),
    (r"`optimizer_step` in mro", "an optimizer's step is no part of a graph"),
    (r"Unsupported context manager", "a with block that Dynamo does not know"),
)


def graph_break(text: str, source: str) -> GraphBreak:
    """A break by Dynamo's reason, and the user's line."""
    reason, explanation = _words(text)
    expected = next((by for pattern, by in _EXPECTED if re.search(pattern, text)), "")
    return GraphBreak(reason, source, expected, "" if expected else explanation)


def why(text: str) -> str:
    """Dynamo's reason, plain words first."""
    reason, explanation = _words(text)
    return f"{reason}. {explanation}" if explanation else reason


def _words(text: str) -> tuple[str, str]:
    """Plain words, or else Dynamo's; and Dynamo's if they are not those."""
    given = re.search(r"\(reason: (.+)\)\s*$", text, re.MULTILINE)
    given = given or re.search(
        r"disabled function .* with the reason: (.+?)\.?$|(?<!skip )[Rr]eason: (.+)$", text, re.MULTILINE
    )
    if given:
        found = next(group for group in given.groups() if group)
        if found != "None":
            return found.strip(), ""
    explanation = _explanation(text)
    for pattern, words in _PLAIN:
        match = re.search(pattern, text)
        if match:
            return words.format(*match.groups()), explanation
    return explanation.removeprefix("Dynamo: "), ""


def _explanation(text: str) -> str:
    """Dynamo's, whole, or its first line; it begins with "Dynamo"."""
    match = re.search(r"Explanation: (.+?)(?=\n\s*Hint:|\n\s*\n|\n\s*Developer|\Z)", text, re.DOTALL)
    found = " ".join((match[1] if match else first_line(text)).split()).rstrip(".")
    return found if found.startswith("Dynamo") else f"Dynamo: {found}"


def function_name(name: str) -> str:
    """A function by the name of its code, which Dynamo makes up for what comes after a break."""
    resumed = re.search(r"torch_dynamo_resume_in_(\w+)_at_(\d+)", name)
    return "{} from line {} on".format(*resumed.groups()) if resumed else name


def compiled_again(text: str) -> str:
    """Why a function did not fit what it had been compiled for, by Dynamo's failed guard."""
    guard = re.sub(r"^\W*\d+/\d+: ", "", first_line(text))
    # the line of code is whole, but the path behind it is not
    guard, *comments = re.split(r"\s+# ", guard)
    size = re.fullmatch(r"tensor '(.+)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)", guard)
    if size:
        return f"size {size[2]} of {_name(size[1])} was {size[3]} and is {size[4]}"
    if not comments or comments[0].startswith("("):  # a line of torch's or ours alone
        return _name(guard)
    return f"not any more: {_name(guard)} ({comments[0].strip()})"


def _name(expression: str) -> str:
    """Variables as users write them."""
    return re.sub(r"___stack\d+", "a value computed before", re.sub(r"\b[LG]\['(\w+)'\]", r"\1", expression))


def source_of(placeholder: fx.Node) -> Any:
    """Where Dynamo found an input of its graph; ``None`` where it does not say. Private: there is no public name."""
    return getattr(placeholder, "_dynamo_source", None)


def name_of_source(placeholder: fx.Node) -> str:
    """That as an expression, such as ``L['self']._modules['net']``, or the name of the node."""
    source = source_of(placeholder)
    name = placeholder.name if source is None else source.name
    return str(name() if callable(name) else name)


def source_line(node: fx.Node) -> str:
    """``file:line, code`` of the user's call behind an fx node, or an empty string."""
    frame = user_frame(node)
    return "" if frame is None else f"{frame.filename}:{frame.lineno}: {frame.line}"


def place_of(graph: fx.GraphModule) -> str:
    """``the graph of file:line``, for messages: where the user's code calls the first of its operators."""
    frames = (user_frame(n) for n in graph.graph.nodes if n.op.startswith("call"))
    return next((f"the graph of {Path(f.filename).name}:{f.lineno}" for f in frames if f is not None), "a graph")


def user_frame(node: fx.Node) -> traceback.FrameSummary | None:
    """The user's call behind an fx node."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        match = re.match(r'File "(.+)", line (\d+), in (\S+)', lines[i])
        if match:
            code = lines[i + 1] if i + 1 < len(lines) else ""
            return traceback.FrameSummary(match[1], int(match[2]), match[3], lookup_line=False, line=code)
    return None
