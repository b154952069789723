"""Gather, scatter, index and sort: numbers and gradients against eager."""

from __future__ import annotations

import onnx
import pytest
import torch
from graph_harness import Case, check
from torch import Tensor, randint, randn

from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig


def one(*shape: int):
    return lambda b: (randn(b, *shape),)


def three(b: int) -> list[Tensor]:
    """Numbers, indices into their second dimension, and a source of the shape of the indices."""
    return [randn(b, 6, 8), randint(0, 6, (b, 3, 8)), randn(b, 3, 8)]


def distinct(b: int) -> list[Tensor]:
    index = torch.stack([torch.randperm(6)[:3] for _ in range(b * 8)]).view(b, 8, 3).mT.contiguous()
    return [randn(b, 6, 8), index, randn(b, 3, 8)]


def put(x: Tensor, index: tuple, values: Tensor, accumulate: bool = False) -> Tensor:
    return x.clone().index_put_(index, values, accumulate)


def assigned(x: Tensor, index: object, value: object) -> Tensor:
    y = x.clone()
    y[index] = value
    return y


C = torch.tensor([0, 2, 2])
REDUCTIONS = ("sum", "mean", "prod", "amax", "amin")
D = torch.tensor([0, 2, -1])

SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)


def small(b: int) -> list[Tensor]:
    """A mask of rows, and a tensor of each small type, with its largest number in it."""
    tensors = [torch.tensor([0, 1, 1], dtype=dtype).repeat(b, 1) for dtype in SMALL]
    for tensor in tensors[1:]:
        tensor[:, 1] = torch.iinfo(tensor.dtype).max
    return [randn(b) > 0, *tensors]


