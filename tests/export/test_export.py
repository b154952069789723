"""Modules as ONNX files for inference: what the files compute, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import CLASSES, FEATURES, Classifier, TextClassifier, sentences, table
from parity import assert_same_state, fit, make_trainer, quiet, state_of
from torch import nn

from lightning_ort import ExportError, MismatchError, ORTExport, export_onnx
from lightning_ort.export import export_trained
from lightning_ort.export.export import weights_from
from lightning_ort.files import onnx_models

SMALL = {"max_steps": 3, "limit_val_batches": 0}


def run(path: Path, **inputs: torch.Tensor) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return session.run(None, {name: x.numpy() for name, x in inputs.items()})


def of(forward, **members):
    """A module with one linear layer from 6 to 4 features and this ``forward``."""
    module = nn.Module()
    module.linear = nn.Linear(6, 4)
    for name, member in members.items():
        setattr(module, name, member)
    return type(
        "Module", (nn.Module,), {"forward": forward, "__init__": lambda s: s.__dict__.update(module.__dict__)}
    )()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.onnx"


@pytest.fixture
def sample():
    return torch.randn(5, 6)


# -- what the file computes ---------------------------------------------------------------------------------------


def test_file_computes_what_the_module_does_and_the_module_stays(path):
    module = Classifier(dropout=0.5)
    for x, _ in table():
        module(x)  # running statistics
    module.net[0].eval()
    before, x, random_state = state_of(module), torch.randn(1, FEATURES), torch.get_rng_state()

    exported = export_onnx(module, str(path), x, output_names=["logits"])

    assert module.training and module.net[3].training and not module.net[0].training
    assert_same_state(before, state_of(module), 0.0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert exported.path == path
    assert exported.inputs == {"x": ("batch", FEATURES)} and exported.outputs == {"logits": ("batch", CLASSES)}
    assert exported.checked == [{"batch": 1}, {"batch": 2}, {"batch": 3}] and 0 <= exported.difference < 1e-6
    assert repr(exported).startswith(
        f"<ExportedModel {path}: x [batch x {FEATURES}] to logits [batch x {CLASSES}], opset 20"
    )
    model = onnx.load(path)
    assert model.ir_version <= 10 and [(o.domain, o.version) for o in model.opset_import] == [("", 20)]
    assert "net.4.weight" in {t.name for t in model.graph.initializer}
    module.eval()
    for batch in (1, 4, 33):
        x = torch.randn(batch, FEATURES)
        np.testing.assert_allclose(run(path, x=x)[0], module(x).detach(), rtol=0, atol=1e-5)
    assert os.listdir(path.parent) == ["m.onnx"]


def test_sizes_by_request(path):
    module = TextClassifier().eval()
    exported = export_onnx(module, path, torch.randint(1, 20, (4, 7)), dynamic={"tokens": {0: "batch", 1: "length"}})
    assert exported.inputs == {"tokens": ("batch", "length")}
    assert {"batch": 4, "length": 1} in exported.checked and {"batch": 1, "length": 7} in exported.checked
    for shape in ((1, 1), (3, 30)):
        tokens = torch.randint(1, 20, shape)
        np.testing.assert_allclose(run(path, tokens=tokens)[0], module(tokens).detach(), rtol=0, atol=1e-5)


def test_names_of_listed_sizes_are_those_of_torch(path, sample):
    module = of(lambda s, x: s.linear(x))
    exported = export_onnx(module, path, sample, dynamic={"x": [0]})
    assert exported.inputs == {"x": ("x_dynamic_axes_1", 6)}
    other = torch.randn(7, 6)
    np.testing.assert_allclose(run(path, x=other)[0], module(other).detach(), rtol=0, atol=1e-5)


def test_fixed_sizes_by_request(path, sample):
    exported = export_onnx(of(lambda s, x: s.linear(x).view(5, 2, 2)), path, sample, dynamic={})
    assert exported.inputs == {"x": (5, 6)} and exported.outputs == {"output": (5, 2, 2)}
    assert exported.checked == [{}]


def test_nested_outputs_have_names(path, sample):
    def forward(s, x, *, pair):
        return {"logits": s.linear(x), "none": None, "more": (x.argmax(-1), [pair["a"], x])}

    pair = {"a": torch.arange(5), "unused": torch.zeros(5)}
    exported = export_onnx(of(forward), path, {"x": sample, "pair": pair})
    assert list(exported.inputs) == ["x", "a"]
    assert list(exported.outputs) == ["logits", "more_0", "more_1_0", "more_1_1"]
    logits, largest, a, x = run(path, x=sample, a=pair["a"])
    assert largest.tolist() == sample.argmax(-1).tolist() and a.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(x, sample) and logits.shape == (5, 4)


def test_given_names_and_opsets(path, sample):
    module = of(lambda s, x: {"x": x, "y": nn.functional.gelu(s.linear(x)).softmax(-1)})
    assert list(export_onnx(module, path, sample, opset=18).outputs) == ["x_out", "y"]
    assert onnx.load(path).opset_import[0].version == 18
    exported = export_onnx(module, path, sample, input_names=["in"], output_names=["same", "out"], opset=21)
    assert list(exported.inputs) == ["in"] and list(exported.outputs) == ["same", "out"]
    assert onnx.load(path).opset_import[0].version == 21


def test_a_method_with_a_batch(path):
    """predict_step gets a whole batch, and what it does not look at is no input."""
    module = Classifier()
    batch = next(iter(table()))
    exported = export_onnx(module, path, batch, method="predict_step")
    assert exported.inputs == {"batch_0": ("batch", FEATURES)}
    module.eval()
    np.testing.assert_allclose(run(path, batch_0=batch[0])[0], module(batch[0]).softmax(-1).detach(), atol=1e-6)


def test_a_forward_that_replaces_its_buffers(path):
    def forward(s, x):
        s.calls = s.calls + 1
        s.last = x.detach().mean(0)
        return s.linear(x)

    module = of(forward)
    module.register_buffer("calls", torch.zeros(()))
    module.register_buffer("last", None)
    before = module.calls
    export_onnx(module, path, torch.randn(5, 6))
    assert module.calls is before and before == 0 and module.last is None


def test_weights_of_a_module_with_further_state():
    class Counted(nn.Linear):
        steps = (1, [2])

        def get_extra_state(self):
            return self.steps

        def set_extra_state(self, state):
            self.steps = state

    module, other = Counted(2, 3), Counted(2, 3)
    other.steps = (7, [8])
    weight = module.weight.detach().clone()
    with weights_from(module, lambda: module.load_state_dict(other.state_dict())):
        assert torch.equal(module.weight, other.weight) and module.steps == (7, [8])
    assert torch.equal(module.weight, weight) and module.steps == (1, [2])


def test_in_inference_mode_a_forward_that_writes_to_its_buffers(path):
    def forward(s, x):
        s.calls += 1
        return s.linear(x)

    module = of(forward)
    module.register_buffer("calls", torch.zeros(()))
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert export_onnx(module, path, torch.randn(5, 6)).difference < 1e-6
    assert module.calls == 0


# -- types --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "largest"), [("float16", 2e-2), ("float64", 1e-13)])
def test_types_of_the_module(path, name, largest):
    dtype = getattr(torch, name)
    module = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 3), nn.Softmax(-1)).to(dtype)
    x = torch.randn(4, 6, dtype=dtype)
    export_onnx(module, path, x)
    (got,) = run(path, input=x)
    assert got.dtype == name
    np.testing.assert_allclose(got, module.eval()(x).detach(), rtol=0, atol=largest)


def test_numbers_of_python_in_a_float64_module(path):
    module = of(lambda s, x: s.linear(x) * 0.8).double()
    assert export_onnx(module, path, torch.randn(5, 6, dtype=torch.float64)).difference < 1e-7


def test_bfloat16_is_written_as_float32(path, sample):
    module = of(lambda s, x: s.linear(x)).bfloat16()
    weight, before = module.linear.weight, module.linear.weight.data_ptr()
    with pytest.raises(ExportError, match=r"'x' is of type torch.bfloat16.* Export with dtype='float32'"):
        export_onnx(module, path, sample.bfloat16())
    export_onnx(module, path, sample, dtype="float32")
    assert module.linear.weight is weight and weight.dtype == torch.bfloat16 and weight.data_ptr() == before
    expected = nn.functional.linear(sample, weight.float(), module.linear.bias.float())
    np.testing.assert_allclose(run(path, x=sample)[0], expected.detach(), rtol=0, atol=1e-6)


def test_what_the_cpu_has_no_kernel_for_is_refused(path, sample):
    def forward(s, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return s.linear(x).float()

    with pytest.raises(ExportError, match=r"ONNX Runtime 1\.\S+ does not load the exported model: .*dtype='float32'"):
        export_onnx(of(forward), path, sample)
    assert not os.listdir(path.parent)


# -- refusals -----------------------------------------------------------------------------------------------------


def test_what_differs_is_refused_and_the_old_file_stays(path, sample):
    path.write_text("old")
    with pytest.raises(MismatchError, match=r"gives another 'output' than the module at batch=5: largest difference"):
        export_onnx(of(lambda s, x: s.linear(x) + torch.rand_like(x[:, :4])), path, sample)
    assert os.listdir(path.parent) == ["m.onnx"] and path.read_text() == "old"


def by_values(s, x):
    return s.linear(x) if x.sum() > 0 else -s.linear(x)


def by_size(s, x):
    return s.linear(x) if x.shape[0] > 4 else -s.linear(x)


def convolved(s, x):
    return nn.functional.max_pool2d(s.conv(x), 2).flatten(1).mean(1)


def at_positions(s, x):
    return s.linear(x) + s.table[: x.shape[0]]


@pytest.mark.parametrize(
    ("module", "sample", "axes", "other"),
    [
        (of(convolved, conv=nn.Conv2d(3, 4, 3)), (2, 3, 12, 16), {0: "batch", 2: "h", 3: "w"}, (1, 3, 7, 23)),
        (of(at_positions, table=nn.Parameter(torch.randn(20, 4))), (5, 6), {0: "length"}, (19, 6)),
    ],
    ids=["convolution", "table"],
)
def test_sizes_that_the_module_limits(path, capfd, module, sample, axes, other):
    """torch proposes other limits for them than none, over many lines of its log."""
    export_onnx(module, path, torch.randn(sample), dynamic={"x": axes})
    x = torch.randn(other)
    np.testing.assert_allclose(run(path, x=x)[0], module(x).detach(), rtol=1e-4, atol=1e-5)
    assert not capfd.readouterr().err


def test_names_that_the_exporter_gives_too(path):
    module = nn.Sequential(nn.Linear(6, 3), nn.Sigmoid()).eval()
    x = torch.randn(4, 6)
    export_onnx(module, path, x, input_names=["sigmoid"], output_names=["linear"])
    np.testing.assert_allclose(run(path, sigmoid=x)[0], module(x).detach(), rtol=1e-5)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda s, x: s.linear(x).view(5, 2, 2), r"your code specialized it to be a constant \(5\)"),
        (by_size, r"Not all values of batch"),
        (lambda s, x: s.linear(x) * (1.0 if x.shape[0] <= 50 else 2.0), r"Not all values of batch"),
        (lambda s, x: s.linear(x) * (1.0 if x.shape[0] != 17 else 2.0), r"Not all values of batch"),
        (by_values, r"data-dependent.* Python that depends on the values"),
        (lambda s, x: s.linear.weight * 2, r"No output of Module.forward depends on its inputs \['x'\]"),
        (lambda s, x: s.linear(x) + torch.zeros(5, 4), r"constant \(5\)"),
    ],
    ids=["view", "size", "many", "one_size", "values", "constant", "added"],
)
def test_what_cannot_be_exported(path, sample, forward, message, capfd):
    with pytest.raises(ExportError, match=message):
        export_onnx(of(forward), path, sample)
    assert not os.listdir(path.parent)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("sample", "options", "error", "message"),
    [
        (None, {}, ValueError, r"Module.forward needs inputs to run it with. Pass sample="),
        (0, {"method": "predict"}, ValueError, r"method='predict': Module has no such method"),
        (0, {"dtype": "bfloat16"}, ValueError, r"dtype='bfloat16': expected 'float16', 'float32', 'float64'"),
        (0, {"opset": 17}, ValueError, r"opset=17: expected 18 to 21"),
        (0, {"tolerance": -1.0}, ValueError, r"tolerance=-1.0: expected a share"),
        (0, {"dynamic": {"y": {0: "batch"}}}, ValueError, r"the inputs \['y'\], but the inputs are \['x'\]"),
        (0, {"dynamic": {"x": {2: "n"}}}, ValueError, r"dynamic\['x'\] names dimension 2 of .* shape \(5, 6\)"),
        (0, {"dynamic": {"x": [2]}}, ValueError, r"dynamic\['x'\] names dimension 2 of .* shape \(5, 6\)"),
        (0, {"dynamic": ["x"]}, TypeError, r"dynamic=\['x'\] \(a list\): expected a mapping"),
        (0, {"dynamic": {"x": 0}}, TypeError, r"dynamic\['x'\]=0: expected dimensions with the names"),
        (0, {"dynamic": {"x": ["batch"]}}, TypeError, r"dynamic\['x'\]=\['batch'\] .*, or a list of dimensions"),
        (0, {"dynamic": {"x": {0: 3}}}, ValueError, r"dynamic\['x'\]\[0\] is 3: expected a name"),
        (0, {"dynamic": {"x": {0: "n", 1: "n"}}}, ValueError, r"two dimensions 'n', but one is 5 long"),
        (0, {"input_names": ["a", "b"]}, ValueError, r"input_names=\['a', 'b'\]: expected 1 names, which are \['x'\]"),
        (0, {"output_names": "y"}, ValueError, r"output_names='y': expected 1 names"),
        (0, {"output_names": ["x"]}, ValueError, r"\['x'\] are several tensors"),
        ((), {}, TypeError, r"sample: Module.forward\(x\) cannot be called with 0 positional arguments"),
        (({"a": 1},), {}, ValueError, r"sample: no tensor is among the arguments"),
        ({"y": torch.ones(2)}, {}, TypeError, r"cannot be called with 0 positional arguments and \['y'\] by name"),
    ],
)  # fmt: skip
def test_arguments_are_checked(path, sample, options, error, message):
    sample = torch.randn(5, 6) if sample == 0 else sample
    with pytest.raises(error, match=message):
        export_onnx(of(lambda s, x: s.linear(x)), path, sample, **options)
    assert not os.listdir(path.parent)


def test_results_that_are_no_tensors(path, sample):
    with pytest.raises(TypeError, match=r"Module.forward returns float, which an ONNX graph cannot give"):
        export_onnx(of(lambda s, x: (s.linear(x), 3.0)), path, sample)
    with pytest.raises(TypeError, match=r"Module.forward returns no tensor"):
        export_onnx(of(lambda s, x: None), path, sample)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)

    def forward(self, x):
        return self.encoder(x, mask=nn.Transformer.generate_square_subsequent_mask(5))


def test_an_encoder_with_a_mask(path):
    """Whose values torch would look at."""
    exported = export_onnx(Masked(), path, torch.randn(3, 5, 8))
    assert exported.inputs == {"x": ("batch", 5, 8)} and exported.difference < 1e-5


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)], ids=str)
def test_a_loss_with_label_smoothing(path, shape):
    class Loss(nn.Module):
        def forward(self, logits, labels):
            return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)

    logits = torch.randn(*shape[:1], 4, *shape[1:])
    assert export_onnx(Loss(), path, (logits, torch.randint(0, 4, shape)), dynamic={}).difference < 1e-5


LARGE = {
    "log sigmoid": F.logsigmoid,
    "binary cross entropy": lambda x: F.binary_cross_entropy_with_logits(x, (x < 0).float(), reduction="none"),
    "logaddexp": lambda x: torch.logaddexp(x, 2 * x),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_numbers(path, name):
    """No exponential overflows, and no logarithm is of zero."""
    x = torch.tensor([-100.0, -50.0, -20.0, 0.0, 25.0, 100.0])
    export_onnx(of(lambda s, x: LARGE[name](x)), path, torch.randn(6))
    (got,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(got), LARGE[name](x))


def test_a_module_for_one_size_only(path, sample):
    """An error of the module at any other size is no proof that the file is right there."""
    module = of(lambda s, x, y: s.linear(x) + y.sum())
    with pytest.raises((ExportError, RuntimeError), match="batch"):
        export_onnx(of(lambda s, x: s.linear(x) + s.b, b=torch.randn(5, 4)), path, sample)
    # y is as long as the batch by chance, and is said not to belong to it
    exported = export_onnx(module, path, (sample, torch.randn(5)), dynamic={"x": {0: "batch"}})
    assert exported.inputs == {"x": ("batch", 6), "y": (5,)}


def test_paths_are_checked(tmp_path, sample):
    module = of(lambda s, x: s.linear(x))
    with pytest.raises(FileNotFoundError, match=r"no/m.onnx': the folder .*no' does not exist"):
        export_onnx(module, tmp_path / "no" / "m.onnx", sample)
    with pytest.raises(IsADirectoryError, match=r"is a folder. Name a file"):
        export_onnx(module, tmp_path, sample)


# -- external data ------------------------------------------------------------------------------------------------


def test_external_data_is_replaced_with_its_model(path, sample, monkeypatch):
    module = of(lambda s, x: s.linear(x))
    export_onnx(module, path, sample, external_data=True)
    (data,) = {f for f in os.listdir(path.parent) if f != "m.onnx"}
    assert data.startswith("m.") and data.endswith(".data") and (path.parent / data).stat().st_size >= 6 * 4 * 4
    first = run(path, x=sample)[0]
    np.testing.assert_allclose(first, module(sample).detach(), atol=1e-6)

    # a failed export leaves both files
    with pytest.raises(MismatchError, match=r"tolerance 0 of the largest entry"):
        export_onnx(module, path, torch.randn(100, 6), external_data=True, tolerance=0.0)
    assert set(os.listdir(path.parent)) == {"m.onnx", data} and np.array_equal(run(path, x=sample)[0], first)

    with torch.no_grad():
        module.linear.weight.zero_()
    monkeypatch.setattr(onnx_models, "LARGEST_FILE", 50)  # the weights have 112 bytes
    with pytest.raises(ValueError, match=r"external_data=False, but the weights are .* GiB"):
        export_onnx(module, path, sample, external_data=False)
    export_onnx(module, path, sample)
    (second,) = {f for f in os.listdir(path.parent) if f != "m.onnx"}
    assert second != data
    np.testing.assert_allclose(run(path, x=sample)[0], module.linear.bias.detach().expand(5, 4), atol=1e-6)


# -- Trainers -----------------------------------------------------------------------------------------------------


class EachEpoch(Callback):
    """Exports from inside of the training, and of the validation, which runs in inference mode."""

    def __init__(self, path: Path) -> None:
        self.path, self.exported = path, []

    def on_train_epoch_start(self, trainer: Trainer, pl_module) -> None:
        self.exported.append(trainer.strategy.export(self.path))

    on_validation_epoch_end = on_train_epoch_start


def test_export_does_not_change_the_training(path):
    callback = EachEpoch(path)
    flags = {"max_steps": 6, "limit_val_batches": 1, "num_sanity_val_steps": 0, "strategy": "ort"}
    loader = lambda: table(shuffle=True)  # noqa: E731
    make = lambda: Classifier(dropout=0.5)  # noqa: E731
    expected = fit(make, loader, table, **flags)
    got = fit(make, loader, table, callbacks=callback, **flags)
    assert len(callback.exported) == 2
    assert_same_state(state_of(expected.module), state_of(got.module), 0.0)
    assert torch.equal(expected.rng, got.rng)
    # the last export was that of the end: part of a validation batch is the sample
    got.module.eval()
    x = torch.randn(7, FEATURES)
    np.testing.assert_allclose(run(path, x=x)[0], got.module(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("precision", ["16-true", "bf16-mixed"])
def test_precisions_of_the_trainer(path, precision):
    trained = fit(Classifier, table, strategy="auto", precision=precision, **SMALL)
    exported = export_trained(trained.trainer, path)
    assert exported.checked[0] == {"batch": 16}
    half = precision == "16-true"
    x = torch.randn(9, FEATURES, dtype=torch.float16 if half else torch.float32)
    (got,) = run(path, x=x)
    assert got.dtype == ("float16" if half else "float32")
    expected = trained.module.eval()(x)  # mixed precision has float32 weights, and the file computes in their type
    np.testing.assert_allclose(got, expected.detach(), rtol=0, atol=1e-2 if half else 1e-5)


def test_before_there_is_anything(path):
    from lightning_ort import ORTStrategy

    with pytest.raises(ValueError, match=r"The strategy has no module yet. Export after fit"):
        ORTStrategy().export(path)


def test_a_batch_that_says_nothing_of_forward(path):
    class Odd(TextClassifier):
        def forward(self, tokens, weights, other):
            return super().forward(tokens)

        def training_step(self, batch, batch_idx):
            return super().forward(batch[0]).sum()

    trained = fit(Odd, sentences, strategy="auto", **SMALL)
    with pytest.raises(ValueError, match=r"Odd.forward takes \['tokens', 'weights', 'other'\], and it is not clear"):
        export_trained(trained.trainer, path)
    with pytest.raises(ValueError, match=r"method='no'"):
        export_trained(trained.trainer, path, method="no")


class Worsens(Classifier):
    """Whose loss is logged as a number that grows from epoch to epoch."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.current_epoch))


