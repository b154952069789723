"""16-bit tensors in regions: under autocast and by themselves, against eager under the same settings."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from parity import needs_ort
from torch import nn

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.errors import MismatchError
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = needs_ort

HALF = [torch.float16, torch.bfloat16]
EPS = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(function: Callable, **options) -> tuple[Callable, list]:
    fallbacks: list = []
    return torch.compile(function, backend=ORTBackend(on_fallback=fallbacks.extend, **options)), fallbacks


def gradients(function: Callable, leaves: list[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    loss = function(*leaves)
    loss.backward()
    return loss.detach(), [x.grad for x in leaves]


def assert_close(got: torch.Tensor, wanted: torch.Tensor, eps: float) -> None:
    assert got.dtype == wanted.dtype
    scale = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, rtol=2 * eps, atol=eps * scale)


def assert_same(function: Callable, leaves: list[torch.Tensor], eps: float, **options) -> None:
    """Loss, gradients and their types are eager's but for the rounding of 16 bits; all of it ran in ONNX Runtime."""
    wanted, wanted_gradients = gradients(function, leaves)
    other, fallbacks = compiled(function, **options)
    for _ in range(2):  # checked, and not
        got, got_gradients = gradients(other, leaves)
        assert_close(got, wanted, eps)
        for one, two in zip(got_gradients, wanted_gradients, strict=True):
            assert_close(one, two, 4 * eps)
    assert not fallbacks


def network(x, w, b, v):
    return F.gelu(F.linear(x, w, b)).matmul(v).square().mean()


