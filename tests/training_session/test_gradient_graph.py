"""Gradient graphs of ONNX files, run by ONNX Runtime, against torch, and against the wheel's builder where it works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_exports import EXPORTS, Export
from onnx_text import floats, parse
from torch import Tensor, nn

from lightning_ort import GradientGraphBuilder, UnsupportedError
from lightning_ort.onnx_reader import to_torch


def run(model: bytes, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))


def gradient_model(model: Any, y: set[str], x: set[str], loss: str) -> bytes:
    builder = GradientGraphBuilder(model, y, x, loss)
    builder.build()
    return builder.get_model()


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request: pytest.FixtureRequest) -> tuple[Export, nn.Module, bytes]:
    export = EXPORTS[request.param]
    module = export.make()
    module.train(not export.dynamo)
    return export, module, export.write(module)


def test_gradients_of_exported_modules_are_torchs(exported: tuple[Export, nn.Module, bytes]) -> None:
    export, module, data = exported
    reader = to_torch(data)
    names = set(reader.parameter_names.values())
    floating = {n for n, x in zip(reader.input_names, export.inputs(2), strict=True) if x.is_floating_point()}
    model = gradient_model(data, {"loss"}, names | floating, "loss")
    assert all(not node.domain for node in onnx.load_model_from_string(model).graph.node)
    for batch in (7, 1) if not isinstance(module, EXPORTS["conv"].module) else (7, 2):
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in export.inputs(batch)]
        results = run(model, {n: x.detach().numpy() for n, x in zip(reader.input_names, inputs, strict=True)})
        module.zero_grad()
        loss = module(*inputs)
        loss.backward()
        assert results["loss"].item() == pytest.approx(loss.item(), rel=1e-5)
        expected: dict[str, Tensor | None] = {n: p.grad for n, p in module.named_parameters()}
        expected |= {n: x.grad for n, x in zip(reader.input_names, inputs, strict=True)}
        for name in floating | (names & set(expected)):
            gradient = expected[name]
            assert gradient is not None
            torch.testing.assert_close(torch.from_numpy(results[f"{name}_grad"]), gradient, rtol=1e-4, atol=1e-6)
        # weights that the exporter has stored in another form have other names
        total = np.sqrt(sum((results[f"{n}_grad"] ** 2).sum() for n in names))
        norm = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).norm()
        assert total == pytest.approx(norm.item(), rel=1e-4)


MLP = """g (float[N,3] x, int64[N] t) => (float loss, float[N,4] scores) {
    h = Gemm(x, w, b) r = Relu(h) scores = MatMul(r, v) loss, logp = SoftmaxCrossEntropyLoss(scores, t) }"""


def mlp() -> onnx.ModelProto:
    return parse(MLP, w=floats(3, 5), b=floats(5, seed=1), v=floats(5, 4, seed=2))


FEED = {"x": floats(6, 3, seed=3), "t": np.array([0, 1, 2, 3, 3, 0])}


def wheels_gradients(data: bytes, x: set[str], feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    wheel = getattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder", None)
    if wheel is None:
        pytest.skip("the training build of ONNX Runtime is not installed")
    theirs = wheel(data, {"loss"}, x, "loss")
    theirs.build()
    return run(theirs.get_model(), feed)


def test_gradients_equal_those_of_the_wheels_builder() -> None:
    names = {"w", "b", "v", "x"}
    expected = wheels_gradients(mlp().SerializeToString(), names, FEED)
    results = run(gradient_model(mlp(), {"loss"}, names, "loss"), FEED)
    assert results.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(results[name], expected[name], rtol=1e-5, atol=1e-6)


# operators of the wheel's builder, after the product of x (4, 6, 6) with the weight w (6, 6)
WHEELS = [
    "Relu(h)", "LeakyRelu<alpha=0.2>(h)", "Tanh(h)", "Sigmoid(h)", "Erf(h)", "Exp(h)", "Neg(h)", "Sin(h)", "Cos(h)",
    "Softmax<axis=-1>(h)", "LogSoftmax<axis=-1>(h)", "Sub(h, x)", "Mul(h, x)", "Div(x, e)", "Pow(e, two)", "Sqrt(e)",
    "Log(e)", "Abs(h)", "Reciprocal(e)", "MatMul(h, h)", "Transpose<perm=[2,0,1]>(h)",
    "Concat<axis=1>(h, x)", "Slice(h, one, three, axis)", "Gather<axis=1>(h, index)",
    "GatherElements<axis=0>(h, index3)", "Reshape(h, shape)", "Unsqueeze(h, axis)", "Expand(h, wide)",
    "Where(c, h, x)", "Min(h, x)", "Max(h, x)",
    "ReduceMean<axes=[1]>(h)", "ReduceSum(h, axis)", "ReduceLogSumExp<axes=[2]>(h)", "Pad(h, pads)",
    "MaxPool<kernel_shape=[2]>(h)", "AveragePool<kernel_shape=[2], strides=[2]>(h)", "GlobalAveragePool(h)",
    "Conv<kernel_shape=[3], pads=[1,1]>(h, k)", "Conv<strides=[2]>(h, k, bias)", "Trilu(h)", "Tile(h, tiles)",
]  # fmt: skip


@pytest.mark.parametrize("call", WHEELS)
def test_gradients_of_operators_are_those_of_the_wheels_builder(call: str) -> None:
    text = f"""g (float[4,6,6] x) => (float loss) {{
        h = MatMul(x, w) p = Mul(h, h) e = Add(p, half) c = Greater(h, x)
        y = {call} q = Mul(y, y) s = Tanh(q) loss = ReduceMean<keepdims=0>(s) }}"""
    numbers = {
        "half": np.float32(0.5), "two": np.float32(2), "one": [1], "three": [3], "axis": [1], "index": [[0, 2], [5, 2]],
        "index3": np.arange(48).reshape(8, 3, 2) % 4, "shape": [4, -1], "wide": [2, 1, 1, 1],
        "pads": [0, 1, 0, 0, 0, 2], "tiles": [1, 2, 1], "k": floats(3, 6, 3, seed=5) / 3, "bias": floats(3, seed=6),
    }  # fmt: skip
    used = {n: np.asarray(v) for n, v in numbers.items() if re.search(rf"[(, ]{n}[,)]", call + " half)")}
    model = parse(text, w=floats(6, 6), **used)
    names, feed = {"w", "x"} | ({"k"} if "k" in used else set()), {"x": floats(4, 6, 6, seed=3)}
    expected = wheels_gradients(model.SerializeToString(), names, feed)
    results = run(gradient_model(model, {"loss"}, names, "loss"), feed)
    for name in names:
        np.testing.assert_allclose(results[f"{name}_grad"], expected[f"{name}_grad"], rtol=1e-4, atol=1e-6)


def test_the_graph_keeps_the_names_of_the_file_and_saves_what_it_returns(tmp_path: Path) -> None:
    builder = GradientGraphBuilder(mlp(), {"loss"}, ["v", "x"], "loss")
    with pytest.raises(RuntimeError, match=r"does not exist yet; call build\(\) first"):
        builder.get_model()
    builder.build()
    model = onnx.load_model_from_string(builder.get_model())
    onnx.checker.check_model(model, full_check=True)
    assert [i.name for i in model.graph.input] == ["x", "t"]
    assert [o.name for o in model.graph.output] == ["loss", "scores", "v_grad", "x_grad"]
    assert {"w", "b", "v"} <= {i.name for i in model.graph.initializer}
    assert all(not node.domain for node in model.graph.node)
    builder.save(tmp_path / "g.onnx")
    assert onnx.load(str(tmp_path / "g.onnx")) == model


def test_gradients_of_other_outputs_come_in() -> None:
    model = gradient_model(mlp(), {"loss", "scores"}, {"w", "x"}, "loss")
    weight = floats(6, 4, seed=5)
    results = run(model, FEED | {"scores_grad": weight})
    reader = to_torch(mlp(), ["w"])
    x = torch.from_numpy(FEED["x"]).requires_grad_()
    loss, scores = reader(x, torch.from_numpy(FEED["t"]))
    (loss + (scores * torch.from_numpy(weight)).sum()).backward()
    torch.testing.assert_close(torch.from_numpy(results["w_grad"]), reader.w.grad)
    torch.testing.assert_close(torch.from_numpy(results["x_grad"]), x.grad)
    alone = run(gradient_model(mlp(), {"loss"}, {"w"}, ""), FEED | {"loss_grad": np.array(2, np.float32)})
    plain = run(gradient_model(mlp(), {"loss"}, {"w"}, "loss"), FEED)
    np.testing.assert_allclose(alone["w_grad"], 2 * plain["w_grad"], rtol=1e-5)


def test_what_nothing_depends_on_has_a_gradient_of_zero() -> None:
    model = parse("g (float[2] x, float[3] u) => (float y) { s = Mul(x, w) y = ReduceSum<keepdims=0>(s) }",
                  w=floats(2), q=floats(2, 2))  # fmt: skip
    results = run(gradient_model(model, {"y"}, {"x", "u", "w", "q"}, "y"), {"x": floats(2), "u": floats(3)})
    assert not results["u_grad"].any() and results["u_grad"].shape == (3,)
    assert not results["q_grad"].any() and results["q_grad"].shape == (2, 2)
    np.testing.assert_array_equal(results["w_grad"], floats(2))


def test_dropout_draws_in_the_graph_the_same_for_value_and_gradient() -> None:
    model = parse("""g (float[N,50] x) => (float[N,50] y) {
        r = Constant<value = float {0.25}>() t = Constant<value = bool {1}>() y = Dropout(x, r, t) }""")
    data = gradient_model(model, {"y"}, {"x"}, "y")
    x = np.ones((40, 50), np.float32)
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    first, second = (dict(zip(names, session.run(None, {"x": x}), strict=True)) for _ in range(2))
    for results in (first, second):
        np.testing.assert_allclose(results["y"], results["x_grad"])
        assert (results["y"] == 0).mean() == pytest.approx(0.25, abs=0.04)
        assert results["y"].max() == pytest.approx(4 / 3)
    assert (first["y"] != second["y"]).any()


@pytest.mark.parametrize("distribution", ["RandomNormalLike<scale=2.0>", "RandomUniformLike<low=-3.0>"])
def test_random_operators_draw_in_the_graph(distribution: str) -> None:
    model = parse(f"g (float[N,M] x) => (float[N,M] y) {{ n = {distribution}(x) y = Mul(x, n) }}")
    results = run(gradient_model(model, {"y"}, {"x"}, "y"), {"x": np.full((30, 20), 3, np.float32)})
    np.testing.assert_allclose(results["y"], 3 * results["x_grad"], rtol=1e-5)
    assert results["x_grad"].std() == pytest.approx(2 if "Normal" in distribution else 4 / 12**0.5, rel=0.15)


def test_running_statistics_are_outputs_where_the_file_gives_them_out() -> None:
    text = """g (float[N,3] x) => (float[N,3] y, float[3] m) {
        y, m, v = BatchNormalization<training_mode=1, momentum=0.8>(x, s, b, mean, var) }"""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    model = parse(text, s=ones, b=zeros, mean=zeros, var=ones)
    x = floats(8, 3) + 1
    results = run(gradient_model(model, {"y"}, {"b"}, "y"), {"x": x})
    np.testing.assert_allclose(results["m"], 0.2 * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(results["b_grad"], np.full(3, 8), rtol=1e-5)


def loss_of(text: str, values: dict[str, np.ndarray]) -> float:
    """The loss of a graph in ONNX Runtime; a session of its own, as training mode writes into initializers."""
    model = parse(text, **{n: a for n, a in values.items() if n != "x"})
    return float(run(model.SerializeToString(), {"x": values["x"]})["loss"])


def differences(text: str, values: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Finite differences of the loss by ``values[name]``, in float64."""
    found = np.zeros(values[name].shape)
    for index in np.ndindex(found.shape):
        sides = []
        for step in (1e-5, -1e-5):
            moved = values[name].copy()
            moved[index] += step
            sides.append(loss_of(text, values | {name: moved}))
        found[index] = (sides[0] - sides[1]) / 2e-5
    return found


