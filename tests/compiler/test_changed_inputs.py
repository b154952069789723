"""Gradients of what a step has read, whoever has changed its buffers and weights meanwhile."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import graph_break
from torch.nn.utils import spectral_norm

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.kept import Kept
from lightning_ort.errors import UnsupportedError


class Net(nn.Module):
    """A linear layer 6 to 8 between what a case adds to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8))
        self.teacher = nn.Linear(6, 8).requires_grad_(False)
        self.register_buffer("p", torch.rand(8) + 0.5)
        self.register_buffer("queue", torch.randn(8, 16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))


def queue(net, x, y):
    """MoCo's."""
    q = F.normalize(net.layers(x), dim=1)
    logits = q @ net.queue.clone().detach()
    net.queue[:, :4] = q.detach().T * 3
    graph_break()
    return F.cross_entropy(logits, y)


def kept_by_nobody(net, x, y):
    """What eager keeps is a result, a cast, a mask or a copy; the buffer it comes from may change."""
    h = net.layers(x)
    v = h * net.p.exp() + h * net.count.to(x.dtype) + h * net.p.clone()
    v = torch.where((net.p > 0.7) | (net.p < 0.6), v, v * 3)
    graph_break()
    net.p.mul_(0.9)
    net.count.add_(1)
    return v.sin().mean()


def writes_and_reads(net, x, y):
    """Regions that write a buffer for one another, through views of it."""
    v = net.layers(x)
    net.p.copy_(v.detach().mean(0))
    graph_break()
    w = v * net.p.view(2, 4).exp().view(8)
    net.p.view(2, 4)[1].mul_(0.3)
    graph_break()
    return (w * net.p.cos()).square().mean()


def teacher(net, x, y):
    """A moving average of the weights, before and after it is read."""
    with torch.no_grad():
        for old, new in zip(net.teacher.parameters(), net.layers.parameters(), strict=True):
            old.lerp_(new, 0.1)
    target = net.teacher(x)
    v = F.linear(net.layers(x)[:, :6], net.teacher.weight.clone())
    with torch.no_grad():
        net.teacher.weight.mul_(0.9)
    graph_break()
    return F.mse_loss(v, target)


def counter(net, x, y):
    """A counter as a factor, counted on before the gradient comes."""
    net.count += 1
    v = (net.layers(x) * (1.0 / net.count)).tanh()
    graph_break()
    net.count += 1
    return (v * (1.0 / net.count)).square().mean()


def through_view(net, x, view):
    v = net.layers(x) * net.p.exp()
    view.mul_(0.9)
    return (v * net.p.exp()).square().mean()


@pytest.mark.parametrize(
    "step", [queue, kept_by_nobody, writes_and_reads, teacher, counter], ids=lambda step: step.__name__
)
def test_changed_before_backward(step):
    assert_same(step)


def test_changed_through_another_name():
    assert_same(lambda compiled, net, x, y: compiled(net, x, net.p.view(2, 4)[:, :2]), through_view)


def test_weight_changed_before_backward():
    """Eager needs no weight whose input has no gradient."""

    def outer(compiled, net, x, y):
        v = compiled(net, x)
        with torch.no_grad():
            net.layers[0].weight.mul_(0.9)
        return v.sin().mean()

    assert_same(outer, lambda net, x: net.layers(x))


def halves(net, x, y):
    """Two outputs with gradients, of a buffer that is written afterwards."""
    h = net.layers(x)
    a, b = (h * net.p.clone()).tanh(), (h * net.p.exp()).sin()
    net.p.mul_(0.8)
    return a, b


def loss_and_logits(net, x, y):
    a, b = halves(net, x, y)
    return a.square().mean(), b


@pytest.mark.parametrize("step", [halves, loss_and_logits], ids=lambda step: step.__name__)
def test_gradients_at_several_outputs(step):
    def outer(compiled, net, x, y):
        a, b = compiled(net, x, y)
        net.p.mul_(0.8)
        return (a * b).mean()

    assert_same(outer, step)


def test_backward_twice():
    """With two losses of one run, and with ``retain_graph=True`` of one loss."""

    def outer(compiled, net, x, y):
        a, b = compiled(net, x, y)
        a.backward(retain_graph=True)
        net.p.mul_(0.5)
        a.backward(retain_graph=True)
        return b.square().mean()

    assert_same(outer, loss_and_logits)


def test_backward_twice_without_retain_graph():
    net, (x, y) = Net(), batch(torch.float32)
    loss = compile(lambda net, x, y: net.layers(x).square().mean())(net, x, y)
    loss.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        loss.backward()


def adversaries(net, x, y):
    """Two losses with nothing in common but the data."""
    return net.layers(x * net.p[:6]).sin().mean(), net.teacher(x * net.p[:6]).square().mean()