INDEXING = [
    Case("mask_in_small_types", lambda m, *xs: [assigned(x, m, 1) for x in xs], small, gradients=False),
    Case(
        "mask_in_small_types_accumulated",
        lambda m, *xs: [put(x, (m,), x.new_ones(()), accumulate=True) for x in xs],
        small,
        gradients=False,
    ),
    Case("gather", lambda x, i, _: x.gather(1, i), three),
    Case("gather_last", lambda x, i: x.gather(-1, i), lambda b: (randn(b, 6), randint(0, 6, (b, 1)))),
    Case("gather_smaller_index", lambda x, i: x.gather(0, i), lambda b: (randn(6, 8), randint(0, 6, (3, 5)))),
    Case("gather_scalar", lambda x, i: x.sum().gather(0, i), lambda b: (randn(3), torch.tensor(0)), dynamic=False),
    Case("take_along_dim", lambda x, i, _: x.take_along_dim(i, 1), three, dynamic=False),
    Case("take", lambda x: x.take(torch.tensor([[0, 3], [5, 1]])), one(6)),
    Case("scatter", lambda x, i, s: x.scatter(1, i, s), distinct),
    Case("scatter_longer_source", lambda x, i: x.scatter(1, i, x * 2), lambda b: distinct(b)[:2], gradients=False),
    Case("scatter_nothing", lambda x: x.scatter(1, torch.zeros(0, dtype=torch.int64), 1.5), one(6)),
    Case("scatter_add_nothing", lambda x: x.scatter_add(0, torch.zeros(0, 6, dtype=torch.int64), x.detach()), one(6)),
    Case("scatter_value", lambda x, i, _: x.scatter(1, i, 1.5), three),
    Case(
        "one_hot_by_scatter",
        lambda i: torch.zeros(i.shape[0], 5).scatter_(1, i, 1),
        lambda b: (randint(0, 5, (b, 1)),),
        gradients=False,
    ),
    Case("scatter_add", lambda x, i, s: x.scatter_add(1, i, s), three),
    Case("scatter_add_smaller", lambda x, i: x.scatter_add(1, i, x), lambda b: three(b)[:2], gradients=False),
    Case("scatter_reduce_sum", lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), three),
    Case("scatter_reduce_amax", lambda x, i, s: x.scatter_reduce(1, i, s, "amax"), three),
    Case("scatter_reduce_amin", lambda x, i, s: x.scatter_reduce(1, i, s, "amin"), three),
    Case("scatter_reduce_prod", lambda x, i, s: x.scatter_reduce(1, i, s, "prod"), three, gradients=False),
    Case("scatter_reduce_mean", lambda x, i, s: x.scatter_reduce(1, i, s, "mean"), three),
    Case(
        "scatter_reduce_others",
        lambda x, i, s: [x.scatter_reduce(1, i, s, r, include_self=False) for r in REDUCTIONS],
        three,
        gradients=False,
    ),
    Case(
        "scatter_reduce_int",
        lambda i: i.scatter_reduce(1, i % 5, i, "mean"),
        lambda b: (randint(0, 50, (b, 6)),),
        gradients=False,
    ),
    Case(
        "index_reduce",
        lambda x, s: x.index_reduce(1, C, s, "amax", include_self=False),
        lambda b: (randn(b, 6), randn(b, 3)),
        gradients=False,
    ),
    Case("scatter_multiply", lambda x, i, s: x.scatter(1, i, s, reduce="multiply"), three, gradients=False),
    Case("index_select", lambda x: x.index_select(1, C), one(6, 8)),
    Case("index_select_batch", lambda x: x.index_select(0, C), one(6)),
    Case("index_add", lambda x, s: x.index_add(1, C, s), lambda b: (randn(b, 6, 4), randn(b, 3, 4))),
    Case(
        "index_add_alpha",
        lambda x, s: x.index_add(0, C, s, alpha=2),
        lambda b: (randn(6, 4), randn(3, 4)),
        dynamic=False,
    ),
    Case("index_copy", lambda x, s: x.index_copy(1, torch.tensor([4, 0, 2]), s), lambda b: (randn(b, 6), randn(b, 3))),
    Case("index_fill", lambda x: x.index_fill(1, C, 2.0), one(6)),
    Case("index", lambda x: x[:, C], one(6, 8)),
    Case("index_negative", lambda x: x[:, D], one(6, 8)),
    Case(
        "index_batch_and_class",
        lambda x, y: x[torch.arange(x.shape[0]), y],
        lambda b: (randn(b, 6), randint(0, 6, (b,))),
    ),
    Case(
        "index_first_row", lambda x: x[torch.arange(x.shape[0]), torch.zeros(x.shape[0], dtype=torch.long)], one(6, 8)
    ),
    Case("index_two_inner", lambda x: x[:, C, D], one(6, 8)),
    Case("index_two_inner_of_four", lambda x: x[:, :, C, D], one(3, 6, 8)),
    Case("index_apart", lambda x: x[:, C, :, D], one(6, 4, 8)),
    Case("index_broadcast", lambda x: x[:, C[:, None], D], one(6, 8)),
    Case("index_2d", lambda x: x[:, torch.tensor([[0, 1], [2, 3]])], one(6, 8)),
    Case("index_int32", lambda x: x[:, C.int()], one(6)),
    Case("embedding_like", lambda w, i: w[i], lambda b: (randn(10, 4), randint(0, 10, (b, 5)))),
    Case("assign_columns", lambda x: assigned(x, (slice(None), torch.tensor([0, 2])), x[:, :2] * 2), one(6, 8)),
    Case("assign_number", lambda x: assigned(x, (slice(None), C), 0.0), one(6, 8)),
    Case("assign_pairs", lambda x: assigned(x, (C[:2], D[:2]), 5.0), one(6)),
    Case(
        "assign_row_per_batch",
        lambda x, y: assigned(x, (torch.arange(x.shape[0]), y), 0.0),
        lambda b: (randn(b, 6), randint(0, 6, (b,))),
    ),
    Case("put", lambda x, v: put(x, (C[:2],), v), lambda b: (randn(b, 4), randn(2, 4))),
    Case("put_accumulate", lambda x, v: put(x, (C,), v, True), lambda b: (randn(b, 4), randn(3, 4))),
    Case("put_accumulate_pairs", lambda x, v: put(x, (C, D), v, True), lambda b: (randn(b, 4), randn(3))),
    Case("put_accumulate_negative", lambda x, v: put(x, (D,), v, True), lambda b: (randn(b, 4), randn(4))),
    Case("assign_mask", lambda x: assigned(x, x > 0, 0.0), one(6)),
    Case("masked_fill", lambda x: x.masked_fill(x > 0, -1.0), one(6)),
    Case("masked_fill_tensor", lambda x, v: x.masked_fill(x > 0, v), lambda b: (randn(b, 4), torch.tensor(2.0))),
    Case("where", lambda x: torch.where(x > 0, x, x * 2), one(6, 8)),
    Case(
        "where_numbers",
        lambda x: [torch.where(x > 0, 1.0, x), torch.where(x > 0, x, 0), torch.where(x > 0, 1, 2)],
        one(6),
    ),
    Case("where_broadcast", lambda x, w: torch.where(x[:, :1] > 0, w, x), lambda b: (randn(b, 4), randn(4))),
    Case(  # nothing but the expanded mask has the result's shape
        "where_mask_repeated",
        lambda x: (torch.where((x[:1] > 0).expand(x.shape[0], 6), torch.tensor(0.5), -1.0) * x[:1]).sum(0),
        one(6),
    ),
    Case(
        "where_all_repeated",
        lambda x: torch.where(*(v.expand(x.shape[0], 6) for v in (x[:1] > 0, x[:1] * 2, x[0, 0]))) * x[:1],
        one(6),
    ),
    Case("topk", lambda x: x.topk(3, -1), one(6, 8)),
    Case("topk_smallest", lambda x: x.topk(2, 1, largest=False), one(6, 8)),
    Case("topk_batch", lambda x: x.topk(2, 0), one(6)),
    Case("sort", lambda x: x.sort(-1), one(6, 8)),
    Case("sort_descending", lambda x: x.sort(1, descending=True)[0], one(6, 8)),
    Case("sort_ties", lambda x: x.round().sort(dim=1, stable=True), one(9)),
    Case("sort_batch", lambda x: x.sort(0), one(6)),
    Case("argsort", lambda x: x.argsort(1), one(6), gradients=False),
    Case("sort_int8", lambda x: x.sort(1), lambda b: (randint(-50, 50, (b, 5)).to(torch.int8),), gradients=False),
    Case("msort", lambda x: x.msort(), one(6)),
    Case("one_hot", lambda i: torch.nn.functional.one_hot(i, 5), lambda b: (randint(0, 5, (b, 3)),), gradients=False),
    Case("isin", lambda i: torch.isin(i, torch.tensor([1, 4])), lambda b: (randint(0, 5, (b, 3)),), gradients=False),
    Case("bucketize", lambda x: torch.bucketize(x, torch.tensor([-1.0, 0, 1])), one(6), gradients=False),
    Case(
        "bucketize_right",
        lambda x: torch.bucketize(x.round(), torch.tensor([-1.0, 0, 1]), right=True),
        one(6),
        gradients=False,
    ),
    Case("searchsorted", lambda x: torch.searchsorted(torch.tensor([-1.0, 0, 1]), x), one(6), gradients=False),
    Case(
        "searchsorted_rows",
        lambda s, x: torch.searchsorted(s.cumsum(1), x),
        lambda b: (torch.rand(b, 6), torch.rand(b, 3)),
        gradients=False,
    ),
]


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter", "ignore:index_reduce.* is in beta")
@pytest.mark.parametrize("case", INDEXING, ids=str)
def test_indexing(case: Case) -> None:
    check(case)