def operands(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [t.to(dtype) for t in (torch.randn(8, 12), torch.randn(16, 12) / 3, torch.randn(16), torch.randn(16, 3) / 4)]


@pytest.mark.parametrize("dtype", HALF)
def test_ambient_autocast(dtype):
    def step(*args):
        with torch.autocast("cpu", dtype=dtype):
            return surrounded(*args)

    surrounded, fallbacks = compiled(network)
    leaves = operands()
    wanted, expected = gradients(lambda *a: _under(dtype, network, *a), leaves)
    got, found = gradients(step, leaves)
    assert_close(got, wanted, EPS[dtype])
    for one, two in zip(found, expected, strict=True):
        assert_close(one, two, 4 * EPS[dtype])
    assert not fallbacks


def _under(dtype, function, *args):
    with torch.autocast("cpu", dtype=dtype):
        return function(*args)


@pytest.mark.parametrize("dtype", HALF)
def test_autocast_inside_of_the_region(dtype):
    assert_same(lambda *a: _under(dtype, network, *a), operands(), EPS[dtype])


@pytest.mark.parametrize("dtype", HALF)
def test_tensors_of_16_bits(dtype):
    """Inputs, outputs and gradients are bound as they are."""
    assert_same(network, operands(dtype), EPS[dtype])


def test_autocast_is_guarded():
    """A function called under other settings is compiled for them."""
    other, _ = compiled(lambda a, b: a @ b)
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    assert other(a, b).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert other(a, b).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert other(a, b).dtype == torch.float16
    assert other(a, b).dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_after_each_operator(dtype):
    """Products and sums are rounded one by one, to the bit."""

    def chain(x, y):
        return ((x * y + x) / 3 - y) * x

    x, y = torch.randn(2, 500).to(dtype)
    other, fallbacks = compiled(chain)
    assert torch.equal(other(x, y), chain(x, y))
    assert not torch.equal(chain(x.float(), y.float()).to(dtype), chain(x, y)), "one rounding at the end does as well"
    assert not fallbacks


def test_values_beyond_float16():
    other, _ = compiled(lambda x: x * x, verify=False)
    x = torch.tensor([300.0, -300.0, 2.0, float("nan")], dtype=torch.float16)
    torch.testing.assert_close(other(x), x * x, equal_nan=True, rtol=0, atol=0)


class Small(nn.Module):
    """Operators that autocast keeps in float32 beside those it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.ln, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x, y):
        h = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        h = self.ln(F.dropout(h.mean((2, 3)), 0.2, self.training))
        return F.cross_entropy(self.head(h), y)


@pytest.mark.parametrize("dtype", HALF)
def test_module_with_buffers_and_dropout(dtype):
    module = Small()
    twin = copy.deepcopy(module)
    x, y = torch.randn(6, 2, 8, 8), torch.randint(0, 3, (6,))
    other, fallbacks = compiled(lambda x, y: twin(x, y))
    for seed in range(3):
        torch.manual_seed(seed)
        loss = _under(dtype, module, x, y)
        torch.manual_seed(seed)
        got = _under(dtype, other, x, y)
        assert_close(got.detach(), loss.detach(), EPS[dtype])
        loss.backward()
        got.backward()
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        if name != "conv.bias":  # zero but for rounding
            assert_close(q.grad, p.grad, 8 * EPS[dtype])
    for b, c in zip(module.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(c, b, rtol=1e-2, atol=1e-3)
    assert not fallbacks


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_at_several_outputs(dtype):
    """The backward graph, compiled when the autocast is over, still belongs to the forward one."""
    pair, fallbacks = compiled(lambda x, w: (F.linear(x, w).relu(), F.linear(x, w).sigmoid()))

    def step(x, w, function):
        with torch.autocast("cpu", dtype=dtype):
            a, b = function(x, w)
        return a.float().square().mean() + b.float().sum()

    leaves = operands()[:2]
    wanted = gradients(lambda x, w: step(x, w, lambda x, w: (F.linear(x, w).relu(), F.linear(x, w).sigmoid())), leaves)
    got = gradients(lambda x, w: step(x, w, pair), leaves)
    assert_close(got[0], wanted[0], EPS[dtype])
    for one, two in zip(got[1], wanted[1], strict=True):
        assert_close(one, two, 4 * EPS[dtype])
    assert not fallbacks


def test_own_conversions_do_not_spoil_the_exact_result():
    """Where rounding decides much, the check computes in float64 what the region computes in its own types."""

    def cancels(x, w):
        big = (x.bfloat16() @ w.bfloat16()).float()
        return (big - big.mean() + x.to(torch.float16).float().sum()).relu().std()

    assert_same(cancels, [torch.randn(32, 32), torch.randn(32, 32)], EPS[torch.bfloat16])


def test_any_batch_size():
    """The second size compiles for all sizes."""
    other, fallbacks = compiled(lambda x, w, b, v: _under(torch.bfloat16, network, x, w, b, v))
    for n in (8, 5, 11):
        leaves = [torch.randn(n, 12), *operands()[1:]]
        wanted, got = (gradients(f, leaves) for f in (lambda *a: _under(torch.bfloat16, network, *a), other))
        for one, two in zip([got[0], *got[1]], [wanted[0], *wanted[1]], strict=True):
            assert_close(one, two, 4 * EPS[torch.bfloat16])
    assert not fallbacks


def test_operators_that_stay_in_torch():
    """Their arguments are the widened values, whatever runs before and after them."""

    def step(x, w):
        h = F.linear(x, w).float()
        return (torch.fft.rfft(h).abs() * F.linear(x, w)[:, :9]).mean()

    other, fallbacks = compiled(step)
    leaves = [torch.randn(8, 12), torch.randn(16, 12)]
    wanted = gradients(lambda *a: _under(torch.bfloat16, step, *a), leaves)
    got = gradients(lambda *a: _under(torch.bfloat16, other, *a), leaves)
    assert_close(got[0], wanted[0], 4 * EPS[torch.bfloat16])
    for one, two in zip(got[1], wanted[1], strict=True):
        assert_close(one, two, 4 * EPS[torch.bfloat16])
    assert any("fft" in f.operator for f in fallbacks)


def test_how_many_operators_were_widened():
    counts = []
    other = torch.compile(network, backend=ORTBackend(on_graph=lambda executable: counts.append(executable.widened)))
    other(*operands())
    _under(torch.bfloat16, other, *operands())
    assert counts[0] == 0
    assert counts[1] >= 2


def test_zero_gradients_excuse_no_other(monkeypatch):
    """The key bias of attention has a gradient of pure noise; beside it, one that is off by a fifth is found."""
    from lightning_ort.compiler.lowering import LOWERINGS

    right = LOWERINGS[torch.ops.aten.tanh.default]
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(attention.in_proj_bias)

    def step(x, w):
        return (attention(x, x, x, need_weights=False)[0].tanh() @ w).square().mean()

    def wrong(g, node, x):
        return g.op("Mul", right(g, node, x), g.constant(1.2, torch.float32))

    leaves = [torch.randn(4, 6, 8), torch.randn(8, 3)]
    good, _ = compiled(step)
    gradients(lambda *a: _under(torch.bfloat16, good, *a), leaves)
    torch._dynamo.reset()
    monkeypatch.setitem(LOWERINGS, torch.ops.aten.tanh.default, wrong)
    bad, _ = compiled(step)
    with pytest.raises(MismatchError):
        gradients(lambda *a: _under(torch.bfloat16, bad, *a), leaves)


def test_the_check_finds_a_wrong_result_in_16_bits(monkeypatch):
    """Its tolerance is no blank cheque: an operator that is off by a tenth is found."""
    from lightning_ort.compiler.lowering import LOWERINGS

    def wrong(g, node, x):
        return g.op("Mul", g.op("Tanh", g.value(x)), g.constant(1.1, torch.float32))

    monkeypatch.setitem(LOWERINGS, torch.ops.aten.tanh.default, wrong)
    other, _ = compiled(lambda x, w: F.linear(x, w).tanh().sum())
    x, w = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(MismatchError):
        other(x, w)


SIXTEEN_BITS = {
    "largest": lambda x: x.square().amax(1),
    "norm": lambda x: (x * 3).norm(float("inf"), dim=1),
    "clipped by its largest": lambda x: x / (x / 3).abs().amax(1, keepdim=True),
    "position": lambda x: (x / 7).argmax(1),
    "equal after rounding": lambda x: ((x / 7 + 64) == 64).to(x.dtype) * x,
    "seen in float32": lambda x: (x / 7).float().square(),
    "steps": lambda x: (x * 3).sgn() * x,
    "counted": lambda x: torch.histc((x / 7).detach(), 5, min=-0.3, max=0.3),
    "powers of a matrix": lambda x: torch.matrix_exp(x[:, :8].detach() / 3),
    "overflow": lambda x: F.soft_margin_loss(x * 9, -torch.ones_like(x).copysign(x.detach()), reduction="none"),
    "truncated": lambda x: torch.div(x * 64, x.detach().abs() + 0.3, rounding_mode="trunc") + x,
    "dropped": lambda x: torch.native_dropout(x, 0.0, True)[0],
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_what_compares_reads_rounded_numbers(name, dtype):
    """Numbers that meet after rounding and not before send a gradient, or a choice, elsewhere."""
    function, generator = SIXTEEN_BITS[name], torch.Generator().manual_seed(3)
    x = torch.randn(8, 40, generator=generator).to(dtype)
    found = []
    for step in (function, compiled(function, verify=False)[0]):
        leaf = x.clone().requires_grad_()
        result = step(leaf)
        if result.requires_grad:
            result.float().nan_to_num(posinf=0.0).sum().backward()
        found.append((result.detach(), leaf.grad))
    (wanted, gradient), (got, other) = found
    if wanted.dtype == torch.int64:
        assert torch.equal(got, wanted)
    else:
        assert torch.equal(got.isfinite(), wanted.isfinite())
        assert_close(got.nan_to_num(posinf=0.0), wanted.nan_to_num(posinf=0.0), EPS[dtype])
    assert (other is None) == (gradient is None)
    if gradient is not None:
        assert torch.equal(other != 0, gradient != 0) and torch.equal(other.isnan(), gradient.isnan())
        assert_close(other.nan_to_num(), gradient.nan_to_num(), 4 * EPS[dtype])


NUMBERS = {
    "equal": lambda x: x == 0.3,
    "product equal": lambda x: (x * 1) == 0.3,
    "above": lambda x: x > 0.3,
    "tensor": lambda x: x <= torch.tensor(0.3, dtype=torch.float64),
    "sum": lambda x: x + 0.3,
    "sum of whole numbers": lambda x: x + 257,
    "sum with a tensor": lambda x: x - torch.tensor(0.3),
    "difference": lambda x: 0.3 - x,
    "scaled": lambda x: torch.add(x, x, alpha=0.3),
    "rest": lambda x: torch.remainder(x, 0.3),
    "product": lambda x: x * 0.3,
    "quotient": lambda x: x / 0.3,
    "kernel": lambda x: F.softshrink(x, 0.3),
    "rewritten kernel": lambda x: F.hardswish(x),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_rounded_where_torch_does(name, dtype):
    """To the bit: 0.3 equals the 16-bit number next to it, and is subtracted as that."""
    function = NUMBERS[name]
    x = torch.cat([torch.randn(500) / 3, torch.full((12,), 0.3)]).to(dtype)  # whole vectors: the rest differs in eager
    other, fallbacks = compiled(function)
    assert torch.equal(other(x), function(x))
    assert not fallbacks


def test_one_number_beside_both_types():
    """Rounded to each by itself."""

    def step(x, y, t):
        return x + t, y - t

    x, t = torch.randn(64), torch.tensor(0.3)
    other, _ = compiled(step)
    wanted = step(x.half(), x.bfloat16(), t)
    for got, expected in zip(other(x.half(), x.bfloat16(), t), wanted, strict=True):
        assert torch.equal(got, expected)


@torch.library.custom_op("tests_of_mixed_precision::product", mutates_args=())
def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A product, which autocast makes one of 16 bits."""
    return torch.mm(x, y)


@product.register_fake
def _(x, y):
    return x.new_empty(x.shape[0], y.shape[1])


@pytest.mark.parametrize("dtype", HALF)
def test_operators_of_users_under_autocast(dtype):
    """They compute as in eager where autocast is around the step, as a Trainer has it; else no less exactly."""
    x, y = torch.randn(16, 32), torch.randn(32, 8)
    other, fallbacks = compiled(lambda x, y: product(x, y) * 2 + x.sum(), verify=False)
    assert_close(other(x, y), product(x, y) * 2 + x.sum(), 1e-6)
    with torch.autocast("cpu", dtype=dtype):
        wanted = product(x, y).float() * 2 + x.sum()
        assert_close(other(x, y), wanted, 1e-6)

    inside, _ = compiled(lambda x, y: _under(dtype, product, x, y) * 2 + x.sum(), verify=False)
    assert_close(inside(x, y), wanted, 4 * EPS[dtype])
    assert {f.operator for f in fallbacks} == {"tests_of_mixed_precision.product.default"}


@torch._dynamo.config.patch(allow_rnn=True)
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("wide", [True, False], ids=["float32 in", "16 bits in"])
@pytest.mark.parametrize("layer", ["GRU", "GRU without biases", "GRU of two layers", "RNN", "LSTM of projections"])
def test_states_of_recurrent_layers_have_the_types_of_eager(layer: str, wide: bool, dtype: torch.dtype) -> None:
    """A GRU's states stay as wide as they begin under autocast, in which its products are of 16 bits."""
    made = {
        "GRU": lambda: nn.GRU(6, 4, batch_first=True),
        "GRU without biases": lambda: nn.GRU(6, 4, bias=False),
        "GRU of two layers": lambda: nn.GRU(6, 4, num_layers=2, bidirectional=True),
        "RNN": lambda: nn.RNN(6, 4, nonlinearity="relu"),
        "LSTM of projections": lambda: nn.LSTM(6, 4, proj_size=3),
    }[layer]()
    x = torch.randn(3, 5, 6, dtype=torch.float32 if wide else dtype)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.autocast("cpu", dtype):
            outputs, states = made(x)
        states = states if isinstance(states, tuple) else (states,)
        return sum(t.float().square().mean() for t in (outputs, *states)), outputs, *states

    results, found = [], []
    for function in (step, compiled(step)[0]):
        made.zero_grad()
        loss, *others = function(x)
        loss.backward()
        results.append((loss, *others))
        found.append([p.grad.clone() for p in made.parameters()])
    for got, wanted in zip(results[1], results[0], strict=True):
        assert_close(got.detach(), wanted.detach(), 2 * EPS[dtype])
    for got, wanted in zip(found[1], found[0], strict=True):
        assert_close(got, wanted, 4 * EPS[dtype])


MET: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "whole numbers times 16 bits": lambda h, whole, single: whole * h,
    "16 bits by whole numbers": lambda h, whole, single: h / whole,
    "whole numbers by a number": lambda h, whole, single: whole / 3 + 0 * h,
    "the cosine of whole numbers": lambda h, whole, single: (whole * 1.7).cos() + 0 * h,
    "the root of whole numbers": lambda h, whole, single: whole.sqrt() + 0 * h,
    "the larger": lambda h, whole, single: torch.maximum(whole, h),
    "one of both": lambda h, whole, single: torch.where(h > 0, whole, h),
    "a number to whole numbers": lambda h, whole, single: 1.0013**whole * h,
    "a number to 16 bits": lambda h, whole, single: 1.013 ** (100 * h),
    "16 bits to a number": lambda h, whole, single: h.abs() ** 1.7013,
    "a single one before": lambda h, whole, single: single * h,
    "a single one behind": lambda h, whole, single: h * single,
    "a single one by 16 bits": lambda h, whole, single: single / h,
    "16 bits by a single one": lambda h, whole, single: h / single,
    "a single whole number": lambda h, whole, single: whole[-1] * h,
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", MET)
def test_what_16_bits_meet_is_rounded_where_torch_rounds_it(name: str, dtype: torch.dtype) -> None:
    """Positions beyond 256, which bfloat16 does not hold, and a scale of float32 that is not in 16 bits."""
    h = torch.randn(5000).to(dtype)
    whole, single = torch.arange(1, 5001), torch.tensor(14.2837)
    function, old = MET[name], torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # as Lightning does
    try:
        other = torch.compile(function, backend="lightning_ort", options={"placement": "onnxruntime"})
        got, wanted = other(h, whole, single), function(h, whole, single)
    finally:
        torch.set_default_dtype(old)
    assert got.dtype == wanted.dtype == dtype
    unequal = (got != wanted) & ~(got.isnan() & wanted.isnan())
    assert int(unequal.sum()) <= 10  # a sine or a root that is computed otherwise


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("mask", ["none", "numbers", "booleans"])
def test_scores_of_attention_are_as_exact_as_those_of_eager(mask: str, dtype: torch.dtype) -> None:
    """Torch's kernels for CPUs keep them in float32, also where gradients of a mask want attention written out."""
    heads = [torch.randn(2, 3, 48, 16) for _ in range(3)]
    masks = {"numbers": torch.randn(48, 48), "booleans": torch.rand(48, 48) < 0.7, "none": torch.zeros(())}
    weights = torch.randn(2, 3, 48, 16)

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        return (F.scaled_dot_product_attention(q, k, v, None if mask == "none" else m) * weights.to(q.dtype)).sum()

    def found(function: Callable, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).to(kind).requires_grad_() for x in heads]
        leaves.append(masks[mask].to(dtype).to(kind).requires_grad_() if mask == "numbers" else masks[mask])
        function(*leaves).backward()
        return [x.grad.double() for x in leaves if x.grad is not None]

    other = torch.compile(step, backend="lightning_ort", options={"placement": "onnxruntime"})
    runs = (found(f, d) for f, d in ((step, torch.float64), (step, dtype), (other, dtype)))
    for wide, eager, ours in zip(*runs, strict=True):
        assert float((ours - wide).norm()) <= 1.2 * float((eager - wide).norm())


