"""Views, slices and concatenations: numbers and gradients against eager, at two batch sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graph_harness import BATCH, Case, check, op_types
from torch import Tensor, randn


def one(*shape: int):
    """A batch of random numbers of that shape."""
    return lambda b: (randn(b, *shape),)


def assigned(x: Tensor, *index: object) -> Tensor:
    y = x.clone()
    y[index] = x[index] * 2
    return y


SHAPES = [
    Case("view", lambda x: x.view(x.shape[0], 48), one(6, 8)),
    Case("view_inferred", lambda x: x.view(-1, 48), one(6, 8)),
    Case("view_merge_batch", lambda x: x.view(x.shape[0] * 6, 8), one(6, 8)),
    Case("view_inferred_inner", lambda x: x.reshape(x.shape[0], 2, -1, 4), one(6, 8)),
    Case("view_two_symbolic", lambda x: x.reshape(x.shape[0], x.shape[0] * 2, 3), lambda b: (randn(b, 6, b),)),
    Case("reshape_of_permuted", lambda x: x.permute(0, 2, 1).reshape(x.shape[0], -1), one(6, 8)),
    Case("flatten", lambda x: x.flatten(1), one(2, 3, 4)),
    Case("unflatten", lambda x: x.unflatten(1, (2, 3)), one(6, 8)),
    Case("scalar_view", lambda x: x.sum().view(1, 1), one(3)),
    Case("permute", lambda x: x.permute(2, 0, -2), one(6, 8)),
    Case("transpose", lambda x: x.transpose(-1, 0), one(6, 8)),
    Case(
        "diagonal scattered, and multiplied",
        lambda x, w: F.linear(torch.diagonal_scatter(x, w[0]), w),
        lambda b: (randn(4, 4), randn(4, 4)),
    ),
    Case("mT", lambda x: x.mT * 2, one(6, 8)),
    Case("t", lambda x: x.t(), one(6)),
    Case("movedim", lambda x: x.movedim(0, -1), one(6, 8)),
    Case("swapaxes_twice", lambda x: x.swapaxes(1, 2).swapaxes(0, 1), one(6, 8)),
    Case("expand", lambda x: x.unsqueeze(1).expand(-1, 5, -1), one(8)),
    Case("expand_lead", lambda x: x.expand(3, -1, -1), one(8)),
    Case("expand_to_batch", lambda x, w: w.expand(x.shape[0], 4) * x, lambda b: (randn(b, 4), randn(4))),
    Case("expand_as", lambda x, w: w.expand_as(x), lambda b: (randn(b, 4), randn(1, 4))),
    Case("broadcast_to", lambda x: x.broadcast_to(2, x.shape[0], 4), one(4)),
    Case("squeeze_all", lambda x: x.squeeze(), one(1, 4, 1)),
    Case("squeeze_dim", lambda x: x.squeeze(1), one(1, 4, 1)),
    Case("squeeze_not_one", lambda x: x.squeeze(2), one(1, 4, 1)),
    Case("squeeze_dims", lambda x: x.squeeze((1, -1)), one(1, 4, 1)),
    Case("unsqueeze", lambda x: x.unsqueeze(-1).unsqueeze(0), one(4)),
    Case("repeat", lambda x: x.repeat(2, 1, 3), one(4)),
    Case("repeat_batch", lambda x, w: w.repeat(x.shape[0], 1) + x, lambda b: (randn(b, 4), randn(4))),
    Case("tile", lambda x: x.tile(2, 3), one(4)),
    Case("repeat_interleave", lambda x: x.repeat_interleave(2, 1), one(6, 8)),
    Case("tril", lambda x: x.tril(), one(6, 6)),
    Case("triu", lambda x: x.triu(1), one(6, 5)),
    Case("tril_negative", lambda x: x.tril(-2), one(5, 6)),
    Case("tril_bool", lambda x: x.gt(0).tril(), one(5, 6), gradients=False),
    Case("tril_int32", lambda x: x.mul(9).int().triu(), one(5, 6), gradients=False),
    Case("causal_mask", lambda x: x.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -1e9), one(5, 5)),
    Case("diagonal", lambda x: x.diagonal(dim1=1, dim2=2), one(6, 6)),
    Case("diagonal_above", lambda x: x.diagonal(2, 1, 2), one(4, 6)),
    Case("diagonal_below", lambda x: x.diagonal(-1, 2, 1), one(4, 6)),
    Case("diagonal_outer_dims", lambda x: x.diagonal(0, 1, 3), one(3, 4, 3)),
    Case("diagonal_far", lambda x: x.diagonal(-3, -2, -1), one(4, 2)),
    Case("diag_embed", lambda x: torch.diag_embed(x), one(4)),
    Case("diag_embed_offset", lambda x: torch.diag_embed(x, 1), one(4)),
    Case("trace", lambda x, w: x * w.trace(), lambda b: (randn(b, 3), randn(4, 4))),
    Case("fill_diagonal", lambda x: assigned_diagonal(x), lambda b: (randn(b, 4, 4),)),
    Case("as_strided", lambda w: (w + 1).as_strided((3, 2), (2, 4), 1) * 2, lambda b: (randn(4, 4),), dynamic=False),
    Case("as_strided_plain", lambda w: w.as_strided((2, 8), (8, 1)) * 2, lambda b: (randn(4, 4),), dynamic=False),
    Case(
        "as_strided_in_order",
        lambda x: x.tanh().as_strided((x.shape[0], 4, 1, 1), (4, 1, 4, 4)) * x.sum(0)[:, None, None],
        one(4),
    ),
    Case("average_of_channels_last", lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1).sin(), one(5, 6, 3)),
    Case("pixel_shuffle", lambda x: torch.pixel_shuffle(x, 2), one(8, 3, 3)),
    Case("pixel_unshuffle", lambda x: torch.pixel_unshuffle(x, 2), one(2, 4, 6)),
    Case("channel_shuffle", lambda x: torch.channel_shuffle(x, 2), one(8, 3, 3)),
    Case("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="ij")[0] * y, lambda b: (randn(b), randn(5))),
    Case("block_diag", lambda x, y: torch.block_diag(x, y), lambda b: (randn(2, 3), randn(4, 2)), dynamic=False),
    Case("tril_indices", lambda x: x[(slice(None), *torch.tril_indices(4, 4))], one(4, 4)),
]


def assigned_diagonal(x: Tensor) -> Tensor:
    y = x.clone()
    y.diagonal(dim1=-2, dim2=-1).copy_(x[:, 0])
    return y


SLICES = [
    Case("slice", lambda x: x[:, 1:5:2], one(6, 8)),
    Case("slice_batch", lambda x: x[1:-1], one(6)),
    Case("slice_to_symbolic", lambda x: x[: x.shape[0] - 1], one(6)),
    Case("slice_half_batch", lambda x: x[: x.shape[0] // 2], one(6)),
    Case("slice_beyond", lambda x: x[:, 2:100], one(6)),
    Case("slice_negative", lambda x: x[:, -3:-1], one(6)),
    Case("slice_step_batch", lambda x: x[::2], one(6)),
    Case("slice_of_transposed", lambda x: x.transpose(0, 2)[:, 1:3].tanh().transpose(0, 2), one(3, 4)),
    Case("narrow", lambda x: x.narrow(1, 2, 3), one(6)),
    Case("select", lambda x: x[:, 2], one(6, 8)),
    Case("select_last", lambda x: x[..., -1], one(6, 8)),
    Case("select_batch", lambda x: x[0] + x[-1], one(6)),
    Case("none_and_ellipsis", lambda x: x[:, None, ..., 1:3], one(6, 8)),
    Case("cat", lambda x, y: torch.cat([x, y * 2, x], 1), lambda b: (randn(b, 2, 3), randn(b, 4, 3))),
    Case("cat_batch", lambda x: torch.cat([x, x * 2]), one(3)),
    Case("cat_promotes", lambda x: torch.cat([x, torch.ones(x.shape[0], 2, dtype=torch.int64)], 1), one(3)),
    Case("cat_empty", lambda x: torch.cat([torch.zeros(0), x.sin()], 1), one(3)),
    Case("stack", lambda x: torch.stack([x, x * 2], 1), one(6, 8)),
    Case("stack_last", lambda x: torch.stack([x, x.exp()], -1), one(6)),
    Case("hstack_vstack", lambda x: torch.vstack([torch.hstack([x, x * 2]), torch.hstack([x, x])]), one(6)),
    Case("split", lambda x: torch.cat([p * i for i, p in enumerate(x.split(4, 1))], 1), one(10)),
    Case("split_sizes", lambda x: x.split([1, 3, 2], 1)[1], one(6)),
    Case("split_batch", lambda x: x.split(3)[0], one(6), dynamic=False),
    Case("chunk", lambda x: torch.stack(x.chunk(3, -1)).prod(0), one(4, 9)),
    Case("unbind", lambda x: sum(p * i for i, p in enumerate(x.unbind(1))), one(4, 3)),
    Case("tensor_split", lambda x: x.tensor_split(3, 1)[2], one(8)),
    Case("flip", lambda x: x.flip(1), one(6, 8)),
    Case("flip_two", lambda x: x.flip(0, 2), one(6, 8)),
    Case("fliplr", lambda x: torch.fliplr(x), one(6)),
    Case("rot90", lambda x: torch.rot90(x, 1, (1, 2)), one(5, 6)),
    Case("roll", lambda x: x.roll(2, 1), one(6)),
    Case("roll_batch", lambda x: x.roll(1, 0), one(6)),
    Case("roll_batch_back", lambda x: x.roll(-2, 0), one(6)),
    Case("roll_batch_around", lambda x: x.roll(9, 0), one(6)),
    Case("roll_two", lambda x: x.roll((1, -2), (0, 2)), one(6, 8)),
    Case("roll_flat", lambda x: x.roll(5), one(6)),
    Case("unfold", lambda x: x.unfold(1, 3, 1), one(6, 4)),
    Case("unfold_step", lambda x: x.unfold(1, 3, 2), one(8)),
    Case("unfold_gaps", lambda x: x.unfold(-1, 2, 3), one(4, 9)),
    Case("unfold_batch", lambda x: x.unfold(0, 3, 1), one(4)),
    Case("assign_select", lambda x: assigned(x, slice(None), 2), one(6, 8)),
    Case("assign_select_last", lambda x: assigned(x, slice(None), -1), one(6, 8)),
    Case("assign_slice", lambda x: assigned(x, slice(None), slice(2, 5)), one(6, 8)),
    Case("assign_slice_step", lambda x: assigned(x, slice(None), slice(1, None, 2)), one(6, 8)),
    Case("assign_slice_step_inner", lambda x: assigned(x, ..., slice(0, 7, 3)), one(6, 8)),
    Case("assign_batch_row", lambda x: assigned(x, 0), one(6)),
    Case("assign_batch_rows", lambda x: assigned(x, slice(1, 3)), one(6)),
    Case("assign_batch_step", lambda x: assigned(x, slice(None, None, 2)), one(6)),
    Case("assign_all", lambda x: assigned(x, slice(None), slice(None)), one(6)),
    Case("diff", lambda x: x.diff(dim=1), one(6)),
    # ONNX Runtime makes slices of these
    Case("falling_rows", lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)] * 2, one(6)),
    Case("every_second_falling_row", lambda x: x[torch.arange(x.shape[0] - 1, -1, -2)] * 2, one(6)),
    Case("falling_rows_from_the_first", lambda x: x[torch.arange(0, -x.shape[0], -1)] * 2, one(6)),
    Case("last_rows", lambda x: x[torch.arange(-(x.shape[0] // 2), 0)] * 2, one(6)),
]


SYMBOLIC = [
    Case("halves", lambda x: x[:, : x.shape[1] // 2] + x[:, -(x.shape[1] // 2) :], lambda b: (randn(2, b),)),
    Case("halves_of_batch", lambda x: x[x.shape[0] // 2 :] * 2, one(3)),
    Case("split_batch", lambda x: x.split([x.shape[0] // 2, x.shape[0] - x.shape[0] // 2])[1], one(2)),
    Case("positions", lambda x: x + torch.arange(x.shape[1])[:, None] / x.shape[1], lambda b: (randn(2, b, 4),)),
    Case("causal", lambda x: (x @ x.mT) + torch.full((x.shape[1],) * 2, -9.0).triu(1), lambda b: (randn(2, b, 4),)),
    Case("identity", lambda x: x @ x.t() * (1 - torch.eye(x.shape[0])), one(4)),
    Case("pad_to", lambda x: torch.nn.functional.pad(x, (0, 10 - x.shape[1])), lambda b: (randn(2, b),)),
    Case("pairs", lambda x: (x[:, None] - x[None]).square().sum(-1), one(4)),
    Case("count", lambda x: x.sum() / x.numel() + x.mean() * x.shape[0] ** 2, one(4)),
    Case(
        "sum_of_sizes",
        lambda x, y: torch.cat([x, y, x])[: x.shape[0] + y.shape[0] + 1],
        lambda b: (randn(b, 3), randn(b, 3)),
    ),
    Case(
        "window",
        lambda x: x.new_zeros(x.shape[0] * 2, 3).slice_scatter(x, 0, x.shape[0] // 2, x.shape[0] // 2 + x.shape[0]),
        one(3),
    ),
    # sizes as other arguments than sizes
    Case("ignored_class", lambda x: F.cross_entropy(x, torch.arange(x.shape[0]), ignore_index=x.shape[0] - 1), one(8)),
    Case(
        "ignored_class_of_pixels",
        lambda x: F.cross_entropy(
            x, torch.arange(3).expand(x.shape[0], 3), ignore_index=x.shape[0] - 4, reduction="sum"
        ),
        one(3, 3),
    ),
    Case("threshold", lambda x: F.threshold(x, 1 / x.shape[0], x.shape[0]), one(3)),
    Case("correction", lambda x: x.var(0, correction=x.shape[0] - 3) * x.std(correction=x.shape[0] // 4), one(3)),
    Case("correction_of_few", lambda x: x.var(1, correction=x.shape[0] // 4), one(3)),
    Case("padding_row", lambda x: F.embedding(torch.arange(x.shape[0]), x, padding_idx=x.shape[0] - 1), one(3)),
]


@pytest.mark.parametrize("case", SYMBOLIC, ids=str)
def test_symbolic_sizes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SHAPES, ids=str)
def test_shapes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", SLICES, ids=str)
def test_slices(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_every_integer_type_moves(dtype: torch.dtype) -> None:
    def moves(x: Tensor) -> list[Tensor]:
        y = torch.cat([x.flip(1), x.roll(1, 1).transpose(1, 2)], 1)
        return [y[:, ::2], y.tril(), y.unfold(1, 2, 1), y.diagonal(dim1=1, dim2=2), y.repeat(1, 2, 1)]

    def inputs(b: int) -> list[Tensor]:
        return [torch.randint(0, 2 if dtype == torch.bool else 100, (b, 4, 4)).to(dtype)]

    check(Case(str(dtype), moves, inputs, gradients=False))


def test_a_view_of_a_static_shape_needs_no_shape_computation() -> None:
    lowered = check(Case("static", lambda x: x.view(BATCH, 2, 3).permute(0, 2, 1) * 2, one(6), dynamic=False))
    assert not {"Shape", "Concat", "Gather"} & set(op_types(lowered))
