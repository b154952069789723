"""Element-wise operators and activations: numbers and gradients against eager."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from graph_harness import Case, Lowered, check, op_types
from torch import Tensor, nn, randint, randn

from lightning_ort.compiler.lowering import NotLowered

EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.5, 1e-4, -1e-4, 30.0, -30.0, 100.0, -100.0])
SPECIAL = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0, -3.0])


def one(b: int) -> list[Tensor]:
    return [randn(b, 13)]


def two(b: int) -> list[Tensor]:
    return [randn(b, 13), randn(b, 13)]


def positive(b: int) -> list[Tensor]:
    return [torch.rand(b, 13) + 0.1]


def unit(b: int) -> list[Tensor]:
    return [torch.rand(b, 13) * 1.8 - 0.9]


def edges(b: int) -> list[Tensor]:
    return [EDGES.expand(b, -1).contiguous()]


def integers(b: int) -> list[Tensor]:
    return [randint(-9, 9, (b, 4)), randint(1, 5, (b, 4))]


ARITHMETIC = [
    Case("add_sub_mul_div", lambda x, y: (x + 2 * y - x * y) / (y.abs() + 1), two),
    Case("alpha", lambda x, y: torch.add(x, y, alpha=2) - torch.sub(x, y, alpha=0.5), two),
    Case("rsub", lambda x: 2 - x, one),
    Case("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, x, y.abs() + 1), two),
    Case("lerp", lambda x, y: torch.lerp(x, y, 0.3) + torch.lerp(x, y, torch.tensor(0.8)), two),
    Case("broadcast", lambda x, w: x * w + w, lambda b: (randn(b, 3, 4), randn(4))),
    Case("promote", lambda x, i: x * i + i / 2, lambda b: (randn(b, 3), randint(0, 5, (b, 3)))),
    Case("promote_scalar", lambda i: [i * 1.5, i + True, i > 1.5], lambda b: (randint(0, 5, (b, 3)),), gradients=False),
    Case("bool_arithmetic", lambda x: [(x > 0) + 1, (x > 0) * x, (x > 0) + (x < 0)], one, gradients=False),
    Case("number_of_rows", lambda x: x * x.shape[0] + x.shape[0] / 2, one),
    Case("pow", lambda x: (x.abs() + 1) ** 1.7, one),
    Case("pow_integer", lambda x: x**2 + x**3 + x**4 + x**1 + (x.abs() + 1) ** -1, one),
    Case("pow_root", lambda x: x**0.5 + x**-0.5 + x**-2, positive),
    Case("pow_tensor", lambda x, y: (x.abs() + 0.5) ** y, two),
    Case("pow_of_number", lambda x: 2**x, one),
    Case("square_sqrt", lambda x: x.square().sqrt(), one),
    Case("maximum", lambda x, y: torch.maximum(x, y) - torch.minimum(x, y), two),
    Case("fmax", lambda x, y: torch.fmax(x, y) - torch.fmin(x, y), two),
    Case(
        "fmax_nan",
        lambda x: [torch.fmax(x, torch.ones(7)), torch.fmin(torch.ones(7), x)],
        lambda b: (SPECIAL,),
        gradients=False,
    ),
    Case("clamp", lambda x: x.clamp(-0.5, 0.5), one),
    Case("clamp_one_side", lambda x: x.clamp(min=-0.5) * x.clamp(max=0.5), one),
    Case("clamp_tensor", lambda x, y: x.clamp(y - 1, y), two),
    Case("clamp_nan", lambda x: [x.clamp(-1, 1), x.clamp(min=0), x.relu()], lambda b: (SPECIAL,), gradients=False),
    Case("floor_ceil_round", lambda x: [x.floor(), x.ceil(), x.round(), x.trunc(), x.frac()], edges, gradients=False),
    Case("round_decimals", lambda x: [x.round(decimals=2), (x * 100).round(decimals=-1)], one, gradients=False),
    Case("round_integers", lambda i, _: [i.floor(), i.round(), i.trunc()], integers, gradients=False),
    Case("remainder", lambda x: [x % 1.5, x.fmod(1.5), torch.floor_divide(x, 0.7)], one, gradients=False),
    Case("remainder_gradient", lambda x: x % 1.5, one),
    Case(
        "integer_division",
        lambda i, j: [i // j, i % j, i.fmod(j), i.div(j, rounding_mode="trunc"), i // -2, i % -3],
        integers,
        gradients=False,
    ),
    Case("integer_pow", lambda i, j: [i**2, i**3, i**4, 2**j], integers, gradients=False),
    Case("sign", lambda x: [x.sign(), x.sgn(), x.abs(), -x, x.signbit()], edges, gradients=False),
    Case("copysign", lambda x: [torch.copysign(x, EDGES.flip(0)), torch.copysign(x, -1.0)], edges, gradients=False),
    Case(
        "signs_of_choices",
        lambda x: [
            torch.where(x < 7, x, 0.0).signbit(),
            torch.where(x.abs() < 7, x.masked_fill(x > 20, -0.0), torch.zeros(())).nan_to_num().signbit(),
            torch.copysign(EDGES.flip(0), x.masked_fill(x < -7, 0.0)),
            torch.where((x > 0)[:, :1], x, -x[:1]).signbit(),
            torch.where(x > 0, -0.0, 0.0).signbit(),
            torch.atan2(torch.where(x < 7, x, 0.0), torch.where(x < 7, -x.abs(), 0.0)),
        ],
        edges,
        gradients=False,
    ),
    Case("copysign_gradient", lambda x, y: torch.copysign(x, y), two),
    Case("hypot", lambda x, y: torch.hypot(x, y), two),
    Case("hypot_large", lambda x: torch.hypot(x * 1e30, x * 1e30), edges, gradients=False),
    Case("nan_to_num", lambda x: [x.nan_to_num(), x.nan_to_num(1.0, 2.0, 3.0)], lambda b: (SPECIAL,), gradients=False),
    Case(
        "isnan",
        lambda x: [x.isnan(), x.isinf(), x.isfinite(), x.isposinf(), x.isneginf()],
        lambda b: (SPECIAL,),
        gradients=False,
    ),
    Case("isnan_of_integers", lambda i, _: [i.isnan(), i.isinf(), i.isfinite()], integers, gradients=False),
    Case("isclose", lambda x, y: torch.isclose(x, x + y * 1e-6), two, gradients=False),
    Case("compare", lambda x, y: [x == y, x != y, x < y, x <= y, x > 0, x >= 0, x == x], two, gradients=False),
    Case(
        "compare_mixed",
        lambda i, j: [i > 0.5, i.float() == i, (i > 0) == (j > 2), (i > 0) < (j > 2)],
        integers,
        gradients=False,
    ),
    Case(
        "logic",
        lambda x, y: [(x > 0) & (y > 0), (x > 0) | (y > 0), (x > 0) ^ (y > 0), ~(x > 0), x.logical_and(y)],
        two,
        gradients=False,
    ),
    Case("logical_not", lambda i, _: [i.logical_not(), i.logical_or(i), i.logical_xor(i)], integers, gradients=False),
    Case("bitwise", lambda i, j: [i & j, i | 3, i ^ j, ~i], integers, gradients=False),
    Case("shift", lambda i, _: [i << 2, i >> 1, i.int() >> 3], integers, gradients=False),
    Case("angle", lambda x: [x.angle(), x.double().angle()], lambda b: (SPECIAL,), gradients=False),
    Case(
        "truth_values",
        lambda x: [(x > 0).sign(), (x > 0).clamp_min(x > 1), (x > 0).maximum(x < 0)],
        one,
        gradients=False,
    ),
    Case("heaviside", lambda x: x.heaviside(torch.tensor(0.5)), edges, gradients=False),
]

ELEMENTARY = [
    Case("exp_log", lambda x: (x.exp() + 1).log() + x.exp2(), one),
    Case("logs", lambda x: x.log2() + x.log10() + x.log1p() + x.log(), positive),
    Case("log1p_small", lambda x: (x * 1e-6).log1p() * 1e6, one),
    Case("log1p_edges", lambda x: [x.abs().log1p(), (x - x.detach().abs()).log1p()], edges, gradients=False),
    Case("expm1_small", lambda x: (x * 1e-6).expm1() * 1e6, one),
    Case("expm1", lambda x: x.expm1(), one),
    Case("trigonometric", lambda x: x.sin() + x.cos() + (x * 0.5).tan(), one),
    Case("inverse", lambda x: x.asin() + x.acos() + x.atan() + x.atanh(), unit),
    Case("hyperbolic", lambda x: x.sinh() + x.cosh() + x.tanh() + x.asinh() + (x.abs() + 1.5).acosh(), one),
    Case("erf", lambda x: x.erf() + x.erfc(), one),
    Case("sigmoid_logit", lambda x: x.sigmoid() + x.sigmoid().logit(1e-3), one),
    Case("rsqrt", lambda x: x.rsqrt() + x.reciprocal(), positive),
    Case("atan2", lambda x, y: torch.atan2(x, y), two),
    Case(
        "atan2_edges",
        lambda x: torch.atan2(x[:, :, None], x[:, None]),
        lambda b: (torch.cat([EDGES, SPECIAL]).expand(b, -1).contiguous(),),
        gradients=False,
    ),
    Case("xlogy", lambda x, y: torch.xlogy(x, y.abs() + 0.1), two),
    Case("logaddexp", lambda x, y: torch.logaddexp(x, y) + torch.logaddexp2(x, y), two),
    Case("sinc", lambda x: x.sinc(), one),
    Case("deg2rad", lambda x: x.deg2rad() + x.rad2deg(), one),
    Case("ldexp", lambda x: torch.ldexp(x, torch.tensor([3])), one),
    Case("entr", lambda x: torch.special.entr(x), positive),
]

ACTIVATIONS = [
    *(
        Case(n, getattr(nn, n)(), one)
        for n in (
            "ReLU",
            "GELU",
            "SiLU",
            "Tanh",
            "Sigmoid",
            "LeakyReLU",
            "ELU",
            "Softplus",
            "Hardswish",
            "Mish",
            "SELU",
            "CELU",
            "Softsign",
            "LogSigmoid",
            "Hardtanh",
            "ReLU6",
            "Hardsigmoid",
            "Hardshrink",
            "Softshrink",
            "Tanhshrink",
        )
    ),
    Case("GELU_tanh", nn.GELU("tanh"), one),
    Case("ELU_alpha", nn.ELU(0.5), one),
    Case("Softplus_beta", nn.Softplus(3, 2), one),
    Case("Threshold", nn.Threshold(0.1, 20), one),
    Case("PReLU", lambda x, w: F.prelu(x, w), lambda b: (randn(b, 5, 3), torch.rand(5))),
    Case("PReLU_single", lambda x, w: F.prelu(x, w), lambda b: (randn(b, 5), torch.rand(1))),
    Case("GLU", lambda x: F.glu(x, 1), lambda b: (randn(b, 8),)),
    Case(
        "edges", lambda x: [F.relu(x), F.gelu(x), F.silu(x), F.softplus(x), F.elu(x), F.mish(x), F.hardswish(x)], edges
    ),
    Case(
        "saturation", lambda x: [x.sigmoid(), x.tanh(), F.logsigmoid(x), F.selu(x), F.celu(x), F.hardsigmoid(x)], edges
    ),
    Case("gelu_tanh_edges", lambda x: F.gelu(x, approximate="tanh"), edges),
]


DYNAMIC = {"broadcast", "promote", "number_of_rows", "clamp_tensor", "isnan_of_integers", "PReLU", "GLU"}


@pytest.mark.parametrize("case", [*ARITHMETIC, *ELEMENTARY, *ACTIVATIONS], ids=str)
def test_pointwise(case: Case) -> None:
    check(case if case.name in DYNAMIC else case.static)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_integer_types(dtype: torch.dtype) -> None:
    def computed(x: Tensor, y: Tensor) -> list[Tensor]:
        results = [x + y, x * y, x - 1, x // y, x % y, torch.maximum(x, y), x.clamp(2, 50), x == y, x > y, x.relu()]
        return [*results, torch.where(x > y, x, y), x & y, ~x, x.sign(), x.abs(), x**2, x << 1, x.bool(), x.float() / 3]

    def inputs(b: int) -> list[Tensor]:
        return [randint(0, 100, (b, 3)).to(dtype), randint(1, 9, (b, 3)).to(dtype)]

    check(Case(str(dtype), computed, inputs, gradients=False))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
def test_numbers_beyond_small_integers_wrap(dtype: torch.dtype) -> None:
    def computed(x: Tensor, n: Tensor) -> list[Tensor]:
        compared = [x > -1, x < -1, x > 300, x <= 65543, x == 256 + 3, x > n, x != n]
        return [
            *compared,
            torch.maximum(x, n),
            torch.minimum(x, n),
            x // 300,
            x % 300,
            x % 261,
            torch.fmod(x, 261),
            x // n,
        ]

    check(Case(str(dtype), computed, lambda b: [randint(0, 120, (b, 3)).to(dtype), torch.tensor(300)], gradients=False))


def test_a_fraction_among_truth_values_is_true() -> None:
    def computed(x: Tensor, n: Tensor) -> list[Tensor]:
        y = torch.zeros_like(x)
        return [x.masked_fill(x, 0.5), y.masked_fill(x, n), F.pad(x, (1, 1), value=0.5), y.copy_(0.5), y.copy_(n)]

    check(Case("fractions", computed, lambda b: [randn(b, 3) > 0, torch.tensor(0.25)], gradients=False))


def test_numbers_are_copied_into_tensors() -> None:
    def computed(x: Tensor) -> list[Tensor]:
        return [x * torch.zeros(4).copy_(2), x.clone().copy_(0.5) * x, torch.zeros_like(x, dtype=torch.int64).copy_(7)]

    check(Case("numbers", computed, lambda b: [randn(b, 4)]))


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool])
def test_conversions(source: torch.dtype) -> None:
    targets = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.bool,
    ]

    def inputs(b: int) -> list[Tensor]:
        x = randn(b, 9) * 90
        return [(x if source.is_floating_point else x.abs()).to(source)]

    check(Case(str(source), lambda x: [x.to(t) for t in targets], inputs, gradients=False))


def test_float64() -> None:
    def computed(x: Tensor) -> Tensor:
        y = x.exp() * x.sin() + x.cos() * x.tan() + x.abs().log1p() + x.expm1() + x.sigmoid() * x.tanh()
        return y + F.relu(x) + F.leaky_relu(x) + F.elu(x) + F.silu(x) + F.softplus(x) + F.gelu(x, approximate="tanh")

    check(Case("float64", computed, lambda b: (randn(b, 5, dtype=torch.float64),), scale=10))


def test_float16() -> None:
    def computed(x: Tensor, w: Tensor) -> list[Tensor]:
        y = F.linear(x, w)
        return [
            y[:, torch.tensor([0, 2, 2])],
            F.gelu(y),
            F.relu(y),
            F.silu(y),
            F.leaky_relu(y),
            y.softmax(1),
            F.softplus(y),
            y.clamp(-1, 1),
            y.logsumexp(1),
        ]

    check(Case("float16", computed, lambda b: (randn(b, 5).half(), randn(6, 5).half()), scale=2))


def test_where_a_gradient_may_be_infinite_it_is_dropped_not_multiplied_by_0() -> None:
    def distances(x: Tensor) -> list[Tensor]:
        return [x.relu().sqrt(), x.clamp(min=0).sqrt(), x.clamp(-1, 0).neg().sqrt()]

    check(Case("sqrt", distances, lambda b: (randn(b, 5).abs().neg() - 1.5,)))


def test_missing_data_is_masked() -> None:
    def masked(x: Tensor, missing: Tensor, rows: Tensor) -> list[Tensor]:
        y = x.masked_fill(rows, 0) * 2
        return [x.masked_fill(missing, 0), torch.where(missing, 0.0, x * 3), y, x.nan_to_num() @ torch.ones(5, 2)]

    def inputs(b: int) -> list[Tensor]:
        missing = torch.rand(b, 5) > 0.5
        missing[0] = True
        return [randn(b, 5).masked_fill(missing, math.nan), missing, missing[:, :1]]

    check(Case("missing", masked, inputs, gradients=False))


ATTENTION = torch.ones(6, 6, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("fill", [-math.inf, -1e9, 0.0, 2.5, torch.finfo(torch.float32).min])
def test_masks_smaller_than_the_tensor(fill: float) -> None:
    def attention(q: Tensor, lengths: Tensor) -> list[Tensor]:
        scores = q @ q.mT
        padding = torch.arange(6) >= lengths[:, None]
        scores = scores.masked_fill(ATTENTION, fill).masked_fill(padding[:, None, None], fill)
        return [scores, torch.where(ATTENTION.logical_not(), scores, fill).softmax(-1)]

    check(Case("attention", attention, lambda b: (randn(b, 2, 6, 3), randint(1, 7, (b,))), gradients=fill > -1))


@pytest.mark.parametrize("fill", [-math.inf, -1e9])
def test_gradients_of_masked_attention(fill: float) -> None:
    def attention(x: Tensor, mask: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(ATTENTION, fill)
        return torch.where(mask[:, None, None], scores, fill if fill > -2e9 else -1e4).softmax(-1) @ x

    def inputs(b: int) -> list[Tensor]:
        return [randn(b, 2, 6, 3), torch.arange(6).expand(b, 6) < 5]

    check(Case("attention", attention, inputs))


def test_a_repeated_gradient_is_not_expanded() -> None:
    lowered = check(Case("mean", lambda x: (x * x).mean(), lambda b: (randn(b, 5),)))
    assert "Expand" not in op_types(lowered)


def test_division_of_integers_by_zero_is_an_error() -> None:
    lowered = Lowered(Case("divide", lambda i, j: i // j, integers, gradients=False))
    numbers = torch.ones(4, 4, dtype=torch.int64)
    with pytest.raises(Exception, match="ZeroDivisionError"):
        lowered(numbers, numbers - torch.eye(4, dtype=torch.int64))


def test_an_assertion_is_checked_in_the_graph() -> None:
    lowered = Lowered(Case("one_hot", lambda i: F.one_hot(i, 3), lambda b: (randint(0, 3, (b,)),), gradients=False))
    with pytest.raises(Exception, match="Class values must be smaller than num_classes"):
        lowered(torch.tensor([0, 3]))


def test_powers_of_integers_wrap() -> None:
    """By products: in float64, as ONNX Runtime computes them, digits beyond the 53rd bit are lost."""
    numbers = torch.tensor([3, -7, 10, 1_000_003, 2**31, 0, -1])
    for exponent in (0, 1, 2, 3, 5, 7, 13):
        check(Case("power", lambda i, e=exponent: i**e, lambda b: (numbers,), gradients=False).static)
    for dtype in (torch.int8, torch.int32, torch.uint8):
        small = torch.tensor([3, 7, 100, 0, 1], dtype=dtype)
        check(Case("power", lambda i: [i**5, i**6], lambda b, x=small: (x,), gradients=False).static)


def test_powers_of_integers_by_tensors_are_torchs() -> None:
    with pytest.raises(NotLowered, match="a power of integers by a tensor"):
        Lowered(Case("power", lambda i, j: i**j, lambda b: (randint(0, 9, (4,)), randint(0, 9, (4,))), gradients=False))


def test_the_tail_of_the_error_function_keeps_its_digits() -> None:
    x = torch.tensor([-30.0, -6.0, -1.0, 0.0, 0.49, 0.51, 1.0, 2.0, 3.0, 4.5, 6.0, 8.0, 9.2, 12.0, math.inf, -math.inf])
    lowered = Lowered(Case("erfc", torch.erfc, lambda b: (x,), gradients=False).static)
    got = torch.from_numpy(lowered(x)[0])
    wanted = torch.erfc(x.double())
    off = (got.double() - wanted).abs() / wanted.clamp(min=torch.finfo(torch.float32).tiny)
    assert float(off.max()) < 2e-6
    assert torch.from_numpy(lowered(x.new_full(x.shape, math.nan))[0]).isnan().all()


PER_SAMPLE = {
    "times": lambda row: row.sum() * 3,
    "times a fraction": lambda row: (row - 1).square().mean() * 0.5,
    "plus": lambda row: torch.relu(row.sum() - 0.5),
    "quotients": lambda row: row.sum() / 2 + 1 / (row.square().sum() + 5),
    "of a product": lambda row: (row @ row) * 2,
    "an entry": lambda row: 2 * row[0] - 1,
    "of a gradient": lambda row: torch.func.grad(lambda r: (r.sum() * 0.1).sin())(row).sum() * 2,
}


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_scalars_of_samples_meet_numbers_under_vmap(name: str) -> None:
    check(Case(name, lambda x: torch.vmap(PER_SAMPLE[name])(x), one))
