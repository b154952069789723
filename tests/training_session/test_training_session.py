"""TrainingSession against recorded trainings of ONNX Runtime's ORTTrainer, and what it keeps, restores and refuses."""

from __future__ import annotations

import io
import warnings
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx_exports import EXPORTS
from onnx_text import parse
from orttrainer_models import Recording, batches, make
from torch import Tensor, nn

from lightning_ort import GradientGraphBuilder, TrainingParameters, TrainingSession, UnsupportedError

RATE = "Learning_Rate"


class WithLoss(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = make(name)

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return F.cross_entropy(scores, label), scores


def exported(name: str = "mlp") -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            WithLoss(name), batches(name, 1)[0], buffer, dynamo=False, input_names=["x", "label"],
            output_names=["loss", "scores"], opset_version=17, training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False, dynamic_axes={n: {0: "batch"} for n in ("x", "label", "scores")},
        )  # fmt: skip
    return buffer.getvalue()


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {name: exported(name) for name in ("mlp", "enc")}


def parameters(optimizer: str = "AdamOptimizer", **values: Any) -> TrainingParameters:
    found = TrainingParameters()
    found.loss_output_name, found.training_optimizer_name = "loss", optimizer
    for name, value in values.items():
        setattr(found, name, value)
    return found


def of_recording(recording: Recording) -> TrainingParameters:
    """The parameters that ORTTrainer made of its configuration."""
    config, settings = recording.config(), recording.settings
    names = [f"net.{n}" for n, _ in make(settings["model"]).named_parameters()]
    groups = {f"net.{n}": g for g in config.params for n in g["params"]}
    floats: dict[str, dict[str, float]] = {}
    ints: dict[str, dict[str, int]] = {}
    for name in names:
        values = {**config.defaults, **groups.get(name, {})}
        kinds = ("alpha", "beta", "lambda", "epsilon", "max_norm_clip", "ratio_min", "ratio_max")
        floats[name] = {k: float(values[k]) for k in kinds if k in values}
        ints[name] = {"do_bias_correction": int(values["do_bias_correction"])} if "do_bias_correction" in values else {}
        if "weight_decay_mode" in values:
            ints[name]["weight_decay_mode"] = int(getattr(values["weight_decay_mode"], "value", 0))
    frozen = {f"net.{n}" for n in settings.get("frozen", [])}
    kept = [n for n in names if n not in frozen]
    adaptive = config.name != "SGDOptimizer"
    return parameters(
        config.name,
        weights_not_to_train=frozen,
        optimizer_attributes_map={n: floats[n] for n in kept} if adaptive else {},
        optimizer_int_attributes_map={n: ints[n] for n in kept} if adaptive else {},
        enable_grad_norm_clip=recording.options()["utils"]["grad_norm_clip"],
        gradient_accumulation_steps=settings.get("acc", 1),
    )


@pytest.mark.parametrize(
    "name",
    ["mlp_adam_default", "mlp_adam_mode1_wd", "mlp_adam_mode0_wd", "mlp_adam_groups", "mlp_adam_frozen",
     "mlp_adam_nobias", "FORMULA_mlp_adam_clip_0.1", "FORMULA_mlp_adam_acc4", "FORMULA_mlp_lamb_lr1e-2_wd",
     "FORMULA_mlp_sgd_acc4", "enc_adam_lr1e-2", "enc_sgd_lr1e-1"],
)  # fmt: skip
def test_a_training_repeats_the_recorded_one(name: str, files: dict[str, bytes]) -> None:
    recording = Recording(name)
    model = recording.settings["model"]
    session = TrainingSession(files[model], of_recording(recording))
    losses = []
    for (x, label), rate in zip(batches(model), recording.arrays["lrs"], strict=True):
        losses += session.run(["loss"], {"x": x, "label": label, RATE: np.array([rate], np.float32)})
    np.testing.assert_allclose(np.array(losses), recording.arrays["losses"], atol=2e-6, rtol=0)
    weights = session.get_model_state()["full_precision"]
    for key, array in recording.arrays.items():
        if key.startswith("w/"):
            np.testing.assert_allclose(weights[f"net.{key[2:]}"], array, atol=5e-6)


BATCH = {"x": batches(count=1)[0][0].numpy(), "label": batches(count=1)[0][1].numpy()}


def steps(session: TrainingSession, count: int, rate: float = 0.01, start: int = 0) -> list[float]:
    feeds = batches(count=start + count)[start:]
    return [session.run(["loss"], {"x": x, "label": y, RATE: np.array([rate], np.float32)})[0].item() for x, y in feeds]


