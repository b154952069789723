"""Functions of a file with defaults for their attributes, and operators that nobody needs who asks for an output."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from onnx_text import floats

from lightning_ort import GradientGraphBuilder, TrainingParameters, TrainingSession, UnsupportedError
from lightning_ort.ondevice import CheckpointState, Module, generate_artifacts
from lightning_ort.onnx_reader import to_torch
from lightning_ort.onnx_reader.initializers import trainable_initializers
from lightning_ort.onnx_reader.load import load

OPTIONS = onnxruntime.SessionOptions()
OPTIONS.intra_op_num_threads = 1
OPTIONS.log_severity_level = 4

FUNCTIONS = """
<domain: "own", opset_import: ["" : 17]> Leaky <alpha: float = 0.5> (a) => (b) {
    b = LeakyRelu<alpha: float = @alpha>(a) }
<domain: "own", opset_import: ["" : 17]> Soft <axis: int = 0> (a) => (b) { b = Softmax<axis: int = @axis>(a) }
<domain: "own", opset_import: ["" : 17]> Bare <alpha> (a) => (b) { b = Elu<alpha: float = @alpha>(a) }
<domain: "own", opset_import: ["" : 17, "own" : 1]> Within (a) => (b) { b = own.Leaky(a) }
<domain: "own", opset_import: ["" : 17, "own" : 1]> Hands <slope: float = 0.25> (a) => (b) {
    b = own.Leaky<alpha: float = @slope>(a) }
<domain: "own", opset_import: ["" : 17, "own" : 1]> May <slope> (a) => (b) {
    h = own.Leaky<alpha: float = @slope>(a) b = LeakyRelu<alpha: float = @slope>(h) }
<domain: "own", opset_import: ["" : 17, "own" : 1]> Branches <slope> (a) => (b) {
    go = Constant<value = bool {1}>()
    b = If(go) <
        then_branch = t () => (float[3,2] p) { p = own.May<slope: float = @slope>(a) },
        else_branch = e () => (float[3,2] q) { q = Neg(a) }
    >
}
"""


def calling(text: str) -> onnx.ModelProto:
    """A model that calls the functions above."""
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17, "own" : 1]> g (float[3,2] x) => (float[3,2] y) '
        f"{{ {text} }} {FUNCTIONS}"
    )


@pytest.mark.parametrize(
    "text",
    [
        "y = own.Leaky(x)",
        "h = own.Leaky<alpha = 0.125>(x) y = own.Leaky(h)",
        "y = own.Soft(x)",
        "y = own.Within(x)",
        "h = own.Hands(x) y = own.Hands<slope = 0.125>(h)",
        "h = own.Soft(x) k = Sub(x, h) y = own.Bare(k)",
        # no value for an attribute that has no default: those of the function and of the operator within hold
        "y = own.May(x)",
        "h = own.May(x) y = own.May<slope = 0.125>(h)",
        "y = own.Branches(x)",
        "h = own.Branches<slope = 0.75>(x) y = own.Branches(h)",
        """go = Constant<value = bool {1}>() y = If(go) <
            then_branch = t () => (float[3,2] p) { p = own.Leaky(x) },
            else_branch = e () => (float[3,2] q) { q = Neg(x) }
        >""",
        """n = Constant<value = int64 {2}>() go = Constant<value = bool {1}>() y = Loop(n, go, x) <
            body = b (int64 i, bool c, float[3,2] h) => (bool d, float[3,2] k) { d = Identity(c) k = own.Leaky(h) }
        >""",
    ],
)
def test_what_a_call_leaves_out_is_the_default_of_the_function(text: str) -> None:
    model, x = calling(text), floats(3, 2) - 0.5
    before = model.SerializeToString()
    session = onnxruntime.InferenceSession(before, OPTIONS, providers=["CPUExecutionProvider"])
    torch.testing.assert_close(
        to_torch(model)(torch.from_numpy(x))[0], torch.from_numpy(session.run(None, {"x": x})[0])
    )
    assert model.SerializeToString() == before


def test_functions_of_one_name_have_defaults_of_their_own() -> None:
    model = calling("h = own.Leaky(x) y = own.Leaky(h)")
    model.ir_version = 10
    other = model.functions.add()
    other.CopyFrom(model.functions[0])
    other.overload = model.graph.node[1].overload = "steep"
    other.attribute_proto[0].f = 0.125
    x = torch.tensor([[-16.0, 1.0]] * 3)
    assert to_torch(model)(x)[0].tolist() == [[-1.0, 1.0]] * 3


@pytest.mark.parametrize("opset", [13, 19])
def test_a_function_of_another_opset_has_its_defaults(opset: int) -> None:
    model = calling("y = own.Leaky(x)")
    model.functions[0].opset_import[0].version = opset
    x = torch.tensor([[-16.0, 1.0]] * 3)
    assert to_torch(model)(x)[0].tolist() == [[-8.0, 1.0]] * 3


def test_a_graph_as_a_default_is_refused() -> None:
    model = calling("y = own.Branches(x)")
    branch = model.functions[6].node[1].attribute[0]
    model.functions[6].attribute_proto.add().CopyFrom(branch)
    branch.Clear()
    branch.name = branch.ref_attr_name = "then_branch"
    branch.type = onnx.AttributeProto.GRAPH
    with pytest.raises(UnsupportedError, match=r"function 'Branches' has a graph as the default of .* 'then_branch'"):
        to_torch(model)


def test_gradients_and_updates_go_by_the_default() -> None:
    model = calling("t = Mul(x, w) y = own.Leaky(t) loss = ReduceSum<keepdims = 0>(y)")
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("loss", TensorProto.FLOAT, []))
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "w"))
    x = np.array([[-8.0, 1.0]] * 3, np.float32)
    builder = GradientGraphBuilder(model, {"loss"}, {"w"}, "loss")
    builder.build()
    session = onnxruntime.InferenceSession(builder.get_model(), OPTIONS, providers=["CPUExecutionProvider"])
    assert session.run(["w_grad"], {"x": x})[0].tolist() == [-12.0, 3.0]
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "SGDOptimizer"
    trained = TrainingSession(model, parameters)
    assert trained.run(["loss"], {"x": x, "Learning_Rate": [0.25]})[0].item() == -9.0
    assert trained.get_state()["w"].tolist() == [4.0, 0.25]


# -- operators that are not in the table ----------------------------------------------------------------------------


def classifier(*outputs: str) -> onnx.ModelProto:
    """As written for scikit-learn: ``probability``, and ``label``, which is looked up in texts."""
    text = """g (float[N,2] x) => (float[N,3] probability) {
        h = MatMul(x, w) s = Add(h, b) probability = Softmax(s)
        r = Mul(probability, calibration) i = ArgMax<axis = 1>(r)
        found = ml.ArrayFeatureExtractor(classes, i)
        flat = Constant<value = int64[1] {-1}>() label = Reshape(found, flat)
    }"""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17, "ml" : 3]> {text}')
    model.graph.node[5].domain = model.opset_import[1].domain = "ai.onnx.ml"
    stored = {"w": floats(2, 3), "b": floats(3, seed=1), "calibration": floats(3, seed=2)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in stored.items())
    model.graph.initializer.append(helper.make_tensor("classes", TensorProto.STRING, [3], [b"a", b"b", b"c"]))
    known = {"probability": model.graph.output[0], "label": helper.make_tensor_value_info("label", 8, ["N"])}
    values = [known[name] for name in outputs]
    del model.graph.output[:]
    model.graph.output.extend(values)
    onnx.checker.check_model(model)
    return model


def test_operators_that_no_output_needs_may_be_unknown() -> None:
    model, x = classifier("probability"), floats(5, 2)
    session = onnxruntime.InferenceSession(model.SerializeToString(), OPTIONS, providers=["CPUExecutionProvider"])
    module = to_torch(model)
    torch.testing.assert_close(
        module(torch.from_numpy(x))[0].detach(), torch.from_numpy(session.run(None, {"x": x})[0])
    )
    assert list(module.parameter_names) == ["w", "b"]
    builder = GradientGraphBuilder(model, {"probability"}, {"w"}, "")
    builder.build(verify=True)
    assert len(model.graph.node) == 8


def test_operators_that_no_result_of_a_branch_needs_may_be_unknown() -> None:
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]> g (float[2] x) => (float[2] y) {
        go = Constant<value = bool {1}>() k = Neg(x) y = If(go) <
            then_branch = t () => (float[2] p) { p = Exp(k) q = Unheard(p) r = Abs(q) },
            else_branch = e () => (float[2] s) { s = Neg(x) }
        >
    }""")
    x = torch.tensor([1.0, -2.0])
    torch.testing.assert_close(to_torch(model)(x)[0], (-x).exp())


