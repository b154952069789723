"""Sizes that a file leaves open and its operators fix, or make equal."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from ondevice_models import opened
from ondevice_wheel import needs_wheel
from onnx_text import floats, parse
from test_gradient_graph import gradient_model, run
from torch import fx, nn

from lightning_ort import GradientGraphBuilder, TrainingParameters, TrainingSession, UnsupportedError
from lightning_ort.compiler.aot.agreement import _Replay
from lightning_ort.compiler.aot.inputs import InputInfo
from lightning_ort.compiler.aot.sizes import mismatch
from lightning_ort.ondevice import CheckpointState, Module, generate_artifacts
from lightning_ort.onnx_reader import to_torch

# inputs, nodes, the shapes that are declared then, and shapes that fit
GRAPHS: dict[str, tuple[str, str, dict[str, list[Any]], list[tuple[int, ...]]]] = {
    "three names": (
        "float[N,3] x, float[M,K] y, float[P,Q] z", "s = Add(x, y) o = Mul(s, z)",
        {"x": ["N", 3], "y": ["N", 3], "z": ["N", 3]}, [(5, 3), (5, 3), (5, 3)],
    ),
    "fixed by a weight": (
        "float[N,K] x, float[M,4] y", "h = MatMul(x, w) o = Mul(h, y)",
        {"x": ["N", 3], "y": ["N", 4]}, [(5, 3), (5, 4)],
    ),
    "twice": (
        "float[M,3] y, float[N,3] x", "s = Concat<axis=0>(x, x) o = Mul(s, y)",
        {"x": ["N", 3], "y": ["2*N", 3]}, [(10, 3), (5, 3)],
    ),
    "a sum": (
        "float[N,3] x, float[M,3] y, float[P,3] z", "s = Concat<axis=0>(x, y) o = Mul(s, z)",
        {"x": ["N", 3], "y": ["M", 3], "z": ["N + M", 3]}, [(5, 3), (2, 3), (7, 3)],
    ),
    "half": (
        "float[1,1,N,4] x, float[1,1,M,2] y", "p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x) o = Mul(p, y)",
        {"x": [1, 1, "N", 4], "y": [1, 1, "N//2", 2]}, [(1, 1, 9, 4), (1, 1, 4, 2)],
    ),
    "a constant shape": (
        "float[N,6] x, float[M,3] y", "c = Constant<value = int64[2] {4, 3}>() r = Reshape(x, c) o = Mul(r, y)",
        {"x": [2, 6], "y": [4, 3]}, [(2, 6), (4, 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAPHS)
def test_sizes_become_what_the_operators_require(name: str, caplog: pytest.LogCaptureFixture) -> None:
    inputs, nodes, declared, shapes = GRAPHS[name]
    model = parse(f"g ({inputs}) => (float o) {{ {nodes} }}", w=floats(3, 4))
    names = [i.name for i in model.graph.input]
    with caplog.at_level(logging.WARNING):
        data = gradient_model(model, {"o"}, set(names), "o")
    assert not caplog.records
    written = onnx.load_from_string(data).graph
    assert {
        i.name: [d.dim_param or d.dim_value for d in i.type.tensor_type.shape.dim] for i in written.input
    } == declared
    feed = {n: floats(*shape, seed=i) for i, (n, shape) in enumerate(zip(names, shapes, strict=True))}
    leaves = [torch.from_numpy(feed[n].copy()).requires_grad_() for n in names]
    to_torch(model)(*leaves)[0].sum().backward()
    results = run(data, feed)
    for n, leaf in zip(names, leaves, strict=True):
        np.testing.assert_allclose(results[f"{n}_grad"], leaf.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_sizes_that_only_their_product_fixes_are_named() -> None:
    model = parse("g (float[N,H,W] x) => (float[N,4] o) { f = Flatten(x) o = MatMul(f, w) }", w=floats(6, 4))
    refusal = r"but got \[N, (H\*W|W\*H)\] X \[6, 4\]. Of N, H, W, declare as numbers the ones that are always the same"
    with pytest.raises(UnsupportedError, match=refusal):
        GradientGraphBuilder(model, {"o"}, {"w"}, "o").build()


def exported(module: nn.Module, *shape: int) -> onnx.ModelProto:
    """All sizes are open, as the exporter names them."""
    file = io.BytesIO()
    axes = {"x": list(range(len(shape))), "y": [0, 1]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (torch.zeros(shape),), file, input_names=["x"], output_names=["y"], dynamic_axes=axes,
            opset_version=14, dynamo=False, training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


@pytest.mark.parametrize(
    ("loss", "reference"), [("MSELoss", nn.MSELoss()), ("CrossEntropyLoss", nn.CrossEntropyLoss())]
)
def test_artifacts_of_a_model_with_open_sizes(loss: str, reference: nn.Module, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    generate_artifacts(exported(network, 4, 6), tmp_path, loss=loss)
    state, module, _ = opened(tmp_path)
    x = torch.randn(7, 6)
    target = torch.randn(7, 3) if loss == "MSELoss" else torch.randint(3, (7,))
    value = reference(network(x), target)
    value.backward()
    assert float(module(x.numpy(), target.numpy())) == pytest.approx(value.item(), rel=1e-5)
    for name, parameter in network.named_parameters():
        np.testing.assert_allclose(state.parameters[name].grad, parameter.grad.numpy(), rtol=1e-4, atol=1e-6)
    name = module.input_names()[1]
    for training in (True, False):
        module.train(training)
        with pytest.raises(ValueError, match=rf"Input '{name}' has shape \(5.*\); expected .* where \S+ is 7\."):
            module(x.numpy(), target[:5].numpy())
        with pytest.raises(ValueError, match=r"Input 'x' has shape \(7, 4\); expected \['\S+', 6\]"):
            module(x[:, :4].numpy(), target.numpy())


@needs_wheel
def test_the_wheels_artifacts_with_open_sizes_train_here(tmp_path: Path) -> None:
    from onnxruntime.training import artifacts

    network = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model = exported(network, 4, 6)
    artifacts.generate_artifacts(
        model, [i.name for i in model.graph.initializer], [], artifacts.LossType.CrossEntropyLoss, None, str(tmp_path)
    )
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    module = Module(tmp_path / "training_model.onnx", state, tmp_path / "eval_model.onnx")
    x, labels = torch.randn(7, 6), torch.randint(3, (7,))
    value = nn.functional.cross_entropy(network(x), labels)
    assert float(module(x.numpy(), labels.numpy())) == pytest.approx(value.item(), rel=1e-5)
    with pytest.raises(ValueError, match=r"Input 'labels' has shape \(5,\); expected \['x_dynamic_axes_1'\]"):
        module(x.numpy(), labels[:5].numpy())


def test_a_training_session_checks_what_the_operators_require() -> None:
    model = parse(
        "g (float[N,K] x, float[M,L] y) => (float loss) { h = MatMul(x, w) d = Sub(h, y) s = Mul(d, d) "
        "loss = ReduceMean<keepdims=0>(s) }",
        w=floats(3, 4),
    )
    parameters = TrainingParameters()
    parameters.loss_output_name = "loss"
    parameters.weights_to_train = {"w"}
    session = TrainingSession(model.SerializeToString(), parameters)
    x, y = floats(5, 3), floats(5, 4, seed=1)
    (loss,) = session.run(["loss"], {"x": x, "y": y})
    assert float(loss) == pytest.approx(((x @ floats(3, 4) - y) ** 2).mean(), rel=1e-5)
    with pytest.raises(
        ValueError, match=r"Input 'y' has shape \(1, 4\); expected \['N', 4\], where N is 5\. A size of 1"
    ):
        session.run(["loss"], {"x": x, "y": y[:1]})


def test_sizes_are_compared_by_name_and_by_expression() -> None:
    shapes: list[tuple[Any, ...]] = [("2*in-0", 3), ("in-0", "N"), ("N//2 + 1",)]
    infos = [InputInfo(n, torch.float32, s) for n, s in zip("abc", shapes, strict=True)]
    assert mismatch(infos, [(8, 3), (4, 7), (4,)]) is None
    wrong = mismatch(infos, [(8, 3), (4, 7), (3,)])
    assert wrong == "Input 'c' has shape (3,); expected ['N//2 + 1'], where N//2 + 1 is 4."
    assert "where 2*in-0 is 8" in (mismatch(infos, [(7, 3), (4, 7), (4,)]) or "")
    # what is no expression of other names is a name
    assert mismatch([InputInfo("a", torch.float32, ("x*y", "x*y"))], [(3, 3)]) is None


NEAREST = 'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
LAYERS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "Resize": (
        "(float[b,1,8,8] x) => (float loss) { s = Constant<value = float[4] {1.0, 1.0, 2.0, 2.0}>() h = Mul(x, w) "
        f"u = Resize<{NEAREST}>(h, , s) q = Mul(u, u) loss = ReduceMean<keepdims=0>(q) }}",
        {"w": (1,)},
    ),
    "LSTM": (
        "(float[5,b,3] x) => (float loss) { y, h = LSTM<hidden_size=4>(x, w, r) loss = ReduceMean<keepdims=0>(y) }",
        {"w": (1, 16, 3), "r": (1, 16, 4)},
    ),
    "GRU": (
        "(float[5,b,3] x) => (float loss) { y, h = GRU<hidden_size=4, linear_before_reset=1>(x, w, r) "
        "loss = ReduceMean<keepdims=0>(y) }",
        {"w": (1, 12, 3), "r": (1, 12, 4)},
    ),
    "InstanceNormalization": (
        "(float[b,3,h,k] x) => (float loss) { y = InstanceNormalization(x, w, c) z = Mul(y, x) "
        "loss = ReduceMean<keepdims=0>(z) }",
        {"w": (3,), "c": (3,)},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_a_loss_is_an_input_where_the_batch_is_open(name: str) -> None:
    text, shapes = LAYERS[name]
    weights = {n: floats(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    model = parse(f"g {text}", 18, **weights)
    data = gradient_model(model, {"loss"}, set(weights), "")
    settings = TrainingParameters()
    settings.loss_output_name, settings.training_optimizer_name = "loss", "SGDOptimizer"
    session = TrainingSession(model.SerializeToString(), settings)
    for batch in (3, 2):
        shape = [d.dim_value or batch for d in model.graph.input[0].type.tensor_type.shape.dim]
        x = floats(*shape, seed=batch)
        module = to_torch(model, list(weights))
        (loss,) = module(torch.from_numpy(x))
        loss.backward()
        assert run(model.SerializeToString(), {"x": x})["loss"] == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        results = run(data, {"x": x, "loss_grad": np.array(2, np.float32)})
        for path, n in module.parameter_names.items():
            np.testing.assert_allclose(results[f"{n}_grad"], 2 * module.get_parameter(path).grad, rtol=1e-4, atol=1e-6)
        (got,) = session.run(["loss"], {"x": x, "Learning_Rate": [0.0]})
        assert got == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)


def test_a_number_of_steps_that_must_be_fixed() -> None:
    text = "(float[s,b,3] x) => (float loss) { y, h = GRU<hidden_size=4>(x, w, r) loss = ReduceMean<keepdims=0>(y) }"
    model = parse(f"g {text}", 18, w=floats(1, 12, 3), r=floats(1, 12, 4))
    with pytest.raises(UnsupportedError, match="linear_before_reset=0 the number of steps must be fixed"):
        gradient_model(model, {"loss"}, {"w", "r"}, "")


def sgd(model: onnx.ModelProto, *weights: str) -> TrainingSession:
    settings = TrainingParameters()
    settings.loss_output_name, settings.training_optimizer_name = "loss", "SGDOptimizer"
    settings.weights_to_train = set(weights)
    return TrainingSession(model.SerializeToString(), settings)


def compare(model: onnx.ModelProto, session: TrainingSession, data: bytes | None, *shape: int) -> None:
    """The loss with ONNX Runtime's of the file itself, the gradient with torch's of the file as it is read."""
    x = floats(*shape, seed=sum(shape))
    wanted = run(model.SerializeToString(), {"x": x})["loss"]
    (loss,) = session.run(["loss"], {"x": x, "Learning_Rate": [0.0]})
    assert loss == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    if data is None:
        return
    leaf = torch.from_numpy(x).requires_grad_()
    to_torch(model)(leaf)[0].backward()
    results = run(data, {"x": x})
    assert results["loss"] == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(results["x_grad"], leaf.grad.numpy(), rtol=1e-4, atol=1e-5)


COMPARED = {
    "Equal(s, one)": "y = Where(c, h, m)",
    "Greater(s, ten)": "y = Where(c, h, m)",
    "Less(s, hundred)": "f = Cast<to=1>(c) y = Add(h, f)",
    "GreaterOrEqual(s, ten)": "q = Not(c) r = LessOrEqual(s, hundred) t = Or(q, r) y = Where(t, h, m)",
    "LessOrEqual(ten, s)": "k = Where(c, s, one) f = Cast<to=1>(k) y = Mul(h, f)",
}


@pytest.mark.parametrize("comparison", COMPARED)
def test_what_compares_open_sizes_is_computed(comparison: str) -> None:
    text = f"""g (float[N,L] x) => (float loss) {{ h = Mul(x, w) m = Neg(h) s = Shape<start=1>(x) c = {comparison}
        {COMPARED[comparison]} z = Mul(y, y) p = Add(z, y) loss = ReduceSum<keepdims=0>(p) }}"""
    constants = {"one": np.array([1]), "ten": np.array([10]), "hundred": np.array([100])}
    model = parse(text, 17, w=np.float32(2), **constants)
    session, data = sgd(model, "w"), gradient_model(model, {"loss"}, {"x"}, "loss")
    for length in (3, 10, 11, 100, 101, 1):
        compare(model, session, data, 2, length)


WINDOWS = {
    "Conv same upper": 'y = Conv<auto_pad="SAME_UPPER", strides=[2], kernel_shape=[3]>(h, k)',
    "Conv same lower": 'y = Conv<auto_pad="SAME_LOWER", strides=[3], kernel_shape=[3]>(h, k)',
    "MaxPool same": 'y = MaxPool<auto_pad="SAME_UPPER", strides=[2], kernel_shape=[3]>(h)',
    "MaxPool ceil": "y = MaxPool<ceil_mode=1, strides=[2], kernel_shape=[3]>(h)",
    "second half": "s = Shape<start=2>(x) i = Div(s, pair) y = Slice(h, i, end, pair)",
    "rounded up": (
        "s = Shape<start=2>(x) a = Neg(s) b = Div(a, pair) e = Neg(b) o = Constant<value = int64[1] {0}>() "
        "y = Slice(h, o, e, pair)"
    ),
    "reflect": 'y = Pad<mode="reflect">(h, two)',
    "linear": 'c = Constant<value = float[3] {1.0, 1.0, 1.7}>() y = Resize<mode="linear">(h, , c)',
    "edge": 'y = Pad<mode="edge">(h, two)',
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_borders_of_an_open_length(name: str) -> None:
    text = f"""g (float[N,2,L] x) => (float loss) {{ h = Mul(x, w) {WINDOWS[name]} z = Mul(y, y)
        loss = ReduceMean<keepdims=0>(z) }}"""
    model = parse(
        text,
        18,
        w=np.float32(2),
        k=floats(3, 2, 3),
        two=np.array([0, 0, 2, 0, 0, 2]),
        pair=np.array([2]),
        end=np.array([99]),
    )
    session, data = sgd(model, "w"), gradient_model(model, {"loss"}, {"x"}, "loss")
    for length in (3, 4, 5, 8, 9, 20):
        compare(model, session, data, 2, 2, length)
    if name == "edge":
        compare(model, session, data, 2, 2, 1)


def test_windows_in_the_padding_alone_overwrite_nothing() -> None:
    """At sizes that are tried torch's kernel for the gradient would write outside of the image."""
    text = """g (double[N,2,L] x) => (double loss) { h = Mul(x, w)
        y = MaxPool<kernel_shape=[2], dilations=[3], pads=[1,1], strides=[2], ceil_mode=1>(h)
        loss = ReduceSum<keepdims=0>(y) }"""
    model = parse(text, 18, w=np.float64(2))
    data, x = gradient_model(model, {"loss"}, {"x"}, "loss"), floats(2, 2, 9).astype(np.float64)
    leaf = torch.from_numpy(x).requires_grad_()
    to_torch(model)(leaf)[0].backward()
    np.testing.assert_allclose(run(data, {"x": x})["x_grad"], leaf.grad.numpy(), rtol=1e-12)
    replay = _Replay(fx.symbolic_trace(lambda g, x, i: _POOLED(g, x, [1, 2], [1, 2], [0, 1], [1, 3], True, i)))
    image, incoming = torch.rand(1, 1, 1, 4), torch.ones(1, 1, 1, 2)
    with pytest.raises(IndexError, match="outside of the image"):
        replay.run(incoming, image, torch.full((1, 1, 1, 2), 4))
    assert replay.run(incoming, image, torch.zeros(1, 1, 1, 2, dtype=torch.long)).sum() == 2