def test_points_of_the_nearest_pixel_have_a_gradient_of_zeros() -> None:
    """As in eager: an optimizer passes over a parameter without a gradient, but not over one whose gradient is zero."""
    image = torch.randn(2, 3, 5, 5, requires_grad=True)
    grid = (torch.rand(2, 4, 4, 2) * 2 - 1).requires_grad_()

    def sample(x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grid_sample(x, points, mode="nearest", align_corners=False).square()

    eager = torch.autograd.grad(sample(image, grid).sum(), (image, grid))
    other = torch.autograd.grad(torch.compile(sample, backend="lightning_ort")(image, grid).sum(), (image, grid))
    for gradient, expected in zip(other, eager, strict=True):
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_points_that_are_nowhere(mode: str, padding: str, dtype: torch.dtype) -> None:
    """They have a value, or none, as in eager, and are no index out of range."""
    image = torch.randn(2, 3, 5, 5, dtype=dtype)
    grid = torch.rand(2, 4, 4, 2, dtype=dtype) * 2 - 1
    grid[0, 0, :3, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=dtype)

    def sample(x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.grid_sample(x, points, mode, padding, align_corners=False)

    found = torch.compile(sample, backend=ORTBackend(RuntimeConfig(placement="onnxruntime")))(image, grid)
    torch.testing.assert_close(found, sample(image, grid), equal_nan=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_an_embedding_are_added_up_without_a_race(threads: int) -> None:
    """The fast form is for one thread: several would add to the same row at the same time."""
    table, tokens = torch.nn.Embedding(3, 64), randint(0, 3, (8, 700))
    models: list[bytes] = []

    def step(tokens: Tensor) -> Tensor:
        return (table(tokens).reshape(-1, 64) @ torch.eye(64)).sin().square().sum()

    config = RuntimeConfig(
        session_options={"intra_op_num_threads": threads}, on_session=lambda session, model: models.append(model)
    )
    step(tokens).backward()
    wanted, table.weight.grad = table.weight.grad, None
    torch.compile(step, backend=ORTBackend(config))(tokens).backward()
    torch.testing.assert_close(table.weight.grad, wanted, rtol=1e-4, atol=1e-6)
    operators = {node.op_type for node in onnx.load_from_string(models[0]).graph.node}
    assert len(models) == 1
    assert ("ScatterND" in operators, "ScatterElements" in operators) == (threads == 1, threads == 2)
