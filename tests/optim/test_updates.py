"""Update graphs against the formulas in torch, and the rule for writing in place."""

from __future__ import annotations

import itertools

import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn, optim

from lightning_ort.optim.rules import SGD, Adam, Lamb, Momentum
from lightning_ort.optim.settings import OptimizerSettings
from lightning_ort.optim.update import Update
from lightning_ort.optim.update import graph as update_graph
from lightning_ort.optim.update.graph import UpdateGraph, pieces_of
from lightning_ort.optim.update.update import may_overwrite
from lightning_ort.optim.updater import Updater
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory

SHAPES = [(7,), (300, 200), (33, 5), (1,), (130, 70), (), (0, 3)]
RULES = [Adam("before"), Adam("after"), Adam("none"), Lamb(), SGD()]


def numbers(rule, lr, count, decay):
    if isinstance(rule, SGD):
        return (lr,)
    common = (lr, 0.9, 0.999, 1e-6, decay, count)
    if isinstance(rule, Lamb):
        return Lamb.numbers(*common, bias_correction=True, ratio_min=0.01, ratio_max=10.0)
    return Adam.numbers(*common, bias_correction=True, scaled_epsilon=rule.decay == "before")


def reference(rule, p, g, states, lr, count, decay):
    """The recorded formulas, in float64 and in place."""
    if isinstance(rule, SGD):
        p -= lr * g
        return
    m, v = states
    m.mul_(0.9).add_(0.1 * g)
    v.mul_(0.999).add_(0.001 * g * g)
    first, second = 1 - 0.9**count, 1 - 0.999**count
    if isinstance(rule, Lamb):
        d = decay * p + (m / first) / ((v / second).sqrt() + 1e-6)
        w, n = p.norm(), d.norm()
        ratio = (w / n).clamp(0.01, 10.0) if w > 0 and n > 0 else 1.0
        p -= lr * ratio * d
    elif rule.decay == "before":
        p -= lr * ((m / first) / ((v / second).sqrt() + 1e-6) + decay * p)
    else:
        p -= lr * second**0.5 / first * m / (v.sqrt() + 1e-6)
        p -= lr * (decay if rule.decay == "after" else 0.0) * p


def problem(shapes, dtype=torch.float32):
    params = [torch.randn(s, dtype=dtype) for s in shapes]
    if len(params) > 2:
        params[2].zero_()  # a weight of zero has no trust ratio
    return params, [torch.randn(s, dtype=dtype) for s in shapes]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("clip", "guard"), [(False, False), (True, False), (True, True)])
def test_rules_follow_their_formulas(rule, clip, guard):
    params, _ = problem(SHAPES)
    states = [tuple(torch.zeros_like(p) for _ in rule.states) for p in params]
    exact = [p.double() for p in params]
    exact_states = [tuple(s.double() for s in ss) for ss in states]
    groups = [0, 1, 0, 1, 0, 0, 1]
    update = Update(rule, params, states, groups, SessionFactory(), clip=clip, guard=guard)
    for count in (1, 2, 3):
        _, gradients = problem(SHAPES)
        lr = 0.01 * count
        for c, decay in zip(update.coefficients, (0.1, 0.0), strict=True):
            c.copy_(torch.tensor(numbers(rule, lr, count, decay), dtype=torch.float64))
        assert update.run([4 * g for g in gradients], scale=0.25, limits=[3.0, 1e9]) is True
        norm = sum(g.double().square().sum() for g in gradients).sqrt()
        for p, g, ss, group in zip(exact, gradients, exact_states, groups, strict=True):
            factor = 3.0 / norm if clip and group == 0 and norm > 3 else 1.0
            reference(rule, p, g.double() * factor, ss, lr, count, (0.1, 0.0)[group])
    for got, expected in zip(
        params + [s for ss in states for s in ss], exact + [s for ss in exact_states for s in ss], strict=True
    ):
        torch.testing.assert_close(
            got.double(), expected, rtol=0, atol=2e-6 * max(1.0, float(expected.abs().max()) if expected.numel() else 0)
        )


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_everything_is_written_in_place(rule):
    params, _ = problem(SHAPES)
    states = [tuple(torch.zeros_like(p) for _ in rule.states) for p in params]
    update = Update(rule, params, states, [0] * len(params), SessionFactory(), clip=True, guard=True)
    outputs = update._graph_outputs
    assert [slot.what for slot, ok in zip(outputs, update._in_place, strict=True) if not ok] == ["finite"]


