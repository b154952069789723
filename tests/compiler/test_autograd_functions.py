"""``torch.autograd.Function`` of users: gradients of their gradients, and views that they make."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.compiler.plain_values import left_to_python
from lightning_ort.runtime.config import RuntimeConfig

pytestmark = [
    pytest.mark.stock_only,  # what Dynamo makes of them, whoever runs the graphs
    # Dynamo makes one of torch.autograd.Function
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Cube(torch.autograd.Function):
    """In the new style, and with what it reads as attributes."""

    @staticmethod
    def forward(x, factor):
        return x**3 * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x, ctx.factor = inputs

    @staticmethod
    def backward(ctx, grad):
        return grad * 3 * ctx.x**2 * ctx.factor, None


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, grad):
        ctx.save_for_backward(x, grad)
        return grad * x.cos()

    @staticmethod
    def backward(ctx, grad):
        x, outer = ctx.saved_tensors
        return -grad * outer * x.sin(), grad * x.cos()


class Sine(torch.autograd.Function):
    """Its gradient is a function with a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return Slope.apply(ctx.saved_tensors[0], grad)


class OfWhatItComputed(torch.autograd.Function):
    """What is neither input nor output is a constant to the second derivative, in eager too."""

    @staticmethod
    def forward(ctx, x):
        half = x.exp()
        ctx.save_for_backward(half)
        return half * half

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0] ** 2


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class WithGradients(torch.autograd.Function):
    """Turns gradients on for a while."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            z = y**3
        (found,) = torch.autograd.grad(z, y, grad)
        return found * x / x.detach()


class Product(torch.autograd.Function):
    """Two results, one without a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        y = x @ weight
        best = y.argmax(1)
        ctx.mark_non_differentiable(best)
        return y, best

    @staticmethod
    def backward(ctx, grad, _):
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


FUNCTIONS = {
    "exp": Exp.apply,
    "twice": lambda x: Exp.apply(0.1 * Exp.apply(x)),
    "attributes": lambda x: Cube.apply(x, 2.0),
    "function": Sine.apply,
    "computed": OfWhatItComputed.apply,
    "once": Once.apply,
    "with gradients": WithGradients.apply,
    "two results": lambda x: Product.apply(x, torch.arange(9.0).view(3, 3) / 4)[0],
}


def both(step, **options):
    """What ``step`` and the gradient of its sum are, in eager and compiled."""
    found = []
    for function in (step, torch.compile(step, backend="lightning_ort", options=options)):
        x = torch.linspace(-1, 1.2, 12).view(4, 3).requires_grad_()
        y = function(x)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    return found


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_gradients(name, placement):
    def penalty(w):
        x = w * 1.5
        u = FUNCTIONS[name](x)
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (g - 1).square().mean() + u.mean()

    expected, got = both(penalty, placement=placement)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients_in_a_graph_that_stays_in_torch():
    """A graph that may have to be cut, and cannot be."""
    seen = torch.zeros(3)

    def penalty(w):
        x = w * 1.5
        with torch.no_grad():
            seen.copy_(x.detach().mean(0))
        u = Exp.apply(x)
        (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (g - 1).square().mean() + u.mean()

    expected, got = both(penalty)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients(name):
    expected, got = both(lambda w: FUNCTIONS[name](w * 1.5).square().mean(), placement="onnxruntime")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients_behind_the_graph():
    """What one graph gives is differentiated twice by Python."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def energy(x):
        return Exp.apply(net(x)).sum()

    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    found = []
    for function in (energy, torch.compile(energy, backend=ORTBackend())):
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        (force,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        force.square().sum().backward()
        found.append([leaf.grad, *(p.grad.clone() for p in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


class Reversed(torch.autograd.Function):
    """A gradient reversal layer."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


class Same(Reversed):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x


class Turned(Reversed):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.t()

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad.t(), None


def broken(x):
    torch._dynamo.graph_break()
    return x


def beside(function, w):
    y = broken(w * 3)
    return broken(function(y, 0.5)).square().sum() + y.sum()


PLACES = {
    "result": lambda f, w: f(w, 0.5),
    "of a computed one": lambda f, w: f(w * 2, 0.5),
    "inside": lambda f, w: f(w, 0.5).square().mean(),
    "between two breaks": lambda f, w: broken(f(broken(w * 2), 0.5)).square().mean(),
    "beside what it is of": beside,
    "two results": lambda f, w: (lambda y: torch.cat([v.flatten() for v in broken((y, f(y, 0.5)))]))(w * 2),
    "seen through a view": lambda f, w: broken(f(w, 0.5).unsqueeze(0)[..., 1:]).square().sum(),
    "under a checkpoint": lambda f, w: broken(
        torch.utils.checkpoint.checkpoint(lambda v: f(v, 0.5), w, use_reentrant=False)
    ).square(),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("function", [Reversed, Same, Turned])
def test_views_with_a_gradient_of_their_own(function, place):
    expected, got = both(lambda w: PLACES[place](function.apply, w), placement="onnxruntime")
    torch.testing.assert_close(got, expected)


def test_a_view_of_what_a_function_gives_is_a_view():
    """The function is behind neither of two results, but before both."""
    fallbacks = []
    step = torch.compile(
        lambda x: (lambda y: (y, y.view(-1)))(Exp.apply(x)), backend=ORTBackend(on_fallback=fallbacks.extend)
    )
    x = torch.ones(2, 3, requires_grad=True)
    y, flat = step(x)
    (y.sum() + flat.square().sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((2, 3), torch.e + 2 * torch.e**2))
    assert flat.data_ptr() == y.data_ptr() and not fallbacks


def test_a_view_without_gradients_stays_a_view():
    def step(x):
        with torch.no_grad():
            return Reversed.apply(x, 0.5)

    x = torch.ones(3, requires_grad=True)
    y = torch.compile(step, backend="lightning_ort")(x)
    assert y.data_ptr() == x.data_ptr() and not y.requires_grad


def test_what_has_saved_nothing_goes_back_twice():
    """There is nothing that a first ``backward`` would have freed, neither in eager nor here."""
    x = torch.ones(3, requires_grad=True)
    y = torch.compile(lambda x: Reversed.apply(x, 0.5), backend="lightning_ort")(x)
    y.sum().backward()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), -1.0))