_POOLED = torch.ops.aten.max_pool2d_with_indices_backward.default
TABLES = {
    "rows of a table": "e = Shape<start=1, end=2>(x) t = Slice(table, zero, e, axis) y = Add(h, t)",
    "rows and a mask": (
        "e = Shape<start=1, end=2>(x) t = Slice(table, zero, e, axis) a = Add(h, t) u = Slice(mask, zero, e, zero) "
        "v = Slice(u, zero, e, axis) m = Transpose<perm=[0,2,1]>(a) r = MatMul(m, v) y = Transpose<perm=[0,2,1]>(r)"
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_length_that_is_at_most_that_of_a_table_is_open(name: str) -> None:
    """As of positions: no length beyond the table's is one that the graph can be traced with."""
    text = f"""g (float[N,T,3] x) => (float loss) {{ h = Mul(x, w) {TABLES[name]} z = Mul(y, y)
        loss = ReduceMean<keepdims=0>(z) }}"""
    numbers = {"zero": np.array([0]), "axis": np.array([1])}
    tables = {"table": floats(1, 6, 3, seed=5), **({"mask": floats(6, 6, seed=6)} if "mask" in text else {})}
    model = parse(text, 20, w=np.float32(2), **numbers, **tables)
    session, data = sgd(model, "w", "table"), gradient_model(model, {"loss"}, {"x"}, "loss")
    for length in (2, 3, 5, 6, 1):
        compare(model, session, data, 4, length, 3)


HALVED = """g (float[N,L] x) => (float loss) { h = Mul(x, w) m = Neg(h) s = Shape<start=1>(x) f = Cast<to=1>(s)
    i = Mul(f, half) c = Greater(i, limit) y = Where(c, h, m) z = Mul(y, y) p = Add(z, y)
    loss = ReduceSum<keepdims=0>(p) }"""


def test_a_session_has_a_graph_for_each_answer_to_what_cannot_be_computed() -> None:
    model = parse(HALVED, w=np.float32(2), half=np.array([0.5], np.float32), limit=np.array([5.25], np.float32))
    session = sgd(model, "w")
    for shape in ((2, 11), (2, 10), (3, 12), (3, 3), (1, 30), (4, 1), (2, 10), (5, 7)):
        compare(model, session, None, *shape)
    assert set(session._train._others) == {(2, 10), (3, 3), (1, 30), (4, 1), (5, 7)}
    for rows in range(2, 30):
        compare(model, session, None, rows, 8)
    assert len(session._train._others) == 16


def test_graphs_that_depend_on_an_open_size_are_refused_where_they_are_written(tmp_path: Path) -> None:
    model = parse(HALVED, w=np.float32(2), half=np.array([0.5], np.float32), limit=np.array([5.25], np.float32))
    refusal = r"what it computes depends on N, L\. Declare these sizes"
    with pytest.raises(UnsupportedError, match=refusal):
        GradientGraphBuilder(model, {"loss"}, {"x"}, "loss").build()
    with pytest.raises(UnsupportedError, match=refusal):
        generate_artifacts(model, tmp_path, requires_grad=["w"])


def test_a_number_that_one_size_in_many_has_is_found() -> None:
    text = """g (float[N,L] x) => (float loss) { h = Mul(x, w) m = Neg(h) s = Shape<start=1>(x) f = Cast<to=1>(s)
        i = Mul(f, half) c = Equal(i, limit) y = Where(c, h, m) loss = ReduceSum<keepdims=0>(y) }"""
    model = parse(text, w=np.float32(2), half=np.array([0.5], np.float32), limit=np.array([3.5], np.float32))
    with pytest.raises(UnsupportedError, match="what it computes depends on"):
        GradientGraphBuilder(model, {"loss"}, {"x"}, "loss").build()
    session = sgd(model, "w")
    for length in (6, 7, 8):
        compare(model, session, None, 2, length)


def test_the_gradient_of_a_product_along_an_open_size_is_refused() -> None:
    model = parse("g (float[N,4] x) => (float loss) { h = Mul(x, w) loss = ReduceProd<keepdims=0>(h) }", w=floats(4))
    with pytest.raises(UnsupportedError, match=r"product \(ReduceProd\) along an axis .* Declare N as numbers"):
        GradientGraphBuilder(model, {"loss"}, {"w"}, "loss").build()
