"""What one region gives and the next one changes in place, with and without gradients that follow."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import graph_break

from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.region import Region


def by_numbers(net, x):
    y = net(x)
    graph_break()
    y[torch.tensor([0, 2])] = torch.full((2, 4), 3.0)
    graph_break()
    return y.sin().sum()


def by_a_factor(net, x):
    y = net(x)
    graph_break()
    y.mul_(2.0)
    graph_break()
    return y.sin().sum()


def by_other_results(net, x):
    y = net(x)
    graph_break()
    y += net(x)
    y[0] = net(x)[1]
    graph_break()
    return y.square().sum()


def by_data(net, x):
    y = net(x)
    graph_break()
    y.copy_(x * 2)
    graph_break()
    return y.square().sum() + net(x).sum()


def beside_an_output(net, x):
    """The region that changes it has an output with a gradient as well."""
    y = net(x)
    graph_break()
    z = net(x).cos()
    y[1] = z[0]
    graph_break()
    return (y * z).sum()


def collected(net, x):
    """Gradients pass through a tensor that had none, and are easily lost."""
    rows = torch.zeros(len(x), 4)
    graph_break()
    rows[1] = net(x)[0]
    graph_break()
    return rows.square().sum() + net(x).mean()


def collected_beside_an_output(net, x):
    rows = torch.zeros(len(x), 4)
    graph_break()
    z = net(x)
    rows[1] = z[0]
    graph_break()
    return (rows + z).square().sum()


def through_a_view(net, x):
    y = net(x)
    flat, row, turned, same = y.view(-1), y[1], y.t(), y.reshape(*x.shape)
    graph_break()
    flat[0] = 1.0
    row.mul_(2.0)
    graph_break()
    same.add_(turned.detach().mean())
    return (y**3).sum() + flat.sin().sum() + (turned * 2).cos().sum() + row.sum()


def through_parts_without_gradients(net, x):
    with torch.no_grad():
        left, right = (whole := x * 2).chunk(2, 1)
    y = net(x).detach()
    last = y[-1]
    graph_break()
    left.zero_()
    last.mul_(3.0)
    graph_break()
    return ((whole + y) * net(x)).sum() + right.sum()


def given_twice(net, x):
    """One result under several names, which are copies of it or not."""
    y = net(x)
    copied, same = y.clone(), y.contiguous()
    graph_break()
    copied.mul_(2.0)
    graph_break()
    return (copied * same).sum() + y.sin().sum()


def complex_numbers(net, x):
    y = torch.fft.rfft(net(x))
    graph_break()
    y.mul_(2)
    graph_break()
    return y.abs().sum()


def detached(net, x):
    y = net(x)
    graph_break()
    y.detach().mul_(2.0)
    graph_break()
    return y.square().sum()


def without_gradients(net, x):
    y = net(x)
    graph_break()
    with torch.no_grad():
        y.mul_(2.0)
    graph_break()
    return y.square().sum()


STEPS = (
    by_numbers, by_a_factor, by_other_results, by_data, beside_an_output, collected, collected_beside_an_output,
    through_a_view, through_parts_without_gradients, given_twice, complex_numbers, detached, without_gradients,
)  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_changed_by_the_next_region(step):
    """Values and gradients are eager's, and nothing is changed twice, whether first runs are compared or not."""
    torch.manual_seed(0)
    net, batches = nn.Linear(4, 4), [torch.randn(rows, 4) for rows in (3, 3, 5)]

    def run(function):
        found = []
        for x in batches:
            net.zero_grad()
            loss = function(net, x.clone())
            loss.backward()
            found += [loss.detach(), net.weight.grad.clone(), net.bias.grad.clone()]
        return found

    wanted = run(step)
    for verify in (True, False):
        torch._dynamo.reset()
        for got, expected in zip(run(torch.compile(step, backend=ORTBackend(verify=verify))), wanted, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("inside", [True, False], ids=["no_grad inside", "no_grad outside"])
def test_weights_changed_without_gradients(inside, verify):
    """A moving average of weights that could be trained is made once in each step, in ONNX Runtime."""
    torch.manual_seed(0)
    teacher, net, graphs, reasons = nn.Linear(4, 4), nn.Linear(4, 4), [], []

    def step():
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 0.1)

    backend = ORTBackend(verify=verify, on_graph=graphs.append, on_fallback=reasons.extend)
    compiled = torch.compile(step, backend=backend)
    wanted = [p.detach().clone() for p in teacher.parameters()]
    for _ in range(3):
        with torch.set_grad_enabled(inside):
            compiled()
        wanted = [old.lerp(new.detach(), 0.1) for old, new in zip(wanted, net.parameters(), strict=True)]
    for got, expected in zip(teacher.parameters(), wanted, strict=True):
        torch.testing.assert_close(got.detach(), expected)
    assert graphs and not reasons