NORMS = {
    "batch": (lambda: nn.BatchNorm1d(32), (8, 32)),
    "batch of images": (lambda: nn.BatchNorm2d(8), (4, 8, 5, 5)),
    "instance": (lambda: nn.InstanceNorm2d(8, affine=True), (4, 8, 5, 5)),
    "layer": (lambda: nn.LayerNorm(32), (8, 32)),
    "group": (lambda: nn.GroupNorm(4, 8), (4, 8, 5, 5)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", NORMS)
def test_gradients_of_norms_are_those_of_unrounded_statistics(kind, dtype):
    """As torch's kernels keep them where weights are float32: rounded means of numbers around 10 are off by 0.03."""
    make, shape = NORMS[kind]
    torch.manual_seed(0)
    values, factors = (10 + 0.3 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)

    def found(compile, module, x):
        def loss(x):
            with torch.autocast("cpu", dtype):
                return (module(x) * factors).float().sum()

        return torch.autograd.grad(compile(loss)(x), [x, *module.parameters()])

    x = values.double().requires_grad_()
    exact = torch.autograd.grad((make().double()(x) * factors).sum(), x)[0]
    backend = ORTBackend(config=RuntimeConfig(placement="onnxruntime"))
    for compile in (lambda f: f, lambda f: torch.compile(f, backend=backend)):
        gradient = found(compile, make(), values.clone().requires_grad_())[0]
        assert (gradient - exact).norm() < 4e-3 * exact.norm()


LEFT_IN_FLOAT32 = {
    "linear interpolation": (lambda x: F.interpolate(x.flatten(2), scale_factor=1.5, mode="linear"), (2, 2, 6, 6)),
    "bilinear interpolation": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), (2, 2, 6, 6)),
    "bicubic interpolation": (lambda x: F.interpolate(x, (5, 11), mode="bicubic", align_corners=True), (2, 2, 6, 6)),
    "smoothed interpolation": (lambda x: F.interpolate(x, (4, 4), mode="bilinear", antialias=True), (2, 2, 6, 6)),
    "trilinear interpolation": (lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"), (1, 2, 3, 4, 3)),
    "windows of many sizes": (lambda x: F.adaptive_avg_pool2d(x, 3), (2, 2, 8, 8)),
    "windows in space": (lambda x: F.adaptive_avg_pool3d(x, 3), (1, 2, 4, 4, 4)),
}


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", LEFT_IN_FLOAT32)
def test_what_autocast_leaves_alone_stays_exact(name, dtype, placement):
    """Where torch has one kernel, the products by which that is written out for ONNX are not cast."""
    function, shape = LEFT_IN_FLOAT32[name]
    x = torch.randn(shape)
    other, _ = compiled(function, config=RuntimeConfig(placement=placement))

    def under(f):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            y = f(leaf)
        y.backward(torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape))
        return y.detach(), leaf.grad

    wanted = under(function)
    assert wanted[0].dtype == torch.float32
    for got, value in zip(under(other), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("bias", [True, False])
def test_a_bilinear_layer_sums_in_float32(bias, dtype):
    layer = nn.Bilinear(6, 5, 4, bias=bias)
    other, _ = compiled(layer)
    x, y = torch.randn(7, 6), torch.randn(7, 5)

    def results(f):
        layer.zero_grad()
        out = _under(dtype, f, x, y)
        out.square().mean().backward()
        return [out.detach(), *[p.grad.clone() for p in layer.parameters()]]

    for got, wanted in zip(results(other), results(layer), strict=True):
        assert_close(got, wanted, 2 * EPS[dtype])


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("dtype", HALF)
def test_the_product_in_an_affine_grid_is_cast(dtype, placement):
    """As in torch, whose kernel calls one; a spatial transformer computes so."""
    theta, image = torch.eye(2, 3).expand(2, 2, 3) + torch.randn(2, 2, 3) / 9, torch.randn(2, 1, 5, 5)

    def sampled(theta):
        grid = F.affine_grid(theta, (2, 1, 4, 6), align_corners=False)
        return F.grid_sample(image, grid, align_corners=False).square().mean()

    other, _ = compiled(sampled, config=RuntimeConfig(placement=placement))
    wanted = gradients(lambda t: _under(dtype, sampled, t), [theta])
    got = gradients(lambda t: _under(dtype, other, t), [theta])
    assert_close(got[0], wanted[0], EPS[dtype])
    assert_close(got[1][0], wanted[1][0], 4 * EPS[dtype])


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x.clamp(min=-4)),  # below, little is left of 1 + erf in float32 as well
    "gelu by tanh": lambda x: F.gelu(x.clamp(min=-4), approximate="tanh"),
    "mish": F.mish,
    "silu": F.silu,
    "elu": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": lambda x: F.softplus(x, 3.0, 5.0),
    "log of sigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).to(x), reduction="none"),
}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    """As torch's kernels do, up to the largest numbers, whose squares and exponentials float16 does not hold."""
    function = ACTIVATIONS[name]
    compiled = torch.compile(function, backend="lightning_ort", options={"placement": "onnxruntime", "verify": False})
    x = torch.cat([torch.randn(40) * scale for scale in (1, 8, 60, 300, 20000)]).clamp(-6e4, 6e4).to(dtype)
    found = []
    for f in (function, compiled):
        leaf = x.clone().requires_grad_()
        y = f(leaf)
        found.append((y.detach(), *torch.autograd.grad(y.sum(), leaf)))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1.5 * torch.finfo(dtype).eps, atol=2e-7)