def test_outputs_that_need_unknown_operators_are_named() -> None:
    message = (
        r"cannot be read as torch operations:\n  ai.onnx.ml.ArrayFeatureExtractor \(node 'found'\)\n"
        r"Only these outputs need them: 'label'. Take these out .* train it by the others: 'probability'\.$"
    )
    model = classifier("label", "probability")
    parameters = TrainingParameters()
    parameters.loss_output_name = "probability"
    for read in (
        lambda: to_torch(model),
        lambda: GradientGraphBuilder(model, {"probability"}, {"w"}, ""),
        lambda: TrainingSession(model, parameters),
    ):
        with pytest.raises(UnsupportedError, match=message):
            read()
    with pytest.raises(UnsupportedError, match=r"\(node 'found'\)$"):
        to_torch(classifier("label"))


def test_outputs_that_nobody_asked_for_are_left_out_where_they_cannot_be_read() -> None:
    model = classifier("label", "probability")
    found = load(model, {"probability"})
    assert [o.name for o in found.graph.output] == ["probability"]
    assert [n.op_type for n in found.graph.node] == ["MatMul", "Add", "Softmax"]
    assert trainable_initializers(found) == ["w", "b"]
    with pytest.raises(UnsupportedError, match="ArrayFeatureExtractor"):
        load(model, {"label"})
    # those that can be read stay
    model.graph.output.append(helper.make_tensor_value_info("s", TensorProto.FLOAT, ["N", 3]))
    assert [o.name for o in load(model, {"probability"}).graph.output] == ["probability", "s"]
    # and all, where none of those asked for is there: whoever asked says which there are
    assert [o.name for o in load(classifier("probability"), {"typo"}).graph.output] == ["probability"]


def test_artifacts_of_the_scores_of_a_classifier(tmp_path) -> None:
    """Its labels cannot be read, and are not asked for."""
    model = classifier("label", "probability")
    with pytest.raises(UnsupportedError, match="ArrayFeatureExtractor"):
        generate_artifacts(model, tmp_path, loss="MSELoss")
    generate_artifacts(model, tmp_path, loss="MSELoss", loss_input_names=["probability"])
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint.safetensors")
    module = Module(tmp_path / "train_step.onnx", state, tmp_path / "eval_step.onnx")
    x, target = np.ones((4, 2), np.float32), np.eye(4, 3, dtype=np.float32)
    (scores,) = to_torch(classifier("probability"))(torch.from_numpy(x))
    assert float(module(x, target)) == pytest.approx(F.mse_loss(scores, torch.from_numpy(target)).item(), rel=1e-6)