def test_backward_of_one_loss_after_the_other():
    """Without ``retain_graph``, and with an update between: eager still has the graph of the second loss."""

    def make():
        net = Net()
        net.teacher.requires_grad_()
        return net

    def outer(compiled, net, x, y):
        a, b = compiled(net, x, y)
        a.backward()
        with torch.no_grad():
            for p in net.layers.parameters():
                p.sub_(p.grad)
        return b

    assert_same(outer, adversaries, make, steps=4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "ort"])
def test_backward_of_losses_that_share_a_graph(compiled):
    """What one loss has used up is not there for the other one."""
    function = compile(loss_and_logits) if compiled else loss_and_logits
    net, (x, y) = Net(), batch(torch.float32)
    for _ in range(3):
        a, b = function(net, x, y)
        a.backward()
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            b.square().mean().backward()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "ort"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest"])
def test_gradients_of_an_interpolation_read_sizes_only(compiled, mode):
    """Fake tensors decompose it, and what keeps nothing in eager keeps something then."""

    def resized(image):
        small = F.interpolate(image, size=(4, 4), mode=mode)
        return small.mean(), small

    function = compile(resized) if compiled else resized
    for seed in range(3):
        image = torch.rand(2, 3, 6, 6, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        loss, small = function(image)
        loss.backward()
        small.backward(torch.ones_like(small))
        wanted = torch.zeros(2, 3, 6, 6, requires_grad=True)
        (resized(wanted)[0] + resized(wanted)[1].sum()).backward()
        torch.testing.assert_close(image.grad, wanted.grad)


def penalty(compiled, net, x, y):
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(compiled(net, x, y), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def scaled_by_buffer(net, x, y):
    v = (net.layers(x) * (net.p * 1.0)).pow(3).mean()
    with torch.no_grad():
        net.p.add_(1)
    return v


def in_two_regions(net, x, y):
    v = (net.layers(x) * net.p.exp()).sin()
    net.p.mul_(0.9)
    graph_break()
    net.p.mul_(0.9)
    return (v * net.p.exp()).square().mean()


@pytest.mark.parametrize("step", [scaled_by_buffer, in_two_regions], ids=lambda step: step.__name__)
def test_gradient_penalty(step):
    assert_same(penalty, step)


def test_gradient_penalty_after_another_region():
    """A region that writes lets those before it keep what it is about to change."""

    def outer(compiled, net, x, y):
        return penalty(lambda *args: [compiled(*args), compiled(net, None, y)][0], net, x, y)

    def step(net, x, y):
        if x is None:
            net.p.mul_(0.9)
            return net.p * 2
        return (net.layers(x) * net.p.exp()).sin().mean()

    assert_same(outer, step)


def test_spectral_norm_with_gradient_penalty():
    def make():
        net = Net()
        net.layers = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1)))
        return net

    assert_same(penalty, lambda net, x, y: net.layers(x).sum(), make)


def test_batch_norm_twice():
    """Eager does not count changes of running statistics: the second forward pass is no error of the first."""

    def make():
        net = Net()
        net.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        return net

    def outer(compiled, net, x, y):
        a, b = compiled(net, x), compiled(net, x * 2)
        return (a * b).mean()

    assert_same(outer, lambda net, x: net.layers(x), make)


def test_gradients_are_none_where_eager_has_none():
    """Weight decay and momentum move a weight whose gradient is zero, but not one that has none."""

    def make():
        net = Net()
        net.teacher.requires_grad_()
        return net

    assert_same(
        lambda compiled, net, x, y: compiled(net, x)[0].sin().mean(),
        lambda net, x: (net.layers(x), net.teacher(x)),
        make,
    )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "ort"])
def test_backward_visits_what_leads_to_the_loss(compiled):
    """Not what a region only reads: a graph that was used up, a tensor changed since, a hook that needs a number."""

    def step(x, used_up, changed, hooked):
        return (x * x).sum() + (used_up * changed * hooked).detach().sum()

    def read(x, used_up, changed, hooked):
        unused = [used_up * 2, changed > 0, hooked - 1]
        return (x * x).sum(), [u.detach() for u in unused]

    for function in (step, read):
        x, leaf = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
        used_up, exponential, hooked = leaf.sin(), leaf.exp(), leaf * 2
        changed = exponential * 2
        exponential.zero_()
        hooked.register_hook(lambda gradient: gradient * 2)
        used_up.sum().backward()
        result = (compile(function) if compiled else function)(x, used_up, changed, hooked)
        (result if isinstance(result, torch.Tensor) else result[0]).backward()
        assert torch.equal(x.grad, 2 * x.detach())
        assert torch.equal(leaf.grad, leaf.detach().cos())


def read_and_written(net, x, y):
    v = net.layers(x) * net.p
    graph_break()
    net.p.mul_(0.9)
    return v.sin().mean()