def test_callback_exports_the_best_weights(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, "best", monitor="val_loss")
    best = ORTExport(tmp_path / "best.onnx", checkpoint="best", output_names=["logits"])
    flags = {"max_epochs": 2, "max_steps": -1, "enable_checkpointing": True}
    end = ORTExport(tmp_path / "end.onnx")
    trained = fit(Worsens, table, table, strategy="auto", callbacks=[best, end, checkpoint], **flags)
    assert list(best.exported.outputs) == ["logits"] and best.exported.path == tmp_path / "best.onnx"
    x, module = torch.randn(7, FEATURES), trained.module.eval()
    last = module(x).detach()  # the module has its own weights again
    np.testing.assert_allclose(run(tmp_path / "end.onnx", x=x)[0], last, rtol=0, atol=1e-5)
    got = run(tmp_path / "best.onnx", x=x)[0]
    assert np.abs(got - last.numpy()).max() > 1e-2
    saved = torch.load(checkpoint.best_model_path, weights_only=True)["state_dict"]
    module.load_state_dict(saved)
    np.testing.assert_allclose(got, module(x).detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "callbacks", "message"),
    [
        ({"checkpoint": "best"}, [], r"checkpoint='best': the Trainer has no ModelCheckpoint"),
        ({"checkpoint": "best"}, [ModelCheckpoint], r"checkpoint='best': the ModelCheckpoint has no monitor"),
        ({"path": "no/m.onnx"}, [], r"the folder 'no' does not exist"),
        ({"method": "infer"}, [], r"method='infer': Classifier has no such method"),
        ({"opset": 12}, [], r"opset=12"),
    ],
    ids=["no checkpoints", "no monitor", "folder", "method", "opset"],
)
def test_callback_refuses_before_the_training(tmp_path, arguments, callbacks, message):
    flags = {"enable_checkpointing": bool(callbacks), "default_root_dir": tmp_path}
    module = Classifier()
    before = state_of(module)
    trainer = make_trainer("auto", callbacks=[ORTExport(**arguments), *(c() for c in callbacks)], **flags)
    with quiet(), pytest.raises((ValueError, FileNotFoundError), match=message):
        trainer.fit(module, table())
    assert_same_state(before, state_of(module), 0.0)


