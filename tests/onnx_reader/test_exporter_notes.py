"""What is trained of the files of torch.onnx.export(dynamo=True): parameters, in their own place or another."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import onnx
import onnx.version_converter
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import Tensor, nn

from lightning_ort import GradientGraphBuilder, UnsupportedError
from lightning_ort.onnx_reader import to_torch

pytest.importorskip("onnxscript")

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"


class Net(nn.Module):
    """A module of some tensors and layers, with ``function`` as its forward."""

    def __init__(self, function: Callable[..., Tensor], **members: Any) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            if isinstance(member, (nn.Parameter, nn.Module)):
                setattr(self, name, member)
            else:
                self.register_buffer(name, member)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(self, *inputs)


def parameter(*size: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(size))


def exported(module: nn.Module, *inputs: Tensor, dynamo: bool = True, **options: Any) -> onnx.ModelProto:
    """The file of ``module``, with random numbers for new biases and scales: exporters merge tensors that are equal."""
    module.eval()
    for p in module.parameters():
        if p.unique().numel() == 1:
            nn.init.normal_(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if dynamo:
            program = torch.onnx.export(module, inputs, dynamo=True, verbose=False, **options)
            assert program is not None
            return program.model_proto
        stream = io.BytesIO()
        torch.onnx.export(module, inputs, stream, dynamo=False, **options)
        return onnx.load_from_string(stream.getvalue())


def trained(model: onnx.ModelProto, **options: Any) -> set[str]:
    return set(to_torch(model, **options).parameter_names.values())


def check_gradients(module: nn.Module, model: onnx.ModelProto, *inputs: Tensor) -> None:
    """Each entry of a parameter is trained once, wherever it is: squares of gradients have the same sum."""
    reader = to_torch(model)
    module.zero_grad()
    (got,), expected = reader(*inputs), module(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    sums = []
    for result, one in ((got, reader), (expected, module)):
        result.square().mean().backward()
        sums.append(sum(p.grad.square().sum() for p in one.parameters() if p.grad is not None))
    torch.testing.assert_close(*sums, rtol=1e-3, atol=1e-6)


ROWS = torch.randn(2, 7, 6)
IMAGES = torch.randn(2, 3, 6, 6)


def fused(opset: int = 20) -> onnx.ModelProto:
    """A file of two convolutions that took in their batch norms, which leaves no marks, and of three constants."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False), nn.BatchNorm2d(2)
    )
    module = Net(lambda m, x: ((m.f(x) * 0.7).abs() + 0.5).pow(2.5).mean(), f=net)
    return exported(module, IMAGES, opset_version=opset)


@pytest.mark.parametrize("opset", [18, 21])
def test_constants_beside_nothing_but_fused_layers_are_not_trained(opset: int) -> None:
    assert trained(fused(opset)) == {"f.0.weight", "f.0.bias", "f.3.weight", "f.3.weight_bias"}


def test_a_signature_as_older_versions_wrote_it_is_read() -> None:
    specs = "".join(
        f"InputSpec(kind=<InputKind.PARAMETER: 2>, arg=TensorArgument(name='p'), target='f.{n}', persistent=None), "
        for n in ("0.weight", "0.bias", "3.weight")
    )
    model = fused()
    (entry,) = [p for p in model.graph.metadata_props if p.key == SIGNATURE]
    entry.value = f"ExportGraphSignature(input_specs=[{specs}], output_specs=[])"
    assert trained(model) == {"f.0.weight", "f.0.bias", "f.3.weight", "f.3.weight_bias"}


def test_a_buffer_that_took_in_a_batch_norm_is_refused() -> None:
    module = Net(
        lambda m, x: m.n(F.conv2d(m.c(x), m.blur)),
        c=nn.Conv2d(3, 3, 1),
        blur=torch.randn(2, 3, 3, 3),
        n=nn.BatchNorm2d(2),
    )
    model = exported(module, IMAGES)
    with pytest.raises(
        UnsupportedError, match=r"'blur' was computed .* from tensors of a layer that are not all param"
    ):
        to_torch(model)
    assert {"c.weight", "c.bias"} < trained(model, frozen=["blur", "blur_bias"])


