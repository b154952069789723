"""Look at a module as it is used for inference, and leave it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from lightning_ort.compiler.checking import ForkedRNG
from lightning_ort.compiler.dynamo import no_fast_path
from lightning_ort.compiler.surroundings import without_autocast

__all__ = ["undisturbed"]


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and the random state are as before afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    device = next((t.device for t in tensors), torch.device("cpu"))
    # a forward that writes to its buffers, such as one that counts its calls
    buffers = [(b, b.detach().clone()) for b in module.buffers()]
    module.eval()
    try:
        with torch.inference_mode(False), torch.no_grad(), without_autocast(), no_fast_path(), ForkedRNG(device):
            yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)
        for m, mode in modes:
            m.training = mode
