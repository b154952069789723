"""All that has to run on a GPU to be believed: ``make test-gpu``. Skipped where there is none."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
from collections.abc import Callable

import modules
import networks
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from modules import curve, images, sentences, table
from orttrainer_models import ADAM, LAMB, SGD, batches, trainer
from parity import (
    MemoryLogger,
    assert_fit_parity,
    assert_in_ort,
    assert_same_outcome,
    assert_same_state,
    assert_same_tensors,
    fit,
    state_of,
    step_report,
    step_tensors,
)
from seeded_networks import Problem
from test_coverage_layers import BATCH, LAYERS, scalar
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_ort import ORTStrategy
from lightning_ort.cli import doctor
from lightning_ort.compiler import ORTBackend, first_run
from lightning_ort.runtime.config import RuntimeConfig

there = torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
if os.environ.get("LIGHTNING_ORT_TEST_GPU") and not there:
    raise RuntimeError(
        f"LIGHTNING_ORT_TEST_GPU asks for the tests on a GPU, but torch {torch.__version__} sees "
        f"{torch.cuda.device_count()} of them, and ONNX Runtime has {onnxruntime.get_available_providers()}."
    )
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not there, reason="needs a GPU that torch and ONNX Runtime reach")]

ON_GPU = {"accelerator": "cuda", "devices": 1}
# those whose dropout torch draws in kernels of its own, for which no graph can follow it
DROPOUT = ("attention, dropout", "lstm", "encoder layer", "encoder layer, norm first")


def test_the_provider_starts():
    findings = [f.text for f in doctor.diagnose()]
    assert "CUDAExecutionProvider works" in findings


@pytest.mark.parametrize("network", ["Classifier", "Regressor", "ConvNet", "TextClassifier"])
def test_fit_as_under_auto(network):
    loader = {"Classifier": table, "Regressor": curve, "ConvNet": images, "TextClassifier": sentences}[network]
    make = getattr(modules, network)
    make = (lambda: modules.Classifier(dropout=0.3)) if network == "Classifier" else make
    devices = set()

    class Seen(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            devices.update(p.device.type for p in module.parameters())

    _, ours = assert_fit_parity(make, loader, lambda: loader(48, seed=1) if loader is not sentences else loader(16),
                                tolerance=1e-3, callbacks=[Seen()], **ON_GPU)  # fmt: skip
    assert ours.trainer.strategy.root_device.type == "cuda"
    assert devices == {"cuda"}


@pytest.mark.parametrize("network", [networks.MLP, networks.ConvNet, networks.GPT])
def test_networks(network):
    eager, ours = (
        fit(network, lambda: networks.examples(network), strategy=s, max_steps=10, **ON_GPU) for s in ("auto", "ort")
    )
    assert_same_state(state_of(eager.module), state_of(ours.module), 1e-2)
    assert_in_ort(ours.trainer)
    assert not step_report(ours.trainer, "training_step").on_cpu


ALLOWED = {"64-true": 1e-9, "16-mixed": 2e-2, "bf16-mixed": 6e-2, "16-true": 5e-2, "bf16-true": 2e-1}
"""by which losses may be off, which start at 1.5: in 16 bits, single weights are as much noise as number"""


@pytest.mark.parametrize(("precision", "allowed"), ALLOWED.items(), ids=ALLOWED)
@pytest.mark.parametrize("network", ["Classifier", "ConvNet"])
def test_precision(network, precision, allowed):
    losses = []
    for strategy in ("auto", "ort"):
        flags = {"precision": precision, "max_steps": 10, "logger": MemoryLogger, **ON_GPU}
        loader = images if network == "ConvNet" else table
        run = fit(getattr(modules, network), loader, strategy=strategy, **flags)
        losses.append([row["train_loss"] for _, row in run.trainer.logger.rows if "train_loss" in row])
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], abs=allowed)
    assert_in_ort(run.trainer)
    if network == "ConvNet" and precision in ("16-mixed", "bf16-mixed"):
        assert step_report(run.trainer, "training_step").preferred


@contextlib.contextmanager
def drawing_as_a_graph():
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cudnn.enabled = before


@pytest.mark.parametrize("name", LAYERS)
@torch._dynamo.config.patch(allow_rnn=True)
def test_layers(name):
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        ours = make()
        x = torch.randn(BATCH, *shape)
    eager = copy.deepcopy(ours)
    for part in eager.modules():
        if isinstance(part, nn.RNNBase):  # of a copy, weights lie apart, of which cuDNN warns
            part.flatten_parameters()
    fallbacks: list = []
    step = torch.compile(lambda x: scalar(ours(x)), backend=ORTBackend(on_fallback=fallbacks.extend))

    def on_gpu(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.device("cuda"):
                return function(x)

        return run

    got = step_tensors(ours, on_gpu(step), x)
    with drawing_as_a_graph() if name in DROPOUT else contextlib.nullcontext():
        wanted = step_tensors(eager, on_gpu(lambda x: scalar(eager(x))), x)
    # torch's convolutions round to TF32 by default
    assert_same_tensors(got, wanted, relative=2e-3, of_all=1e-4)
    assert not fallbacks


# of the last step's graph, which is there while the next one is made on another stream
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_runs_stay_in_order_with_torch_on_any_stream():
    """Long work before each run and reads right after it: whoever does not wait computes with old numbers."""
    torch.manual_seed(0)
    layer = nn.Linear(1024, 1024).cuda()
    step = torch.compile(lambda x: layer(x).tanh().mean(0).sum(), backend=ORTBackend())
    eager = copy.deepcopy(layer)
    other = torch.cuda.Stream()
    big = torch.randn(4096, 4096, device="cuda") / 64
    step(torch.randn(256, 1024, device="cuda", requires_grad=True)).backward()
    torch.cuda.synchronize()
    for number in range(40):
        with torch.cuda.stream(other if number % 2 else torch.cuda.default_stream()):
            work = big
            for _ in range(8):
                work = work @ big
            x = work[:256, :1024].clone().requires_grad_()
            layer.weight.grad = eager.weight.grad = None
            got, wanted = step(x), eager(x).tanh().mean(0).sum()
            got.backward(), wanted.backward()
            difference = (layer.weight.grad - eager.weight.grad).abs().max()
            allowed = 1e-4 * eager.weight.grad.abs().max() + 1e-7
            assert difference <= allowed, number
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
        torch.cuda.synchronize()


def test_tensors_of_the_cpu_take_part():
    weights = torch.rand(8)

    def step(x, factor):
        return (x * factor * torch.tensor(0.5) + weights.to(x.device)).sum(), x.detach().cpu().max()

    x = torch.randn(4, 8, device="cuda", requires_grad=True)
    fallbacks: list = []
    compiled = torch.compile(step, backend=ORTBackend(on_fallback=fallbacks.extend))
    for factor in (2.0, 3.0, 4.0):
        for got, wanted in zip(compiled(x, factor), step(x, factor), strict=True):
            assert got.device == wanted.device
            torch.testing.assert_close(got, wanted)
    assert not fallbacks


def test_attention_with_dropout_trains_and_draws_by_seed():
    losses = []
    for _ in range(2):
        torch.manual_seed(3)
        torch._dynamo.reset()
        layer = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True).cuda()
        step = torch.compile(
            lambda x, layer=layer: layer(x, x, x, need_weights=False)[0].square().mean(), backend=ORTBackend()
        )
        x = torch.randn(4, 6, 16, device="cuda")
        found = [step(x) for _ in range(3)]
        losses.append(torch.stack(found).tolist())
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("network", [networks.MLP, networks.ConvNet, networks.GPT])
def test_the_fastest_trains_as_well(network, precision):
    """Who runs the graphs is found out by measuring, and whoever it is, the numbers are eager's."""
    losses = []
    for strategy in ("auto", "ort"):
        flags = {"precision": precision, "max_steps": 10, "logger": MemoryLogger, **ON_GPU}
        run = fit(network, lambda: networks.examples(network), strategy=strategy, **flags)
        losses.append([row["loss"] for _, row in run.trainer.logger.rows if "loss" in row])
    assert len(losses[0]) == 10
    assert losses[1] == pytest.approx(losses[0], abs=ALLOWED.get(precision, 1e-3))
    report = step_report(run.trainer, "training_step")
    assert report.each_graph and all("onnxruntime" in g.measured for g in report.each_graph)


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize("measure", [False, True])
@pytest.mark.parametrize("seed", range(1000, 1020))
def test_no_false_alarm(monkeypatch, seed, measure):
    """Random networks, with other weights and batches at each step, are as in eager, and not left to torch."""
    found, fallbacks = [], []
    right = first_run.find_mismatch
    monkeypatch.setattr(first_run, "find_mismatch", lambda *a, **k: found.append(right(*a, **k)) or found[-1])
    monkeypatch.setattr(first_run.FirstRun, "is_due", lambda self, executable: True)
    torch._dynamo.reset()
    problem = Problem(seed, "cuda")
    backend = ORTBackend(RuntimeConfig(measure=measure), on_fallback=fallbacks.extend)
    step = torch.compile(problem.step, backend=backend)
    for number in range(3):
        if number:
            problem.draw_again(number)
        step(*problem.batch).backward()
    # nothing is compared where eager is the fastest
    assert (found or measure) and set(found) <= {None}, problem.description
    assert not fallbacks, problem.description