def test_gradients_that_are_not_finite_change_nothing():
    params, gradients = problem(SHAPES)
    states = [(torch.rand_like(p), torch.rand_like(p)) for p in params]
    update = Update(Adam("before"), params, states, [0] * len(params), SessionFactory(), guard=True)
    update.coefficients[0].copy_(torch.tensor(numbers(Adam("before"), 0.1, 1, 0.1)))
    before = [t.clone() for t in params + [s for ss in states for s in ss]]
    for bad in (torch.inf, torch.nan):
        broken = [g.clone() for g in gradients]
        broken[1][17, 3] = bad
        assert update.run(broken) is False
        assert all(torch.equal(a, b) for a, b in zip(params + [s for ss in states for s in ss], before, strict=True))
    assert update.run(gradients) is True
    assert not torch.equal(params[1], before[1])


def test_large_tensors_are_cut_and_small_ones_joined(monkeypatch):
    monkeypatch.setattr(update_graph, "CHUNK", 100)
    monkeypatch.setattr(update_graph, "SMALL", 20)
    sizes, groups = [250, 5, 30, 7, 0, 19], [0, 0, 1, 1, 0, 0]
    found = pieces_of(sizes, groups, elementwise=True)
    assert sorted((p.group, [len(part) for part in p.parts]) for p in found) == [
        (0, [5, 19]), (0, [83]), (0, [83]), (0, [84]), (1, [7]), (1, [30]),
    ]  # fmt: skip
    covered = {(part.param, i) for p in found for part in p.parts for i in range(part.start, part.stop)}
    assert covered == {(k, i) for k, n in enumerate(sizes) for i in range(n)}
    assert [len(p.parts) for p in pieces_of(sizes, groups, elementwise=False)] == [1] * 5
    larger = pieces_of(sizes, groups, elementwise=True, chunk=1000)
    assert sorted(len(p) for p in larger) == [7, 24, 30, 250]


def test_however_tensors_lie_in_memory():
    """Channels last or strided, in parameters, states and gradients alike or not."""
    layouts = (
        lambda t: t.clone(),
        lambda t: t.to(memory_format=torch.channels_last),
        lambda t: torch.stack([t, t], -1)[..., 0],
    )
    start, gradients = torch.randn(2, 3, 4, 5), [torch.randn(2, 3, 4, 5) for _ in range(2)]
    results = []
    for number, (of_param, of_state) in enumerate(itertools.product(layouts, repeat=2)):
        p, states = of_param(start), [of_state(torch.zeros(2, 3, 4, 5)) for _ in range(2)]
        update = Update(Adam("none"), [p], [states], [0], SessionFactory())
        for count, gradient in enumerate(gradients, 1):
            update.set_coefficients(0, numbers(Adam("none"), 0.1, count, 0.0))
            update.run([layouts[(number + count) % 3](gradient)])
        results.append((p, *states))
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_a_gradient_may_be_a_weight_or_a_state():
    p, q, s = torch.randn(50), torch.randn(50), torch.zeros(50)
    expected = p - 0.1 * q, q - 0.1 * s, q.clone()
    update = Update(Momentum(), [p, q], [(s,), (torch.zeros(50),)], [0, 0], SessionFactory())
    update.set_coefficients(0, Momentum.numbers(0.1, 0.9))
    for _ in range(2):  # the second time on what is bound
        update.run([q, s])
        assert torch.equal(s, expected[2])
        torch.testing.assert_close(p, expected[0])
        torch.testing.assert_close(q, expected[1])
        expected = p - 0.1 * (0.9 * s + q), q - 0.1 * (0.9 * update._states[1][0] + s), 0.9 * s + q


