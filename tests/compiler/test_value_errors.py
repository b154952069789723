"""Values that eager refuses are refused in ONNX Runtime too, and never taken for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

from lightning_ort import RefusedValueError

pytestmark = pytest.mark.stock_only

NAN_AS_INTEGER = -(2**63)

random = torch.Generator().manual_seed(0)
table = torch.rand(10, 3, generator=random)
matrix = torch.rand(4, 5, generator=random)
columns = tensor([[0, 1, 2, 3, 4]] * 4)


def with_last(index: Tensor, *values: int) -> list[Tensor]:
    """``index`` once for each value, which replaces its last element."""
    found = []
    for value in values:
        changed = index.clone()
        changed.view(-1)[-1] = value
        found.append(changed)
    return found


ids = tensor([[1, 2], [3, 9]])
pair = (tensor([0, 3]), tensor([1, 4]))
labels = tensor([[0, 2, -1, 3, 1]] * 4)
classes = tensor([0, 1, 2, 4])
NAN = float("nan")


class Refused:
    """A function, arguments it accepts, and some that eager refuses."""

    def __init__(self, function: Callable[..., Tensor], good: tuple[Tensor, ...], *bad: tuple[Tensor, ...]) -> None:
        self.function, self.good, self.bad = function, good, bad


def of_index(function: Callable[..., Tensor], data: Tensor, index: Tensor, *bad: int) -> Refused:
    return Refused(function, (data, index), *[(data, i) for i in with_last(index, *bad)])


def bags(i: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(i, w, offsets, mode="sum")


def fixed_bags(i: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(i, w, offsets, mode="sum", include_last_offset=True)


MOST = (-1, 5, NAN_AS_INTEGER)

REFUSED = {
    "embedding": of_index(lambda w, i: F.embedding(i, w), table, ids, -1, -10, 10, NAN_AS_INTEGER, 2**62, 2**63 - 1),
    "embedding_int32": of_index(lambda w, i: F.embedding(i.int(), w), table, ids, -1, 10, -(2**31)),
    "embedding_bag": of_index(lambda w, i: F.embedding_bag(i, w), table, ids, -1, 10),
    "offsets": of_index(lambda w, o: bags(ids.flatten(), w, o), table, tensor([0, 2, 3]), 5),
    "gather": of_index(lambda x, i: x.gather(1, i), matrix, columns, *MOST),
    "index_select": of_index(lambda x, i: x.index_select(1, i), matrix, tensor([0, 4]), *MOST),
    "scatter": of_index(lambda x, i: x.scatter(1, i, x.sin()), matrix, columns, *MOST),
    "scatter_add": of_index(lambda x, i: x.scatter_add(1, i, x.sin()), matrix, columns, *MOST),
    "scatter_mean": of_index(lambda x, i: x.scatter_reduce(1, i, x.sin(), "mean"), matrix, columns, *MOST),
    "index_add": of_index(lambda x, i: x.index_add(1, i, x[:, :2]), matrix, tensor([0, 4]), *MOST),
    "index_copy": of_index(lambda x, i: x.index_copy(1, i, x[:, :2].sin()), matrix, tensor([0, 4]), *MOST),
    "index": of_index(lambda x, i: x[:, i], matrix, tensor([0, 4]), 5, -6),
    "index_fill": of_index(lambda x, i: x.index_fill(1, i, 2.0), matrix, tensor([0, -5]), 5, -6),
    "two_indices": Refused(lambda x, i, j: x[i, j], (matrix, *pair), (matrix, tensor([0, 4]), tensor([1, 0]))),
    "index_put": Refused(
        lambda x, i, j: x.index_put((i, j), tensor(1.0)),
        (matrix, *pair),
        (matrix, tensor([0, 4]), tensor([1, 0])),
        (matrix, tensor([0, 3]), tensor([1, 5])),
        (matrix, tensor([0, -5]), tensor([1, 4])),
        (matrix, tensor([0, 0]), tensor([1, -6])),
    ),
    "max_unpool": of_index(lambda x, i: F.max_unpool1d(x[:1, :3], i, 2), matrix, tensor([[0, 2, 5]]), -1, 6),
    "sorter": of_index(
        lambda x, i: x.sum() * torch.searchsorted(x[0].detach().sort()[0], x[1], sorter=i), matrix, columns[0], -1, 5
    ),
    "one_hot": of_index(lambda x, i: F.one_hot(i, 5) * x[0], matrix, tensor([0, 4]), -1, 5),
    "cross_entropy": of_index(F.cross_entropy, matrix, classes, -3, *MOST),
    "cross_entropy_ignoring_-1": of_index(
        lambda x, y: F.cross_entropy(x, y, ignore_index=-1), matrix, tensor([0, -1, 2, 4]), -2, -100, 5
    ),
    "cross_entropy_weights": of_index(
        lambda x, y: F.cross_entropy(x, y, weight=tensor([1.0, 2.0, 3.0, 4.0, 5.0])), matrix, classes, *MOST
    ),
    "cross_entropy_smooth": of_index(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1, reduction="none"), matrix, classes, *MOST
    ),
    "cross_entropy_image": of_index(
        lambda x, y: F.cross_entropy(x[:, :, None], y[:, None], reduction="sum"), matrix, classes, *MOST
    ),
    "nll_loss": of_index(F.nll_loss, matrix, classes, *MOST),
    "multi_margin": of_index(F.multi_margin_loss, matrix, classes, *MOST),
    "multilabel_margin": Refused(
        F.multilabel_margin_loss, (matrix, labels), *[(matrix, i) for i in with_last(labels, 5, -2)]
    ),
    "binary_cross_entropy": Refused(
        F.binary_cross_entropy,
        (tensor([0.1, 0.5, 1.0]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, 0.5, 1.2]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, -0.5, 1.0]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, -1e-30, 1.0]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, 1.0000001, 1.0]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, float("inf"), 1.0]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, 0.5, NAN]), tensor([0.0, 1.0, 0.2])),
        (tensor([0.1, 0.5, 1.0]), tensor([0.0, 1.0, 2.0])),
    ),
    "floor_divide": of_index(lambda x, i: x * (7 // i), matrix, columns + 1, 0),
    "remainder": of_index(lambda x, i: x * (columns % i), matrix, columns + 1, 0),
    "assert": of_index(lambda x, i: torch._assert_async((i > 0).all()) or x * i, matrix, columns + 1, 0),
}


def step_of(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def step(data: Tensor, *rest: Tensor) -> Tensor:
        return function(data, *rest).sin().sum()

    return step


def gradient(step: Callable[..., Tensor], data: Tensor, *rest: Tensor) -> list[Tensor]:
    leaf = data.clone().requires_grad_()
    loss = step(leaf, *rest)
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad]


@pytest.mark.parametrize("name", REFUSED)
def test_a_training_step_refuses_what_eager_refuses(name):
    case = REFUSED[name]
    step = step_of(case.function)
    compiled = torch.compile(step, backend="lightning_ort", options={"on_unsupported": "error"}, dynamic=False)
    expected = gradient(step, *case.good)
    for got, wanted in zip(gradient(compiled, *case.good), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    for bad in case.bad:
        with pytest.raises((IndexError, RuntimeError)):
            step(*bad)
        with pytest.raises(RefusedValueError):  # not eager's error
            gradient(compiled, *bad)
    for got, wanted in zip(gradient(compiled, *case.good), expected, strict=True):
        torch.testing.assert_close(got, wanted)


def test_indices_that_eager_counts_from_the_end_still_are() -> None:
    def write(x: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return x.index_put((i, j), x[j, i].sin(), accumulate=True).put(i, x[0, :2]).index_fill(1, j, 2.0)

    compiled = torch.compile(step_of(write), backend="lightning_ort", options={"on_unsupported": "error"})
    square = matrix[:, :4]
    for i, j in ((tensor([0, 3]), tensor([1, 2])), (tensor([0, -4]), tensor([-1, 2]))):
        expected = gradient(step_of(write), square, i, j)
        for got, wanted in zip(gradient(compiled, square, i, j), expected, strict=True):
            torch.testing.assert_close(got, wanted)


def test_the_smallest_integer_can_be_divided_by_minus_one() -> None:
    """ONNX Runtime alone would end the process."""

    def divide(a: Tensor, b: Tensor) -> list[Tensor]:
        return [a // b, a % b, torch.fmod(a, b)]

    compiled = torch.compile(divide, backend="lightning_ort", options={"on_unsupported": "error"})
    for dtype in (torch.int64, torch.int32):
        a = tensor([torch.iinfo(dtype).min, 7, -7, -7], dtype=dtype)
        b = tensor([-1, -1, -1, 2], dtype=dtype)
        for got, wanted in zip(compiled(a, b), divide(a, b), strict=True):
            assert torch.equal(got, wanted)


def test_an_assertion_about_what_torch_computed_is_checked() -> None:
    def step(x: Tensor) -> Tensor:
        torch._assert_async((torch.linalg.det(x) > 0).all(), "a determinant is not positive")
        return x.sin()

    compiled = torch.compile(step, backend="lightning_ort")
    eye = torch.eye(3)
    torch.testing.assert_close(compiled(eye), eye.sin())
    with pytest.raises(RuntimeError, match="a determinant is not positive"):
        compiled(-eye)


def test_a_region_without_inputs() -> None:
    """What comes before a graph break may read nothing, as the zeros here, while torch asks for the variance."""

    def loss(x: Tensor, variance: Tensor) -> Tensor:
        return F.gaussian_nll_loss(x, torch.zeros(3), variance)

    compiled = torch.compile(loss, backend="lightning_ort")
    x, variance = tensor([0.5, -1.0, 2.0]), tensor([1.0, 0.5, 2.0])
    torch.testing.assert_close(compiled(x, variance), loss(x, variance))
    for step in (loss, compiled):
        with pytest.raises(ValueError, match="var has negative entry"):
            step(x, -variance)


@pytest.mark.parametrize("last", [1, -1])
def test_offsets_that_fall_are_refused(last):
    """Eager reads what lies beside its arrays then, and sometimes finds an index there that it refuses."""
    step = step_of(lambda w, o: bags(ids.flatten(), w, o))
    compiled = torch.compile(step, backend="lightning_ort", options={"on_unsupported": "error"}, dynamic=False)
    good = (table, tensor([0, 2, 3]))
    gradient(compiled, *good)
    with pytest.raises(RefusedValueError):
        gradient(compiled, table, tensor([0, 2, last]))
    for got, wanted in zip(gradient(compiled, *good), gradient(step, *good), strict=True):
        torch.testing.assert_close(got, wanted)
