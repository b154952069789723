"""Reductions, scans and softmax: numbers and gradients against eager."""

from __future__ import annotations

import contextlib
import math

import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from graph_harness import Case, Lowered, check, op_types
from onnxruntime import InferenceSession
from torch import Tensor, randint, randn

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.lowering import LOWERINGS, GraphBuilder, NotLowered
from lightning_ort.compiler.passes import optimize


def one(*shape: int):
    return lambda b: (randn(b, *shape),)


def with_nan(b: int) -> list[Tensor]:
    x = randn(b, 40)
    x[0, 3], x[1, 39], x[2, :] = math.nan, math.nan, math.nan
    return [x]


REDUCTIONS = [
    Case("sum", lambda x: x.sum(), one(6, 8)),
    Case("sum_dim", lambda x: x.sum(1), one(6, 8)),
    Case("sum_dims_keep", lambda x: x.sum((0, -1), keepdim=True), one(6, 8)),
    Case("sum_rows", lambda x: x.sum(0), one(6)),
    Case("sum_rows_keep", lambda x: x.sum(0, keepdim=True), one(6)),
    Case("sum_rows_and_columns_keep", lambda x: x.sum((0, 1), keepdim=True), one(5, 6)),
    Case("sum_matrices", lambda x: x.sum(0), one(5, 6)),
    Case("sum_many_rows", lambda x: (x.repeat(1500, 1) * 0.1).sum(0) * 0.01, one(3), dynamic=False),
    Case("sum_rows_of_float64", lambda x: x.double().sum((0, 1)), one(5, 6)),
    Case("sum_rows_with_nan", lambda x: x.sum(0), with_nan),
    Case("sum_rows_with_infinity", lambda x: (x / (x > 0).float()).sum((0,)), one(4), gradients=False),
    Case("sum_of_bool", lambda x: (x > 0).sum(1), one(6), gradients=False),
    Case("sum_of_uint8", lambda x: x.sum(), lambda b: (randint(0, 200, (b, 9)).byte(),), gradients=False),
    Case("sum_to_float64", lambda x: x.sum(0, dtype=torch.float64), one(6)),
    Case("mean", lambda x: x.mean(), one(6, 8)),
    Case("mean_dim", lambda x: x.mean((1, 2)), one(6, 8)),
    Case("mean_batch", lambda x: x.mean(0, keepdim=True), one(6)),
    Case("mean_bool", lambda x: (x > 0).float().mean(), one(6), gradients=False),
    Case("mean_of_nothing", lambda x: x[:, :0].mean(1), one(6), gradients=False),
    Case("sum_of_nothing", lambda x: x[:, :0].sum(1), one(6)),
    Case("prod", lambda x: x.prod(), lambda b: (randn(b, 3) * 1.5,), dynamic=False),
    Case("prod_dim", lambda x: x.prod(1), one(6, 3)),
    Case("prod_dim_zero", lambda x: (x * torch.tensor([1.0, 0.0, 2.0])).prod(1), one(3)),
    Case("prod_two_zeros", lambda x: (x * torch.tensor([0.0, 0.0, 2.0])).prod(1), one(3)),
    Case("prod_int", lambda x: x.prod(1), lambda b: (randint(-4, 5, (b, 3)),), gradients=False),
    Case("amax", lambda x: x.amax(1), one(6, 8)),
    Case("amax_ties", lambda x: x.round().amax(1), one(9)),
    Case("amin_dims", lambda x: x.amin((1, 2), keepdim=True), one(6, 8)),
    Case("amax_all", lambda x: x.amax(), one(6)),
    Case("max", lambda x: x.max() - x.min(), one(6, 8)),
    Case("max_dim", lambda x: x.max(1)[0], one(6, 8)),
    Case("min_dim_keep", lambda x: x.min(-1, keepdim=True), one(6, 8)),
    Case("max_dim_index", lambda x: x.max(2)[1], one(6, 8), gradients=False),
    Case("aminmax", lambda x: torch.stack(torch.aminmax(x, dim=1)), one(6)),
    Case("max_int64", lambda x: x.max(1)[0], lambda b: (randint(-90, 90, (b, 5)),), gradients=False),
    Case("argmax", lambda x: x.argmax(), one(6, 8), gradients=False),
    Case("argmax_keep", lambda x: x.argmax(keepdim=True), one(6, 8), gradients=False),
    Case("argmax_dim", lambda x: x.argmax(-1), one(6, 8), gradients=False),
    Case("argmin_dim", lambda x: x.argmin(1, keepdim=True), one(6, 8), gradients=False),
    Case("argmax_int32", lambda x: x.argmax(1), lambda b: (randint(-9, 9, (b, 5)).int(),), gradients=False),
    Case("argmax_int64", lambda x: x.argmax(1), lambda b: (randint(-9, 9, (b, 5)),), gradients=False),
    Case("argmax_bool", lambda x: (x > 0).int().argmax(1), one(6), gradients=False),
    Case(
        "accuracy",
        lambda x, y: (x.argmax(-1) == y).float().mean(),
        lambda b: (randn(b, 5), randint(0, 5, (b,))),
        gradients=False,
    ),
    Case("any_all", lambda x: ((x > 1).any(), (x > -1).all()), one(6), gradients=False),
    Case("any_all_dim", lambda x: ((x > 1).any(1), (x > -1).all(0, keepdim=True)), one(6), gradients=False),
    Case("any_of_float", lambda x: x.floor().any(1), one(2), gradients=False),
    Case("all_of_uint8", lambda x: x.all(1), lambda b: (randint(0, 3, (b, 2)).byte(),), gradients=False),
    Case("any_dims", lambda x: (x > 1.5).any((1, 2)), one(2, 3), gradients=False),
    Case("any_of_nothing", lambda x: ((x[:, :0] > 1).any(1), (x[:, :0] > 1).all(1)), one(6), gradients=False),
    Case("count_nonzero", lambda x: x.round().count_nonzero(1), one(6), gradients=False),
    Case("isfinite_all", lambda x: x.isfinite().all(), one(6), gradients=False),
    Case("logsumexp", lambda x: x.logsumexp(1), one(6, 8)),
    Case("logsumexp_dims", lambda x: x.logsumexp((1, 2), keepdim=True), one(6, 8)),
    Case("logsumexp_large", lambda x: (x * 500).logsumexp(1), one(6)),
    Case("logsumexp_masked", lambda x: x.masked_fill(x > 0, -math.inf).logsumexp(1), one(2), gradients=False),
    Case("var", lambda x: x.var(1), one(6, 8)),
    Case("var_all", lambda x: x.var(), one(6)),
    Case("var_population", lambda x: x.var((0, 2), unbiased=False, keepdim=True), one(6, 8)),
    Case("std", lambda x: x.std(1), one(6, 8)),
    Case("var_mean", lambda x: torch.var_mean(x, 1), one(6, 8)),
    Case("std_mean_batch", lambda x: torch.std_mean(x, 0, correction=0), one(6)),
    Case("norm", lambda x: x.norm(dim=-1), one(6, 8)),
    Case("norm_all", lambda x: x.norm(), one(6)),
    Case("norm_1", lambda x: x.norm(1, dim=1), one(6)),
    Case("norm_inf", lambda x: torch.linalg.vector_norm(x, math.inf, dim=1), one(6)),
    Case("norm_3", lambda x: torch.linalg.vector_norm(x, 3, dim=1), one(6)),
    Case("norm_fro", lambda x: torch.linalg.matrix_norm(x), one(4, 5)),
    Case("nansum", lambda x: x.nansum(1), with_nan, gradients=False),
    Case("nanmean", lambda x: x[:2].nanmean(1), with_nan, gradients=False),
    Case("max_of_nan", lambda x: [x.max(1)[0], x.amin(1), x.amax(0), x.max()], with_nan, gradients=False),
    Case("median", lambda x: x.median(1)[0], one(6, 8)),
    Case("median_even", lambda x: x.median(-1), one(5, 6)),
    Case("median_all", lambda x: x.median(), one(3)),
    Case("nanmedian", lambda x: [x.nanmedian(1)[0], x.nanmedian()], with_nan, gradients=False),
    Case(
        "var_of_one", lambda x: [x[0].var(), x.var(0, correction=0), *torch.var_mean(x[:, 0])], one(1), gradients=False
    ),
    Case("kthvalue", lambda x: x.kthvalue(2, 1), one(5)),
    Case("mode_free_quantile", lambda x: x.quantile(0.3, dim=1), one(5)),
    Case("scalar", lambda x: [x.sum().sum(), x.sum().mean(), x.sum().amax(), x.sum().max(0)[0]], one(3)),
]

