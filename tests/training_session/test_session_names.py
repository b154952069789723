"""Names in a file that are like those of what a TrainingSession adds, or keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_text import floats, parse
from test_training_session import RATE, parameters

from lightning_ort import GradientGraphBuilder, TrainingSession, UnsupportedError

X, W = floats(3, 4, seed=1), floats(4, 2, seed=2)


def product(x: str = "x", w: str = "w", y: str = "y") -> onnx.ModelProto:
    model = parse(
        f"g (float[N,4] {x}) => (float loss, float[N,2] {y}) {{ {y} = MatMul({x}, {w}) q = Mul({y}, {y}) "
        "loss = ReduceMean<keepdims=0>(q) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(W, w))
    return model


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("x", "y"),
    [("x", "w_new"), ("w_new", "y"), ("one", "minus_one"), ("shape", "indices"), ("value", "one"),
     ("x", "all_finite"), ("Group_Accumulated_Gradients", "y")],
)  # fmt: skip
def test_names_of_inputs_and_outputs_have_no_meaning(x: str, y: str, verify: bool) -> None:
    session = TrainingSession(product(x, y=y), parameters("SGDOptimizer"), verify=verify)
    results = session.run([y, "loss"], {x: X, RATE: [0.1]})
    np.testing.assert_allclose(results[0], X @ W, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.get_state()["w"], W - 0.1 * X.T @ (X @ W) / 3, rtol=1e-5, atol=1e-6)
    assert [i.name for i in session.get_inputs()] == [x, RATE]


STATISTICS = """g (float[N,4] x) => (float loss, float[N,4] NAME) {
    h = Mul(x, w) NAME, m, v = BatchNormalization<training_mode=1>(h, scale, shift, mean, var)
    loss = ReduceMean<keepdims=0>(NAME) }"""


def test_an_output_called_like_a_new_running_statistic_is_refused() -> None:
    tensors = {n: np.ones(4, np.float32) for n in ("w", "scale", "shift", "mean", "var")}
    given = parameters("SGDOptimizer", weights_to_train={"w"})
    with pytest.raises(UnsupportedError, match="'mean_new' is a name in the ONNX file, and that of the new value of"):
        TrainingSession(parse(STATISTICS.replace("NAME", "mean_new"), **tensors), given)
    # what does not change has no new value
    results = []
    for name in ("y", "shift_new"):
        session = TrainingSession(parse(STATISTICS.replace("NAME", name), **tensors), given)
        results.append([*session.run(None, {"x": X, RATE: [0.1]}), *session.get_state().values()])
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("passed", ["x", "w"])
def test_an_output_that_is_an_input_or_weight_may_have_a_copy(passed: str) -> None:
    text = f"""g (float[N,4] x) => (float loss, float {passed}, float copy, float[N,2] y) {{ y = MatMul(x, w)
        copy = Identity({passed}) q = Mul(y, y) loss = ReduceMean<keepdims=0>(q) }}"""
    model = parse(text, w=W)
    for output in model.graph.output[1:3]:
        output.type.tensor_type.ClearField("shape")
    names = ["loss", passed, "copy", "y"]
    value = {"x": X, "w": W}[passed]
    builder = GradientGraphBuilder(model, {"loss"}, {"x", "w"}, "loss")
    builder.build(verify=True)
    graph = onnxruntime.InferenceSession(builder.get_model(), providers=["CPUExecutionProvider"])
    assert [o.name for o in graph.get_outputs()] == [*names, "w_grad", "x_grad"]
    session = TrainingSession(model, parameters("SGDOptimizer"))
    for results in (graph.run(names, {"x": X}), session.run(names, {"x": X, RATE: [0.1]})):
        for got, expected in zip(results, [np.mean((X @ W) ** 2), value, value, X @ W], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(session.get_state()["w"], W - 0.1 * X.T @ (X @ W) / 3, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [("AdamOptimizer", "Moment_1_w"), ("AdamOptimizer", "Update_Count_w"), ("LambOptimizer", "Step"),
     ("LambOptimizer", "shared_optimizer_state")],
)  # fmt: skip
@pytest.mark.parametrize("frozen", [True, False])
def test_a_weight_called_like_a_state_is_refused(optimizer: str, name: str, frozen: bool) -> None:
    text = f"g (float[N,4] x) => (float loss) {{ a = Mul(x, w) b = Mul(a, {name}) loss = ReduceMean<keepdims=0>(b) }}"
    model = parse(text, w=np.ones(4, np.float32), **{name: np.ones(4, np.float32)})
    given: dict[str, Any] = {"weights_not_to_train": {name}} if frozen else {}
    with pytest.raises(
        UnsupportedError, match=f"'{name}' is a name in the ONNX file, and that of an optimizer's state"
    ):
        TrainingSession(model, parameters(optimizer, **given))
    # without such states it is a name as any other
    assert set(TrainingSession(model, parameters("SGDOptimizer", **given)).get_state()) == {"w", name}


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ({"y": "all_finite"}, {"loss_scale": 2.0}, "has an output 'all_finite', .*leave loss_scale at 0.0"),
        ({"x": "all_finite"}, {"loss_scale": 2.0}, "has an input 'all_finite'"),
        (
            {"y": "Group_Accumulated_Gradients"}, {"gradient_accumulation_steps": 2},
            "has an output 'Group_Accumulated_Gradients', .*leave gradient_accumulation_steps at 1",
        ),
        ({}, {"lr_params_feed_name": ""}, "lr_params_feed_name='': expected the name"),
        ({}, {"lr_params_feed_name": "w"}, "has an initializer 'w', which is what the learning rate"),
        ({}, {"lr_params_feed_name": "q"}, "has a value 'q', which is what"),
        ({}, {"lr_params_feed_name": "y"}, "has an output 'y', which is what"),
        ({}, {"lr_params_feed_name": "all_finite", "loss_scale": 2.0}, "output 'all_finite', which is what"),
        ({}, {"lr_params_feed_name": "w_grad", "set_gradients_as_graph_outputs": True}, "output 'w_grad', which is"),
    ],
)  # fmt: skip
def test_names_that_would_stand_for_two_values_are_refused(
    names: dict[str, str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSession(product(**names), parameters("SGDOptimizer", **options))
