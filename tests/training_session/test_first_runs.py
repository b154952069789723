"""First runs of the graphs of a TrainingSession, and of gradient graphs, beside torch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from onnx_text import floats, parse

from lightning_ort import GradientGraphBuilder, TrainingParameters, TrainingSession, UnsupportedError
from lightning_ort.errors import MismatchError, RefusedValueError
from lightning_ort.training_session import generated_run, gradient_graph, graph
from lightning_ort.verification import Mismatch

NETWORK = """g (float[n,3] x, int64[n] t) => (float loss, float[n,4] scores) {
    h = Gemm(x, w, b)
    y, mean_out, var_out = BatchNormalization<training_mode=1>(h, scale, shift, mean, var)
    r = Relu(y) scores = MatMul(r, v) loss = SoftmaxCrossEntropyLoss(scores, t) }"""
DROPOUT = """g (float[n,3] x, int64[n] t) => (float loss, float[n,4] scores) {
    h = Gemm(x, w, b) d = Dropout(h, half, yes) scores = MatMul(d, v) loss = SoftmaxCrossEntropyLoss(scores, t) }"""
FEED = {"x": floats(6, 3, seed=3), "t": np.array([0, 1, 2, 3, 3, 0])}
EVALUATE = onnxruntime.RunOptions()
EVALUATE.only_execute_path_to_fetches = True


def network(text: str = NETWORK) -> onnx.ModelProto:
    weights = {"w": floats(3, 5), "b": floats(5, seed=1), "v": floats(5, 4, seed=2)}
    if text == NETWORK:
        weights |= {"scale": floats(5, seed=4), "shift": floats(5, seed=5), "mean": floats(5, seed=6)}
        weights["var"] = np.ones(5, np.float32)
    else:
        weights |= {"half": np.float32(0.5), "yes": np.array(True)}
    return parse(text, **weights)


def session(
    model: onnx.ModelProto | None = None, optimizer: str = "AdamOptimizer", **arguments: Any
) -> TrainingSession:
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", optimizer
    return TrainingSession(model or network(), parameters, **arguments)


def falsify(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, factor: float = 1.01) -> None:
    """Let the graphs that ``module`` makes give ``factor`` times the right result called ``name``."""
    original = module.written

    def written(*args: Any, **keywords: Any) -> ir.Model:
        proto = ir.to_proto(original(*args, **keywords))
        for node in proto.graph.node:
            if name in node.output:
                for inputs in (n.input for n in proto.graph.node):
                    inputs[:] = ["right" if i == name else i for i in inputs]
                node.output[:] = ["right" if o == name else o for o in node.output]
                proto.graph.node.append(helper.make_node("Mul", ["right", "factor"], [name]))
                array = np.array(factor, np.float32)
                proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "factor"))
                break
        return ir.from_proto(proto)

    monkeypatch.setattr(module, "written", written)


WRONG = {
    "scores": "output 'scores' differs",
    "w_grad": "the gradient of 'w' differs",
    "mean_new": "the new value of 'mean' differs",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_of_a_step_is_refused_and_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, graph, name)
    found = session()
    before = found.get_state()
    with pytest.raises(MismatchError, match=f"^{WRONG[name]} between ONNX Runtime and torch.*Nothing was updated"):
        found.run(None, FEED | {"Learning_Rate": [0.1]})
    after = found.get_state()
    assert all(np.array_equal(after[n], value) for n, value in before.items())
    # the check is off where it is asked to be
    session(verify=False).run(None, FEED | {"Learning_Rate": [0.1]})


@pytest.mark.parametrize("op", ["Round", "Sign", "Floor"])
def test_gradients_that_are_all_zero_are_compared(op: str) -> None:
    """No node of such a graph reads the gradient of the loss."""
    text = f"g (float[n,3] x) => (float loss) {{ h = Mul(x, w) q = {op}(h) loss = ReduceMean<keepdims=0>(q) }}"
    model = parse(text, w=floats(3))
    found = session(model, "SGDOptimizer")
    rates = {"Learning_Rate": [0.1]}
    for _ in range(2):
        found.run(None, {"x": floats(6, 3, seed=3)} | rates)
    assert np.array_equal(found.get_state()["w"], floats(3))


def test_a_wrong_evaluation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = session()
    found.run(None, FEED | {"Learning_Rate": [0.1]})
    falsify(monkeypatch, graph, "scores")
    with pytest.raises(MismatchError, match=r"^output 'scores' differs"):
        found.run(None, FEED, EVALUATE)
    found.run(None, FEED | {"Learning_Rate": [0.1]})


def test_a_graph_is_compared_once_and_gives_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = graph.StepReference.results

    def results(self: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(self)
        return original(self, *args, **keywords)

    monkeypatch.setattr(graph.StepReference, "results", results)
    checked, unchecked = session(), session(verify=False)
    for options in (None, None, EVALUATE, EVALUATE):
        rate = {} if options else {"Learning_Rate": [0.1]}
        for got, wanted in zip(*(s.run(None, FEED | rate, options) for s in (checked, unchecked)), strict=True):
            assert np.array_equal(got, wanted)
    assert len(calls) == len(set(map(id, calls))) == 2
    state, other = checked.get_state(), unchecked.get_state()
    assert all(np.array_equal(state[n], other[n]) for n in other)


@pytest.mark.parametrize("runs", [0, 1])
def test_a_label_that_is_no_class_is_refused_by_the_name_of_the_input(runs: int) -> None:
    trained = session()
    for _ in range(runs):
        trained.run(None, FEED | {"Learning_Rate": [0.1]})
    before = trained.get_state()
    with pytest.raises(RefusedValueError, match=r"label.* is out of range .* come from the input 't'"):
        trained.run(None, FEED | {"Learning_Rate": [0.1], "t": np.array([0, 1, 7, 3, 3, 0])})
    assert all(np.array_equal(x, before[name]) for name, x in trained.get_state().items())


def test_a_difference_that_other_weights_do_not_show_is_forgiven_once(monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, graph, "w_grad")
    wrong = session(optimizer="SGDOptimizer")
    monkeypatch.undo()
    right = session(optimizer="SGDOptimizer", verify=False)
    answers: list[Mismatch | None] = [Mismatch("the gradient of 'w' differs", certain=False), None, None]
    monkeypatch.setattr(graph.StepReference, "mismatch", lambda *args: answers.pop(0))
    feed = FEED | {"Learning_Rate": [0.1]}
    # torch's results are taken
    for got, wanted in zip(wrong.run(None, feed), right.run(None, feed), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert answers == []
    state, other = wrong.get_state(), right.get_state()
    for name, value in other.items():
        np.testing.assert_allclose(state[name], value, rtol=1e-4, atol=1e-6)
    # but not a second time
    answers.append(Mismatch("the gradient of 'w' differs", certain=False))
    with pytest.raises(MismatchError, match="the gradient of 'w' differs"):
        wrong.run(None, feed)


def test_a_loss_scale_beyond_the_range_is_compared_when_it_fits() -> None:
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "SGDOptimizer"
    parameters.loss_scale = 3e38
    found = TrainingSession(network(), parameters)
    feed = FEED | {"Learning_Rate": [0.1]}
    first = dict(
        zip([o.name for o in found.get_outputs()], found.run(None, feed | {"x": FEED["x"] * 1e3}), strict=True)
    )
    assert not first["all_finite"][0] and found._train._reference is not None
    found._parameters.loss_scale = 128.0
    found.run(None, feed)
    assert found._train._reference is None


def test_random_draws_are_not_compared_but_the_evaluation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, graph, "scores")
    found = session(network(DROPOUT))
    found.run(None, FEED | {"Learning_Rate": [0.1]})
    with pytest.raises(MismatchError, match=r"^output 'scores' differs"):
        found.run(None, FEED, EVALUATE)


# -- gradient graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "x_grad"])
def test_a_wrong_gradient_graph_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    falsify(monkeypatch, gradient_graph, name)
    builder = GradientGraphBuilder(network(), {"loss"}, {"w", "x"}, "loss")
    with pytest.raises(MismatchError, match=rf"{name.removesuffix('_grad')}' differs.*build\(verify=False\)"):
        builder.build()
    with pytest.raises(RuntimeError, match="does not exist yet"):
        builder.get_model()
    builder.build(verify=False)
    assert builder.not_compared == "verify=False" and builder.get_model()


def test_gradient_graphs_are_compared_where_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    # with an incoming gradient, and a size that is left open
    builder = GradientGraphBuilder(network(), {"loss", "scores"}, {"w", "x"}, "loss")
    assert "has not been called" in str(builder.not_compared)
    builder.build()
    assert builder.not_compared is None
    falsify(monkeypatch, gradient_graph, "w_grad")
    monkeypatch.setattr(generated_run, "_OPERATIONS", 100.0)
    builder.build()
    assert "it is large" in str(builder.not_compared)
    with pytest.raises(MismatchError):
        builder.build(verify=True)
    random = GradientGraphBuilder(network(DROPOUT), {"loss"}, {"w"}, "loss")
    random.build()
    assert "random numbers" in str(random.not_compared)
    with pytest.raises(UnsupportedError, match="was not compared: it draws random numbers"):
        random.build(verify=True)
    with pytest.raises(TypeError, match="verify=0: expected True or False"):
        session(verify=0)
    with pytest.raises(TypeError, match="verify='no'"):
        random.build(verify="no")  # type: ignore[arg-type]
