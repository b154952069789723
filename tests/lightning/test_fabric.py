"""Fabric(strategy="ort"): the weights of Fabric(strategy="auto"), computed in ONNX Runtime."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lightning.fabric
import lightning_fabric
import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F
from lightning.fabric.plugins import MixedPrecision
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ort import CheckpointError, ORTFabricStrategy, UnsupportedError
from lightning_ort.compiler.dynamo import DYNAMO_SETTINGS

pytestmark = pytest.mark.stock_only

STEPS = 36
SINGLE, DOUBLE = 1e-4, 1e-9


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x):
        return self.layers(x)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.Linear(12, 5)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x.view(-1, 1, 3, 4))))
        return self.head(F.max_pool2d(x, 2).flatten(1))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.encoder(x.view(-1, 3, 4)).mean(1))


def dataset(rows: int = 64) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(rows, 12, generator=generator), torch.arange(rows) % 5)


def fabric_of(strategy: Any, package: Any = lightning.fabric, **arguments: Any) -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return package.Fabric(accelerator="cpu", devices=1, strategy=strategy, **arguments)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def batches(fabric: Any, size: int = 16) -> Iterator[Any]:
    loader = fabric.setup_dataloaders(DataLoader(dataset(), size, shuffle=True))
    return itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), STEPS)


def train(
    strategy: Any,
    make: Callable[[], nn.Module],
    *,
    accumulate: int = 1,
    clip: dict[str, float] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    size: int = 16,
    **arguments: Any,
) -> tuple[Any, Any, Any, list[float]]:
    """The loop of Fabric's documentation; returns the Fabric, the model, the optimizer, and the losses."""
    fabric = fabric_of(strategy, **arguments)
    module = make()
    model, optimizer = fabric.setup(module, optimizer(module))
    losses = []
    for i, (x, y) in enumerate(batches(fabric, size)):
        ends = i % accumulate == accumulate - 1
        with fabric.no_backward_sync(model, enabled=not ends):
            loss = F.cross_entropy(model(x), y) / accumulate
            fabric.backward(loss)
        losses.append(loss.item())
        if ends:
            if clip is not None:
                fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return fabric, model, optimizer, losses


def distance(got: Any, wanted: Any) -> float:
    """The largest difference of two state dictionaries, in units of the largest entry of each tensor."""
    assert got.keys() == wanted.keys()
    differences = []
    for name, x in wanted.items():
        assert got[name].dtype == x.dtype
        if x.is_floating_point():
            differences.append(float((got[name] - x).abs().max() / x.abs().max().clamp(min=1e-3)))
        else:
            assert torch.equal(got[name], x)
    return max(differences)


def assert_in_ort(fabric: Any, *names: str) -> None:
    report = fabric.strategy.report()
    assert set(names) <= set(report)
    for name in names:
        step = report[name]
        assert step.graphs > step.graphs_in_torch == 0, name
        assert not step.in_torch and not step.graph_breaks and not step.recompilations, report


def assert_parity(make: Callable[[], nn.Module], tolerance: float, **arguments: Any) -> Any:
    """Losses and weights are those of eager, and every graph ran in ONNX Runtime. Returns what `train` does."""
    _, wanted, _, losses = train("auto", make, **arguments)
    found = train("ort", make, **arguments)
    assert found[3] == pytest.approx(losses, rel=10 * tolerance)
    assert distance(found[1].state_dict(), wanted.state_dict()) <= tolerance
    assert losses[-1] < losses[0]
    assert_in_ort(found[0], f"{make.__name__}.forward")
    return found


@pytest.mark.parametrize("make", [Perceptron, Images, Transformer])
def test_single_precision(make):
    """The transformer draws the dropout of eager."""
    fabric, *_ = assert_parity(make, SINGLE)
    step = fabric.strategy.report()[f"{make.__name__}.forward"]
    assert (step.calls, step.graphs) == (STEPS, 2)  # outputs, and their gradients


