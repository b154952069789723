"""Where in the user's code an fx node comes from."""

from __future__ import annotations

import re

from torch import fx

__all__ = ["source_line"]


def source_line(node: fx.Node) -> str:
    """``file:line, code`` of the user's call behind an fx node, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        match = re.match(r'File "(.+)", line (\d+), in (\S+)', lines[i])
        if match:
            code = lines[i + 1] if i + 1 < len(lines) else ""
            return f"{match[1]}:{match[2]}: {code}"
    return ""
