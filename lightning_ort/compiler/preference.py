"""Operators that ONNX Runtime could run, and whose kernels in torch are the faster ones."""

from __future__ import annotations

import math

import torch
from torch import fx

from lightning_ort.compiler.work import operations
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.providers import choose_providers

__all__ = ["faster_in_torch"]

aten = torch.ops.aten
_BACKWARD = aten.convolution_backward.default

_LARGE, _GROUPED = 1e7, 0.1
"""Operations of a convolution from which oneDNN's lead is more than leaving a session and entering the next one costs:
it was 1.1 to 2 times as fast there, 2.5 to 3.5 times with groups (stacks of four layers, forward and backward, batch
16 to 32, 8 to 128 channels, 8x8 to 64x64 pixels, 2 cores). A convolution of single pixels is a matrix product, in which
ONNX Runtime is the faster one or as fast."""
_LARGE_ON_GPU = 1e9
"""Operations of a convolution from which its gradient is placed in torch on a GPU. An estimate, not measured: ONNX
Runtime has no kernels for these gradients, and its other operators copy each image once per pixel of the filter."""


def faster_in_torch(graph: fx.Graph, config: RuntimeConfig, device: torch.device) -> set[fx.Node]:
    """Calls of ``graph`` to place in torch for speed.

    On the CPU those are large convolutions in float32, forward and backward: torch's come from oneDNN, which computes
    in blocked layouts, and ONNX Runtime has kernels like that for constant weights only. On a GPU those are the
    gradients of still larger ones, for which torch has those of cuDNN.
    """
    if config.placement != "fastest":
        return set()
    if device.type == "cuda":
        return {n for n in graph.nodes if _is_for_cudnn(n)}
    if not _has_onednn():
        return set()
    (first, _), *_ = choose_providers(device, config.providers, config.provider_options)
    if first != "CPUExecutionProvider":
        return set()
    return {n for n in graph.nodes if _is_large_convolution(n, _LARGE)}


def _is_for_cudnn(node: fx.Node) -> bool:
    """Whether ONNX Runtime has no kernel for a convolution on a GPU: for gradients, and in bfloat16."""
    if node.target not in (aten.convolution.default, _BACKWARD):
        return False
    dtype = node.all_input_nodes[0].meta["val"].dtype
    if dtype.itemsize < 4:
        return node.target is _BACKWARD or dtype == torch.bfloat16
    return node.target is _BACKWARD and _is_large_convolution(node, _LARGE_ON_GPU)


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _is_large_convolution(node: fx.Node, large: float) -> bool:
    if node.target is aten.convolution.default:
        weight, groups = node.args[1], node.args[8]
    elif node.target is _BACKWARD:
        weight, groups = node.args[2], node.args[9]
    else:
        return False
    tensors = [a.meta["val"] for a in node.args if isinstance(a, fx.Node)]
    if any(t.dtype != torch.float32 for t in tensors) or math.prod(weight.meta["val"].shape[2:]) == 1:
        return False
    return operations([node]) >= (large if groups == 1 else large * _GROUPED)