def test_callback_without_a_path(tmp_path):
    fit(Classifier, table, strategy="auto", callbacks=ORTExport(), default_root_dir=tmp_path, fast_dev_run=True)
    assert not os.listdir(tmp_path)
    fit(Classifier, table, strategy="auto", callbacks=ORTExport(), default_root_dir=tmp_path, **SMALL)
    assert os.listdir(tmp_path) == ["model.onnx"]


def test_a_checkpoint_of_another_module(tmp_path):
    trained = fit(Classifier, table, strategy="auto", **SMALL)
    other = fit(lambda: Classifier(width=3), table, strategy="auto", **SMALL)
    other.trainer.save_checkpoint(tmp_path / "other.ckpt")
    before = state_of(trained.module)
    with pytest.raises(RuntimeError, match=r"size mismatch for net.0.weight"):
        export_trained(trained.trainer, tmp_path / "m.onnx", checkpoint=tmp_path / "other.ckpt")
    with pytest.raises(FileNotFoundError, match=r"no.ckpt"):
        export_trained(trained.trainer, tmp_path / "m.onnx", checkpoint="no.ckpt")
    assert_same_state(before, state_of(trained.module), 0.0)
    assert os.listdir(tmp_path) == ["other.ckpt"]


class Counted(nn.Module):
    """Asks for the length of a batch as Python does."""

    def __init__(self):
        super().__init__()
        self.start, self.mix = nn.Parameter(torch.randn(1, 1, 4)), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.mix(self.start.expand(len(x), -1, -1), x, x, need_weights=False)[0].squeeze(1)


def test_a_length_asked_for_by_len_stays_open(tmp_path):
    module = Counted().eval()
    export_onnx(module, tmp_path / "model.onnx", torch.randn(3, 5, 4))
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for batch in (1, 6):
        x = torch.randn(batch, 5, 4)
        (got,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), module(x).detach(), rtol=1e-5, atol=1e-6)