def beside_the_loss(a, b):
    """What the second output comes from was changed in place, so that eager cannot derive by it; nobody does."""
    peaks = b.amax(-1)
    peaks[..., :2] = peaks[..., 1:3].clone()
    graph_break()
    return a.sum(), F.selu(peaks * 2)


def kept_beside_the_loss(a, b):
    changed = b.sin().sum(-1)
    graph_break()
    return a.sum() * 2, F.selu(changed * 2)


def through_several(a, b):
    """Gradients arrive at the loss and beside it in one backward, at two nodes of one run."""
    changed = b.sin().sum(-1).round()
    graph_break()
    x = a.abs() + F.one_hot(changed.argmax(-1), 3).sum()
    return x.log().mean(), (changed * 2 + x.exp().mean()).tanh()


def one_of_several_views(a, b):
    """Eager refuses to say what made the second output, whose base has changed, and is not asked."""
    base = b.sin() * 2
    part = torch.chunk(base, 2, dim=-1)[0]
    base.clamp_(-1.0, 1.0)
    return a.sum(), part


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
def test_outputs_beside_a_loss(placement):
    """They have gradients of their own, and are visited by nobody who asks for those of the loss alone."""

    def run(function, wanted, seed):
        generator = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(6, 3, 4, generator=generator, requires_grad=True) for _ in range(2)]
        loss, other = function(leaves[0] * 2, leaves[1].exp())
        if "loss" in wanted:
            loss.backward(retain_graph="other" in wanted)
        if "other" in wanted:
            other.sum().backward()
        if "again" in wanted:
            (gradient,) = torch.autograd.grad(other.sum(), leaves[1], create_graph=True)
            gradient.square().sum().backward()
        if "both" in wanted:
            (loss + other.sum()).backward()
        return [loss.detach(), other.detach(), *[x.grad for x in leaves]]

    runs = [(beside_the_loss, ("loss",)), (through_several, ("both",)), (through_several, ("loss", "other"))]
    runs += [(one_of_several_views, ("loss",))]
    runs += [(kept_beside_the_loss, w) for w in (("loss",), ("other",), ("loss", "other"), ("both",), ("again",))]
    for step, wanted in runs:
        torch._dynamo.reset()
        compiled = torch.compile(step, backend="lightning_ort", options={"verify": False, "placement": placement})
        for seed in range(3):
            for got, expected in zip(run(compiled, wanted, seed), run(step, wanted, seed), strict=True):
                assert (got is None) == (expected is None), (wanted, got, expected)
                if expected is not None:
                    torch.testing.assert_close(got, expected)


def divided(x):
    h = (x * 2).square().sum()
    graph_break()
    return h.div_(20)


def rooted(x):
    h = (x * 2).square().sum()
    graph_break()
    h.sqrt_()
    h = h + 1
    graph_break()
    return h.mul_(3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("placement", "verify"), [("onnxruntime", True), ("onnxruntime", False), ("torch", False)])
@pytest.mark.parametrize("function", [divided, rooted])
def test_numbers_that_are_changed(function, placement, verify, dtype):
    """Dynamo knows the value of a float64 tensor without dimensions, as it does that of a Python float."""
    options, found = {"verify": verify, "placement": placement}, []
    for f in (function, torch.compile(function, backend="lightning_ort", options=options)):
        x = torch.arange(1.0, 4.0, dtype=dtype, requires_grad=True)
        f(x).backward()
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def _towers(a, b):
    """What the second and third outputs come from was changed in place; eager cannot derive by it."""
    changed = b.exp()
    changed[..., 0] = 0.0
    graph_break()
    return a.tanh(), changed * 3, a + changed.sin()


