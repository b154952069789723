"""Matrix products: numbers and gradients against eager, and which ONNX operators they become."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from graph_harness import Case, check, op_types
from torch import randint, randn

MATMUL = [
    Case("mm", lambda x, w: x @ w, lambda b: (randn(b, 6), randn(6, 5))),
    Case("mm_transposed", lambda x, w: x @ w.t(), lambda b: (randn(b, 6), randn(5, 6))),
    Case("mm_both_transposed", lambda x, w: x.t() @ w.t(), lambda b: (randn(6, b), randn(5, 6))),
    Case("linear", F.linear, lambda b: (randn(b, 6), randn(5, 6), randn(5))),
    Case("linear_3d", F.linear, lambda b: (randn(b, 3, 6), randn(5, 6), randn(5))),
    Case("linear_3d_without_bias", F.linear, lambda b: (randn(b, 3, 6), randn(5, 6))),
    Case("linear_1d", F.linear, lambda b: (randn(6), randn(5, 6), randn(5)), dynamic=False),
    Case("linear_of_transposed", lambda x, w: F.linear(x.mT, w), lambda b: (randn(b, 6, 3), randn(5, 6))),
    Case(
        "addmm_scaled",
        lambda c, x, w: torch.addmm(c, x, w, beta=0.5, alpha=2),
        lambda b: (randn(5), randn(b, 6), randn(6, 5)),
    ),
    Case("addmm_full", lambda c, x, w: torch.addmm(c, x, w), lambda b: (randn(b, 5), randn(b, 6), randn(6, 5))),
    Case("addmm_column", lambda c, x, w: torch.addmm(c, x, w), lambda b: (randn(b, 1), randn(b, 6), randn(6, 5))),
    Case("addmm_beta_0", lambda c, x, w: torch.addmm(c, x, w, beta=0), lambda b: (randn(5), randn(b, 6), randn(6, 5))),
    Case("bmm", lambda x, y: torch.bmm(x, y.mT), lambda b: (randn(b, 3, 6), randn(b, 4, 6))),
    Case(
        "baddbmm",
        lambda c, x, y: torch.baddbmm(c, x, y, alpha=0.5),
        lambda b: (randn(b, 3, 4), randn(b, 3, 6), randn(b, 6, 4)),
    ),
    Case("addbmm", lambda c, x, y: torch.addbmm(c, x, y), lambda b: (randn(3, 4), randn(b, 3, 6), randn(b, 6, 4))),
    Case("matmul_4d", lambda x, y: x @ y.mT, lambda b: (randn(b, 2, 3, 6), randn(b, 2, 4, 6))),
    Case("matmul_broadcast", lambda x, y: x @ y, lambda b: (randn(b, 2, 3, 6), randn(6, 4))),
    Case("matmul_broadcast_batch", lambda x, y: x @ y, lambda b: (randn(b, 1, 3, 6), randn(2, 6, 4))),
    Case("mv", lambda x, v: x @ v, lambda b: (randn(b, 6), randn(6))),
    Case("vm", lambda v, x: v @ x, lambda b: (randn(b), randn(b, 6))),
    Case("addmv", lambda c, x, v: torch.addmv(c, x, v), lambda b: (randn(b), randn(b, 6), randn(6))),
    Case("dot", torch.dot, lambda b: (randn(b), randn(b))),
    Case("outer", torch.outer, lambda b: (randn(b), randn(4))),
    Case("addr", torch.addr, lambda b: (randn(b, 4), randn(b), randn(4))),
    Case("kron", torch.kron, lambda b: (randn(2, 3), randn(4, 2)), dynamic=False),
    Case("einsum_pairs", lambda x: torch.einsum("bij,bkj->bik", x, x), lambda b: (randn(b, 3, 6),)),
    Case(
        "einsum_attention",
        lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q, k),
        lambda b: (randn(b, 3, 2, 4), randn(b, 5, 2, 4)),
    ),
    Case("einsum_outer", lambda x, y: torch.einsum("bi,bj->bij", x, y), lambda b: (randn(b, 3), randn(b, 4))),
    Case("einsum_trace", lambda x: torch.einsum("bii->b", x), lambda b: (randn(b, 4, 4),)),
    Case("tensordot", lambda x, y: torch.tensordot(x, y, 2), lambda b: (randn(b, 3, 4), randn(3, 4, 5))),
    Case("bilinear", F.bilinear, lambda b: (randn(b, 3), randn(b, 4), randn(5, 3, 4), randn(5))),
    Case(
        "multi_dot",
        lambda x, y, z: torch.linalg.multi_dot([x, y, z]),
        lambda b: (randn(b, 3), randn(3, 4), randn(4, 2)),
        dynamic=False,
    ),
    Case("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), lambda b: (randn(b, 3, 3),)),
    Case("cross", lambda x, y: torch.linalg.cross(x, y), lambda b: (randn(b, 3), randn(b, 3))),
    Case("vecdot", torch.linalg.vecdot, lambda b: (randn(b, 3), randn(b, 3))),
    Case(
        "integers",
        lambda x, y: [x @ y, x.int() @ y.int(), x.byte() @ y.byte()],
        lambda b: (randint(0, 9, (b, 3)), randint(0, 9, (3, 4))),
        gradients=False,
    ),
    Case(
        "nothing_inside",
        lambda x, w: [x[:, :0] @ w[:0], torch.addmm(w[0], x[:, :0], w[:0])],
        lambda b: (randn(b, 3), randn(3, 4)),
    ),
    Case("cdist", torch.cdist, lambda b: (randn(b, 3, 4), randn(b, 5, 4))),
    Case("cdist_large", lambda x, y: torch.cdist(x, y), lambda b: (randn(b, 30, 4), randn(b, 28, 4)), scale=20),
    Case("cdist_l1", lambda x, y: torch.cdist(x, y, p=1), lambda b: (randn(b, 3, 4), randn(b, 5, 4))),
    Case("cdist_l3", lambda x, y: torch.cdist(x, y, p=3), lambda b: (randn(b, 3, 4), randn(b, 5, 4))),
    Case("cdist_inf", lambda x, y: torch.cdist(x, y, p=float("inf")), lambda b: (randn(b, 3, 4), randn(b, 5, 4))),
    Case("cdist_of_self", lambda x: torch.cdist(x, x * 1), lambda b: (randn(b, 3, 4),)),
    Case("dist", torch.dist, lambda b: (randn(b, 3), randn(b, 3))),
    Case("pdist", lambda x: torch.pdist(x), lambda b: (randn(5, 3),), dynamic=False),
]


@pytest.mark.parametrize("case", MATMUL, ids=str)
def test_matmul(case: Case) -> None:
    check(case)


def test_float64() -> None:
    def products(x, w, c):
        return [F.linear(x, w, c), torch.addmm(c, x, w.t(), alpha=0.1, beta=0.3)]

    shapes = (5, 6), (4, 6), (4,)
    check(Case("linear", products, lambda b: [randn(*s, dtype=torch.float64) for s in shapes], dynamic=False))


def test_a_linear_layer_and_its_gradients_are_four_products_without_transposes() -> None:
    """The gradient of the bias is one with a row of ones."""
    lowered = check(Case("linear", F.linear, lambda b: (randn(b, 3, 6), randn(5, 6), randn(5))))
    types = op_types(lowered)
    assert types.count("Gemm") + types.count("MatMul") == 4
    assert "Transpose" not in types