@pytest.mark.parametrize("make", [Images, Transformer])
def test_double_precision(make):
    _, model, *_ = assert_parity(make, DOUBLE, precision="64-true")
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_accumulation_and_clipping():
    assert_parity(Perceptron, DOUBLE, precision="64-true", accumulate=3, clip={"max_norm": 0.1}, optimizer=adam)
    assert_parity(Perceptron, SINGLE, accumulate=2, clip={"clip_val": 0.01})


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def test_batches_of_two_sizes():
    """The last of an epoch is smaller: one more pair of graphs, for any size."""
    arguments = {"size": 24, "precision": "64-true"}
    _, wanted, *_ = train("auto", Perceptron, **arguments)
    fabric, model, *_ = train("ort", Perceptron, **arguments)
    assert distance(model.state_dict(), wanted.state_dict()) <= DOUBLE
    step = fabric.strategy.report()["Perceptron.forward"]
    assert step.graphs <= 4 and not step.in_torch


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_sixteen_bits(precision):
    """ONNX Runtime computes in float32 and rounds each result: as far from eager as eager is from another order."""
    _, wanted, _, losses = train("auto", Perceptron, precision=precision)
    fabric, model, _, found = train("ort", Perceptron, precision=precision)
    bits = torch.finfo(torch.float16 if precision.startswith("16") else torch.bfloat16).eps
    assert distance(model.state_dict(), wanted.state_dict()) <= 4 * bits
    assert found == pytest.approx(losses, abs=4 * bits)
    assert_in_ort(fabric, "Perceptron.forward")


def test_float16_with_loss_scaling():
    """Fabric scales the loss: what arrives at the module's outputs is scaled, and a step that overflows is left out."""

    def scaled(strategy: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=10)
        fabric = fabric_of(strategy, plugins=[MixedPrecision("16-mixed", device="cpu", scaler=scaler)])
        module = Perceptron()
        model, optimizer = fabric.setup(module, sgd(module))
        scales = []
        for x, y in batches(fabric):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return fabric, model, scales

    _, wanted, scales = scaled("auto")
    fabric, model, found = scaled("ort")
    assert found == scales and min(scales) < 2.0**24
    assert any(b > a for a, b in itertools.pairwise(scales))
    assert distance(model.state_dict(), wanted.state_dict()) <= 4 * torch.finfo(torch.float16).eps
    assert_in_ort(fabric, "Perceptron.forward")