def _towers_kept(a, b):
    other = b.exp()
    graph_break()
    return a.tanh() * 2, other * 3, a.cos() + other.sin()


def _scalars(a, b):
    other = b.exp()
    graph_break()
    return a.tanh().sum(), (other * 3).sum(), (a.cos() + other.sin()).mean()


@pytest.mark.parametrize(("placement", "verify"), [("onnxruntime", True), ("onnxruntime", False), ("torch", True)])
def test_outputs_that_come_from_different_inputs(placement, verify):
    """Gradients of one visit what made the inputs that lead to it, and nothing else."""

    def run(function, wanted, seed):
        generator = torch.Generator().manual_seed(seed)
        leaves = [torch.randn(6, 3, 4, generator=generator, requires_grad=True) for _ in range(2)]
        middle = [leaves[0] * 2, leaves[1] + 1]
        outputs = function(*middle)
        scalars = [(x * torch.linspace(1, 2, x.numel()).view_as(x)).sum() for x in outputs]
        outputs[1].detach().mul_(0.5)  # no gradient reads it
        for numbers in wanted:
            last = numbers is wanted[-1]
            if numbers[0] == "create":
                gradients = torch.autograd.grad(sum(scalars[i] for i in numbers[1:]), leaves, create_graph=True)
                sum(g.square().sum() for g in gradients).backward(retain_graph=not last)
            elif numbers[0] == "inputs":
                leaves[0].grad = torch.autograd.grad(
                    sum(scalars[i] for i in numbers[1:]), middle[:1], retain_graph=not last
                )[0]
            else:
                sum(scalars[i] for i in numbers).backward(retain_graph=not last)
        return [x.grad for x in leaves]

    everything = [[(0,)], [(1,)], [(2,)], [(0, 1)], [(0, 1, 2)], [(0,), (1, 2)], [(2,), (0,), (2, 1)]]
    everything += [[("create", 0, 2)], [("create", 1, 2), (0,)], [("inputs", 0, 1, 2)], [("inputs", 0, 2), (1, 2)]]
    runs = [(_towers, [(0,)])] + [(f, w) for f in (_towers_kept, _scalars) for w in everything]
    for step, wanted in runs:
        torch._dynamo.reset()
        options = {"verify": verify, "placement": placement}
        compiled = torch.compile(step, backend="lightning_ort", options=options)
        for seed in range(3):
            for got, expected in zip(run(compiled, wanted, seed), run(step, wanted, seed), strict=True):
                assert (got is None) == (expected is None), (step, wanted, got, expected)
                if expected is not None:
                    told = functools.partial("{} {}: {}".format, step.__name__, wanted)
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, msg=told)


def test_one_run_of_the_backward_graph_for_outputs_of_nested_inputs(monkeypatch):
    """As in a pyramid of features, where each level reads those above it."""

    def step(a, b):
        top = b.tanh()
        return a.sin() + top, top

    runs = []
    run_backward = Region.run_backward
    monkeypatch.setattr(Region, "run_backward", lambda *args: runs.append(1) or run_backward(*args))
    compiled = torch.compile(step, backend=ORTBackend(verify=False))
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    for wanted in ((0, 1), (1,), (0,)):
        outputs = [function(*[x * 2 for x in leaves]) for function in (compiled, step)]
        got, expected = (
            torch.autograd.grad(sum(o[i].square().sum() for i in wanted), leaves, allow_unused=True) for o in outputs
        )
        assert len(runs) == 1, wanted
        runs.clear()
        torch.testing.assert_close(got[1], expected[1])
        if 0 in wanted:
            torch.testing.assert_close(got[0], expected[0])


