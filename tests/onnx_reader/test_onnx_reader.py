"""Files of torch's exporters as torch modules: results of ONNX Runtime, gradients of torch; and what is refused."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx_exports import EXPORTS
from onnx_text import floats, parse
from torch import Tensor, nn

from lightning_ort import UnsupportedError
from lightning_ort.onnx_reader import OnnxModule, to_torch

OPTIONS = onnxruntime.SessionOptions()
OPTIONS.intra_op_num_threads = 1
OPTIONS.log_severity_level = 4


@pytest.fixture(scope="module", params=EXPORTS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, bytes, tuple[Tensor, ...]]:
    """A module, its file, and inputs of another batch size than that of the export."""
    export = EXPORTS[request.param]
    module = export.make()
    module.train(not export.dynamo)  # the dynamo exporter writes inference graphs only
    data = export.write(module)
    return module, data, export.inputs(7)


def test_loss_and_gradients_are_those_of_the_exported_module(
    pair: tuple[nn.Module, bytes, tuple[Tensor, ...]],
) -> None:
    module, data, inputs = pair
    reader = to_torch(data)
    (loss,) = reader(*inputs)
    loss.backward()
    session = onnxruntime.InferenceSession(data, OPTIONS, providers=["CPUExecutionProvider"])
    feed = {n: x.numpy() for n, x in zip(reader.input_names, inputs, strict=True)}
    assert loss.item() == pytest.approx(session.run(None, feed)[0].item(), rel=1e-5)
    expected = module(*inputs)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found = {reader.parameter_names[path]: p for path, p in reader.named_parameters()}
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        if name in found and found[name].shape == gradient.shape:
            torch.testing.assert_close(found[name].grad, gradient, rtol=1e-4, atol=1e-6)
    # transposed and rearranged weights have other names; the norm of all gradients is the same
    total = torch.cat([p.grad.flatten() for p in found.values() if p.grad is not None]).norm()
    torch.testing.assert_close(total, torch.cat([g.flatten() for g in gradients.values()]).norm(), rtol=1e-4, atol=1e-6)


NORM = """g (float[N,3] x) => (float[N,3] y) {
    y, m, v = BatchNormalization<training_mode=1, momentum=0.8>(x, s, b, mean, var)
}"""


def norm() -> OnnxModule:
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    return to_torch(parse(NORM, s=ones, b=zeros, mean=zeros, var=ones))


def test_running_statistics_move_in_training_and_count_in_evaluation() -> None:
    module, x = norm(), torch.randn(8, 3) + 2
    assert set(module.parameter_names.values()) == {"s", "b"}
    assert set(module.buffer_names.values()) == {"mean", "var"}
    module(x)
    torch.testing.assert_close(module.mean, 0.2 * x.mean(0))
    torch.testing.assert_close(module.var, 0.8 + 0.2 * x.var(0, correction=0))
    (y,) = module.eval()(x)
    torch.testing.assert_close(y, (x - 0.2 * x.mean(0)) / (module.var + 1e-5).sqrt())


@pytest.mark.parametrize("training", [True, False])
def test_scales_that_are_expanded_constants_have_the_gradients_of_whole_ones(training: bool) -> None:
    """As the exporter writes layers without weights of their own."""
    zeros, ones = np.zeros(5, np.float32), np.ones(5, np.float32)
    mode = "<training_mode=1>" if training else ""
    outputs = "y, m, v" if training else "y"
    made = "s = Expand(one, five) b = Expand(zero, five)"
    node = f"{outputs} = BatchNormalization{mode}(x, s, b, mean, var)"
    expanded = {"one": np.float32([1.5]), "zero": np.float32([0.5]), "five": np.int64([5])}
    whole = {"s": np.full(5, 1.5, np.float32), "b": np.full(5, 0.5, np.float32)}
    x = torch.randn(6, 5)
    found = []
    for nodes, weights in ((f"{made} {node}", expanded), (node, whole)):
        text = f"g (float[N,5] x) => (float[N,5] y) {{ {nodes} }}"
        module = to_torch(parse(text, mean=zeros, var=ones * 4, **weights))
        given = x.clone().requires_grad_()
        module(given)[0].square().cumsum(0).sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(*found)


SAVED = NORM.replace("m, v =", "m, v, saved, saved_var =").replace("training_mode=1, ", "")


def test_saved_statistics_that_nothing_reads_are_left_out() -> None:
    """A node of opset 13 with outputs by the side is one of training."""
    ones, zeros = np.ones(3, np.float32), np.zeros(3, np.float32)
    weights = {"s": ones, "b": zeros, "mean": zeros, "var": ones}
    module, x = to_torch(parse(SAVED, 13, **weights)), torch.randn(8, 3) + 2
    (y,) = module(x)
    torch.testing.assert_close(y, (x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(module.mean, 0.2 * x.mean(0))
    (y,) = module.eval()(x)
    torch.testing.assert_close(y, (x - 0.2 * x.mean(0)) / (module.var + 1e-5).sqrt())
    read = to_torch(parse(SAVED.replace("y) {", "y, float[3] saved) {"), 13, **weights))
    with pytest.raises(UnsupportedError, match=r"saved statistics .* cannot be read"):
        read(x)


def test_only_initializers_that_are_not_trained_are_moved() -> None:
    """What a node computes, or the caller passes, keeps its values, also for others that read it."""
    text = """g (float[N,3] x, float[3] mean) => (float[N,3] y, float[3] m, float[3] read, float[3] passed) {
        squares = Mul(var, var) y, m, v = BatchNormalization<training_mode=1, momentum=0.8>(x, s, b, mean, squares)
        read = Identity(squares) passed = Identity(mean) }"""
    ones = np.ones(3, np.float32)
    module, x, mean = to_torch(parse(text, s=ones, b=0 * ones, var=2 * ones)), torch.randn(8, 3) + 2, torch.zeros(3)
    _, moved, read, passed = module(x, mean)
    torch.testing.assert_close(moved, 0.2 * x.mean(0))
    assert mean.tolist() == passed.tolist() == [0, 0, 0] and read.tolist() == [4, 4, 4]
    model = parse(NORM, s=ones, b=0 * ones, mean=0 * ones, var=ones)
    trained = to_torch(model, ["mean"])
    trained(x)
    assert set(trained.parameter_names.values()) == {"mean"} and not trained.mean.any()
    torch.testing.assert_close(trained.var, 0.8 + 0.2 * x.var(0, correction=0))


def test_initializers_are_what_reads_them_behind_an_identity() -> None:
    text = """g (float[N,3] x) => (float[N,3] y) {
        m = Identity(mean) scale = Identity(s) y = BatchNormalization(x, scale, b, m, var) }"""
    ones = np.ones(3, np.float32)
    module = to_torch(parse(text, s=ones, b=0 * ones, mean=ones, var=ones))
    assert set(module.parameter_names.values()) == {"s", "b"}
    assert set(module.buffer_names.values()) == {"mean", "var"}


def test_statistics_that_were_merged_with_weights_do_not_follow_them() -> None:
    text = "g (float[N,3] x) => (float[N,3] y) { m = Identity(b) y = BatchNormalization(x, s, b, m, s) }"
    module = to_torch(parse(text, s=np.ones(3, np.float32), b=np.zeros(3, np.float32)))
    x = torch.randn(4, 3)
    (y,) = module(x)
    y.square().sum().backward()
    torch.testing.assert_close(module.s.grad, 2 * (x * x / (1 + 1e-5)).sum(0))
    with torch.no_grad():
        module.s.mul_(3)
        module.b.add_(1)
    torch.testing.assert_close(module(x)[0], 3 * x / (1 + 1e-5) ** 0.5 + 1)


def test_dropout_drops_in_training_only() -> None:
    text = """g (float[N] x) => (float[N] y) {
        r = Constant<value = float {0.25}>() t = Constant<value = bool {1}>() y = Dropout(x, r, t) }"""
    module, x = to_torch(parse(text)), torch.ones(4000)
    (y,) = module(x)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert torch.equal(module.eval()(x)[0], x)


GEMM = "g (float[N,3] x) => (float[N,2] y) { h = Gemm(x, w, b) c = Relu(h) y = Clip(c, low) }"


def gemm() -> onnx.ModelProto:
    return parse(GEMM, w=floats(3, 2), b=floats(2), low=np.float32(-1))


def test_a_model_is_read_from_a_proto_bytes_and_a_file_with_external_data(tmp_path: Path) -> None:
    model, x = gemm(), torch.randn(4, 3)
    before = model.SerializeToString(deterministic=True)
    (expected,) = to_torch(model)(x)
    assert model.SerializeToString(deterministic=True) == before
    assert torch.equal(to_torch(before)(x)[0], expected)
    path = tmp_path / "m.onnx"
    onnx.save(model, str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    assert torch.equal(to_torch(path)(x)[0], expected)
    assert torch.equal(to_torch(str(path))(x=x)[0], expected)


def test_parameters_are_the_floats_a_gradient_reaches_or_those_named() -> None:
    assert list(to_torch(gemm()).parameter_names.values()) == ["w", "b"]
    chosen = to_torch(gemm(), parameters=["b"])
    assert [n for n, _ in chosen.named_parameters()] == ["b"]
    assert "w" in chosen.buffer_names.values()
    with pytest.raises(ValueError, match=r"no initializer 'q'\. It has: w, b, low"):
        to_torch(gemm(), parameters=["q"])
    whole = parse("g (float[2] x) => (float[2] y) { y = Gather(x, i) }", i=np.array([1, 0]))
    with pytest.raises(ValueError, match=r"'i' is torch.int64; only floating-point"):
        to_torch(whole, parameters=["i"])


def test_names_that_python_does_not_allow_are_replaced_and_kept_apart() -> None:
    names = ["layer.0.weight", "layer.0", "/a b", "/a_b", "forward"]
    terms = " ".join(f"h{i + 1} = Add(h{i}, p{i})" for i in range(5))
    model = parse(f"g (float[2] h0) => (float[2] h5) {{ {terms} }}", **{f"p{i}": floats(2, seed=i) for i in range(5)})
    for i, name in enumerate(names):
        model.graph.initializer[i].name = model.graph.node[i].input[1] = name
    module = to_torch(model)
    assert sorted(module.parameter_names.values()) == sorted(names)
    assert module.get_parameter("layer.0.weight") is not None
    expected = sum(floats(2, seed=i) for i in range(5))
    torch.testing.assert_close(module(torch.zeros(2))[0], torch.as_tensor(expected))


@pytest.mark.parametrize(
    "names",
    [
        ("meta.weight", "training"), ("x.training", "x.forward"), ("net.lambda", "x.class.w"), ("None", "_graph"),
        ("_modules", "a._parameters.b"), ("l1.weight", "l1"), ("l1", "l1.weight"), ("constant_0", "node_0_Dropout"),
        ("input_names", "self"), ("x\u00b2", "\ufb01"),
    ],
)  # fmt: skip
def test_names_that_python_or_torch_reserve_are_read(names: tuple[str, str]) -> None:
    text = "g (float[2] x) => (float[2] y) { c = Constant<value = float[2] {1.0, 2.0}>() h = Mul(x, p) k = Add(h, q) "
    model = parse(text + "y = Mul(k, c) }", p=floats(2, seed=1), q=floats(2, seed=2))
    for i, name in enumerate(names):
        model.graph.initializer[i].name = model.graph.node[i + 1].input[1] = name
    module = to_torch(model)
    assert sorted(module.parameter_names.values()) == sorted(names)
    module.load_state_dict(module.state_dict())
    (y,) = module(torch.ones(2))
    np.testing.assert_allclose(y.detach(), (floats(2, seed=1) + floats(2, seed=2)) * [1, 2], rtol=1e-6)


@pytest.mark.parametrize("names", [("self", "a.b", "a_b"), ("torch", "None", "x\u00b2")])
def test_inputs_with_names_that_python_reserves_are_read(names: tuple[str, ...]) -> None:
    model = parse(
        "g (float[2] a, float[2] b, float[2] c) => (float[2] y) { h = Cast<to=1>(a) k = Sub(h, b) y = Mul(k, c) }"
    )
    for i, name in enumerate(names):
        model.graph.input[i].name = model.graph.node[i].input[1 if i else 0] = name
    inputs = [torch.from_numpy(floats(2, seed=i)) for i in range(3)]
    torch.testing.assert_close(to_torch(model)(*inputs)[0], (inputs[0] - inputs[1]) * inputs[2])


def test_operators_of_the_domain_by_its_other_name_are_read() -> None:
    model = parse(
        "g (float[2] x) => (float[2] y) { c = Constant<value = float {2.0}>() h = Mul(x, c) y = Identity(h) }"
    )
    for node in model.graph.node:
        node.domain = "ai.onnx"
    assert to_torch(model)(torch.ones(2))[0].tolist() == [2.0, 2.0]


def with_function(opset: int, nodes: str, calls: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 18, "own" : 1]> g (float[2,2] x) => (float[2,n] y) {{ {calls} }} '
        f'<domain: "own", opset_import: ["" : {opset}]> F (a) => (c) {{ {nodes} }}'
    )


@pytest.mark.parametrize("opset", [17, 19])
def test_a_function_of_another_opset_is_read(opset: int) -> None:
    x = floats(2, 2)
    same = with_function(opset, "h = Relu(a) c = Mul(h, h)", "k = own.F(x) y = Neg(k)")
    session = onnxruntime.InferenceSession(same.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(to_torch(same)(torch.from_numpy(x))[0], session.run(None, {"x": x})[0])


def test_a_function_whose_operators_have_changed_is_converted_or_refused() -> None:
    x = torch.from_numpy(floats(2, 2))
    (mean,) = to_torch(with_function(17, "c = ReduceMean<axes=[1]>(a)", "y = own.F(x)"))(x)
    torch.testing.assert_close(mean, x.mean(1, keepdim=True))
    with pytest.raises(UnsupportedError, match=r"opset 18, and functions in it for others \(F for opset 17\)"):
        to_torch(with_function(17, "c = ReduceMean<axes=[1]>(a)", "h = own.F(x) y = Relu(h)"))


def test_sizes_stay_numbers_through_casts_and_arithmetic() -> None:
    text = """g (float[N,4,M] x) => (float[A,B,C] y) {
        s = Shape(x) zero = Constant<value = int64 {0}>() two = Constant<value = int64 {2}>()
        last = Constant<value = int64[1] {-1}>() axis = Constant<value = int64[1] {0}>()
        n = Gather(s, zero) m = Gather(s, two)
        mf = Cast<to=1>(m) half = Constant<value = float {0.5}>() hf = Mul(mf, half) fl = Floor(hf) h = Cast<to=7>(fl)
        nu = Unsqueeze(n, axis) hu = Unsqueeze(h, axis) t = Concat<axis=0>(nu, last, hu) y = Reshape(x, t) }"""
    module = to_torch(parse(text))
    assert module(torch.zeros(3, 4, 6))[0].shape == (3, 8, 3)
    assert module(torch.zeros(5, 4, 2))[0].shape == (5, 8, 1)


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"])
def test_sizes_that_are_reduced_along_no_axis_stay_as_they_are(operator: str) -> None:
    text = f"""g (float[N,6] x) => (float[A,B] y) {{
        s = Shape(x) t = {operator}<noop_with_empty_axes=1>(s) all = {operator}(s)
        zero = Sub(all, all) u = Add(t, zero) y = Reshape(x, u) }}"""
    assert to_torch(parse(text, 20))(torch.zeros(4, 6))[0].shape == (4, 6)


MOVED = {
    "Expand": "k = Constant<value = int64[1] {2}>() u = Unsqueeze(n, zero) e = Expand(u, k) t = Slice(e, zero, one)",
    "Expand of a number": "k = Constant<value = int64[1] {1}>() t = Expand(n, k)",
    "Expand to as many as there are sizes": "k = Shape(s) e = Expand(n, k) t = Slice(e, zero, one)",
    "Tile": "u = Unsqueeze(n, zero) e = Tile(u, two) t = Slice(e, one, two)",
    "Transpose": "u = Unsqueeze(n, zero) t = Transpose<perm=[0]>(u)",
    "Split": "t, rest = Split<num_outputs=2>(s)",
    "Split into parts": "k = Constant<value = int64[2] {1, 1}>() t, rest = Split(s, k)",
    "Split without the last part": """
        all = Concat<axis=0>(s, s, s) a, b, c = Split<num_outputs=3>(all) t = Slice(b, zero, one)""",
}


@pytest.mark.parametrize("of", ["x", "w"])
@pytest.mark.parametrize("operators", MOVED.values(), ids=list(MOVED))
def test_sizes_that_are_moved(operators: str, of: str) -> None:
    """Those of a batch stay numbers, those of a weight are constants."""
    shape = f"s = Shape({of}) z = Constant<value = int64 {{0}}>() n = Gather(s, z)"
    constants = " ".join(
        f"{name} = Constant<value = int64[1] {{{value}}}>()" for value, name in enumerate(["zero", "one", "two"])
    )
    last = "l = Constant<value = int64[1] {-1}>() target = Concat<axis=0>(t, l) y = Reshape(p, target)"
    model = parse(
        f"g (float[N,6] x) => (float[A,B] y) {{ {shape} {constants} {operators} p = MatMul(x, w) {last} }}", 20
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 6), np.float32), "w"))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    module = to_torch(model)
    for rows in (12, 6):
        x = torch.randn(rows, 6)
        (found,), (expected,) = module(x), session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(found.detach(), torch.from_numpy(expected))
        assert len(found) == (rows if of == "x" else 6)


IF = """g (float[2] x, bool c) => (float[2] y) {
    k = Constant<value = bool {1}>()
    y = If(CONDITION) <
        then_branch = t () => (float[2] a) { a = Relu(x) },
        else_branch = e () => (float[2] b) { b = Neg(x) }
    >
}"""


def test_a_branch_with_a_constant_condition_is_taken() -> None:
    x = torch.tensor([1.0, -2.0])
    assert to_torch(parse(IF.replace("CONDITION", "k")))(x, torch.tensor(False))[0].tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("g (float[2,2] x) => (float y) { d = Bar(x) e = Abs(d) y = Foo(e) }", r"Bar \(node 'd'\)\n  Foo \(node 'y'\)"),
        (IF.replace("CONDITION", "c"), r"If \(node 'y'\): its condition is computed"),
        ("g (float[4] x, int64[1] s) => (float[N] y) { y = Reshape(x, s) }", r"Reshape \(node 'y'\): its input 'shape' "
         r"\('s'\) is computed from data"),
        ("g (float[4] x) => (float[4] y) { y = Relu<slope=1.0>(x) }", r"Relu \(node 'y'\): attribute slope"),
        ("g (float[4] x) => (float[4] y) { y = Relu(x, x) }", r"Relu \(node 'y'\): 2 inputs, at most 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named_with_its_node(text: str, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        to_torch(parse(text))


@pytest.mark.parametrize("opset", [12, 27])
def test_other_opsets_are_refused(opset: int) -> None:
    with pytest.raises(UnsupportedError, match=rf"opset {opset}; opsets 13 to 26"):
        to_torch(parse("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no ONNX file '.*none.onnx'"):
        to_torch(tmp_path / "none.onnx")
    data = gemm().SerializeToString()
    with pytest.raises(ValueError, match="the bytes passed as model is no ONNX model, or a truncated one"):
        to_torch(data[: len(data) // 2])
    with pytest.raises(ValueError, match="holds no ONNX graph"):
        to_torch(b"")
    with pytest.raises(TypeError, match=r"model is a Linear; expected onnx.ModelProto, bytes or a path"):
        to_torch(nn.Linear(2, 2))  # type: ignore[arg-type]


LOOP = """g (float[3,2] x) => (float[3,2] last, float[K,3,2] all, float[6,2] joined) {
    n = Constant<value = int64 {N}>() go = Constant<value = bool {1}>() two = Constant<value = float {2.0}>()
    empty = SequenceEmpty()
    last, sequence, all = Loop(n, go, x, empty) <
        body = b (int64 i, bool c, float[3,2] h, seq(float[3,2]) s)
            => (bool c_out, float[3,2] h_out, seq(float[3,2]) s_out, float[3,2] scan) {
            c_out = Identity(CONDITION) k = Cast<to=1>(i) f = Add(k, two) h_out = Mul(h, f)
            s_out = SequenceInsert(s, h) scan = Tanh(h_out)
        }
    >
    joined = ConcatFromSequence<axis=0>(sequence)
}"""


def test_a_loop_of_constant_length_is_written_out() -> None:
    model = parse(LOOP.replace("N}", "2}").replace("CONDITION", "c"))
    x = torch.from_numpy(floats(3, 2)).requires_grad_()
    results = to_torch(model)(x)
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    for got, expected in zip(results, session.run(None, {"x": x.detach().numpy()}), strict=True):
        torch.testing.assert_close(got.detach(), torch.from_numpy(expected))
    results[0].sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 2), 6.0))


def test_what_keeps_a_loop_from_being_written_out_is_named() -> None:
    going = parse(LOOP.replace("N}", "1001}").replace("CONDITION", "c"))
    with pytest.raises(UnsupportedError, match=r"Loop \(node 'last'\): it runs more than 1000 times"):
        to_torch(going)
    two = LOOP.replace("N}", "2}")
    computed = {
        "condition \\('c_out'\\)": two.replace("CONDITION", "d").replace("float[3,2] x)", "float[3,2] x, bool d)"),
        "number of iterations \\('m'\\)": two.replace("CONDITION", "c").replace("Loop(n", "Loop(m").replace(
            "float[3,2] x)", "float[3,2] x, int64 m)"
        ),
    }  # fmt: skip
    for what, text in computed.items():
        with pytest.raises(
            UnsupportedError, match=rf"Loop \(node 'last'\): its {what} is computed when the graph runs"
        ):
            to_torch(parse(text))
    never = parse(LOOP.replace("N}", "0}").replace("CONDITION", "c"))
    with pytest.raises(UnsupportedError, match="it never runs"):
        to_torch(never)


COUNTED = """g (float[N,2] x) => (float[K,2] y) {
    s = Shape(x) zero = Constant<value = int64 {0}>() first = Constant<value = int64[1] {0}>()
    rows = Gather(s, zero) row = Unsqueeze(rows, first) three = Constant<value = int64[3] {7, 8, 9}>()
    joined = Concat<axis=0>(three, row) one = Constant<value = int64[1] {1}>() far = Constant<value = int64[1] {100}>()
    part = Slice(joined, FROM, far) lengths = Shape(part) n = Gather(lengths, zero) go = Constant<value = bool {1}>()
    y = Loop(n, go) <
        body = b (int64 i, bool c) => (bool c_out, float[2] scan) {
            c_out = Identity(c) k = Gather(part, i) f = Cast<to=1>(k) h = ReduceSum<keepdims=0>(x, first)
            scan = Mul(h, f)
        }
    >
}"""


def test_a_list_of_sizes_is_as_long_as_the_graph_says() -> None:
    """A loop over [8, 9, rows] has three iterations, however many rows there are."""
    model = parse(COUNTED.replace("FROM", "one"))
    module = to_torch(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    for rows in (2, 5):
        x = floats(rows, 2)
        (got,), (expected,) = module(torch.from_numpy(x)), session.run(None, {"x": x})
        assert got.shape == (3, 2)
        torch.testing.assert_close(got, torch.from_numpy(expected))
    # where a slice of them begins is a size itself
    with pytest.raises(UnsupportedError, match=r"Loop \(node 'y'\): its number of iterations \('n'\) is computed"):
        to_torch(parse(COUNTED.replace("FROM", "row")))


def exported(module: nn.Module, x: torch.Tensor, **options: Any) -> onnx.ModelProto:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (x,), stream, dynamo=False, input_names=["x"], **options)
    return onnx.load_from_string(stream.getvalue())


@pytest.mark.parametrize("factor", [2.3, 0.7])
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@pytest.mark.parametrize("is_open", [False, True])
def test_an_exported_upsampling_has_the_size_that_onnx_runtime_gives_it(
    factor: float, mode: str, is_open: bool
) -> None:
    x = torch.rand(2, 1, 10, 20)
    axes = {"x": {2: "h", 3: "w"}} if is_open else {}
    model = exported(nn.Upsample(scale_factor=factor, mode=mode), x, dynamic_axes=axes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    for size in (10, 20)[: 1 + is_open]:
        x = torch.rand(2, 1, size, 20)
        (expected,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(to_torch(model)(x)[0], torch.from_numpy(expected))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(5, 7), (23, 31)])
def test_an_exported_antialiased_interpolation_is_torchs(mode: str, size: tuple[int, int]) -> None:
    class Smooth(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.interpolate(x, size, mode=mode, antialias=True)

    x = torch.rand(2, 1, 16, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(Smooth(), (x,), dynamo=True, verbose=False)
    assert program is not None
    data = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, OPTIONS, providers=["CPUExecutionProvider"])
    (got,) = to_torch(data)(x)
    torch.testing.assert_close(got, Smooth()(x))
    torch.testing.assert_close(got, torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dynamo", "mode"), [(True, "mean"), (False, "mean"), (False, "sum"), (False, "max")])
def test_an_exported_embedding_bag(dynamo: bool, mode: str) -> None:
    torch.manual_seed(0)
    bag, rows = nn.EmbeddingBag(10, 4, mode=mode).eval(), torch.randint(0, 10, (3, 5))
    if dynamo:
        program = torch.onnx.export(bag, (rows,), dynamo=True, verbose=False)
        assert program is not None
        model = program.model_proto
    else:
        model = exported(bag, rows)
    reader = to_torch(model)
    (got,), expected = reader(rows), bag(rows)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward(), expected.square().sum().backward()
    (weight,) = reader.parameters()
    torch.testing.assert_close(weight.grad, bag.weight.grad)


def test_an_embedding_bag_of_open_sizes_is_refused() -> None:
    model = exported(nn.EmbeddingBag(10, 4), torch.randint(0, 10, (3, 5)), dynamic_axes={"x": {0: "batch"}})
    with pytest.raises(UnsupportedError, match=r"Loop \(node '/Loop'\): its number of iterations \(.*\) is computed"):
        to_torch(model)


def dynamo_export(module: nn.Module, *inputs: Tensor, **options: Any) -> onnx.ModelProto:
    pytest.importorskip("onnxscript")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
    assert program is not None
    return program.model_proto


def test_a_bias_that_the_exporter_makes_of_the_shape_of_a_weight() -> None:
    module, x = nn.Conv2d(2, 4, 3, bias=False), torch.randn(3, 2, 4, 4)
    model = dynamo_export(module, x, optimize=False)
    assert "Expand" in {node.op_type for function in model.functions for node in function.node} | {
        node.op_type for node in model.graph.node
    }
    torch.testing.assert_close(to_torch(model)(x)[0], module(x))


class Folded(nn.Module):
    """Parameters and buffers that the exporter's optimizer computes with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 3, bias=False)
        self.gamma, self.temperature = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(()))
        self.register_buffer("table", torch.rand(9, 4))
        self.norm, self.embedding = nn.GroupNorm(5, 5), nn.Embedding(9, 4)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "gamma":
                x = x * self.gamma.view(1, 1, -1)
            case "temperature":
                x = x * self.temperature.exp()
            case "table":
                x = x + self.table[:5].unsqueeze(0)
            case "twice":
                x = x + self.embedding(torch.zeros(5, dtype=torch.long))
            case "each":
                x = x + self.embedding(torch.arange(5))
            case "norm":
                x = self.norm(x)
        return self.linear(x) / 1.7 * 3.0


