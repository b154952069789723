"""What a TrainingSession refuses changes nothing; and what changes under it from outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx_text import floats, parse
from onnxruntime import OrtValue
from test_training_session import RATE, parameters

from lightning_ort import TrainingSession
from lightning_ort.training_session.binding import TrainingBinding

TEXT = """g (float[N,4] x) => (float loss, z, s, float[4] f) {
    h = Mul(x, w) z, m, v = BatchNormalization<training_mode=1>(h, scale, shift, mean, var)
    s = Shape(z) f = ReduceMean<keepdims=0, axes=[0]>(z) q = Mul(z, z) loss = ReduceMean<keepdims=0>(q) }"""
X = floats(6, 4, seed=1)


def session(optimizer: str = "AdamOptimizer", **options: Any) -> TrainingSession:
    model = parse(TEXT.replace("z, s,", "float[N,4] z, int64[1] s,"), **{
        n: np.ones(4, np.float32) for n in ("w", "scale", "shift", "mean", "var")
    })  # fmt: skip
    model.graph.output[1].type.tensor_type.ClearField("shape")
    return TrainingSession(model, parameters(optimizer, **options))


def bound(trained: TrainingSession) -> TrainingBinding:
    binding = trained.io_binding()
    binding.bind_cpu_input("x", X)
    binding.bind_cpu_input(RATE, np.array([0.1], np.float32))
    return binding


def zeros(*shape: int, dtype: Any = np.float32) -> OrtValue:
    return OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))


def memory(binding: TrainingBinding, name: str, array: np.ndarray) -> None:
    binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def assert_same(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    assert before.keys() == after.keys() and all(np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize(
    ("bind", "message"),
    [
        (lambda b: b.bind_ortvalue_output("z", zeros(6, 4, dtype=np.float64)), r"'z' is tensor\(float\).*\(double\)"),
        (lambda b: memory(b, "z", np.zeros((6, 4), np.int32)), r"'z' is tensor\(float\).*is tensor\(int32\)"),
        (lambda b: b.bind_ortvalue_output("s", zeros(2)), r"'s' is tensor\(int64\).*is tensor\(float\) of shape \[2\]"),
        (lambda b: b.bind_ortvalue_output("f", zeros(3)), r"'f' is tensor\(float\) of shape \[4\]; .*of shape \[3\]"),
        (lambda b: memory(b, "f", np.zeros((1, 4), np.float32)), r"'f' is .*of shape \[4\]; .*of shape \[1, 4\]"),
        # found only by the run
        (lambda b: b.bind_ortvalue_output("z", zeros(5, 4)), r"'z' is of shape \[6, 4\]; .*of shape \[5, 4\]. Nothing"),
        (lambda b: memory(b, "z", np.zeros((2, 12), np.float32)), r"'z' is of shape \[6, 4\]; .*of shape \[2, 12\]"),
        (lambda b: b.bind_ortvalue_output("loss", zeros(1)), r"'loss' is of shape \[\]; .*of shape \[1\]"),
        (lambda b: None, r"^No output is bound; bind one by bind_output"),
    ],
)  # fmt: skip
def test_memory_that_does_not_fit_is_refused_and_nothing_changes(
    bind: Callable[[TrainingBinding], None], message: str
) -> None:
    trained, other = (session(gradient_accumulation_steps=2) for _ in range(2))
    before, binding = trained.get_state(), bound(trained)

    def run() -> None:
        bind(binding)
        trained.run_with_iobinding(binding)

    with pytest.raises(ValueError, match=message):
        run()
    assert_same(before, trained.get_state())
    # the refused run is not counted, nor are its gradients
    for _ in range(2):
        for one in (trained, other):
            one.run(None, {"x": X, RATE: 0.1})
    assert_same(other.get_state(), trained.get_state())


def test_bound_memory_is_filled_also_in_an_evaluation() -> None:
    trained, z, f = session(), zeros(6, 4), np.zeros(4, np.float32)
    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    for given in (None, options):
        binding = bound(trained)
        binding.bind_ortvalue_output("z", z)
        memory(binding, "f", f)
        expected = trained.run(["z", "f"], {"x": X}, options) if given else session().run(["z", "f"], {"x": X, RATE: 0})
        trained.run_with_iobinding(binding, given)
        np.testing.assert_array_equal(z.numpy(), expected[0])
        np.testing.assert_array_equal(f, expected[1])
        np.testing.assert_array_equal(binding.get_outputs()[1].numpy(), f)
    with pytest.raises(TypeError, match=r"Output 'z': ortvalue=array.* expected an onnxruntime.OrtValue"):
        binding.bind_ortvalue_output("z", np.zeros(3))  # type: ignore[arg-type]


def test_a_loaded_state_drops_the_gradients_of_the_old_weights() -> None:
    trained, fresh = (session(gradient_accumulation_steps=2) for _ in range(2))
    state = trained.get_state()
    trained.run(None, {"x": X * 100, RATE: 0.1})
    trained.load_state(state)
    for waiting in (True, False):
        for one in (trained, fresh):
            assert one.run(["Group_Accumulated_Gradients"], {"x": X, RATE: 0.1})[0].item() == waiting
    assert_same(fresh.get_state(), trained.get_state())


def test_parameters_that_change_later_do_not_change_the_session() -> None:
    given = parameters("SGDOptimizer", weights_to_train={"w"})
    model = parse("g (float[N,4] x) => (float loss) { h = Mul(x, w) loss = ReduceMean<keepdims=0>(h) }",
                  w=np.ones(4, np.float32))  # fmt: skip
    trained = TrainingSession(model, given)
    given.gradient_accumulation_steps, given.lr_params_feed_name, given.loss_scale = 2, "rate", 8.0
    given.optimizer_attributes_map["w"] = {}
    trained.set_providers(["CPUExecutionProvider"])
    assert [o.name for o in trained.get_outputs()] == ["loss"]
    trained.run(None, {"x": X, RATE: 0.1})
    np.testing.assert_allclose(trained.get_state()["w"], 1 - 0.1 * X.sum(0) / X.size, rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_states_of_another_element_type_are_refused(dtype: Any) -> None:
    trained = session()
    trained.run(None, {"x": X, RATE: 0.1})
    before, moments = trained.get_state(), trained.get_optimizer_state()
    message = f"Optimizer state 'Moment_1' of 'w' is torch.{np.dtype(dtype)}; expected torch.float32"
    with pytest.raises(ValueError, match=message):
        trained.load_state(before | {"w": before["w"] + 1, "Moment_1_w": np.ones(4, dtype)})
    assert_same(before, trained.get_state())
    with pytest.raises(ValueError, match=r"'Update_Count' of 'w' is torch.float32; expected torch.int64"):
        trained.load_state({"Update_Count_w": np.array([2.5], np.float32)})
    moments["w"]["Moment_1"] = moments["w"]["Moment_1"].astype(dtype)
    given = parameters()
    given.set_optimizer_initial_state(moments)
    with pytest.raises(ValueError, match=message):
        TrainingSession(trained._proto, given)


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        ({"Mul": {-1: 1.0}}, ValueError, r"immutable_weights has 'Mul': \{-1: 1\.0\}.*counted from 0"),
        ({"Mull": {1: 1.0}}, ValueError, "immutable_weights has 'Mull', which no model can have"),
        ({"Mul": {"1": 1.0}}, TypeError, "immutable_weights has 'Mul': .*expected operator types to mappings"),
    ],
)
def test_immutable_weights_that_mean_nothing_are_refused(
    rules: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        session(immutable_weights=rules, weights_to_train={"w"})
    # a table for many files has operators that this one lacks
    session(immutable_weights={"Conv": {1: 1.0}, "Loop": {0: 0.5}})