def test_visited_without_a_gradient():
    """Autograd lets go of what a run has saved on its way to others; gradients that arrive later are eager's."""

    def step(a, b):
        gate = (a.square() + 0.5).rsqrt()
        graph_break()
        return (b.abs() + 0.2) ** 0.75, gate * 2

    def run(function):
        a, b = torch.linspace(-1, 1, 6, requires_grad=True), torch.linspace(2, 3, 6, requires_grad=True)
        one, other = function(a, b)
        unused = torch.stack([one.detach(), one])[0].sum()  # leads to the region, and brings it nothing
        (unused + a.sum()).backward()
        other.sum().backward()
        return [a.grad, b.grad]

    compiled = torch.compile(step, backend=ORTBackend(verify=False))
    for _ in range(2):
        for got, expected in zip(run(compiled), run(step), strict=True):
            torch.testing.assert_close(got, expected)


def detached(x, p):
    """Neither a result that shares an input's memory nor one of a part of it leads gradients there."""
    h, y, z = x * p, x.detach(), x.detach()[1:]
    graph_break()
    return (h * 1.5).sum() + (y * y).sum() + (z * z * z).sum()


def of_a_base_that_gets_a_gradient(x, p):
    """A view of what is changed by differentiable values has their gradient from then on, a detached one has not."""
    whole = torch.argsort(x, dim=-1).to(x.dtype)
    part, apart = whole[-1:], whole.detach()[:1]
    graph_break()
    whole.sub_(x, alpha=0.5)
    return (part * p).sum() + (apart * apart).sum()


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("step", [detached, of_a_base_that_gets_a_gradient])
def test_gradients_of_views(step, placement):
    def run(function):
        torch.manual_seed(0)
        x, p = torch.randn(4, 5, requires_grad=True), torch.randn(5, requires_grad=True)
        function(x, p).backward()
        return x.grad, p.grad

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="lightning_ort", options={"placement": placement})
    # Dynamo itself cannot take the second one's views, and leaves them to Python, as in a step of Lightning
    with torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(2):
            for got, expected in zip(run(compiled), run(step), strict=True):
                assert (got is None) == (expected is None)
                if expected is not None:
                    torch.testing.assert_close(got, expected)


def of_two_views(x, y):
    first, last = y[..., :2], y[..., 1:]
    graph_break()
    return x.sum(), first.unsqueeze(0), last.unsqueeze(0), first * last[..., :2]


def of_a_view(x, y):
    part = y.narrow(-1, 0, 2)
    graph_break()
    return x.sum() + y.sum(), y * 2, part.transpose(0, -1)


def of_a_base(x, y):
    part = y.narrow(-1, 0, 2)
    graph_break()
    return x.sum() + part.sum(), part * 2, y.transpose(0, -1), y[0]


def of_a_base_beside_what_is_detached(x, y):
    y = y * 2
    part = y.detach()[..., 1:]
    graph_break()
    return x.sum() + y.sum(), part * 2, y.transpose(0, -1), part[0]


def of_a_base_whose_view_is_changed(x, y):
    y = y * 2
    part = y.narrow(-1, 0, 2)
    graph_break()
    part.add_(1)
    return x.sum() + y.sum(), part.transpose(0, -1), y[0]


def of_a_base_by_a_checkpoint(x, y):
    part = y.narrow(-1, 0, 2)
    graph_break()
    layers = torch.utils.checkpoint.checkpoint(
        lambda part, y: (part * y[..., :2].sum(), y.transpose(0, 1)), part, y, use_reentrant=False
    )
    return x.sum(), *layers


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("step", [of_two_views, of_a_view, of_a_base, of_a_base_beside_what_is_detached,
                                  of_a_base_whose_view_is_changed, of_a_base_by_a_checkpoint])  # fmt: skip
def test_views_of_inputs_that_share_memory(step, placement):
    """Gradients at an output that is a view go to the input it was made from, not to another one in its memory."""

    def run(function, wanted):
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((6, 4), (6, 3, 4)))
        outputs = [o for i, o in enumerate(function(x, y)) if i in wanted and o.requires_grad]
        total = sum((o * torch.linspace(1, 2, o.numel()).view(o.shape)).sum() for o in outputs)
        gradients = torch.autograd.grad(total, [x, y], allow_unused=True) if outputs else ()
        return [*[o.detach() for o in outputs], *gradients]

    compiled = torch.compile(step, backend="lightning_ort", options={"placement": placement})
    for wanted in ((0,), (1,), (2,), (0, 2), (1, 2), (0, 1, 2, 3)):
        for got, expected in zip(run(compiled, wanted), run(step, wanted), strict=True):
            assert (got is None) == (expected is None), wanted
            if expected is not None:
                torch.testing.assert_close(got, expected)


