"""Values that eager refuses are refused in ONNX Runtime too, and never taken for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, tensor

import lightning_ort  # noqa: F401 - registers the backend

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


class Refused:
    """A function, an index it accepts and some that eager refuses."""

    def __init__(self, function: Callable[..., Tensor], data: Tensor, good: Tensor, *bad: int) -> None:
        self.function, self.data, self.good, self.bad = function, data, good, with_last(good, *bad)


REFUSED = {
    "embedding": Refused(lambda w, i: F.embedding(i, w), table, tensor([[1, 2], [3, 9]]), -1, -10, 10, NAN_AS_INTEGER),
    "gather": Refused(lambda x, i: x.gather(1, i), matrix, columns, -1, 5, NAN_AS_INTEGER),
    "index_select": Refused(lambda x, i: x.index_select(1, i), matrix, tensor([0, 4]), -1, 5, NAN_AS_INTEGER),
    "scatter": Refused(lambda x, i: x.scatter(1, i, x.sin()), matrix, columns, -1, 5, NAN_AS_INTEGER),
    "scatter_add": Refused(lambda x, i: x.scatter_add(1, i, x.sin()), matrix, columns, -1, 5, NAN_AS_INTEGER),
}


def step_of(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def step(data: Tensor, *rest: Tensor) -> Tensor:
        return function(data, *rest).sin().sum()

    return step


def gradient(step: Callable[..., Tensor], data: Tensor, index: Tensor) -> list[Tensor]:
    leaf = data.clone().requires_grad_()
    loss = step(leaf, index)
    loss.backward()
    assert leaf.grad is not None
    return [loss.detach(), leaf.grad]


@pytest.mark.parametrize("name", REFUSED)
def test_a_training_step_refuses_what_eager_refuses(name):
    case = REFUSED[name]
    step = step_of(case.function)
    compiled = torch.compile(step, backend="lightning_ort", options={"on_unsupported": "error"}, dynamic=False)
    expected = gradient(step, case.data, case.good)
    for got, wanted in zip(gradient(compiled, case.data, case.good), expected, strict=True):
        torch.testing.assert_close(got, wanted)
    for bad in case.bad:
        with pytest.raises((IndexError, RuntimeError)):
            step(case.data, bad)
        with pytest.raises((IndexError, RuntimeError), match=r"out of (data )?bounds|Out of range"):
            gradient(compiled, case.data, bad)
    for got, wanted in zip(gradient(compiled, case.data, case.good), expected, strict=True):
        torch.testing.assert_close(got, wanted)