SCANS = [
    Case("cumsum", lambda x: x.cumsum(1), one(6, 8)),
    Case("cumsum_batch", lambda x: x.cumsum(0), one(6)),
    Case("cumsum_bool", lambda x: (x > 0).cumsum(1), one(6), gradients=False),
    Case("cumsum_scalar", lambda x: x.sum().cumsum(0), one(6)),
    Case("cumprod", lambda x: x.cumprod(1), one(6, 8)),
    Case("cumprod_zero", lambda x: (x * torch.tensor([1.0, 0.0, 2.0, 1.0])).cumprod(1), one(4)),
    Case("cummax", lambda x: x.cummax(1)[0], one(6)),
    Case("cummin", lambda x: x.cummin(1), one(6)),
    Case("logcumsumexp", lambda x: x.logcumsumexp(1), one(6, 8)),
]

SOFTMAX = [
    Case("softmax", lambda x: x.softmax(-1), one(6, 8)),
    Case("softmax_middle", lambda x: x.softmax(1), one(6, 8)),
    Case("softmax_batch", lambda x: x.softmax(0), one(6)),
    Case("softmax_scalar", lambda x: x.sum().softmax(0), one(6)),
    Case("softmin", lambda x: torch.nn.functional.softmin(x, 1), one(6)),
    Case("softmax_float64", lambda x: x.softmax(-1, dtype=torch.float64), one(6)),
    Case("softmax_masked", lambda x: x.masked_fill(x > 1, -math.inf).softmax(1), one(9)),
    Case("log_softmax", lambda x: x.log_softmax(-1), one(6, 8)),
    Case("log_softmax_middle", lambda x: x.log_softmax(1), one(6, 8)),
    Case("log_softmax_large", lambda x: (x * 300).log_softmax(1), one(6)),
    Case(
        "double_backward",
        lambda x: torch.autograd.grad((x.softmax(1) ** 2).sum(), x, create_graph=True)[0],
        one(5),
        scale=4,
    ),
]