OF_ROWS = {
    "transposed": lambda x: (x.t(), x.sum()),
    "parts": lambda x: (x[1:].reshape(-1)[2:5], x[0], x.exp()),
    "parts of parts": lambda x: (x.view(2, 6).t()[1:], x.detach()[2], x * 2),
    "windows": lambda x: (x.unfold(0, 2, 1), x.as_strided((2, 2), (2, 1)), x.as_strided((2, 2), (2, 1)) * 2),
    "a place": lambda x: (x.as_strided((2, 2), (2, 1), 1), x.as_strided((2, 2), (2, 1), 1) * 2),
    "changed": lambda x: (x.mul_(2)[1:], x.sum()),
    "changed in part": lambda x: (x[1].add_(1), x.sum()),
}


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("rows", [(1, 0, 2, 3), (0, 3, 1)])
@pytest.mark.parametrize("step", OF_ROWS.values(), ids=OF_ROWS)
def test_views_of_inputs_that_begin_elsewhere_in_their_memory(step, rows, placement):
    """As the batches of a table that is sliced: torch compiles nothing again for them."""
    table = torch.randn(4, 3, 4)
    compiled = torch.compile(step, backend="lightning_ort", options={"placement": placement})
    for i in rows:
        ours, theirs = table.clone(), table.clone()
        for got, expected in zip(compiled(ours[i]), step(theirs[i]), strict=True):
            torch.testing.assert_close(got, expected)
        torch.testing.assert_close(ours, theirs)


def a_part_behind_a_break(x):
    part = (x * 2)[-1:]
    graph_break()
    first = part[..., :2]
    graph_break()
    return first.cos().sum() + part.sum()


def test_views_of_results_whose_place_goes_by_the_size():
    compiled = torch.compile(a_part_behind_a_break, backend="lightning_ort")
    for batch in (6, 5, 4, 7, 1):
        x = torch.randn(batch, 4, requires_grad=True)
        outputs = [f(x) for f in (compiled, a_part_behind_a_break)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad(o, x)[0] for o in outputs))


def seen_without_gradients(x):
    logits = x.softmax(-1)
    with torch.no_grad():
        seen = logits.view(-1)
    return seen[seen.detach() > 0.2].sum() + logits.square().sum()  # a break


def changed_without_gradients(x):
    logits = x * 2
    with torch.no_grad():
        seen = logits.t()
    above = seen[seen.detach() > 0.2]  # a break
    with torch.no_grad():
        seen.mul_(3)
    return logits.square().sum() + above.sum() + seen.detach().sum()


@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("step", [seen_without_gradients, changed_without_gradients])
def test_a_view_made_without_gradients_takes_none_away(step, placement):
    """It is the first result, says that it requires a gradient, and has none."""
    compiled = torch.compile(step, backend="lightning_ort", options={"placement": placement})
    found = []
    for function in (step, compiled):
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        loss = function(x)
        loss.backward()
        found.append((loss.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0])


def stretched(x):
    whole = x * 2
    view = whole.expand(3, 5)
    whole.transpose_(0, -1)
    return view, (x * 3).sum()


def folded(x):
    whole = x * 2
    view = whole.reshape(5, 3)
    whole.transpose_(0, -1)
    return view, (x * 3).sum()


def grown(x):
    whole = x * 2
    view = whole.expand(3, 5)
    whole.unsqueeze_(0)
    return view, whole.sum()


@pytest.mark.parametrize("step", [stretched, folded, grown])
def test_gradients_of_views_whose_tensor_takes_another_shape_afterwards(step):
    found = []
    for function in (step, torch.compile(step, backend=ORTBackend())):
        x = torch.arange(15.0, dtype=torch.float64).view(3, 5).requires_grad_()
        view, total = function(x)
        ((view * view.detach()).sum() + total).backward()
        found.append((view.detach(), x.grad))
    torch.testing.assert_close(found[1], found[0])
