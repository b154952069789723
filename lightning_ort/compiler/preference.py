"""Operators that ONNX Runtime could run, and whose kernels in torch are the faster ones."""

from __future__ import annotations

import math

import torch
from torch import fx

from lightning_ort.compiler.work import operations
from lightning_ort.runtime.providers import choose_providers
from lightning_ort.runtime.session import RuntimeConfig

__all__ = ["faster_in_torch"]

aten = torch.ops.aten

_LARGE, _LARGE_GROUPED = 1e7, 1e6
"""Operations of a convolution from which oneDNN's lead is more than leaving a session and entering the next one costs:
it was 1.1 to 2 times as fast there, 2.5 to 3.5 times with groups (stacks of four layers, forward and backward, batch
16 to 32, 8 to 128 channels, 8x8 to 64x64 pixels, 2 cores). A convolution of single pixels is a matrix product, in which
ONNX Runtime is the faster one or as fast."""


def faster_in_torch(graph: fx.Graph, config: RuntimeConfig, device: torch.device) -> set[fx.Node]:
    """Calls of ``graph`` to place in torch for speed.

    On the CPU those are large convolutions in float32, forward and backward: torch's come from oneDNN, which computes
    in blocked layouts, and ONNX Runtime has kernels like that for constant weights only.
    """
    if config.placement != "fastest" or device.type != "cpu" or not _has_onednn():
        return set()
    (first, _), *_ = choose_providers(device, config.providers, config.provider_options)
    if first != "CPUExecutionProvider":
        return set()
    return {n for n in graph.nodes if _is_large_convolution(n)}


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _is_large_convolution(node: fx.Node) -> bool:
    if node.target is aten.convolution.default:
        weight, groups = node.args[1], node.args[8]
    elif node.target is aten.convolution_backward.default:
        weight, groups = node.args[2], node.args[9]
    else:
        return False
    tensors = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    if any(t.dtype != torch.float32 for t in tensors) or math.prod(weight.meta["val"].shape[2:]) == 1:
        return False
    return operations([node]) >= (_LARGE if groups == 1 else _LARGE_GROUPED)