@pytest.mark.parametrize(("first", "second"), [("auto", "ort"), ("ort", "auto"), ("ort", "ort")])
def test_checkpoints(first, second, tmp_path):
    """Saved under one and gone on with under the other: as if nothing had happened."""

    def steps(fabric: Any, model: Any, optimizer: Any, data: list[Any]) -> None:
        for x, y in data:
            fabric.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    def begin(strategy: Any) -> tuple[Any, dict[str, Any], list[Any]]:
        fabric = fabric_of(strategy, precision="64-true")
        module = Images()
        model, optimizer = fabric.setup(module, sgd(module))
        return fabric, {"model": model, "optimizer": optimizer, "epoch": 0}, list(batches(fabric))

    fabric, straight, data = begin("auto")
    steps(fabric, straight["model"], straight["optimizer"], data)
    fabric, state, _ = begin(first)
    steps(fabric, state["model"], state["optimizer"], data[: STEPS // 2])
    fabric.save(tmp_path / "half.ckpt", {**state, "epoch": 3})
    fabric, other, _ = begin(second)
    assert fabric.load(tmp_path / "half.ckpt", other) == {} and other["epoch"] == 3
    steps(fabric, other["model"], other["optimizer"], data[STEPS // 2 :])
    assert distance(other["model"].state_dict(), straight["model"].state_dict()) <= DOUBLE
    saved = torch.load(tmp_path / "half.ckpt")
    assert list(saved["model"]) == list(Images().state_dict())


def test_two_models_and_two_optimizers():
    """Adversaries, of which one is called three times in a step; updates by ONNX Runtime."""

    def play(strategy: Any) -> Any:
        fabric = fabric_of(strategy, precision="64-true")
        maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 12))
        judge = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        of_maker, of_judge = (torch.optim.Adam(m.parameters(), 0.003, betas=(0.5, 0.99)) for m in (maker, judge))
        maker, of_maker = fabric.setup(maker, of_maker)
        judge, of_judge = fabric.setup(judge, of_judge)
        for real, _ in batches(fabric):
            fake = maker(torch.randn(len(real), 4, dtype=torch.float64))
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            of_judge.zero_grad()
            fabric.backward(loss)
            of_judge.step()
            of_maker.zero_grad()
            fabric.backward(F.softplus(-judge(fake)).mean())
            of_maker.step()
        return fabric, {**maker.state_dict(prefix="maker."), **judge.state_dict(prefix="judge.")}

    _, wanted = play("auto")
    fabric, found = play(ORTFabricStrategy(optimizer="ort"))
    assert distance(found, wanted) <= DOUBLE
    report = fabric.strategy.report()
    assert [report[name].calls for name in ("Sequential.forward", "Sequential 2.forward")] == [STEPS, 3 * STEPS]
    assert all(not step.in_torch and step.graphs_in_torch == 0 < step.graphs for step in report.values())
    assert [(o.in_ort, o.in_torch) for o in report.optimizers] == [(STEPS, 0)] * 2


class TwoHeads(nn.Module):
    """The second result is computed from the first layer, and is no function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.critic = nn.Linear(12, 8), nn.Linear(8, 5), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.head(hidden), self.critic(hidden.detach())


def test_updates_between_backward_calls():
    def train(strategy: Any) -> Any:
        fabric = fabric_of(strategy)
        heads = TwoHeads()
        optimizers = sgd(nn.ModuleList([heads.body, heads.head])), sgd(heads.critic)
        model, *optimizers = fabric.setup(heads, *optimizers)
        for x, y in batches(fabric):
            classes, value = model(x)
            losses = F.cross_entropy(classes, y), (value - 1).square().mean()
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
        return fabric, model.state_dict()

    _, wanted = train("auto")
    fabric, found = train("ort")
    assert distance(found, wanted) <= SINGLE
    assert_in_ort(fabric, "TwoHeads.forward")


def frozen() -> nn.Module:
    module = Images()
    module.conv.requires_grad_(False)
    return module


def test_a_part_that_is_frozen():
    _, wanted, *_ = train("auto", frozen, precision="64-true")
    fabric, model, *_ = train("ort", frozen, precision="64-true")
    assert distance(model.state_dict(), wanted.state_dict()) <= DOUBLE
    assert torch.equal(model.conv.weight, wanted.conv.weight) and model.conv.weight.grad is None
    assert_in_ort(fabric, "Images.forward")


def test_evaluation():
    """Running statistics, no dropout, no gradients; training goes on afterwards."""

    def both(strategy: Any) -> Any:
        fabric, model, *_ = train(strategy, Images, precision="64-true")
        model.eval()
        x = dataset().tensors[0][:16]
        with torch.no_grad():
            results = [model(x)]
        with torch.inference_mode():
            results.append(model(x))
        model.train()
        results.append(model(x).detach())
        return fabric, results

    _, wanted = both("auto")
    fabric, found = both("ort")
    assert not found[0].requires_grad and found[1].is_inference()
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)  # Fabric hands out float32
    assert_in_ort(fabric, "Images.forward")  # and nothing was compiled again


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(12, 6), nn.Linear(6, 12)

    def forward(self, x):
        return self.decoder(torch.tanh(self.encoder(x)))

    def loss(self, x, *, power=2):
        return (self(x) - x).abs().pow(power).mean()

    def reset(self):
        return self.forward(torch.zeros(1, 12))


def test_marked_methods():
    """A method that Fabric calls in the place of forward is compiled, loss and all."""

    def train_by_method(strategy: Any) -> Any:
        fabric = fabric_of(strategy)
        module = Autoencoder()
        model, optimizer = fabric.setup(module, sgd(module))
        model.mark_forward_method("loss")
        for i, (x, _) in enumerate(batches(fabric)):
            fabric.backward(model.loss(x) if i % 2 else (model(x) - x).abs().pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
        return fabric, model, module

    _, wanted, _ = train_by_method("auto")
    fabric, model, module = train_by_method("ort")
    assert distance(model.state_dict(), wanted.state_dict()) <= SINGLE
    assert_in_ort(fabric, "Autoencoder.forward", "Autoencoder.loss")
    report = fabric.strategy.report()
    assert [report[f"Autoencoder.{name}"].calls for name in ("forward", "loss")] == [STEPS // 2] * 2
    assert report["Autoencoder.loss"].graphs == 1  # a loss and its gradients are one
    assert "forward" not in vars(module)
    with pytest.raises(RuntimeError, match=r"mark_forward_method\('reset'\)"):
        model.reset()


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Perceptron()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def test_steps_of_a_lightning_module():
    """Fabric knows the names of steps, and nobody has to mark them."""

    def loop(strategy: Any) -> Any:
        fabric = fabric_of(strategy)
        module = Lit()
        model, optimizer = fabric.setup(module, sgd(module))
        for i, batch in enumerate(batches(fabric)):
            fabric.backward(model.training_step(batch, 0 * i))
            optimizer.step()
            optimizer.zero_grad()
        return fabric, model

    _, wanted = loop("auto")
    fabric, model = loop("ort")
    assert distance(model.state_dict(), wanted.state_dict()) <= SINGLE
    assert_in_ort(fabric, "Lit.training_step")


def test_hooks_and_copies_and_calls_of_loss_backward():
    seen = []
    fabric = fabric_of("ort")
    module = Perceptron()
    module.register_forward_hook(lambda *_: seen.append("after"))
    module.register_forward_pre_hook(lambda *_: seen.append("before"))
    model = fabric.setup(module)
    x = dataset().tensors[0]
    model(x).sum().backward()  # as under "auto": nothing has to be scaled
    assert seen == ["before", "after"] and "forward" not in vars(module)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    expected = copy.deepcopy(other.module)(x)
    assert expected.abs().max().item() > 0.1
    torch.testing.assert_close(other(x), expected, rtol=SINGLE, atol=SINGLE)
    assert not model(x).any()


def test_modules_and_optimizers_are_let_go_of():
    """One Fabric may see many of them, as in a search or a cross-validation."""
    fabric = fabric_of(ORTFabricStrategy(optimizer="ort"))

    def one() -> list[weakref.ref[Any]]:
        module = Perceptron()
        optimizer = sgd(module)
        model, wrapped = fabric.setup(module, optimizer)
        fabric.backward(model(dataset().tensors[0]).sum())
        wrapped.step()
        return [weakref.ref(module), weakref.ref(optimizer)]

    references = one() + one()
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert list(fabric.strategy.report()) == ["Perceptron.forward", "Perceptron 2.forward"]


def test_what_was_compiled_by_hand_runs_in_onnx_runtime():
    fabric = fabric_of("ort")
    module = Perceptron()
    model = fabric.setup(torch.compile(module, backend="eager"))
    x = dataset().tensors[0]
    torch.testing.assert_close(model(x), module(x), rtol=SINGLE, atol=SINGLE)
    assert_in_ort(fabric, "Perceptron.forward")


def test_settings_of_torch_are_left_alone():
    """They are others while a module runs, and at no other time."""
    config, states = torch._dynamo.config, []

    class Watching(Perceptron):
        def forward(self, x):
            note()
            return super().forward(x)

    @torch.compiler.disable
    def note() -> None:
        states.append([getattr(config, name) for name in DYNAMO_SETTINGS])
        states.append(torch.backends.mha.get_fastpath_enabled())

    before = [getattr(config, name) for name in DYNAMO_SETTINGS]
    fabric = fabric_of("ort")
    model = fabric.setup(Watching())
    model(dataset().tensors[0])
    assert states == [list(DYNAMO_SETTINGS.values()), False]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.zeros(2, 3))
    assert [getattr(config, name) for name in DYNAMO_SETTINGS] == before != states[0]
    assert torch.backends.mha.get_fastpath_enabled()


def test_options_of_the_engine():
    class Sorts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(12))

        def forward(self, x):
            return torch.linalg.eigvalsh((x * self.weight).T @ x)

    strategy = ORTFabricStrategy(
        providers=["CPUExecutionProvider"], session_options={"intra_op_num_threads": 1}, placement="onnxruntime",
        on_unsupported="error", verify=False, optimizer="ort",
    )  # fmt: skip
    assert repr(strategy) == (
        "ORTFabricStrategy(providers=['CPUExecutionProvider'], session_options={'intra_op_num_threads': 1}, "
        "placement='onnxruntime', on_unsupported='error', verify=False, optimizer='ort')"
    )
    fabric = fabric_of(strategy)
    assert fabric.strategy is strategy
    model = fabric.setup(Sorts())
    with pytest.raises(UnsupportedError, match="eigh"):
        model(dataset().tensors[0])
    fabric = fabric_of(ORTFabricStrategy(placement="torch"))
    model = fabric.setup(Perceptron())
    model(dataset().tensors[0])
    step = fabric.strategy.report()["Perceptron.forward"]
    assert step.graphs == step.graphs_in_torch > 0


def test_an_optimizer_has_one_update():
    """Whichever strategy has it last makes it."""
    module = Perceptron()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    first, second = (fabric_of(ORTFabricStrategy(optimizer="ort")) for _ in range(2))
    first.setup_optimizers(optimizer)
    last = second.setup_optimizers(optimizer)
    before = copy.deepcopy(module.state_dict())
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    last.step()
    for name, x in module.state_dict().items():
        torch.testing.assert_close(x, before[name] - 1)
    assert [o.in_ort for f in (first, second) for o in f.strategy.report().optimizers] == [0, 1]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"provider": "CPU"}, TypeError, "ORTFabricStrategy has no argument 'provider'. Did you mean 'providers'"),
        ({"on_unsupported": "ignore"}, ValueError, "on_unsupported='ignore'"),
        ({"optimizer": "onnx"}, ValueError, "optimizer='onnx'"),
        ({"verify": 2}, TypeError, "verify=2"),
        ({"device": "nowhere"}, ValueError, "device='nowhere'"),
        ({"accelerator": "cpu"}, TypeError, "accelerator='cpu'"),
        ({"precision": "16-mixed"}, MisconfigurationException, r"precision='16-mixed' \(str\)"),
    ],
)
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        ORTFabricStrategy(**options)


class Foreign(MixedPrecision):
    """Of a library that nobody here knows."""


def test_other_refusals(tmp_path):
    with pytest.raises(MisconfigurationException, match=r"Fabric was given precision='bf16-mixed' \(Foreign\)"):
        fabric_of("ort", plugins=[Foreign("bf16-mixed", device="cpu")])
    with pytest.raises(MisconfigurationException, match=r"device='cpu'.*2 devices"):
        lightning.fabric.Fabric(accelerator="cpu", devices=2, strategy=ORTFabricStrategy(device="cpu"))
    (tmp_path / "no.ckpt").write_bytes(b"nothing of that kind")
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        fabric_of("ort").load(tmp_path / "no.ckpt")


def test_the_other_package():
    """The same class, for ``lightning_fabric``; an object may be given to either."""
    _, wanted, *_ = train("auto", Perceptron)
    for strategy in ("ort", ORTFabricStrategy()):
        fabric, model, *_ = train(strategy, Perceptron, package=lightning_fabric)
        assert isinstance(fabric.strategy, lightning_fabric.strategies.SingleDeviceStrategy)
        assert isinstance(fabric.strategy, ORTFabricStrategy)
        assert distance(model.state_dict(), wanted.state_dict()) <= SINGLE
        assert_in_ort(fabric, "Perceptron.forward")
