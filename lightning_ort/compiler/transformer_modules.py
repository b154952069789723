"""``nn.TransformerEncoder`` and ``nn.TransformerDecoder`` as graphs can hold them.

torch looks at the values of a mask to find out whether it is a causal one, for which there is a faster kernel, unless
it is told; the result is the same. And an encoder in evaluation has a fast path, one operator without an ONNX
counterpart, whose results differ where there is padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["transformers_in_graphs"]


@contextlib.contextmanager
def transformers_in_graphs() -> Iterator[None]:
    """Encoders without their fast path, but with what it shows of itself; no mask is looked at to find what it is."""
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    stand_ins: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
        torch.nn.TransformerEncoder: (_ENCODER, _encoder_with_zeros if has_fast_path else _encoder_as_it_is),
        torch.nn.TransformerDecoder: (_DECODER, _decoder),
    }
    # not in the place of another's patch, nor of these
    placed = {kind: pair for kind, pair in stand_ins.items() if kind.forward is pair[0]}
    for kind, (_, stand_in) in placed.items():
        kind.forward = stand_in
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        for kind, (original, _) in placed.items():
            kind.forward = original


_ENCODER, _DECODER = torch.nn.TransformerEncoder.forward, torch.nn.TransformerDecoder.forward


def _decoder(
    self: torch.nn.TransformerDecoder,
    tgt: torch.Tensor,
    memory: torch.Tensor,
    tgt_mask: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    tgt_key_padding_mask: torch.Tensor | None = None,
    memory_key_padding_mask: torch.Tensor | None = None,
    tgt_is_causal: bool | None = None,
    memory_is_causal: bool = False,
) -> torch.Tensor:
    paddings = tgt_key_padding_mask, memory_key_padding_mask
    return _DECODER(
        self, tgt, memory, tgt_mask, memory_mask, *paddings, _told(tgt_mask, tgt_is_causal), memory_is_causal
    )


def _told(mask: torch.Tensor | None, is_causal: bool | None) -> bool | None:
    """A word on whether ``mask`` is causal, after which its values are not looked at."""
    return False if mask is not None and is_causal is None else is_causal


def _encoder(fills_padding: bool) -> Callable[..., torch.Tensor]:
    """The forward of an encoder; if it ``fills_padding``, with zeros where the fast path has left it out.

    torch takes that path in evaluation, if all sequences are padded at their ends (``mask_check``).
    """

    def forward(
        self: torch.nn.TransformerEncoder,
        src: torch.Tensor,
        mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool | None = None,
    ) -> torch.Tensor:
        output = _ENCODER(self, src, mask, src_key_padding_mask, _told(mask, is_causal))
        if not fills_padding or src_key_padding_mask is None or not _leaves_padding_out(self, src, mask):
            return output
        padding = src_key_padding_mask.bool()
        filled = torch.zeros_like(output)
        if self.norm is not None:
            filled = self.norm(filled)
        chosen = padding
        if getattr(self, "mask_check", True):
            chosen = padding & (padding[:, 1:] | ~padding[:, :-1]).all()
        return torch.where(chosen.unsqueeze(-1), filled, output)

    return forward


# made once: for another function in its place, Dynamo would compile again
_encoder_with_zeros, _encoder_as_it_is = _encoder(True), _encoder(False)


def _leaves_padding_out(encoder: torch.nn.TransformerEncoder, src: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Torch's own conditions for a path without padding, but for those of the mask's values."""
    first = encoder.layers[0]
    tensors = [src, *first.parameters()]
    return (
        bool(getattr(encoder, "use_nested_tensor", False))
        and not first.training
        and src.dim() == 3
        and mask is None
        and not src.is_nested
        and not torch.is_autocast_enabled()
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    )
