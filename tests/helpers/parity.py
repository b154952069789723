"""Fit one module under ``strategy="auto"`` and ``"ort"`` and compare all that a Lightning user can see.

``LIGHTNING_ORT_TEST_STRATEGY`` replaces ``"ort"``, to check the tests themselves without ONNX Runtime:
``auto`` shows that they are deterministic, ``noisy`` that they are well conditioned (see :class:`NoisyEager`).
The assertions about the report are skipped then. ``LIGHTNING_ORT_TEST_ACCELERATOR=cuda`` fits on a GPU.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

STRATEGY = os.environ.get("LIGHTNING_ORT_TEST_STRATEGY", "ort")
ACCELERATOR = os.environ.get("LIGHTNING_ORT_TEST_ACCELERATOR", "cpu")
STEPS = 50
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}

if ACCELERATOR != "cpu":  # where torch rounds factors of convolutions to 10 bits
    torch.backends.cudnn.allow_tf32 = False

if STRATEGY == "ort":
    import lightning_ort  # noqa: F401 - registers the strategy

needs_ort = pytest.mark.skipif(STRATEGY != "ort", reason=f"checks ONNX Runtime, tests run with {STRATEGY}")


class MemoryLogger(Logger):
    """Keep every logged row, so that both fits can be compared step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "memory"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are not compared."""


class NoisyEager(SingleDeviceStrategy):
    """Eager with rounding noise in every gradient, as any other order of summation brings.

    A test that fails under it asks more than any second implementation can give. The usual case: Adam on a
    parameter whose gradient is zero in exact arithmetic (a bias before BatchNorm, the key bias of attention).
    """

    def __init__(self) -> None:
        super().__init__("cpu")
        self.generator = torch.Generator().manual_seed(0)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().backward(closure_loss, *args, **kwargs)
        for parameter in self.lightning_module.parameters():
            gradient = parameter.grad
            if gradient is None or gradient.numel() == 0:
                continue
            scale = torch.finfo(gradient.dtype).eps * (gradient.abs().max() + 1e-2)
            noise = torch.randn(gradient.shape, generator=self.generator, dtype=gradient.dtype)
            gradient.add_(scale * noise * (gradient != 0))
        return loss


if STRATEGY == "noisy":
    StrategyRegistry.register("noisy", NoisyEager)


@dataclass
class Run:
    """One finished fit: the module, its trainer, and the state the module started from."""

    module: LightningModule
    trainer: Trainer
    initial: dict[str, torch.Tensor]
    rng: torch.Tensor


def make_trainer(strategy: Any = STRATEGY, **flags: Any) -> Trainer:
    """A quiet CPU trainer of 50 optimizer steps. Flags given as functions are called: a fresh callback per fit."""
    settings: dict[str, Any] = {
        "accelerator": ACCELERATOR,
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "log_every_n_steps": 1,
    }
    if not {"max_epochs", "max_steps", "fast_dev_run", "max_time"} & flags.keys():
        settings["max_steps"] = STEPS
    settings.update({name: flag() if callable(flag) else flag for name, flag in flags.items()})
    with quiet():
        return Trainer(strategy=strategy, **settings)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's advice (few workers, no validation loader, ...); other warnings stay as pytest has them."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            warnings.filterwarnings("ignore", module="torchmetrics")
            warnings.filterwarnings("ignore", message=".*The `srun` command is available.*")
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*", category=UserWarning)
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        logger.setLevel(level)


def fit(
    make: Callable[[], LightningModule],
    train: Callable[[], Any] | None = None,
    val: Callable[[], Any] | None = None,
    *,
    strategy: Any = STRATEGY,
    seed: int = 1,
    ckpt_path: Any = None,
    datamodule: Callable[[], Any] | None = None,
    **flags: Any,
) -> Run:
    """Seed, build, fit. A reset of Dynamo makes each test independent of the tests before it."""
    torch._dynamo.reset()
    seed_everything(seed, verbose=False)
    module = make()
    initial = state_of(module)
    trainer = make_trainer(strategy, **flags)
    loaders = {"train_dataloaders": train and train(), "val_dataloaders": val and val()}
    with quiet():
        trainer.fit(module, **loaders, datamodule=datamodule and datamodule(), ckpt_path=ckpt_path)
    return Run(module, trainer, initial, torch.get_rng_state())


def assert_fit_parity(
    make: Callable[[], LightningModule],
    train: Callable[[], Any] | None = None,
    val: Callable[[], Any] | None = None,
    *,
    tolerance: float | None = None,
    still: Iterable[str] = (),
    in_ort: Iterable[str] | None = None,
    graphs: int | None = None,
    recompilations: int = 3,
    in_torch: Iterable[str] = (),
    **flags: Any,
) -> tuple[Run, Run]:
    """Fit under both strategies; compare weights, buffers, random stream, counters, metrics and logged rows.

    Args:
        make: builds the module (called after seeding, once per strategy).
        train: builds the training loader.
        val: builds the validation loader.
        tolerance: largest allowed difference relative to each tensor's largest entry, by default that of its dtype.
        still: prefixes of the parameters that are not meant to move.
        in_ort: step functions that must have run in ONNX Runtime; by default those that were given loaders.
        graphs: most graphs of the training step; evaluation, which may break at metric objects, may have twice as many.
        recompilations: most recompilations of each step function.
        in_torch: operators that this ONNX Runtime may lack.
        flags: for :func:`fit` and the Trainer.
    """
    eager = fit(make, train, val, strategy="auto", **flags)
    other = fit(make, train, val, strategy=STRATEGY, **flags)
    assert_moved(eager, still)
    assert_same_outcome(eager, other, tolerance)
    if in_ort is None:
        in_ort = ("training_step", "validation_step") if val else ("training_step",)
    for name in in_ort:
        most = graphs if graphs is None or name == "training_step" else 2 * graphs
        assert_in_ort(other.trainer, name, graphs=most, recompilations=recompilations, in_torch=in_torch)
    return eager, other


def assert_same_outcome(eager: Run, other: Run, tolerance: float | None = None) -> None:
    """Both runs ended with the same weights, buffers, random state, counters, metrics and logged rows."""
    for name in ("global_step", "current_epoch"):
        counts = getattr(eager.trainer, name), getattr(other.trainer, name)
        assert counts[0] == counts[1], f"{name} is {counts[1]}, not {counts[0]}"
    assert_same_state(state_of(eager.module), state_of(other.module), tolerance)
    assert torch.equal(other.rng, eager.rng), "the fits drew different amounts of random numbers"
    assert_same_metrics(eager.trainer.callback_metrics, other.trainer.callback_metrics)
    assert_same_metrics(eager.trainer.progress_bar_metrics, other.trainer.progress_bar_metrics)
    if isinstance(eager.trainer.logger, MemoryLogger):
        assert_same_rows(eager.trainer.logger.rows, other.trainer.logger.rows)


def state_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all parameters and buffers, the non-persistent ones too."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_same_state(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], tolerance: float | None = None
) -> None:
    """Same names and dtypes; floats within the tolerance of each tensor's largest entry, all else exactly."""
    assert list(actual) == list(expected), f"{list(actual)} instead of {list(expected)}"
    worst = {}
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        if tensor.is_floating_point() and tensor.numel():
            assert tensor.isfinite().all(), f"{name} is not finite under strategy='auto'"
            difference = (actual[name].double() - tensor.double()).abs().max().item()
            allowed = TOLERANCE[tensor.dtype] if tolerance is None else tolerance
            if not difference <= allowed * tensor.abs().max().item():
                worst[name] = difference / max(tensor.abs().max().item(), 1e-30)
        else:
            assert torch.equal(actual[name], tensor), f"{name} is {actual[name]} instead of {tensor}"
    assert not worst, f"differ, relative to the largest entry: {worst}"