def test_states_are_replaced_without_another_graph():
    p, g = torch.randn(30), torch.randn(30)
    update = Update(Momentum(), [p], [(torch.zeros(30),)], [0], SessionFactory())
    update.set_coefficients(0, Momentum.numbers(0.1, 0.9))
    update.run([g])
    other, before = torch.randn(30), p.clone()
    expected = 0.9 * other + g
    update.use([(other,)])
    update.run([g])
    torch.testing.assert_close(other, expected)
    torch.testing.assert_close(p, before - 0.1 * expected)
    with pytest.raises(ValueError, match="share memory"):
        update.use([(p,)])


def test_parameters_that_move_are_found():
    p, g = torch.nn.Parameter(torch.randn(10)), torch.randn(10)
    update = Update(SGD(), [p], [()], [0], SessionFactory())
    update.coefficients[0].fill_(1.0)
    p.data = torch.zeros(10)
    update.run([g])
    assert torch.equal(p.detach(), -g)


def test_doubles_keep_their_precision():
    params, gradients = problem([(20, 30)], torch.float64)
    states = [(torch.zeros_like(params[0]), torch.zeros_like(params[0]))]
    exact, exact_states = params[0].clone(), tuple(s.clone() for s in states[0])
    update = Update(Adam("before"), params, states, [0], SessionFactory())
    update.coefficients[0].copy_(torch.tensor(numbers(Adam("before"), 0.1, 1, 0.1), dtype=torch.float64))
    update.run(gradients)
    reference(Adam("before"), exact, gradients[0], exact_states, 0.1, 1, 0.1)
    torch.testing.assert_close(params[0], exact, rtol=1e-12, atol=1e-12)


def test_shared_memory_is_refused():
    flat = torch.zeros(10)
    with pytest.raises(ValueError, match="two parameters share memory"):
        Update(SGD(), [flat[:6], flat[5:]], [(), ()], [0, 0], SessionFactory())
    with pytest.raises(ValueError, match=r"parameters of torch\.float16"):
        Update(SGD(), [flat.half()], [()], [0], SessionFactory())


def graph(text):
    model = ir.from_proto(onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 20]>' + text))
    inputs = {v.name: v for v in model.graph.inputs}
    return inputs, {v.name: v for v in model.graph.outputs}


SAFE = {
    "element by element": "agraph (float[4] w, float[4] g) => (float[4] n) { n = Sub(w, g) }",
    "read before": "agraph (float[4] w, float[4] g) => (float[4] n) { a = Exp(w)  b = Mul(a, g)  n = Neg(b) }",
}
UNSAFE = {
    "read elsewhere": "agraph (float[4] w, float[4] g) => (float[4] n, float[4] o) { n = Sub(w, g)  o = Mul(w, g) }",
    "read later": "agraph (float[4] w, float[4] g) => (float[4] n, float[4] o) { n = Sub(w, g)  o = Mul(n, w) }",
    "broadcast": "agraph (float[1] w, float[4] g) => (float[4] n) { n = Sub(w, g) }",
    "whole rows": "agraph (float[4,4] w) => (float[4,4] n) { n = MatMul(w, w) }",
    "moved": "agraph (float[4] w) => (float[4] n) { i = Constant<value_ints=[3,2,1,0]>()  n = Gather(w, i) }",
    "an input": "agraph (float[4] w) => (float[4] w) { a = Neg(w) }",
}


@pytest.mark.parametrize("name", SAFE)
def test_safe_to_overwrite(name):
    inputs, outputs = graph(SAFE[name])
    assert may_overwrite(outputs["n"], inputs["w"])


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_to_overwrite(name):
    inputs, outputs = graph(UNSAFE[name])
    assert not may_overwrite(outputs.get("n", outputs.get("w")), inputs["w"])


class ReadLater(SGD):
    """A rule whose second result reads the weight that the first replaces."""

    @property
    def states(self):
        return ("copy",)

    def formula(self, param, grad, scale, states, c):
        return param - c["lr"] * grad, states[0] + param