def test_a_restored_training_goes_on_as_the_first_one(files: dict[str, bytes]) -> None:
    first = TrainingSession(files["mlp"], parameters())
    steps(first, 5)
    state = first.get_state()
    assert {"net.fc1.weight", "Moment_1_net.fc1.weight", "Update_Count_net.fc1.weight"} <= set(state)
    second = TrainingSession(files["mlp"], parameters())
    second.load_state(state, strict=True)
    assert steps(second, 5, start=5) == steps(first, 5, start=5)
    third = parameters()
    third.set_optimizer_initial_state(first.get_optimizer_state())
    counts = TrainingSession(files["mlp"], third).get_optimizer_state()["net.fc1.bias"]["Update_Count"]
    assert counts.tolist() == [11]


def test_a_state_that_does_not_fit_changes_nothing(files: dict[str, bytes]) -> None:
    session = TrainingSession(files["mlp"], parameters())
    before = session.get_state()
    state = {"net.fc1.bias": np.ones(32, np.float32), "net.fc3.bias": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"'net.fc3.bias' is torch.float32 of shape \(3,\); expected"):
        session.load_state(state)
    with pytest.raises(ValueError, match=r"unknown names \['q'\]"):
        session.load_state({"q": np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=r"missing names"):
        session.load_state({"net.fc1.bias": np.ones(32, np.float32)}, strict=True)
    with pytest.raises(ValueError, match=r"'Moment_1' of 'net.fc1.bias' has shape \(2,\)"):
        session.load_state({"net.fc1.bias": np.ones(32, np.float32), "Moment_1_net.fc1.bias": np.ones(2, np.float32)})
    after = session.get_state()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_an_evaluation_needs_no_rate_and_changes_nothing(files: dict[str, bytes]) -> None:
    session = TrainingSession(files["mlp"], parameters())
    before = session.get_state()
    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    loss, scores = session.run(None, BATCH, options)
    with torch.no_grad():
        expected, outputs = WithLoss("mlp")(*batches(count=1)[0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(scores, outputs.numpy(), rtol=1e-4, atol=1e-5)
    after = session.get_state()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_batch_norm_trains_and_evaluates() -> None:
    export = EXPORTS["conv"]
    module = export.make().train()
    session = TrainingSession(export.write(module), parameters("SGDOptimizer"))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for number in range(4):
        torch.manual_seed(number)
        x, y = export.inputs(6)
        loss = module(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        (found,) = session.run(None, {"x": x, "y": y, RATE: 0.1})
        assert found.item() == pytest.approx(loss.item(), rel=1e-4)
    weights = session.get_model_state()["full_precision"]
    np.testing.assert_allclose(weights["norm.running_mean"], module.norm.running_mean, rtol=1e-4, atol=1e-6)
    # the variance of the population, as ONNX has it, where torch takes that of the sample
    np.testing.assert_allclose(weights["norm.running_var"], module.norm.running_var, rtol=0.02)
    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    x, y = export.inputs(3)
    (found,) = session.run(None, {"x": x, "y": y}, options)
    module.norm.running_var.copy_(torch.from_numpy(weights["norm.running_var"]))
    assert found.item() == pytest.approx(module.eval()(x, y).item(), rel=1e-4)


def test_bindings_and_ort_values_give_what_run_gives(files: dict[str, bytes]) -> None:
    feed = {**BATCH, RATE: np.array([0.01], np.float32)}
    expected = TrainingSession(files["mlp"], parameters()).run(None, feed)
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(a) for n, a in feed.items()}
    for result, value in zip(
        TrainingSession(files["mlp"], parameters()).run_with_ort_values(None, values), expected, strict=True
    ):
        np.testing.assert_array_equal(result.numpy(), value)
    session = TrainingSession(files["mlp"], parameters())
    binding = session.io_binding()
    for name, array in feed.items():
        binding.bind_cpu_input(name, array)
    scores = np.zeros((16, 10), np.float32)
    binding.bind_output("loss")
    binding.bind_output("scores", "cpu", 0, np.float32, scores.shape, scores.ctypes.data)
    session.run_with_iobinding(binding)
    assert binding.copy_outputs_to_cpu()[0] == expected[0]
    np.testing.assert_array_equal(scores, expected[1])
    with pytest.raises(ValueError, match="The session has no input 'q'"):
        binding.bind_cpu_input("q", scores)


def test_a_loss_scale_skips_updates_that_are_not_finite(files: dict[str, bytes]) -> None:
    session = TrainingSession(files["mlp"], parameters(loss_scale=1024.0, set_gradients_as_graph_outputs=True))
    names = [o.name for o in session.get_outputs()]
    assert names[:3] == ["loss", "scores", "all_finite"] and "net.fc1.weight_grad" in names
    plain = TrainingSession(files["mlp"], parameters())
    assert steps(session, 3) == pytest.approx(steps(plain, 3), rel=1e-5)
    before = session.get_state()
    feed = {"x": np.full((16, 20), np.inf, np.float32), "label": BATCH["label"], RATE: 0.01}
    assert not session.run(["all_finite"], feed)[0].item()
    after = session.get_state()
    assert all(np.array_equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_that_are_not_finite_are_told_also_without_an_update(files: dict[str, bytes], steps: int) -> None:
    given = parameters("" if steps == 1 else "AdamOptimizer", loss_scale=1024.0, gradient_accumulation_steps=steps)
    session = TrainingSession(files["mlp"], given)
    feed = {"x": BATCH["x"], "label": BATCH["label"]} | ({RATE: 0.01} if steps > 1 else {})
    assert session.run(["all_finite"], feed)[0].item()
    assert not session.run(["all_finite"], feed | {"x": np.full((16, 20), np.inf, np.float32)})[0].item()


def test_sessions_that_cannot_be_made_leave_those_that_run(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, plain = (TrainingSession(files["mlp"], parameters()) for _ in range(2))
    steps(session, 1)
    for name in ("TrainingGraph", "WeightUpdate", "signature_session"):
        with monkeypatch.context() as broken:
            failing = Mock(side_effect=OSError("does not start"))
            broken.setattr(f"lightning_ort.training_session.session.{name}", failing)
            with pytest.raises(Exception, match="does not start"):
                session.set_providers(["CPUExecutionProvider"])
    steps(session, 2, start=1)
    steps(plain, 3)
    ours, theirs = session.get_state(), plain.get_state()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array, name)


def test_the_session_describes_itself(files: dict[str, bytes], tmp_path: Any) -> None:
    path = str(tmp_path / "g.onnx")
    session = TrainingSession(
        files["mlp"], parameters(model_with_gradient_graph_path=path), {"intra_op_num_threads": 1},
        ["CPUExecutionProvider"],
    )  # fmt: skip
    assert [i.name for i in session.get_inputs()] == ["x", "label", RATE]
    assert session.get_inputs()[0].shape == ["batch", 20]
    assert session.get_providers() == ["CPUExecutionProvider"]
    assert session.is_output_fp32_node("loss")
    assert session.get_partition_info_map() == {}
    assert session.get_session_options().intra_op_num_threads == 1
    names = [o.name for o in onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_outputs()]
    assert "net.fc3.bias_grad" in names
    steps(session, 1)
    before = session.get_state()
    session.set_providers(["CPUExecutionProvider"])
    after = session.get_state()
    assert all(np.array_equal(before[n], after[n]) for n in before)


def test_a_provider_that_fails_is_replaced_by_the_cpus(files: dict[str, bytes]) -> None:
    class EPFail(Exception):
        pass

    class Failing:
        def __call__(self, feed: Any, scale: float) -> Any:
            raise EPFail("out of memory")

    session = TrainingSession(files["mlp"], parameters())
    session._train = Failing()  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"execution provider failed \(out of memory\); going on with the CPU's"):
        steps(session, 1)
    session._train = Failing()  # type: ignore[assignment]
    session.disable_fallback()
    with pytest.raises(EPFail):
        steps(session, 1)


def test_what_does_not_fit_is_refused(files: dict[str, bytes]) -> None:
    with pytest.raises(TypeError, match=r"expected lightning_ort.TrainingParameters"):
        TrainingSession(files["mlp"], {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^TrainingParameters.loss_output_name is not set"):
        TrainingSession(files["mlp"], TrainingParameters())
    for values, message in (
        ({"loss_output_name": "q"}, r"loss_output_name is 'q'; the model's outputs are"),
        ({"training_optimizer_name": "Adam"}, r"expected one of AdamOptimizer, LambOptimizer, SGDOptimizer"),
        ({"weights_to_train": {"q"}}, r"^weights_to_train: the model has no initializer 'q'"),
        ({"optimizer_attributes_map": {"net.fc1.bias": {"q": 1.0}}}, r"has no float attribute 'q'"),
        ({"optimizer_attributes_map": {"q": {}}}, r"names 'q', which are not trained"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingSession(files["mlp"], parameters(**values))
    session = TrainingSession(files["mlp"], parameters())
    for feed, message in (
        (BATCH, r"lacks the learning rate, one float under 'Learning_Rate'"),
        ({**BATCH, RATE: [0.1, 0.2]}, r"'Learning_Rate' has shape \(2,\); expected one number"),
        ({"x": BATCH["x"], RATE: 0.1}, r"missing: label"),
        ({**BATCH, "q": 1, RATE: 0.1}, r"unknown: q"),
        ({**BATCH, "x": BATCH["x"].astype(np.float64), RATE: 0.1}, r"'x' is torch.float64; expected torch.float32"),
        ({**BATCH, "x": BATCH["x"][:, :3], RATE: 0.1}, r"'x' has shape \(16, 3\)"),
        ({**BATCH, RATE: -0.1}, r"Input 'Learning_Rate' is -0\.1; expected a finite number from 0\."),
    ):
        with pytest.raises(ValueError, match=message):
            session.run(None, feed)
    with pytest.raises(ValueError, match="The session has no output 'q'"):
        session.run(["q"], {**BATCH, RATE: 0.1})


def test_arguments_of_another_kind_change_nothing(files: dict[str, bytes]) -> None:
    session: Any = TrainingSession(files["mlp"], parameters("SGDOptimizer"))
    before, feed, options = session.get_state(), {**BATCH, RATE: 0.1}, {"only_execute_path_to_fetches": True}
    for call, message in (
        (lambda: session.run(None, feed, options), r"run_options=\{.*\} \(a dict\): expected an onnxruntime.RunO"),
        (lambda: session.run("loss", feed), r"output_names='loss' is one name: expected a list"),
        (lambda: session.run(None, [*BATCH.values()]), r"(?s)input_feed=\[array.* \(a list\): expected a mapping"),
        (lambda: session.load_state(None), r"state_dict=None: expected a mapping"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
    assert all(np.array_equal(before[n], array) for n, array in session.get_state().items())


def test_properties_of_small_trainings(tmp_path: Any) -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float loss) {
        a = Mul(x, w) b = Mul(a, half) c = Mul(b, v) loss = ReduceMean<keepdims=0>(c) }""")
    for name, value in (("w", 2.0), ("half", 0.5), ("v", [3.0])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.float32), name))
    found = parameters(
        "SGDOptimizer",
        gradient_accumulation_steps=2,
        immutable_weights={"Mul": {1: 0.5}},
        weights_not_to_train=["v"],
        lr_params_feed_name="rate",
        model_after_graph_transforms_path=str(tmp_path / "forward.onnx"),
        model_with_training_graph_path=str(tmp_path / "training.onnx"),
    )
    session = TrainingSession(model, found)
    assert set(session.get_model_state()["full_precision"]) == {"w", "v"}
    results = [session.run(None, {"x": np.array([x], np.float32), "rate": 0.1}) for x in (1, 3, 5)]
    # loss = 1.5 w x, and w = 2 - 0.1 * 1.5 * (1 + 3) / 2 after two runs
    assert [r[0].item() for r in results] == pytest.approx([3, 9, 1.5 * 1.7 * 5])
    assert [r[1].item() for r in results] == [True, False, True]
    state = session.get_state()
    assert state["w"] == pytest.approx(1.7) and state["v"] == 3
    for name in ("forward.onnx", "training.onnx", "training.onnx.update.onnx"):
        onnx.checker.check_model(str(tmp_path / name))


def test_every_property_has_an_effect_or_refuses_other_values() -> None:
    found = TrainingParameters()
    with pytest.raises(ValueError, match=r"pipeline_parallel_size = 2 is not supported: the graph is not cut"):
        found.pipeline_parallel_size = 2
    found.pipeline_parallel_size = 1
    with pytest.raises(TypeError, match=r"gradient_accumulation_steps must be of type int, not '2'"):
        found.gradient_accumulation_steps = "2"
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps must be at least 1"):
        found.gradient_accumulation_steps = 0
    with pytest.raises(AttributeError, match=r"no property 'learning_rate'"):
        found.learning_rate = 1
    with pytest.raises(AttributeError, match=r"no property 'learning_rate'"):
        _ = found.learning_rate


@pytest.mark.parametrize(
    ("mode", "node", "scales"),
    [
        ("bilinear", 'Resize<mode="linear">', (2.3, 0.7)),
        (
            "nearest",
            'Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">',
            (2, 3),
        ),
    ],
)
def test_a_resized_image_of_open_size_trains(mode: str, node: str, scales: tuple[float, float]) -> None:
    text = (
        f"g (float[b,1,h,k] x) => (float loss) {{ s = Constant<value = float[4] {{1.0, 1.0, {float(scales[0])}, "
        f"{float(scales[1])}}}>() p = Mul(x, w) u = {node}(p, , s) q = Mul(u, u) loss = ReduceMean<keepdims=0>(q) }}"
    )
    session = TrainingSession(parse(text, w=np.array([2], np.float32)), parameters("SGDOptimizer"))
    weight = torch.tensor([2.0], requires_grad=True)
    for shape in ((2, 1, 10, 20), (3, 1, 20, 30)):
        x = torch.rand(shape)
        # the sizes are the products in float32
        size = [int(np.float32(n) * np.float32(s)) for n, s in zip(shape[2:], scales, strict=True)]
        y = getattr(torch._C._nn, f"upsample_{mode}2d")(
            x * weight, size, *([False] if mode == "bilinear" else []), *scales
        )
        y.square().mean().backward()
        (loss,) = session.run(["loss"], {"x": x.numpy(), RATE: [0.1]})
        assert loss == pytest.approx(y.square().mean().item(), rel=1e-5)
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        weight.grad = None
    np.testing.assert_allclose(session.get_state()["w"], weight.detach(), rtol=1e-5)


def test_an_input_that_nothing_reads_is_fed_and_left_alone() -> None:
    text = """g (float[b,3] x, float[b] unused, float[b,2] y) => (float loss) {
        h = MatMul(x, w) d = Sub(h, y) q = Mul(d, d) loss = ReduceMean<keepdims=0>(q) }"""
    session = TrainingSession(parse(text, w=np.ones((3, 2), np.float32)), parameters("SGDOptimizer"))
    x, y, weight = torch.rand(4, 3), torch.rand(4, 2), torch.ones(3, 2, requires_grad=True)
    expected = (x @ weight - y).square().mean()
    expected.backward()
    feed = {"x": x.numpy(), "unused": np.ones(4, np.float32), "y": y.numpy(), RATE: [0.1]}
    assert session.run(["loss"], feed)[0] == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(session.get_state()["w"], (weight - 0.1 * weight.grad).detach(), rtol=1e-5)


def test_an_output_may_be_an_input_or_an_initializer() -> None:
    text = """g (float[b,3] x) => (float loss, float[b,3] x, float[3] w, float[3] k) {
        h = Mul(x, w) j = Add(h, k) loss = ReduceMean<keepdims=0>(j) }"""
    values = {"w": np.array([1, 2, 3], np.float32), "k": np.array([4, 5, 6], np.float32)}
    model, x = parse(text, **values), np.random.default_rng(0).random((4, 3), np.float32)
    wanted = {"loss": (x * values["w"] + values["k"]).mean(), "x": x, **values}
    session = TrainingSession(model, parameters("SGDOptimizer"))
    builder = GradientGraphBuilder(model, {"loss"}, {"x", "w"}, "loss")
    builder.build(verify=True)
    written = onnxruntime.InferenceSession(builder.get_model(), providers=["CPUExecutionProvider"])
    runs = [session.run(list(wanted), {"x": x, RATE: [0.1]}), written.run(list(wanted), {"x": x})]
    for results in runs:
        for got, expected in zip(results, wanted.values(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-6)
    with pytest.raises(UnsupportedError, match="'x' is an output whose gradient comes in, and an input"):
        GradientGraphBuilder(model, {"loss", "x"}, {"x"}, "loss").build()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("loss_grad", "'loss_grad' is a name in the ONNX file, and that of the gradient of 'loss'"),
        ("w_grad", "'w_grad' is a name in the ONNX file, and that of the gradient of 'w'"),
        (RATE, "input 'Learning_Rate', which is what the learning rate is fed as.*lr_params_feed_name"),
    ],
)
def test_inputs_called_like_what_a_session_adds_are_refused(name: str, message: str) -> None:
    model = parse(
        "g (float[b,3] x) => (float loss) { h = Mul(x, w) loss = ReduceMean<keepdims=0>(h) }", w=np.ones(3, np.float32)
    )
    model.graph.input[0].name = model.graph.node[0].input[0] = name
    with pytest.raises((ValueError, UnsupportedError), match=message):
        TrainingSession(model, parameters("SGDOptimizer"))
