"""Which weights of a file a TrainingSession trains, and which it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx_text import parse
from test_training_session import parameters

from lightning_ort import TrainingSession, UnsupportedError


def test_weights_that_no_optimizer_updates_are_refused_at_once() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]> g (float16[N,4] x) => (float16 loss) {
            y = Mul(x, w) loss = ReduceMean<keepdims=0>(y) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(4, dtype=np.float16), "w"))
    with pytest.raises(UnsupportedError, match=r"weights 'w' are float16; training_optimizer_name='SGDOptimizer'"):
        TrainingSession(model, parameters("SGDOptimizer"))
    session = TrainingSession(model, parameters("", set_gradients_as_graph_outputs=True))
    (gradient,) = session.run(["w_grad"], {"x": np.ones((2, 4), np.float16)})
    np.testing.assert_array_equal(gradient, np.full(4, 0.25, np.float16))


def test_a_loss_that_depends_on_no_weight_is_refused() -> None:
    model = parse("g (float[N,4] x) => (float loss) { loss = ReduceMean<keepdims=0>(x) }", w=np.ones(4, np.float32))
    with pytest.raises(ValueError, match="No weight is trained: the loss 'loss' has a gradient by none of 'w'"):
        TrainingSession(model, parameters("SGDOptimizer", weights_to_train={"w"}))


MUL = "g (float[N,2] x) => (float[N,2] z, float loss) { z = Mul(x, w) loss = ReduceSum<keepdims=0>(z) }"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_not_to_train": {"w"}}, r"weights_not_to_train names all weights that could be \(w\)\. Leave out"),
        (
            {"weights_to_train": {"w"}, "weights_not_to_train": {"w"}},
            r"weights_not_to_train names all weights of weights_to_train \(w\)",
        ),
        ({"immutable_weights": {"Mul": {1: 2.0}}}, r"immutable_weights names all weights that could be \(w\)"),
    ],
)
def test_an_option_that_leaves_no_weight_is_named(options: dict[str, Any], message: str) -> None:
    model = parse(MUL, w=np.array([2], np.float32))
    with pytest.raises(ValueError, match=f"^No weight is trained: {message}"):
        TrainingSession(model, parameters("SGDOptimizer", **options))


def test_a_model_without_weights_is_refused() -> None:
    model = parse(MUL.replace("Mul(x, w)", "Abs(x)"))
    with pytest.raises(ValueError, match=r"^No weight is trained: no float initializer of the model leads to"):
        TrainingSession(model, parameters("SGDOptimizer"))


def test_a_loss_of_open_size_is_refused() -> None:
    model = parse(MUL, w=np.ones(2, np.float32))
    with pytest.raises(UnsupportedError, match=r"loss_output_name='z': this output has shape \['N', 2\], whose size"):
        TrainingSession(model, parameters("SGDOptimizer", loss_output_name="z"))


@pytest.mark.parametrize(("taken", "trained"), [(True, "w"), (False, "w_1")])
def test_weights_of_branches_are_trained(taken: bool, trained: str) -> None:
    text = """g (float[N,4] x) => (float loss) { y = If(c) <
            then_branch = one () => (float[N,2] a) <float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { a = MatMul(x, w) },
            else_branch = two () => (float[N,2] b) <float[4,2] w = {2, 2, 2, 2, 2, 2, 2, 2}> { b = MatMul(x, w) } >
        loss = ReduceMean<keepdims=0>(y) }"""
    model = parse(text, c=np.array(taken))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    session = TrainingSession(model, parameters("SGDOptimizer"))
    before = session.get_state()
    assert set(before) == {"w", "w_1"}
    (loss,) = session.run(["loss"], {"x": x, "Learning_Rate": [0.5]})
    assert loss == pytest.approx((x @ before[trained]).mean())
    after = session.get_state()
    wanted = before[trained] - 0.5 * np.repeat(x.sum(0)[:, None] / 6, 2, axis=1)
    np.testing.assert_allclose(after.pop(trained), wanted, rtol=1e-6)
    (other,) = after
    np.testing.assert_array_equal(after[other], before[other])