@pytest.mark.parametrize(
    "name", ["temperature", "t", "std", "mean", "var", "norm", "logit", "val_1", "arange", "float_scale"]
)
def test_a_parameter_may_have_the_name_of_a_function_or_number(name: str) -> None:
    """It is refused under any name where it was computed with, and trained where it was only moved."""
    module = Net(lambda m, x: m.l(x) * getattr(m, name).exp(), l=nn.Linear(6, 6), **{name: parameter(6)})
    with pytest.raises(UnsupportedError, match=rf"computed by torch's exporter from {name}, and the file does not say"):
        to_torch(exported(module, ROWS))
    module = Net(lambda m, x: m.l(x) * getattr(m, name).view(1, 6), l=nn.Linear(6, 6), **{name: parameter(6)})
    check_gradients(module, exported(module, ROWS), ROWS)


def test_a_parameter_may_have_the_name_of_an_input() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x, self.linear = parameter(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.x.t()

    module = Named()
    check_gradients(module, exported(module, ROWS), ROWS)


def alibi(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    return torch.softmax(h @ h.transpose(1, 2) + m.alibi_bias[:7, :7], -1) @ x


BUFFERS = {
    "transposed": Net(lambda m, x: m.l(x) @ m.codebook.t(), l=nn.Linear(6, 5), codebook=torch.randn(4, 5)),
    "linear": Net(lambda m, x: F.linear(m.l(x), m.fixed), l=nn.Linear(6, 5), fixed=torch.randn(4, 5)),
    "named weight": Net(lambda m, x: m.l(x) * m.weight.view(1, 6), l=nn.Linear(6, 6), weight=torch.randn(6)),
    "sliced": Net(alibi, l=nn.Linear(6, 6), alibi_bias=torch.randn(16, 16)),
    "computed": Net(lambda m, x: m.l(x) * m.scale.exp(), l=nn.Linear(6, 6), scale=torch.randn(6)),
    "constants": Net(lambda m, x: F.linear(m.l(x), torch.ones(3, 6) / 9), l=nn.Linear(6, 6)),
}  # fmt: skip


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_and_constants_in_another_place_are_not_trained(kind: str) -> None:
    module = BUFFERS[kind]
    model = exported(module, ROWS)
    names = trained(model)
    assert "l.bias" in names
    assert len(names) == 2  # and the weight of the layer
    check_gradients(module, model, ROWS)


def test_a_kernel_made_of_constants_is_not_refused() -> None:
    module = Net(lambda m, x: F.conv2d(m.c(x), torch.ones(2, 3, 3, 3) / 9), c=nn.Conv2d(3, 3, 1))
    assert trained(exported(module, IMAGES)) == {"c.weight", "c.bias"}


def tied(m: Any, x: Tensor) -> Tensor:
    return F.linear(x @ m.w, m.w)


def shared(m: Any, x: Tensor) -> Tensor:
    return m.l(torch.relu(m.l(torch.cat([x] * 10, 2))))


COPIES = {
    "overlap": Net(lambda m, x: x[..., :3] @ m.w[:3] + x[..., 3:] @ m.w[1:], w=parameter(4, 6)),
    "tied": Net(tied, w=parameter(6, 6)),
    "shared": Net(shared, l=nn.Linear(60, 60)),  # a small one is one tensor
}  # fmt: skip


@pytest.mark.parametrize("kind", COPIES)
def test_several_initializers_of_one_parameter_are_refused(kind: str) -> None:
    """They would come apart; that all but one are left as they are is the user's choice."""
    model = exported(COPIES[kind], ROWS)
    with pytest.raises(UnsupportedError, match=r"were all computed .* come apart\. .*optimize=False") as refused:
        to_torch(model)
    first, second = str(refused.value).split("'")[1:4:2]
    assert {first, second} <= trained(model, frozen=[second])
    whole = exported(COPIES[kind], ROWS, optimize=False)
    check_gradients(COPIES[kind], whole, ROWS)


NO_PARAMETERS = {
    "twice": Net(lambda m, x: F.linear(x, torch.cat([m.weight, m.weight])), weight=parameter(4, 6)),
    "once and twice": Net(
        lambda m, x: F.linear(x, torch.cat([m.a_weight, m.b_weight, m.a_weight])),
        a_weight=parameter(2, 6), b_weight=parameter(3, 6),
    ),
    "with a buffer": Net(
        lambda m, x: x * torch.cat([m.q_bias, m.k_bias]), q_bias=parameter(3), k_bias=torch.zeros(3)
    ),
    "with zeros": Net(lambda m, x: x * torch.cat([m.bias, torch.zeros(3)]), bias=parameter(3)),
    "looked up twice": Net(lambda m, x: x @ m.e(torch.tensor([1, 1, 2, 3, 4, 5])).t(), e=nn.Embedding(9, 6)),
    "repeated": Net(lambda m, x: m.n(x), n=nn.InstanceNorm1d(7, affine=True, track_running_stats=True)),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_PARAMETERS)
def test_what_holds_more_than_each_entry_once_is_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=r"computed by torch's exporter from .*does not say whether"):
        to_torch(exported(NO_PARAMETERS[kind], ROWS))


TRAINED = {
    "linear": Net(lambda m, x: m.l(x), l=nn.Linear(6, 5)),
    "linear of rows": Net(lambda m, x: m.l(x[0]), l=nn.Linear(6, 5)),
    "attention": Net(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(6, 2, batch_first=True)),
    "attention of another": Net(lambda m, x: m.a(x, x * 2, x)[0], a=nn.MultiheadAttention(6, 2, kdim=6)),
    "lstm": Net(lambda m, x: m.r(x)[0], r=nn.LSTM(6, 4, 2, bidirectional=True)),
    "gru": Net(lambda m, x: m.r(x)[0], r=nn.GRU(6, 4)),
    "embedding": Net(lambda m, x: m.e(x[..., 0].abs().long()) + m.p(m.ids[:7]), e=nn.Embedding(9, 6),
                     p=nn.Embedding(9, 6), ids=torch.arange(9)),
    "layer": nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True),
    "norms": nn.Sequential(nn.GroupNorm(7, 7), nn.PReLU(7), nn.LayerNorm(6), nn.InstanceNorm1d(7, affine=True)),
    "bilinear": Net(lambda m, x: m.b(m.l(x), x.tanh()), l=nn.Linear(6, 6), b=nn.Bilinear(6, 6, 3)),
    "joined": Net(lambda m, x: F.linear(x, torch.cat([m.w, m.v])), w=parameter(4, 6), v=parameter(3, 6)),
}  # fmt: skip


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", TRAINED)
def test_weights_of_layers_are_trained_as_in_the_module(kind: str, dynamo: bool) -> None:
    if not dynamo and kind in ("bilinear", "layer"):
        pytest.skip("torch's older exporter does not write it")
    module = TRAINED[kind]
    check_gradients(module, exported(module, ROWS, dynamo=dynamo), ROWS)


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_convolution_with_its_batch_norm_is_trained(dynamo: bool) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    model = exported(module, IMAGES, dynamo=dynamo)
    assert {"3.weight", "3.bias"} < trained(model)
    assert len(trained(model)) == 4