@pytest.mark.parametrize("where", ["cuda", "cpu"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_losses_with_dimensions(shape, where):
    """Gradients of one element, which arrive on the device of the loss."""
    layer, x = nn.Linear(4, 3).cuda(), torch.randn(5, 4, device="cuda")
    eager = copy.deepcopy(layer)
    fallbacks: list = []
    for module, step in ((eager, lambda f: f), (layer, lambda f: torch.compile(f, backend=ORTBackend(
        on_fallback=fallbacks.extend)))):  # fmt: skip
        loss = step(lambda x, m=module: m(x).square().mean().reshape(shape).to(where))(x)
        loss.backward(torch.full(shape, 0.25, device=where))
    torch.testing.assert_close(layer.weight.grad, eager.weight.grad, rtol=1e-4, atol=1e-5)
    assert not fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_that_are_not_exact(dtype):
    x = torch.randn(6, 9, dtype=dtype, device="cuda")
    x[1], x[2], x[3, 3], x[4, 4] = torch.inf, -torch.inf, torch.nan, -torch.inf

    def step(x):
        y = x * 1
        return y.amax(1), y.amin(1), y.max(), y.softmax(-1), y.log_softmax(-1), y.logsumexp(-1), y.norm(torch.inf, 1)

    fallbacks: list = []
    found = torch.compile(step, backend=ORTBackend(on_fallback=fallbacks.extend))(x)
    bounds = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
    for got, wanted in zip(found, step(x), strict=True):
        torch.testing.assert_close(got, wanted, equal_nan=True, **bounds)
    assert not fallbacks


def test_sessions_end():
    """Operators whose kernels read memory of the host: it is there while they run, and given back before the end."""
    image = torch.randn(2, 3, 8, 8, device="cuda")

    def step(x):
        parts = [part * (i + 1) for i, part in enumerate(torch.split(x, [1, 2, 5], 2))] * 15
        padded = [F.pad(x, (1, 2, 3, 1), mode=mode) for mode in ("replicate", "circular", "reflect", "constant")]
        return torch.cat(parts, 2).sum() + torch.cat(padded, 1).square().sum()

    for _ in range(8):
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=ORTBackend())
        for _ in range(3):
            torch.testing.assert_close(compiled(image), step(image), rtol=1e-4, atol=1e-3)
        del compiled
        gc.collect()


@pytest.mark.parametrize("optimizer", ["ort", "torch"])
def test_updates(optimizer):
    eager = fit(modules.Regressor, curve, strategy="auto", max_steps=20, **ON_GPU)
    ours = fit(modules.Regressor, curve, strategy=ORTStrategy(optimizer=optimizer), max_steps=20, **ON_GPU)
    assert_same_state(state_of(eager.module), state_of(ours.module), 1e-3)
    assert any(r.in_ort for r in ours.trainer.strategy.report().optimizers) == (optimizer == "ort")


@pytest.mark.parametrize("placement", ["fastest", "onnxruntime"])
@pytest.mark.parametrize("config", [ADAM(lr=0.01), LAMB(lr=0.01), SGD(lr=0.1)], ids=["adam", "lamb", "sgd"])
@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_orttrainer_as_on_the_cpu(name, config, placement):
    results = []
    for device in ("cpu", "cuda"):
        found = trainer(config, name, device={"id": device}, placement=placement)
        losses = [float(found.train_step(*batch)[0]) for batch in batches(name, 6)]
        results.append((losses, found.state_dict()))
    (losses, state), (others, other_state) = results
    assert others == pytest.approx(losses, rel=1e-4)
    for key, value in state["model"]["full_precision"].items():
        assert abs(value - other_state["model"]["full_precision"][key]).max() <= 1e-3 * abs(value).max() + 1e-6, key


def test_checkpoints_go_to_the_cpu_and_back(tmp_path):
    def run(accelerator, epochs, name, path=None):
        callback = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        flags = {"accelerator": accelerator, "devices": 1, "enable_checkpointing": True, "callbacks": [callback]}
        return fit(modules.Regressor, curve, max_epochs=epochs, ckpt_path=path, **flags)

    run("cuda", 1, "first")
    whole = run("cpu", 3, "whole")
    there = run("cpu", 2, "second", tmp_path / "first" / "epoch=0.ckpt")
    back = run("cuda", 3, "third", tmp_path / "second" / "epoch=1.ckpt")

    assert there.trainer.global_step == 12
    assert back.trainer.strategy.root_device.type == "cuda"
    assert_same_state(state_of(whole.module), state_of(back.module), 1e-3)


def test_a_file_of_orttrainer_goes_to_the_cpu(tmp_path):
    data = batches(count=6)
    found = trainer(device={"id": "cuda"})
    for batch in data[:3]:
        found.train_step(*batch)
    found.save_checkpoint(str(tmp_path / "x.h5"))
    other = trainer()
    other.load_checkpoint(str(tmp_path / "x.h5"))
    for batch in data[3:]:
        assert float(other.train_step(*batch)[0]) == pytest.approx(float(found.train_step(*batch)[0]), rel=1e-4)


def test_export(tmp_path):
    run = fit(modules.ConvNet, images, max_steps=3, **ON_GPU)
    run.trainer.strategy.export(tmp_path / "x.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "x.onnx", providers=["CPUExecutionProvider"])
    x = next(iter(images()))[0]
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        wanted = run.module.cpu().eval()(x)
    torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu():
    flags = {"accelerator": "cuda", "devices": [1], "max_steps": 6}
    runs = [fit(modules.Regressor, curve, strategy=s, **flags) for s in ("auto", "ort")]
    assert runs[1].trainer.strategy.root_device == torch.device("cuda", 1)
    assert_same_outcome(*runs, 1e-3)