class Steeper(torch.autograd.Function):
    """Its gradient is not that of what it computes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * 1.5


TRANSFORMS = {
    "grad": lambda x: torch.func.grad(lambda v: Steeper.apply(v).sum())(x),
    "vmap": lambda x: torch.func.vmap(torch.func.grad(lambda v: Steeper.apply(v).sum()))(x),
    "vjp": lambda x: torch.func.vjp(Steeper.apply, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda x: torch.func.jacrev(Steeper.apply)(x).sum((-2, -1)),
    "alone": lambda x: torch.func.vmap(Steeper.apply)(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functions_within_transforms(transform):
    """torch.func takes their own gradients, where Dynamo would take those of what they compute."""
    weight = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()

    def step(x):
        return (TRANSFORMS[transform]((x * weight).tanh()) * weight).square().sum()

    x = torch.linspace(0, 2, 6, dtype=torch.float64).reshape(2, 3)
    (expected,) = torch.autograd.grad(step(x), weight)
    with left_to_python():
        loss = torch.compile(step, backend="lightning_ort")(x)
    torch.testing.assert_close(loss, step(x), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12)


class Rounded(torch.autograd.Function):
    """A straight-through quantizer."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class OfTheFirst(torch.autograd.Function):
    """A sum that gives its second input no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        return x + y

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("total", [False, True], ids=["many values", "a scalar"])
@pytest.mark.parametrize("function", [Rounded.apply, torch.sin], ids=["a function", "an operator"])
def test_what_brings_no_gradient_is_zeros_to_a_function(function, total, placement):
    """Between two graphs, as within one: an optimizer leaves out what has no gradient, and decays what has zeros."""
    x = torch.tensor([1.0, 2.0, 3.0])

    def gradients(backend):
        torch.compiler.reset()
        one, other = (torch.full((3,), 0.3, requires_grad=True) for _ in range(2))

        def step(x):
            y = function(other * 1.5)
            y = y.sum() if total else y
            torch._dynamo.graph_break()
            return OfTheFirst.apply(one * x, y).square().mean()

        compiled = torch.compile(step, backend=backend) if backend else step
        for _ in range(2):
            compiled(x).backward()
        return one.grad, other.grad

    wanted = gradients(None)
    found = gradients(ORTBackend(RuntimeConfig(placement=placement)))
    assert (wanted[1] is None) is (function is torch.sin)
    torch.testing.assert_close(found, wanted)
