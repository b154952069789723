"""What a report says of one graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lightning_ort.compiler.choice import MARGIN, Choice
from lightning_ort.compiler.dynamo_words import source_line
from lightning_ort.compiler.executors.channels_last import CHANNELS_LAST
from lightning_ort.compiler.executors.executable import Account, Executable
from lightning_ort.environment import LIBRARIES
from lightning_ort.files.cache import is_in_use
from lightning_ort.report import GraphReport
from lightning_ort.runtime.config import RuntimeConfig

__all__ = ["report_of"]


def report_of(
    account: Account,
    part: str,
    graph: fx.GraphModule,
    fakes: Sequence[Any],
    name: Callable[[int], str],
    choice: Choice | None,
    config: RuntimeConfig,
) -> GraphReport:
    """Account of a graph that is taken into use.

    Args:
        account: who runs it; with :attr:`~.Account.milliseconds` if it was measured.
        part: ``"forward"``, ``"backward"``, or empty.
        graph: Dynamo's.
        fakes: its inputs.
        name: user's name of an input.
        choice: what a race has shown, of this graph or of the same one before its gradients had another form.
        config: of the sessions.
    """
    lines = [source_line(n) for n in graph.graph.nodes if n.op.startswith("call")]
    lines = [line for line in lines if line and not line.startswith(LIBRARIES)]
    tensors = {i: x for i, x in enumerate(fakes) if isinstance(x, torch.Tensor)}
    weights = [x for x in tensors.values() if isinstance(x, torch.nn.Parameter)]
    return GraphReport(
        executor=account.executor,
        why=_why(account, choice, config),
        part=part,
        gradients=part == "backward" or bool(isinstance(account, Executable) and account.gradients),
        calls=sum(n.op.startswith("call") for n in graph.graph.nodes),
        begins=lines[0] if lines else "",
        ends=lines[-1] if lines else "",
        inputs={name(i): _shape(x) for i, x in tensors.items() if not isinstance(x, torch.nn.Parameter)},
        weights=len(weights),
        elements=sum(x.numel() for x in weights),
        segments=getattr(account, "segments", (0, 0)),
        measured=dict(account.milliseconds),
        failed={} if choice is None else dict(choice.failed),
        **_against_eager(account.executor, part, choice),
        seconds=account.choosing_seconds,
    )


def _shape(x: torch.Tensor) -> str:
    sizes = " x ".join(str(size) if isinstance(size, int) else "open" for size in x.shape)
    return f"{sizes or 'one'} {str(x.dtype).removeprefix('torch.')}"


def _against_eager(executor: str, part: str, choice: Choice | None) -> dict[str, Any]:
    """Speed and gain, if both were measured."""
    own, eager = (None if choice is None else choice.milliseconds.get(name) for name in (executor, "eager"))
    if not own or eager is None:
        return {}
    return {"speed": eager / own, "gain": 0.0 if part == "backward" else (eager - own) / 1e3}


def _why(account: Account, choice: Choice | None, config: RuntimeConfig) -> str:
    if choice is None and account.fallbacks and not account.in_onnxruntime:
        return account.fallbacks[0].reason
    if choice is not None:
        fastest = min(choice.milliseconds, key=choice.milliseconds.__getitem__)
        if fastest == account.executor:
            return "it took the least time when they were measured side by side"
        if choice.executor == CHANNELS_LAST != account.executor:
            return "images in channels_last took the least time, and this graph has none that gain by it"
        own, least = (choice.milliseconds.get(name, math.inf) for name in (account.executor, fastest))
        if own * (1 - MARGIN) > least * 1.001:  # what is remembered is rounded
            return "another of the processes that train together has measured it to be the fastest, and all take it"
        return f"it took no longer than {MARGIN:.0%} more than the fastest when they were measured side by side"
    if config.placement not in ("fastest", "fastest+inductor"):
        return f"placement='{config.placement}' asks for it; nothing was measured"
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic=True asks for a choice by the graph alone; nothing was measured"
    if not is_in_use():
        return "LIGHTNING_ORT_MEASURE=0 asks for a choice by the graph alone; nothing was measured"
    return "it was not measured"