STATIC = {
    "prod_dim_zero", "prod_two_zeros", "amax_ties", "norm_1", "norm_inf", "norm_3",
    "norm_fro", "nansum", "nanmedian", "var_of_one", "nanmean", "median_even",
    "kthvalue", "cumprod_zero", "cummax", "cummin", "softmin", "softmax_float64",
    "std_mean_batch", "logsumexp_large", "logsumexp_masked", "log_softmax_large", "scalar", "softmax_scalar",
    "cumsum_scalar",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize("case", [*REDUCTIONS, *SCANS, *SOFTMAX], ids=str)
def test_reductions(case: Case) -> None:
    check(case.static if case.name in STATIC else case)


@pytest.mark.parametrize(
    "function", [Tensor.sum, Tensor.mean, Tensor.amax, Tensor.logsumexp, Tensor.var, Tensor.cumsum]
)
def test_float64(function) -> None:
    check(Case(str(function), lambda x: function(x, 1), lambda b: (randn(b, 6, dtype=torch.float64),)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integers(dtype: torch.dtype) -> None:
    def reduced(x: Tensor) -> list[Tensor]:
        return [x.sum(1), x.sum(1, dtype=dtype), x.amax(1), x.amin((0, 1)), *x.max(1), x.prod(1), x.any(1), x.cumsum(1)]

    check(Case(str(dtype), reduced, lambda b: (randint(0, 100, (b, 3)).to(dtype),), gradients=False).static)


SUMS = {
    "all": (lambda x: x.sum(), (3000, 500)),
    "mean": (lambda x: x.mean(), (6, 1, 500, 500)),
    "mean, 1": (lambda x: x.mean(), (1_500_000,)),
    "images": (lambda x: x.sum((0, 2, 3)), (5, 3, 300, 300)),
    "each image": (lambda x: x.mean((2, 3), keepdim=True), (3, 2, 700, 700)),
    "rows": (lambda x: x.sum(0), (900_000, 2)),
    "a prime number of rows": (lambda x: x.sum(0), (8191, 3)),
    "of long rows": (lambda x: x.sum(-1), (3, 1_000_000)),
    "of long rows, kept": (lambda x: x.mean(1, keepdim=True), (3, 1_000_000)),
    "norm": (lambda x: x.norm(), (1000, 1000)),
    "variance": (lambda x: (x - 1 + torch.arange(2.0)).var(0), (600_000, 2)),
    "segmentation": (lambda x: F.cross_entropy(x, torch.zeros(4, 400, 400, dtype=torch.int64)), (4, 3, 400, 400)),
    "logits": (lambda x: F.binary_cross_entropy_with_logits(x * 0, x), (4, 1, 600, 600)),
    "all but an open size": (lambda x: x.sum(), (17, 300, 300)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_of_equal_numbers(name: str) -> None:
    """As exact as torch's, which adds up in pairs: so is the first loss of a network whose last layer is zero."""
    function, shape = SUMS[name]
    compiled = torch.compile(function, backend=ORTBackend(), dynamic="open" in name or None)
    for value in (0.6931472, 0.1):
        x = torch.full(shape, value)
        exact = function(x.double())
        torch.testing.assert_close(compiled(x).double(), exact, rtol=2e-5, atol=1e-9)


def biases(x: Tensor) -> list[Tensor]:
    return [x.sin().sum(0), (x[:, :2] * 2).sum(0), x.flatten().sum()]


def test_sums_over_the_same_rows_share_what_they_multiply_with() -> None:
    types = op_types(check(Case("biases", biases, one(3), gradients=False)))
    assert types.count("MatMul") == 2 and types.count("Expand") == types.count("Shape") == 1


def test_what_is_taken_back_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that is refused after it has written a row of ones; the next one writes its own."""
    packet = torch.ops.aten.sum.dim_IntList
    write = LOWERINGS[packet]

    def refuse(*args, **kwargs):
        write(*args, **kwargs)
        raise NotLowered("by the test")

    traced, g = Lowered(Case("biases", biases, one(3), gradients=False)).traced, GraphBuilder()
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            g.add_input(node)
        elif node.op == "call_function":
            with monkeypatch.context() as patched:
                patched.setitem(LOWERINGS, packet, refuse)
                with contextlib.suppress(NotLowered):
                    g.lower(node)
            if not g.knows(node):
                g.lower(node)
    model = ir.to_proto(optimize(g.model(traced.outputs))).SerializeToString()
    x = randn(5, 3)
    for got, expected in zip(InferenceSession(model).run(None, {g.inputs[0].name: x.numpy()}), biases(x), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), expected)
