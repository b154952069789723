"""The ``torch.compile`` backend by itself: gradients of every kind, checks, fallbacks, aliases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lightning_ort
from lightning_ort.compiler import ORTBackend
from lightning_ort.compiler.autograd import multiply
from lightning_ort.compiler.dynamo import marked_open
from lightning_ort.compiler.executors.executable import Executable
from lightning_ort.compiler.executors.onnxruntime import ORTExecutable
from lightning_ort.compiler.first_run import FirstRun
from lightning_ort.compiler.plan import Plan
from lightning_ort.runtime.config import RuntimeConfig


class Recorder:
    """A backend that remembers what it compiled and what it left to torch."""

    def __init__(self, **options):
        self.graphs: list[Executable] = []
        self.fallbacks: list = []
        self.backend = ORTBackend(on_graph=self.graphs.append, on_fallback=self.fallbacks.extend, **options)

    def compile(self, function):
        return torch.compile(function, backend=self.backend)


def make_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def assert_close(got, wanted, relative=1e-5):
    for a, b in zip(got, wanted, strict=True):
        assert (a - b).abs().max() <= relative * b.abs().max()


def test_by_name():
    net, x = make_net(), torch.randn(5, 6)
    step = torch.compile(lambda x: net(x).square().mean(), backend="lightning_ort")
    step(x).backward()
    got = gradients(net)
    net.zero_grad()
    net(x).square().mean().backward()
    assert_close(got, gradients(net))


def test_options_by_name():
    step = torch.compile(torch.sin, backend="lightning_ort", options={"providers": ["NoSuchProvider"]})
    with pytest.raises(lightning_ort.ProviderError, match="CPUExecutionProvider"):
        step(torch.randn(3))


def test_loss_and_gradients_are_one_graph():
    net, recorder = make_net(), Recorder()
    step = recorder.compile(lambda x, y: F.cross_entropy(net(x), y))
    for size in (8, 8, 5, 3, 1):
        x, y = torch.randn(size, 6), torch.randint(4, (size,))
        net.zero_grad()
        step(x, y).backward()
        got = gradients(net)
        net.zero_grad()
        F.cross_entropy(net(x), y).backward()
        assert_close(got, gradients(net))
    assert len(recorder.graphs) == 3  # of size 8, of any size, of size 1 (which Dynamo treats by itself)
    assert not recorder.fallbacks


def test_scaled_loss():
    net, x = make_net(), torch.randn(5, 6)
    step = Recorder().compile(lambda x: net(x).square().mean())
    (step(x) / 4).backward()
    (step(x) / 4).backward()
    got = gradients(net)
    net.zero_grad()
    (net(x).square().mean() / 2).backward()
    assert_close(got, gradients(net))


@pytest.mark.parametrize(
    "factor", [0.25, torch.tensor(0.25), torch.full((1, 1), 0.25)], ids=["number", "scalar", "1x1"]
)
def test_gradients_times_one_number(factor):
    """As a tensor on a GPU, where its number is not read; it has the dimensions of the loss."""
    gradients = [torch.ones(3), torch.ones(2, 2)]
    multiply(gradients, factor)
    assert all(torch.equal(g, torch.full_like(g, 0.25)) for g in gradients)


def test_gradient_at_another_output():
    """The logits get a gradient too, which the graph of the loss alone would drop."""
    net, x, recorder = make_net(), torch.randn(5, 6), Recorder()

    def forward(x):
        logits = net(x)
        return logits.square().mean(), logits

    step = recorder.compile(forward)
    for function in (step, step, step, forward):
        net.zero_grad()
        loss, logits = function(x)
        (loss + logits.sum()).backward()
        if function is step:
            got = gradients(net)
    assert_close(got, gradients(net))
    assert len(recorder.graphs) == 3  # the loss alone; then forward and backward


def test_backward_from_tensors():
    net, x, recorder = make_net(), torch.randn(5, 6), Recorder()
    step = recorder.compile(lambda x: net(x))
    got = []
    for function in (step, net):
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        function(leaf).pow(2).sum().backward()
        got.append([*gradients(net), leaf.grad])
    assert_close(*got)
    assert len(recorder.graphs) == 2


def test_which_scalar_is_the_loss_is_learned():
    net, x, recorder = make_net(), torch.randn(5, 6), Recorder()

    def forward(x):
        out = net(x)
        return out.mean(), out.square().mean()

    step = recorder.compile(forward)
    for _ in range(3):
        net.zero_grad()
        step(x)[1].backward()
    got = gradients(net)
    net.zero_grad()
    forward(x)[1].backward()
    assert_close(got, gradients(net))
    assert len(recorder.graphs) == 3  # forward, backward, then both in one


def test_double_backward():
    net, x = make_net(), torch.randn(5, 6)
    step = Recorder().compile(lambda x: net(x).pow(3).sum())
    results = []
    for function in (step, lambda x: net(x).pow(3).sum()):
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        gradient.norm().backward()
        results.append(gradients(net))
    assert_close(*results, relative=1e-4)


def test_double_backward_with_dropout():
    net, x = nn.Sequential(nn.Linear(6, 64), nn.Dropout(0.5), nn.Tanh(), nn.Linear(64, 1)), torch.randn(5, 6)
    step = Recorder().compile(lambda x: net(x).sum())
    results = []
    for function in (step, lambda x: net(x).sum()):
        torch.manual_seed(0)
        net.zero_grad()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(leaf), leaf, create_graph=True)
        gradient.norm().backward()
        results.append(gradients(net))
        after = torch.rand(1)
    assert_close(*results, relative=1e-4)
    assert after == torch.rand(1, generator=_generator_after(x, net))


@pytest.mark.parametrize("gives", [lambda y, noise: y.sum(), lambda y, noise: (y, noise), lambda y, noise: (noise, y)])
def test_gradients_that_wait_for_the_next_run(gives):
    """Random numbers may lie where the next run draws its own, but nothing that is given out or kept for gradients."""
    net, x = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)), torch.randn(5, 6)

    def function(x):
        noise = torch.rand(5, 3)
        return gives(F.dropout(net(x), 0.5) * noise, noise)

    def results(step):
        torch.manual_seed(0)
        net.zero_grad()
        found = [step(x), step(2 * x), step(3 * x)]
        tensors = [t for one in found for t in (one if isinstance(one, tuple) else (one,))]
        sum(t.square().sum() for t in tensors if t.requires_grad).backward()
        return [t.detach().clone() for t in tensors] + gradients(net)

    compiled = Recorder().compile(function)
    results(compiled)  # compared with torch's first, and then compiled for the loss alone
    assert_close(results(compiled), results(function))


def test_buffers_that_the_check_runs_again(monkeypatch):
    """What has little to change has the same memory in each run, and the check of the first one may run it again."""
    count, x = torch.zeros(3), torch.randn(4, 3)

    def function(x):
        count.add_(x.sum(0))
        return x * 2

    run = ORTExecutable.run
    times = []

    def mismatch(self, executable, results, reference, args, *rest):
        times.append(run(executable, [100 * a for a in args]))

    monkeypatch.setattr(FirstRun, "_mismatch", mismatch)
    Recorder().compile(function)(x)
    assert len(times) == 1
    torch.testing.assert_close(count, x.sum(0))


def _generator_after(x, net):
    torch.manual_seed(0)
    net(x)
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


def test_second_backward_through_a_kept_graph():
    net, x = make_net(), torch.randn(5, 6)
    step = Recorder().compile(lambda x: net(x).square().mean())
    loss = step(x)
    loss.backward(retain_graph=True)
    loss.backward()
    got = gradients(net)
    net.zero_grad()
    (2 * net(x).square().mean()).backward()
    assert_close(got, gradients(net))


def test_gradients_do_not_change_when_the_next_step_runs():
    net, x = make_net(), torch.randn(5, 6)
    step = Recorder().compile(lambda x: net(x).square().mean())
    held = []
    for i in range(6):
        net.zero_grad(set_to_none=True)
        step(x * (i + 1)).backward()
        held.append(([p.grad for p in net.parameters()], gradients(net)))
    for tensors, copies in held:
        assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_a_parameter_without_gradient():
    net, unused = make_net(), nn.Parameter(torch.ones(3))
    step = Recorder().compile(lambda x: net(x).mean() + 0 * unused.detach().sum())
    step(torch.randn(2, 6)).backward()
    assert unused.grad is None


def test_views_of_inputs_stay_views():
    step = Recorder().compile(lambda x: (x.view(-1), x[1:], x.sin()))
    x = torch.randn(3, 4)
    flat, tail, sine = step(x)
    x.zero_()
    assert flat.tolist() == [0] * 12 and tail.tolist() == [[0] * 4] * 2
    assert sine.abs().sum() > 0


def test_copies_are_copies():
    def forward(x):
        y = x.sin()
        return y, y.clone(), y.detach(), x.clone()

    x = torch.randn(4)
    y, copy, same, of_input = Recorder().compile(forward)(x)
    y.zero_()
    x.zero_()
    assert copy.abs().sum() > 0 and of_input.abs().sum() > 0
    assert same.abs().sum() == 0


def test_inputs_changed_in_place():
    def forward(state, x):
        state.mul_(0.5).add_(x)
        return (state * x).sum()

    states = [torch.ones(4), torch.ones(4)]
    step, x = Recorder().compile(forward), torch.randn(4)
    for _ in range(3):
        got, wanted = step(states[0], x), forward(states[1], x)
        assert torch.allclose(got, wanted)
    assert torch.allclose(*states)


def test_what_onnx_cannot_express_runs_in_torch():
    net, recorder = make_net(), Recorder()

    def forward(x):
        return torch.linalg.slogdet(net(x)[:4] + 3 * torch.eye(4))[1] + net(x).mean()

    x = torch.randn(6, 6)
    step = recorder.compile(forward)
    results = []
    for function in (step, forward):
        net.zero_grad()
        function(x).backward()
        results.append(gradients(net))
    assert_close(*results, relative=1e-4)
    assert recorder.fallbacks
    assert any("test_backend.py" in f.source and "slogdet" in f.source for f in recorder.fallbacks)
    assert all(f.reason for f in recorder.fallbacks)


def test_equations_beside_changes_of_tensors():
    """What a graph has noted of its effects would keep all of it in torch."""

    def forward(matrix, count, x):
        count.add_(1)
        factor = torch.linalg.cholesky(matrix @ matrix.mT + torch.eye(3) * count)
        normal = torch.distributions.MultivariateNormal(x.new_zeros(3), scale_tril=factor, validate_args=False)
        return normal.log_prob(x).sum() + (torch.linalg.inv(factor) * x[:3]).sum()

    recorder = Recorder()
    step, found = recorder.compile(forward), []
    for function in (forward, step):
        torch.manual_seed(0)
        matrix, count, x = torch.randn(3, 3, requires_grad=True), torch.ones(()), torch.randn(5, 3)
        for _ in range(2):
            loss = function(matrix, count, x)
            loss.backward()
        found.append((loss.detach(), matrix.grad, count))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert recorder.fallbacks and not any("whole" in f.operator for f in recorder.fallbacks)
    with pytest.raises(torch.linalg.LinAlgError, match="cholesky"):
        step(torch.zeros(3, 3), torch.tensor(-2.0), x)


def test_a_size_that_a_tensor_tells_is_left_to_torch():
    recorder = Recorder()
    step = recorder.compile(lambda x, n: x.narrow(0, n.sum(), 2).square())
    for first in (0, 1, 3):
        x, n = torch.randn(5, 2), torch.tensor([first])
        assert torch.equal(step(x, n), x[first : first + 2].square())


def test_what_torch_asserts_of_gradients_is_no_part_of_the_forward_graph():
    def forward(x):
        return torch.linalg.eigvals(x).abs().sum(), (x * 2).sum(0)

    step, x = Recorder().compile(forward), torch.randn(4, 4)
    found = []
    for function in (forward, step):
        leaf = x.clone().requires_grad_()
        first, second = function(leaf)
        (first + second.square().sum()).backward()
        found.append(leaf.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch, "hash_tensor"), reason="came with torch 2.9")
def test_the_check_compares_unsigned_integers():
    step, x = Recorder().compile(lambda x: (torch.hash_tensor(x), x * 2)), torch.randn(4, 4)
    assert torch.equal(step(x)[0], torch.hash_tensor(x))


def test_unsupported_can_be_an_error():
    step = Recorder(on_unsupported="error").compile(lambda x: torch.linalg.inv(x).sum())
    with pytest.raises(lightning_ort.UnsupportedError, match="linalg") as raised:
        step(torch.eye(3))
    assert "test_backend.py" in str(raised.value)


def test_a_wrong_graph_is_noticed(monkeypatch):
    run = Plan.run

    def wrong(self, inputs, outputs):
        run(self, inputs, outputs)
        outputs[-1].mul_(1.01)

    monkeypatch.setattr(Plan, "run", wrong)
    net, x = make_net(), torch.randn(5, 6)
    step = Recorder().compile(lambda x: net(x).square().mean())
    before = torch.get_rng_state()
    with pytest.raises(lightning_ort.MismatchError, match=r"gradient of .*largest difference"):
        step(x)
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())


def test_a_wrong_backward_graph_is_noticed(monkeypatch):
    net, x = make_net(), torch.randn(5, 6)
    out = Recorder().compile(lambda x: net(x))(x)
    run = Plan.run

    def wrong(self, inputs, outputs):
        run(self, inputs, outputs)
        outputs[0].mul_(1.01)

    monkeypatch.setattr(Plan, "run", wrong)
    with pytest.raises(lightning_ort.MismatchError, match="gradient of"):
        out.sum().backward()


def test_the_check_can_be_switched_off(monkeypatch):
    run = Plan.run
    monkeypatch.setattr(Plan, "run", lambda self, i, o: (run(self, i, o), o[0].add_(1))[0])
    step = Recorder(verify=False).compile(lambda x: x.sin())
    assert torch.allclose(step(torch.zeros(3)), torch.ones(3))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32, torch.float64]
)
def test_dtypes(dtype):
    x = torch.tensor([[0, 1, 2], [3, 0, 5]]).to(dtype)
    recorder = Recorder()

    def forward(x):
        return x.clone().flip(0), (x != 0).sum(1), torch.cat([x, x]).to(torch.float64).mean(), x.to(torch.int64) * 2

    for got, wanted in zip(recorder.compile(forward)(x), forward(x), strict=True):
        assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    assert recorder.graphs


def test_inputs_that_are_not_contiguous():
    x = torch.randn(6, 8).t()[1::2]
    step = Recorder().compile(lambda x: (x @ x.t()).sin())
    assert torch.allclose(step(x), (x @ x.t()).sin(), atol=1e-6)


def test_session_options():
    with pytest.raises(ValueError, match=r"no 'threads'.*intra_op_num_threads"):
        RuntimeConfig(session_options={"threads": 1}).make_session_options()
    options = RuntimeConfig(session_options={"intra_op_num_threads": 3, "session.intra_op.allow_spinning": 0})
    made = options.make_session_options()
    assert made.intra_op_num_threads == 3
    assert made.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_provider_options_must_match():
    for wrong in ([{}, {}], {"CUDAExecutionProvider": {}}):
        step = Recorder(config=RuntimeConfig(["CPUExecutionProvider"], wrong)).compile(torch.sin)
        with pytest.raises(lightning_ort.ProviderError, match="provider_options"):
            step(torch.randn(3))


def test_gradients_of_open_sizes():
    """A gradient that a step reads has the open sizes of the tensor it belongs to."""

    def step(x):
        x = x.clone().requires_grad_()
        x.square().sum().backward()
        return x.grad.abs().mean() * 2

    compiled = torch.compile(step, backend=ORTBackend())
    for rows in (6, 3, 8):
        x = torch.randn(rows, 4)
        with marked_open([(x, 0)]):
            torch.testing.assert_close(compiled(x), step(x))
