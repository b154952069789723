"""torch's own transformer modules: neither their masks nor their fast path break a graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.transformer_modules import transformers_in_graphs

pytestmark = pytest.mark.stock_only

CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
ROLLED = torch.eye(5).roll(1, 0).bool()
SIZES = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **SIZES), 2)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, **SIZES), 2, norm=nn.LayerNorm(8))


def padded(column: int, mask: torch.Tensor) -> torch.Tensor:
    """Padding in one column, of the kind of ``mask``."""
    return torch.zeros(3, 5, dtype=mask.dtype).index_fill(
        1, torch.tensor(column), True if mask.dtype is torch.bool else -torch.inf
    )


MODULES = {
    "encoder": (encoder, lambda m, x, mask: m(x, mask=mask)),
    "decoder": (decoder, lambda m, x, mask: m(x, x.flip(1)[:, :4], tgt_mask=mask)),
    "decoder, all given": (
        decoder,
        lambda m, x, mask: m(x, x.flip(1), mask, mask.T, padded(4, mask), padded(0, mask), tgt_is_causal=None),
    ),
    "both": (
        lambda: nn.Transformer(8, 2, 1, 2, **SIZES),
        lambda m, x, mask: m(x.flip(1), x, src_mask=mask, tgt_mask=mask),
    ),
}


@pytest.mark.parametrize("mask", [CAUSAL, ROLLED], ids=["causal", "another mask"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", MODULES)
def test_a_mask_breaks_no_graph(kind, training, mask):
    make, call = MODULES[kind]
    module, x = make().train(training), torch.randn(3, 5, 8)

    def step(x):
        y = call(module, x, mask)
        return y[..., :3].square().sum(), y

    step(x)[0].backward()
    in_eager = [p.grad for p in module.parameters()]
    module.zero_grad()
    with transformers_in_graphs():
        loss, y = torch.compile(step, backend=ORTBackend(), fullgraph=True)(x)
        loss.backward()
    pairs = [(y, step(x)[1]), *zip([p.grad for p in module.parameters()], in_eager, strict=True)]
    for got, wanted in pairs:
        assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("has_fast_path", [True, False])
def test_padding_is_filled_as_the_users_setting_has_it(has_fast_path):
    module, x = encoder().eval(), torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [2]])
    torch.backends.mha.set_fastpath_enabled(has_fast_path)
    try:
        with torch.no_grad():
            wanted = module(x, src_key_padding_mask=padding)
            with transformers_in_graphs():
                got = torch.compile(module, backend=ORTBackend())(x, src_key_padding_mask=padding)
        assert torch.backends.mha.get_fastpath_enabled() == has_fast_path
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert bool((wanted[2, 2:] == 0).all()) == has_fast_path
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_others_have_put_in_the_place_of_forward_stays(monkeypatch):
    theirs = lambda self, src: src  # noqa: E731
    monkeypatch.setattr(nn.TransformerEncoder, "forward", theirs)
    before = nn.TransformerDecoder.forward
    with transformers_in_graphs():
        assert nn.TransformerEncoder.forward is theirs
        with transformers_in_graphs():
            assert nn.TransformerDecoder.forward is not before
        assert nn.TransformerDecoder.forward is not before
    assert nn.TransformerEncoder.forward is theirs and nn.TransformerDecoder.forward is before