def check_gradients(text: str, values: dict[str, np.ndarray], names: set[str], dtype: str = "double") -> None:
    """``text`` has ``double`` for its element type."""
    real = {n: a.astype({"double": np.float64, "float": np.float32}[dtype]) for n, a in values.items()}
    model = parse(text.replace("double", dtype), **{n: a for n, a in real.items() if n != "x"})
    results = run(gradient_model(model, {"loss"}, names, "loss"), {"x": real["x"]})
    wide = {n: a.astype(np.float64) for n, a in real.items()}
    rtol, atol = (1e-6, 1e-8) if dtype == "double" else (2e-4, 2e-5)
    for name in names:
        expected = differences(text, wide, name)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(results[f"{name}_grad"], expected, rtol=rtol, atol=atol, err_msg=name)


def normalized(rank: int) -> dict[str, np.ndarray]:
    """An input of that rank with three channels, and the weights and statistics of a BatchNormalization."""
    random = np.random.default_rng(rank)
    values = {"x": random.standard_normal((4, 3, 2, 2)[:rank]), "s": random.uniform(1, 2, 3)}
    return values | {n: random.uniform(0.5, 1.5, 3) for n in ("b", "mean", "var")}


@pytest.mark.parametrize("dtype", ["double", "float"])
@pytest.mark.parametrize("computed", ["mean", "var", "mean var"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_gradients_go_through_statistics_that_nodes_compute(rank: int, computed: str, dtype: str) -> None:
    axes = str([0, *range(2, rank)])
    names = {"mean": "mean", "var": "var"} | {n: f"{n}_of_batch" for n in computed.split()}
    text = f"""g (double[{",".join(["N", "3", "2", "2"][:rank])}] x) => (double loss) {{
        m = ReduceMean<axes={axes}, keepdims=0>(x) mean_of_batch = Add(m, mean)
        q = Mul(x, x) v = ReduceMean<axes={axes}, keepdims=0>(q) var_of_batch = Add(v, var)
        y = BatchNormalization(x, s, b, {names["mean"]}, {names["var"]})
        t = Tanh(y) loss = ReduceSum<keepdims=0>(t) }}"""
    check_gradients(text, normalized(rank), {"x", "s", "b", *computed.split()}, dtype)


@pytest.mark.parametrize("names", [{"mean"}, {"var"}, {"mean", "var", "x"}])
def test_statistics_that_are_asked_for_have_gradients(names: set[str]) -> None:
    text = """g (double[N,3,2] x) => (double loss) {
        m = Identity(mean) y = BatchNormalization(x, s, b, m, var) t = Tanh(y) loss = ReduceSum<keepdims=0>(t) }"""
    check_gradients(text, normalized(3), names)


@pytest.mark.parametrize("mean", ["Identity(mean)", "Mul(mean, mean)"])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_gradients_go_through_running_statistics_that_lead_to_the_loss(rank: int, mean: str) -> None:
    text = f"""g (double[{",".join(["N", "3", "2", "2"][:rank])}] x) => (double loss) {{
        before = {mean} y, m, v = BatchNormalization<training_mode=1, momentum=0.75>(x, s, b, before, var)
        t = Tanh(y) a = ReduceSum<keepdims=0>(t) p = Mul(m, m) q = Mul(v, v) pq = Add(p, q)
        c = ReduceSum<keepdims=0>(pq) loss = Add(a, c) }}"""
    check_gradients(text, normalized(rank), {"x", "s", "b", "mean", "var"})


def test_statistics_in_training_mode_may_be_computed_of_constants() -> None:
    text = """g (double[N,3] x) => (double loss) {
        h = Add(mean, var) y, m, v = BatchNormalization<training_mode=1>(x, s, b, h, var)
        q = Tanh(y) p = Mul(m, q) loss = ReduceSum<keepdims=0>(p) }"""
    check_gradients(text, normalized(2), {"x", "s", "b"})


def test_running_statistics_that_are_a_weight_as_well_are_refused_in_training_mode() -> None:
    model = parse(
        "g (float[N,3] x) => (float[N,3] y) { y, m, v = BatchNormalization<training_mode=1>(x, s, b, b, s) }",
        s=np.ones(3, np.float32), b=np.zeros(3, np.float32),
    )  # fmt: skip
    expected = r"BatchNormalization \(node 'y'\): .* a weight as well; give them an initializer of their own"
    with pytest.raises(UnsupportedError, match=expected):
        gradient_model(model, {"y"}, {"s", "b"}, "y")


@pytest.mark.parametrize("weight", ["computed", "initializer"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("operator", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_class_weights_have_gradients(operator: str, reduction: str, weight: str) -> None:
    scores = "logp" if operator.startswith("N") else "x"
    read = "w" if weight == "initializer" else "squares"
    text = f"""g (float[N,3,2] x, int64[N,2] t) => (float loss) {{
        logp = LogSoftmax<axis=1>(x) squares = Mul(w, w)
        y = {operator}<reduction="{reduction}", ignore_index=1>({scores}, t, {read})
        q = Mul(y, y) loss = ReduceSum<keepdims=0>(q) }}"""
    model = parse(text, w=np.array([0.5, 2, 1.5], np.float32))
    feed = {"x": floats(5, 3, 2), "t": np.array([[0, 1], [2, 2], [1, 1], [0, 2], [0, 0]])}
    results = run(gradient_model(model, {"loss"}, {"x", "w"}, "loss"), feed)
    x = torch.from_numpy(feed["x"]).double().requires_grad_()
    w = torch.tensor([0.5, 2, 1.5], dtype=torch.float64, requires_grad=True)
    labels = torch.nn.functional.one_hot(torch.from_numpy(feed["t"]), 3).movedim(-1, 1) * torch.tensor([[1], [0], [1]])
    share = labels * (w if weight == "initializer" else w * w)[:, None]
    y = -(share * x.log_softmax(1)).sum(1)
    y = {"none": y, "sum": y.sum(), "mean": y.sum() / share.sum()}[reduction]
    y.square().sum().backward()
    assert results["loss"].item() == pytest.approx(y.square().sum().item(), rel=1e-5)
    torch.testing.assert_close(torch.from_numpy(results["x_grad"]), x.grad.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.from_numpy(results["w_grad"]), w.grad.float(), rtol=1e-4, atol=1e-5)


def test_an_initializer_that_is_an_input_as_well_is_an_initializer_of_the_result() -> None:
    model = parse("g (float[2,3] x, float[3] w) => (float loss) { h = Mul(x, w) loss = ReduceSum<keepdims=0>(h) }",
                  w=floats(3))  # fmt: skip
    made = onnx.load_model_from_string(gradient_model(model, {"loss"}, {"w"}, "loss"))
    assert [i.name for i in made.graph.input] == ["x"]
    assert "w" in {i.name for i in made.graph.initializer}


def test_whole_numbers_are_divided_by_a_number() -> None:
    text = "g (int64[5] ids) => (float loss) { q = Div(ids, three) y = Gather(w, q) loss = ReduceMean<keepdims=0>(y) }"
    model = parse(text, 20, w=floats(4, 2), three=np.array(3))
    ids = np.array([0, 3, 5, 9, 11])
    found = run(gradient_model(model, {"loss"}, {"w"}, "loss"), {"ids": ids})
    assert found["loss"] == pytest.approx(floats(4, 2)[ids // 3].mean(), rel=1e-6)
    np.testing.assert_allclose(found["w_grad"], 0.1 * np.bincount(ids // 3)[:, None].repeat(2, 1), rtol=1e-6)


def test_statistics_of_16_bit_numbers_are_of_32() -> None:
    text = """g (float16[4,6] x) => (float loss) { a = Mul(x, w) y, mean, inverse = LayerNormalization(a, w)
        loss = ReduceMean<keepdims=0>(inverse) }"""
    model = parse(text, 20, w=np.ones(6, np.float16))
    x = (1e-3 * floats(4, 6)).astype(np.float16)
    wanted = run(model.SerializeToString(), {"x": x})["loss"]
    assert to_torch(model)(torch.from_numpy(x))[0].item() == pytest.approx(wanted, rel=1e-6)
    found = run(gradient_model(model, {"loss"}, {"w"}, "loss"), {"x": x})
    assert found["loss"] == pytest.approx(wanted, rel=1e-5)


def test_sizes_that_must_be_divisible_stay_open() -> None:
    text = """g (float[N,6] x) => (float[M,12] y) {
        s = Constant<value = int64[2] {-1, 12}>() z = Reshape(x, s) y = Sigmoid(z) }"""
    data = gradient_model(parse(text), {"y"}, {"x"}, "y")
    for rows in (2, 10):
        x = floats(rows, 6)
        share = 1 / (1 + np.exp(-x))
        np.testing.assert_allclose(run(data, {"x": x})["x_grad"], share * (1 - share), rtol=1e-4, atol=1e-7)


def test_gradients_are_zero_where_no_output_depends_on_any_tensor() -> None:
    model = parse(
        "g (float[N,4] x) => (float loss, float count, int64 rows) { y = MatMul(x, w) loss = ReduceSum<keepdims=0>(y) "
        "g = Greater(x, t) q = Cast<to=1>(g) count = ReduceSum<keepdims=0>(q) n = Shape<end=1>(x) rows = Squeeze(n) }",
        w=floats(4, 3), t=np.float32(0), u=floats(2),
    )  # fmt: skip
    x = floats(3, 4)
    for output, names in (("loss", {"u"}), ("count", {"x", "u"}), ("count", {"x"}), ("rows", {"x", "w"})):
        results = run(gradient_model(model, {output}, names, output), {"x": x})
        for name in names:
            shape = {"x": (3, 4), "u": (2,), "w": (4, 3)}[name]
            np.testing.assert_array_equal(results[f"{name}_grad"], np.zeros(shape, np.float32))
        assert results["count"] == (x > 0).sum()
    results = run(gradient_model(model, {"count"}, {"x"}, ""), {"x": x})
    np.testing.assert_array_equal(results["x_grad"], np.zeros((3, 4), np.float32))


def test_what_has_no_gradient_is_named_before_anything_is_built() -> None:
    with pytest.raises(UnsupportedError, match=r"Foo \(node 'd'\)"):
        GradientGraphBuilder(parse("g (float[2,2] x) => (float d) { d = Foo(x) }"), {"d"}, {"x"}, "d")
    builder = GradientGraphBuilder(parse("g (float[2,2] x) => (float d) { d = Det(x) }"), {"d"}, {"x"}, "d")
    with pytest.raises(UnsupportedError, match=r"value or gradient of node 'd' has no ONNX form"):
        builder.build()
    model = parse("g (float[4] x) => (float[N] y) { i = NonZero(x) j = Squeeze(i) y = Gather(x, j) }")
    builder = GradientGraphBuilder(model, {"y"}, {"x"}, "y")
    with pytest.raises(UnsupportedError, match=r"value or gradient of node 'i' has no ONNX form"):
        builder.build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"q"}, {"w"}, ""), r"y_names: the model has no output 'q'\. It has: loss, scores"),
        (({"loss"}, {"q"}, "loss"), r"^x_names: the model has no initializer or input 'q'\. It has: w, b, v, x, t"),
        (({"loss"}, {"w"}, "scores"), r"loss_name 'scores' is not one of y_names: loss"),
        ((set(), {"w"}, ""), r"y_names is empty"),
        (({"loss"}, {"t"}, "loss"), r"'t' is torch\.int64; only floating-point tensors have gradients"),
    ],
)
def test_wrong_names_are_refused(arguments: tuple[set[str], set[str], str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientGraphBuilder(mlp(), *arguments).build()
    with pytest.raises(TypeError, match=r"y_names is the string 'loss'; expected a set of names, as in \{'loss'\}"):
        GradientGraphBuilder(mlp(), "loss", {"w"}, "loss")