def test_a_file_that_has_lost_the_notes_is_refused() -> None:
    """Constants look like weights there; nothing is guessed."""
    module = Net(lambda m, x: m.l(x) * 2.5, l=nn.Linear(6, 5))
    model = exported(module, ROWS)
    for lost in (onnx.version_converter.convert_version(model, 19), exported(module, ROWS, opset_version=17)):
        with pytest.raises(
            UnsupportedError, match=r"notes on the tensors .* no longer in the file.* opset 18 or later"
        ):
            to_torch(lost)
        weights = [i.name for i in lost.graph.initializer if numpy_helper.to_array(i).size > 1]
        torch.testing.assert_close(to_torch(lost, weights)(ROWS)[0], module(ROWS))
    del model.graph.metadata_props[:]  # the marks of single tensors alone tell of those that are not computed
    with pytest.raises(UnsupportedError, match=r"computed by torch's exporter from l\.weight, .* does not say"):
        to_torch(model)
    assert "l.bias" in trained(model, frozen=["val_0"])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inputs, self.outputs = nn.RMSNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.inputs(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.outputs(F.silu(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("opset", [22, 23, 24])
def test_attention_of_later_opsets_has_the_gradients_of_the_module(opset: int) -> None:
    module, x = Attention(), torch.randn(2, 5, 8)
    model = exported(module, x, opset_version=opset, optimize=False)
    assert {"Attention", "RMSNormalization"} <= {node.op_type for node in model.graph.node} or opset < 23
    weights = torch.randn(2, 5, 8)
    (weights * module(x)).sum().backward()
    parameters = dict(module.named_parameters())
    output = model.graph.output[0].name
    builder = GradientGraphBuilder(model, {output}, set(parameters), "")
    builder.build(verify=True)
    session = onnxruntime.InferenceSession(builder.get_model(), providers=["CPUExecutionProvider"])
    wanted = [f"{name}_grad" for name in parameters]
    found = session.run(wanted, {model.graph.input[0].name: x.numpy(), f"{output}_grad": weights.numpy()})
    for gradient, p in zip(found, parameters.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(gradient), p.grad, rtol=1e-4, atol=1e-5)