def step_tensors(
    module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> dict[str, torch.Tensor | None]:
    """The loss that ``function`` computes by ``module``, all gradients, and the buffers afterwards."""
    torch.manual_seed(1)
    module.zero_grad()
    leaf = x.clone().requires_grad_()
    loss = function(leaf)
    loss.backward()
    tensors = {n: p.grad for n, p in module.named_parameters()} | dict(module.named_buffers())
    return tensors | {"loss": loss.detach(), "input": leaf.grad}


def assert_same_tensors(
    got: Mapping[str, torch.Tensor | None],
    wanted: Mapping[str, torch.Tensor | None],
    relative: float = 1e-4,
    of_all: float = 1e-6,
) -> None:
    """Equal within ``relative`` of the largest entry of each tensor, and ``of_all`` of the largest of all floats."""
    scale = max(t.abs().max() for t in wanted.values() if t is not None and t.is_floating_point())
    for key, tensor in wanted.items():
        found = got[key]
        assert (found is None) == (tensor is None), key
        if tensor is not None:
            assert (found - tensor).abs().max() <= relative * tensor.abs().max() + of_all * scale, key


def assert_moved(run: Run, still: Iterable[str] = ()) -> None:
    """Training changed every trainable parameter, except those under the prefixes in ``still``."""
    prefixes = tuple(still)
    for name, parameter in run.module.named_parameters():
        start = run.initial[name].to(parameter.dtype)
        moved = (parameter.detach() - start).abs().max().item() > 1e-3 * start.abs().max().item()
        expected = parameter.requires_grad and not name.startswith(prefixes)
        assert moved == expected, f"{name} {'moved' if moved else 'did not move'} under strategy='auto'"


def assert_same_metrics(expected: Mapping[str, Any], actual: Mapping[str, Any], relative: float = 1e-4) -> None:
    """Same names and the same numbers."""
    assert sorted(actual) == sorted(expected), f"logged {sorted(actual)} instead of {sorted(expected)}"
    for name, value in expected.items():
        one, other = float(value), float(actual[name])
        assert other == pytest.approx(one, rel=relative, abs=relative / 10, nan_ok=True), f"{name}: {other}, not {one}"


def assert_same_rows(
    expected: list[tuple[int | None, dict[str, float]]], actual: list[tuple[int | None, dict[str, float]]]
) -> None:
    """The same metrics were logged at the same steps."""
    assert expected, "nothing was logged under strategy='auto'"
    names, other_names = ([(step, sorted(row)) for step, row in rows] for rows in (expected, actual))
    for one, other in zip(names, other_names, strict=False):
        assert other == one, f"logged {other} instead of {one}"
    assert len(actual) == len(expected), f"logged {len(actual)} rows instead of {len(expected)}"
    for (step, row), (_, other) in zip(expected, actual, strict=True):
        for name, value in row.items():
            close = pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True)
            assert other[name] == close, f"{name} at step {step}: {other[name]}, not {value}"


def step_report(trainer: Trainer, name: str) -> Any:
    """The report's entry for one step function. The only place that knows the report's form."""
    return trainer.strategy.report()[name]


def assert_in_ort(
    trainer: Trainer,
    name: str = "training_step",
    *,
    graphs: int | None = None,
    recompilations: int = 3,
    in_torch: Iterable[str] = (),
) -> None:
    """The named step ran in ONNX Runtime.

    Args:
        trainer: a trainer that has run the step.
        name: the step function.
        graphs: most graphs it may have been compiled to.
        recompilations: most recompilations; one a step would be dozens.
        in_torch: beginnings of the names of operators that may have run in torch; by default none.
    """
    if STRATEGY != "ort":
        return
    step = step_report(trainer, name)
    assert step.graphs >= 1, f"{name} never ran in ONNX Runtime: {step}"
    elsewhere = [entry for entry in step.in_torch if not entry.what.startswith(tuple(in_torch))]
    assert not elsewhere, f"{name} in torch: {elsewhere}"
    assert len(step.recompilations) <= recompilations, f"{name} recompiled: {step.recompilations}"
    assert graphs is None or step.graphs <= graphs, f"{name} has {step.graphs} graphs, not {graphs}"