def test_what_is_not_safe_goes_through_a_second_buffer():
    p, g, s = torch.randn(1000), torch.randn(1000), torch.zeros(1000)
    before = p.clone()
    update = Update(ReadLater(), [p], [(s,)], [0], SessionFactory())
    update.coefficients[0].fill_(0.5)
    assert dict(zip([o.what for o in update._graph_outputs], update._in_place, strict=True)) == {
        "param": False,
        0: True,
    }
    update.run([g])
    torch.testing.assert_close(p, before - 0.5 * g)
    assert torch.equal(s, before)


def test_the_graph_runs_as_it_was_checked():
    """Without graph optimization; an optimizer could take edges away on which the order relies."""
    level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert SessionFactory().as_written().session_options().graph_optimization_level == level
    own = onnxruntime.SessionOptions()
    own.intra_op_num_threads = 3
    made = SessionFactory(RuntimeConfig(session_options=own)).as_written().session_options()
    assert made.graph_optimization_level == level and made.intra_op_num_threads == 3


@pytest.mark.usefixtures("two_threads")
def test_one_thread_stays_one_where_the_graph_is_not_optimized():
    alone = SessionFactory().on_one_thread()
    assert alone.in_one_thread() and alone.as_written().in_one_thread()
    assert not SessionFactory().as_written().in_one_thread()


def test_parameters_that_take_turns_have_their_updates_made_once(monkeypatch):
    """A model with branches: each set of gradients has a graph, which is kept, and each weight a count."""
    made = []
    graph_update = Updater._graph_update
    monkeypatch.setattr(Updater, "_graph_update", lambda self, *a, **k: made.append(a) or graph_update(self, *a, **k))
    settings = OptimizerSettings("AdamW", clip_grad_norm=1.0)
    params = {name: torch.ones(5, dtype=torch.float64) for name in "abc"}
    updater = Updater(dict.fromkeys(params, settings), params, SessionFactory(RuntimeConfig(placement="onnxruntime")))
    plain = {name: nn.Parameter(torch.ones(5, dtype=torch.float64)) for name in "abc"}
    optimizer = optim.AdamW(plain.values(), 0.1, (settings.betas), settings.eps, settings.weight_decay)
    torch.manual_seed(0)
    for step in range(12):
        names = ["ab", "abc", "c"][step % 3]
        gradients = {name: torch.randn(5, dtype=torch.float64) for name in names}
        optimizer.zero_grad()
        for name, gradient in gradients.items():
            plain[name].grad = gradient.clone()
        nn.utils.clip_grad_norm_(plain.values(), 1.0)
        optimizer.step()
        updater.step(gradients, 0.1)
        for name, param in params.items():
            torch.testing.assert_close(param, plain[name].detach(), rtol=0, atol=1e-5)
    assert updater.counts == {"a": 8, "b": 8, "c": 8} and 3 <= len(made) <= 5


@pytest.mark.parametrize("guard", [False, True])
def test_parameters_without_elements_only_count_their_updates(guard):
    params = {"none": torch.zeros(0, 3), "some": torch.ones(2)}
    settings = OptimizerSettings("Lamb", clip_grad_norm=1.0)
    updater = Updater(dict.fromkeys(params, settings), params, SessionFactory(), guard=guard)
    assert updater.step({"none": torch.zeros(0, 3)}, 0.1)
    assert updater.counts == {"none": 1, "some": 0}
    assert updater.step({name: torch.ones_like(p) for name, p in params.items()}, 0.1)
    assert updater.counts == {"none": 2, "some": 1} and (params["some"] < 1).all()


def test_scalar_work_is_done_once():
    """Products of coefficients are common to all pieces of a group."""
    pieces = pieces_of([1 << 19], [0], elementwise=True)
    types = [
        n.op_type for n in UpdateGraph(Adam("before"), pieces, [torch.float32], clip=False, guard=False).model.graph
    ]
    # a root takes seven nodes more where ONNX Runtime's own is wrong for some numbers, as in 1.19
    each = 13 if types.count("Where") == 0 else 20
    assert len(pieces) == 4 and len(types) == 4 * each + 2
    assert "Identity" not in types
