"""Which weights of a file a TrainingSession trains, and which it refuses."""

from __future__ import annotations

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