@pytest.mark.parametrize("change", ["in a region", "by the user"])
def test_raises_where_eager_raises(change):
    """What eager keeps by reference may not change, whether the gradient has been computed already or not."""
    for function in (compile, lambda step: step):
        net, (x, y) = Net(), batch(torch.float32)
        if change == "in a region":
            loss = function(read_and_written)(net, x, y)
        else:
            loss = function(lambda net, x: (net.layers(x) * net.p).sin().mean())(net, x)
            net.p.mul_(0.9)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_changed_by_what_torch_runs():
    """A region that is left to torch changes what the one before reads again, and eager does not."""

    def step(x, labels):
        h = x * 2
        near = F.cosine_similarity(h[:, :2], h[:, 1:3], dim=-1)
        graph_break()
        own = h[torch.arange(len(h)), labels]
        largest = own.max()  # might be the loss
        some = near[near.detach() > -2].sum()  # a graph break
        h.select(-1, 0).mul_(2.0)
        return own.square().mean() + largest + x.sum() + some.detach()

    compiled, labels = compile(step), torch.randint(4, (6,))
    for _ in range(3):
        x = torch.randn(6, 4, requires_grad=True)
        got, expected = (torch.autograd.grad(function(x, labels), x)[0] for function in (compiled, step))
        torch.testing.assert_close(got, expected)


def test_change_that_nobody_saw():
    """A gradient that is computed again, from an input that the user has changed and eager does not need."""
    net, (x, _) = Net(), batch(torch.float32)
    loss = compile(lambda net, x: (net.layers(x) * net.p.exp()).sin().mean())(net, x)
    net.p.mul_(0.9)
    with pytest.raises(RuntimeError, match="p was changed in place"):
        torch.autograd.grad(loss, net.layers[0].weight, create_graph=True)


def test_nothing_is_copied_that_stays(monkeypatch):
    """Weights and batches are kept by reference, and so are running statistics, which no gradient reads."""
    made = []
    seal = Kept.seal
    monkeypatch.setattr(Kept, "seal", lambda self: (made.append(self), seal(self))[1])
    net, (x, y) = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8)), batch(torch.float32)
    step = compile(lambda x, y: F.cross_entropy(net(x), y))
    for _ in range(2):
        step(x, y).backward()
    assert len(made) == 2
    assert not any(kept.copies for kept in made)


def batch(dtype):
    return torch.randn(4, 6, dtype=dtype), torch.randint(8, (4,))


def compile(step):
    return torch.compile(step, backend=ORTBackend())


def assert_same(step, compiled=None, make=Net, steps=3):
    """Train under eager and under the backend; weights, buffers and losses are the same.

    Args:
        step: gives the loss of (net, x, y), or of a compiled function and those.
        compiled: the function, if it is not ``step`` itself.
        make: gives the module.
        steps: how many.
    """
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        ends = []
        torch.manual_seed(0)
        start = make().to(dtype)
        batches = [batch(dtype) for _ in range(steps)]
        for function in (lambda step: step, compile):
            torch._dynamo.reset()
            net = copy.deepcopy(start)
            inner = function(compiled or step)
            optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.01)
            for x, y in batches:
                optimizer.zero_grad()
                loss = step(inner, net, x, y) if compiled else inner(net, x, y)
                loss.backward()
                optimizer.step()
            ends.append([loss.detach(), *net.state_dict().values()])
        for got, wanted in zip(*ends, strict=True):
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=0.1)


def test_inputs_that_come_to_share_memory():
    """The graph was made for others; torch takes the step, and the report or an error says so."""

    def step(written, read):
        written.add_(1.0)
        return (read * 2).sum() + written.sum()

    told, graphs = [], []
    compiled = torch.compile(step, backend=ORTBackend(verify=False, on_fallback=told.extend, on_graph=graphs.append))
    strict = torch.compile(step, backend=ORTBackend(verify=False, on_unsupported="error"))
    memory = torch.arange(8.0)
    apart, shared = (memory[:4], torch.ones(4)), (memory[:4], memory[2:6])
    for function in (compiled, strict):
        function(*apart)
    assert not told
    for _ in range(2):
        copy = memory.clone()
        expected = step(copy[:4], copy[2:6])
        torch.testing.assert_close(compiled(*shared), expected)
        torch.testing.assert_close(memory, copy)
    (reason,) = told
    assert reason.operator == "the whole region" and "shares memory" in reason.reason and "return" in reason.source
    assert graphs[-1].report.executor == "eager" and graphs[-1].report.why == reason.reason
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="shares memory"):
            strict(*shared)
    torch.testing.assert_close(memory, copy)


@pytest.mark.parametrize(
    "step",
    [lambda x: x[0].zero_(), lambda x: x[:, 1].fill_(2.0), lambda x: x[-1:].div_(2)],
    ids=["row", "column", "end"],
)
def test_a_part_is_changed_of_what_repeats_itself(step):
    def changed(x):
        step(x)
        return x.sum()

    reasons = []
    backend = ORTBackend(on_fallback=reasons.extend)
    found = []
    for function in (changed, torch.compile(changed, backend=backend)):
        row = torch.tensor([1.0, 2.0, 3.0])
        found.append((function(row.expand(2, 3)), row))
    torch.testing.assert_close(found[1], found[0])
    assert ["share memory with each other" in reason.reason for reason in reasons] == [True]