@pytest.mark.parametrize("kind", ["temperature", "twice"])
def test_what_the_exporter_computed_is_not_guessed(kind: str) -> None:
    """What an exponential is trained to is no parameter's, nor is a row that was looked up several times."""
    module, x = Folded(kind), torch.randn(2, 5, 4)
    model = dynamo_export(module, x)
    with pytest.raises(UnsupportedError, match=r"computed by torch's exporter from .*optimize=False") as refused:
        to_torch(model)
    unclear = str(refused.value).split("'")[1]
    torch.testing.assert_close(to_torch(model, frozen=[unclear])(x)[0], module(x))
    whole = to_torch(dynamo_export(module, x, optimize=False))
    torch.testing.assert_close(whole(x)[0], module(x))
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(module(x).sum(), parameters, allow_unused=True)
    used = {name for name, grad in zip(names, grads, strict=True) if grad is not None}
    assert set(whole.parameter_names.values()) == used


@pytest.mark.parametrize(("kind", "count"), [("", 1), ("norm", 3), ("each", 2), ("gamma", 2), ("table", 1)])
def test_weights_in_another_place_are_trained_and_constants_are_not(kind: str, count: int) -> None:
    """Also where no parameter is left as it was, so that none has a mark."""
    module, x = Folded(kind), torch.randn(2, 5, 4)
    reader = to_torch(dynamo_export(module, x))
    torch.testing.assert_close(reader(x)[0], module(x))
    assert len(list(reader.parameters())) == count


@pytest.mark.parametrize("opset", [18, 21])
def test_layers_that_took_in_a_batch_norm_are_trained(opset: int, tmp_path: Path) -> None:
    """Their weights come from the exporter's rewriter, without a mark."""
    pytest.importorskip("onnxscript")
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 2, 2), nn.BatchNorm2d(2),
        nn.Flatten(), nn.Linear(98, 5), nn.BatchNorm1d(5), nn.Linear(5, 2),
    )  # fmt: skip
    x = torch.randn(3, 1, 8, 8)
    net(x)
    path = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net.eval(), (x,), path, dynamo=True, opset_version=opset, verbose=False, external_data=False)
    names = set(to_torch(path).parameter_names.values())
    assert {f"{layer}.weight" for layer in (0, 3, 6, 8)} | {"3.bias", "6.bias", "8.bias"} <= names
    assert len(names) == 8  # the first convolution has a bias now
