"""Random arguments for every public door: each is refused by name, or accepted because it is as documented.

``python -m tests.fuzz.options --seconds 60`` draws until the time is over; ``--seed N --count 1`` repeats one draw.

A draw takes a door with valid arguments and gives one or two of them, or an option inside of them, another value. A
table says of each which values are valid. It fails where a valid value is refused or another one accepted, where the
error is of a kind that speaks of a slip in this package, does not name the argument or took too long, and where a
refused call has changed the module.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import io
import math
import numbers
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import lightning_ort
from lightning_ort import amp, ondevice, optim
from lightning_ort.compiler.backend import ORTBackend, backend
from lightning_ort.optim.config import _OptimizerConfig

CPU = "CPUExecutionProvider"
SECONDS = 30
"""how long a call may take"""

# -- which values are valid -------------------------------------------------------------------------------------------

Valid = Callable[[Any], bool]


def number(
    *, low: float = -math.inf, above: float = -math.inf, below: float = math.inf, infinite: bool = False
) -> Valid:
    def valid(value: Any) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, bool) or value != value:
            return False
        if abs(value) > 1e308 and not infinite:
            return False
        return value >= low and (value > above or above == -math.inf) and (value < below or below == math.inf)

    return valid


def tensor_or(check: Valid) -> Valid:
    return lambda v: check(v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v)


def whole(low: float = -math.inf, high: float = math.inf) -> Valid:
    return lambda v: isinstance(v, numbers.Integral) and not isinstance(v, bool) and low <= v <= high


def scale(*, infinite: bool = False) -> Valid:
    return lambda v: number(above=0, infinite=True)(v) and (infinite or v < 3.5e38)


def kind(*types: type) -> Valid:
    return lambda v: isinstance(v, types)


def one_of(*values: str) -> Valid:
    return lambda v: isinstance(v, str) and v in values


def optional(check: Valid) -> Valid:
    return lambda v: v is None or check(v)


def both(*checks: Valid) -> Valid:
    return lambda v: all(check(v) for check in checks)


def strings(v: Any) -> bool:
    return isinstance(v, (list, tuple, set, dict)) and all(isinstance(s, str) for s in v)


FLAG, REAL_FLOAT = kind(bool), both(kind(float), lambda v: v == v)
FINITE_FLOAT = both(kind(float), lambda v: math.isfinite(v))


def NEVER(v: Any) -> bool:  # noqa: N802  # a constant among the others
    return False


SESSION: dict[Any, Valid] = {
    "intra_op_num_threads": whole(0, 4096),
    "inter_op_num_threads": whole(0, 4096),
    "log_severity_level": whole(-1, 4),
    "enable_mem_pattern": FLAG,
    "logid": kind(str),
    "execution_mode": kind(onnxruntime.ExecutionMode),
    "session.intra_op.allow_spinning": lambda v: (
        isinstance(v, bool) or number()(v) or (isinstance(v, str) and len(v) < 999)
    ),
    "add_session_config_entry": NEVER,
    "__class__": NEVER,
    "no_such_attribute": NEVER,
    3: NEVER,
}
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    10**400,
    -(10**30),
    2**40,
    0.0,
    0.5,
    1.0,
    1.5,
    -0.5,
    1e-300,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "1",
    "nan",
    "cpu",
    "a\0b",
    "y" * 5000,
    b"x",
    [],
    [1],
    ["x"],
    [None],
    [[]],
    (),
    (0.9,),
    (0.5, 0.5),
    (0.5, math.nan),
    {},
    {"x": 1},
    {1: 2},
    {"x": None},
    {"x": {"y": math.nan}},
    set(),
    {"x"},
    object(),
    int,
    np.float32("nan"),
    np.float64(0.25),
    np.int64(3),
    np.array([1.0, 2.0]),
    np.bool_(True),
    torch.tensor(math.inf),
    torch.tensor([1.0, 2.0]),
    len,
    lambda: None,
    Ellipsis,
    onnxruntime.SessionOptions(),
    onnxruntime.ExecutionMode.ORT_PARALLEL,
    torch.device("cpu"),
    range(3),
    1 + 2j,
    Path("/nowhere/at/all.onnx"),
]

# -- the doors --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Door:
    """One callable.

    Attributes:
        call: with keyword arguments.
        base: valid ones, made anew for each draw.
        valid: of each argument, or path of keys inside of it, which values are.
        read: of an object and a name, what it has kept; ``NotImplemented`` where that does not show.
        costly: calls with valid arguments are left out.
        also: further words that name an argument in errors.
    """

    call: Callable[..., Any]
    base: Callable[[], dict[str, Any]]
    valid: dict[Any, Valid]
    read: Callable[[Any, str], Any] = lambda made, name: NotImplemented
    costly: bool = False
    also: tuple[str, ...] = ()
    unchanged: Callable[[dict[str, Any]], Any] = lambda arguments: None


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def attribute(made: Any, name: str) -> Any:
    return getattr(made, name, NotImplemented)


def trainer_arguments() -> dict[str, Any]:
    return {
        "model": Classifier(),
        "model_desc": {"inputs": [("x", ["b", 3]), ("y", ["b"])], "outputs": [("loss", [], True), ("p", ["b", 2])]},
        "optim_config": optim.AdamConfig(),
        "loss_fn": nn.CrossEntropyLoss(),
        "options": {"device": {"id": "cpu"}},
    }


def make_trainer(options: Any, **arguments: Any) -> Any:
    return lightning_ort.ORTTrainer(options=lightning_ort.ORTTrainerOptions(options), **arguments)


def weights(arguments: dict[str, Any]) -> Any:
    model = arguments["model"]
    return (
        {n: (p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()}
        if isinstance(model, nn.Module)
        else None
    )


def in_options(**sections: dict[str, Valid]) -> dict[Any, Valid]:
    return {("options", section, key): v for section, keys in sections.items() for key, v in keys.items()}


def of_session(name: str) -> dict[Any, Valid]:
    return {(name, key): valid for key, valid in SESSION.items()}


@functools.cache
def forward_file() -> bytes:
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            nn.Linear(3, 1),
            (torch.ones(2, 3),),
            stream,
            dynamo=False,
            input_names=["x"],
            output_names=["y"],
            dynamic_axes={"x": {0: "b"}, "y": {0: "b"}},
        )
    model = onnx.load_from_string(stream.getvalue())
    model.graph.node.append(onnx.helper.make_node("ReduceMean", ["y"], ["loss"], keepdims=0))
    model.graph.output.append(onnx.helper.make_tensor_value_info("loss", onnx.TensorProto.FLOAT, []))
    return model.SerializeToString()


@functools.cache
def artifacts() -> tuple[str, ondevice.Module, ondevice.Optimizer]:
    folder = tempfile.mkdtemp(prefix="options-")
    ondevice.generate_artifacts(
        Classifier(), folder, inputs=(torch.ones(2, 3), torch.tensor([0, 1])), loss="CrossEntropyLoss"
    )
    module = ondevice.Module(f"{folder}/train_step.onnx", state_of(folder))
    return folder, module, ondevice.Optimizer(f"{folder}/train_step.onnx", module)


def state_of(folder: str) -> ondevice.CheckpointState:
    return ondevice.CheckpointState.load_checkpoint(f"{folder}/checkpoint.safetensors")


def parameters() -> lightning_ort.TrainingParameters:
    found = lightning_ort.TrainingParameters()
    found.loss_output_name = "loss"
    found.training_optimizer_name = "AdamOptimizer"
    return found


def set_parameters(**values: Any) -> Any:
    found = lightning_ort.TrainingParameters()
    for name, value in values.items():
        setattr(found, name, value)
    return found


def train_with(floats: Any) -> Any:
    found = parameters()
    found.optimizer_attributes_map = floats
    return lightning_ort.TrainingSession(forward_file(), found)


def compiled(options: dict[str, Any]) -> Any:
    # Dynamo alone makes graphs that compute something; this one shows whether the options are taken
    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    graph, x = torch.fx.symbolic_trace(Same()), torch.ones(2)
    return backend(graph, [x], options=options)(x)


def rate(learning_rate: Any) -> Any:
    optimizer = artifacts()[2]
    optimizer.set_learning_rate(learning_rate)
    return optimizer.get_learning_rate()


def is_config(v: Any) -> bool:
    return isinstance(v, _OptimizerConfig)


ADAM = {
    "lr": number(low=0),
    "alpha": number(low=0, below=1),
    "beta": number(low=0, below=1),
    "lambda_coef": number(low=0),
    "epsilon": number(low=0),
    "max_norm_clip": number(above=0, infinite=True),
    "do_bias_correction": FLAG,
    "params": lambda v: v is None or (v == [] and isinstance(v, list)),
}
PROVIDERS: dict[Any, Valid] = {
    "providers": lambda v: v is None,
    "provider_options": lambda v: v is None or (isinstance(v, dict) and not v),
    ("provider_options", CPU): lambda v: isinstance(v, dict) and not v,
    ("provider_options", CPU, "x"): NEVER,
    ("provider_options", "Nowhere"): NEVER,
}
SCHEDULE = {"total_steps": whole(1, 2**53 - 1), "warmup": both(kind(float), number(low=0, below=1))}
OPTIONAL_SESSION = {
    "session_options": lambda v: (
        v is None or isinstance(v, onnxruntime.SessionOptions) or (isinstance(v, dict) and not v)
    )
}
PLACES = one_of("fastest", "onnxruntime")
EXECUTORS = one_of("fastest", "onnxruntime", "torch", "torch-channels-last")

DOORS: dict[str, Door] = {
    "AdamConfig": Door(
        optim.AdamConfig, dict, {**ADAM, "weight_decay_mode": kind(optim.AdamConfig.DecayMode)}, attribute
    ),
    "LambConfig": Door(
        optim.LambConfig,
        dict,
        {
            **ADAM,
            "ratio_min": both(REAL_FLOAT, lambda v: v < math.inf),
            "ratio_max": both(REAL_FLOAT, lambda v: v > -math.inf),
        },
        attribute,
    ),
    "SGDConfig": Door(
        optim.SGDConfig,
        dict,
        {"lr": number(low=0), "params": lambda v: isinstance(v, (list, tuple)) and len(v) == 0},
        attribute,
    ),
    "LossScaler": Door(
        amp.LossScaler, lambda: {"loss_scale": 2.0}, {"loss_scale": both(kind(float), scale())}, attribute
    ),
    "DynamicLossScaler": Door(
        amp.DynamicLossScaler,
        dict,
        {
            "automatic_update": FLAG,
            "loss_scale": scale(),
            "up_scale_window": whole(1),
            "min_loss_scale": scale(),
            "max_loss_scale": scale(infinite=True),
        },
        attribute,
    ),
    "ConstantWarmupLRScheduler": Door(optim.ConstantWarmupLRScheduler, lambda: {"total_steps": 5}, SCHEDULE, attribute),
    "CosineWarmupLRScheduler": Door(
        optim.CosineWarmupLRScheduler,
        lambda: {"total_steps": 5},
        {**SCHEDULE, "cycles": both(FINITE_FLOAT, lambda v: 0 < v < 1e100)},
        attribute,
    ),
    "PolyWarmupLRScheduler": Door(
        optim.PolyWarmupLRScheduler,
        lambda: {"total_steps": 5},
        {**SCHEDULE, "lr_end": both(FINITE_FLOAT, number(low=0)), "power": both(FINITE_FLOAT, number(low=0))},
        attribute,
    ),
    "AdamW": Door(
        optim.AdamW,
        lambda: {"params": [torch.ones(1)]},
        {
            "lr": tensor_or(number(low=0)),
            "eps": tensor_or(number(low=0)),
            "weight_decay": tensor_or(number(low=0)),
            "betas": lambda v: (
                isinstance(v, (tuple, list, range)) and len(v) == 2 and all(number(low=0, below=1)(b) for b in v)
            ),
            "bias_correction": FLAG,
            "decay_after": FLAG,
            "max_norm": number(above=0, infinite=True),
        },
        lambda made, name: made.param_groups[0].get(name, NotImplemented),
    ),
    "Lamb": Door(
        optim.Lamb,
        lambda: {"params": [torch.ones(1)]},
        {
            "lr": tensor_or(number(low=0)),
            "ratio_min": both(number(infinite=True), lambda v: v < math.inf),
            "ratio_max": both(number(infinite=True), lambda v: v > -math.inf),
        },
        lambda made, name: made.param_groups[0].get(name, NotImplemented),
    ),
    "ORTPrecision": Door(
        lightning_ort.ORTPrecision,
        lambda: {"precision": "16-mixed"},
        {"precision": NEVER, "scaler": lambda v: v is None, "log": FLAG},
    ),
    "ORTStrategy": Door(
        lightning_ort.ORTStrategy,
        lambda: {"providers": [CPU], "provider_options": {}, "session_options": {}},
        {
            **PROVIDERS,
            **OPTIONAL_SESSION,
            **of_session("session_options"),
            "placement": EXECUTORS,
            "on_unsupported": one_of("torch", "error"),
            "verify": FLAG,
            "print_report": FLAG,
            "optimizer": one_of("auto", "torch", "ort"),
            "accelerator": lambda v: v is None,
            "checkpoint_io": lambda v: v is None,
            "precision_plugin": lambda v: v is None,
        },
        lambda made, name: (
            getattr(made, f"_{name}", NotImplemented)
            if name in ("on_unsupported", "verify", "print_report")
            else NotImplemented
        ),
        also=("precision",),
    ),
    "parse_devices": Door(
        lightning_ort.ORTAccelerator.parse_devices,
        lambda: {"devices": 1},
        {"devices": lambda v: type(v) in (int, str) and str(v) in ("1", "-1")},
        costly=True,
    ),
    "ORTTrainerOptions": Door(
        lightning_ort.ORTTrainerOptions,
        lambda: {"options": {}},
        in_options(
            batch={"gradient_accumulation_steps": lambda v: isinstance(v, int) and v >= 1, "no_such": NEVER},
            device={"id": kind(str), "mem_limit": lambda v: isinstance(v, int) and v >= 0},
            mixed_precision={"enabled": FLAG, "loss_scaler": lambda v: v is None},
            utils={"frozen_weights": kind(list, tuple, range), "grad_norm_clip": FLAG},
            debug={"check_model_export": FLAG, "no_such": NEVER},
            _internal_use={"onnx_opset_version": lambda v: isinstance(v, int) and 12 <= v <= 14},
        )
        | {
            ("options", "session_options"): optional(kind(onnxruntime.SessionOptions)),
            ("options", "placement"): PLACES,
            ("options", "no_such"): NEVER,
            ("options", "lr_scheduler"): lambda v: v is None,
        },
    ),
    "ORTTrainer": Door(
        make_trainer,
        trainer_arguments,
        {
            "model": NEVER,
            "model_desc": NEVER,
            "optim_config": is_config,
            "loss_fn": NEVER,
            ("options", "utils", "frozen_weights"): lambda v: isinstance(v, (list, tuple, range)) and len(v) == 0,
            ("options", "provider_options", CPU): lambda v: v == {} and isinstance(v, dict),
            ("options", "provider_options", "Nowhere"): NEVER,
            ("options", "provider_options", CPU, "x"): NEVER,
            ("options", "device", "id"): one_of("cpu"),
            ("options", "device", "mem_limit"): lambda v: isinstance(v, int) and v == 0,
            ("options", "debug", "graph_save_paths", "model_with_gradient_graph_path"): lambda v: (
                isinstance(v, str) and len(v) < 999 and "\0" not in v
            ),
            ("options", "distributed", "world_size"): lambda v: isinstance(v, int) and v == 1,
            ("model_desc", "inputs"): NEVER,
            ("model_desc", "outputs"): NEVER,
            ("model_desc", "no_such"): NEVER,
        },
        unchanged=weights,
        also=("Nowhere", "model", "'x'"),
    ),
    "torch.compile": Door(
        compiled,
        lambda: {"options": {"providers": [CPU], "provider_options": {}, "session_options": {}}},
        {("options", *((k,) if isinstance(k, str) else k)): v for k, v in {**PROVIDERS, **OPTIONAL_SESSION}.items()}
        | {("options", *path): v for path, v in of_session("session_options").items()}
        | {
            ("options", "placement"): EXECUTORS,
            ("options", "on_unsupported"): one_of("torch", "error"),
            ("options", "verify"): FLAG,
            ("options", "no_such"): NEVER,
        },
    ),
    "ORTBackend": Door(
        ORTBackend,
        dict,
        {
            "config": NEVER,
            "on_unsupported": one_of("torch", "error"),
            "verify": FLAG,
            "scaling": lambda v: v is None,
            "on_graph": callable,
            "on_fallback": callable,
        },
        attribute,
    ),
    "TrainingParameters": Door(
        set_parameters,
        dict,
        {
            "gradient_accumulation_steps": whole(1),
            "loss_scale": number(low=0),
            "enable_grad_norm_clip": FLAG,
            "loss_output_name": kind(str),
            "weights_to_train": lambda v: isinstance(v, (set, frozenset, list, tuple)) and strings(v),
            "world_size": whole(1),
            "deepspeed_zero_stage": whole(0, 1),
            "optimizer_attributes_map": kind(dict),
            "no_such": NEVER,
        },
        attribute,
    ),
    "TrainingSession": Door(
        functools.partial(lightning_ort.TrainingSession, forward_file(), parameters()),
        lambda: {"providers": [CPU], "provider_options": {}, "sess_options": {}},
        {**PROVIDERS, "sess_options": OPTIONAL_SESSION["session_options"], **of_session("sess_options")},
        costly=True,
        also=("session_options",),
    ),
    "optimizer_attributes_map": Door(
        train_with,
        lambda: {"floats": {}},
        {
            ("floats", "weight"): kind(dict),
            ("floats", "weight", "alpha"): number(low=0, below=1),
            ("floats", "weight", "epsilon"): number(low=0),
            ("floats", "weight", "no_such"): NEVER,
            ("floats", "nowhere"): NEVER,
        },
        costly=True,
        also=("optimizer_attributes_map",),
    ),
    "GradientGraphBuilder": Door(
        lightning_ort.GradientGraphBuilder,
        lambda: {"model": forward_file(), "y_names": {"loss"}, "x_names": {"weight"}, "loss_name": "loss"},
        {
            "model": NEVER,
            "y_names": NEVER,
            "x_names": lambda v: isinstance(v, (list, tuple, set, dict)) and len(v) == 1 and "x" in v,
            "loss_name": one_of(""),
        },
        also=("ONNX file",),
    ),
    "OptimizerConfig": Door(
        ondevice.OptimizerConfig,
        dict,
        {
            "kind": NEVER,
            "lr": tensor_or(number(low=0)),
            "eps": tensor_or(number(low=0)),
            "weight_decay": tensor_or(number(low=0)),
            "betas": lambda v: isinstance(v, tuple) and len(v) == 2 and all(number(low=0, below=1)(b) for b in v),
            "bias_correction": FLAG,
            "clip_grad_norm": optional(tensor_or(number(above=0))),
            "decay": one_of("before", "after"),
            "no_such": NEVER,
        },
        attribute,
        also=("optimizer",),
    ),
    "Module": Door(
        ondevice.Module,
        lambda: {
            "train_model_uri": f"{artifacts()[0]}/train_step.onnx",
            "state": state_of(artifacts()[0]),
            "session_options": {},
        },
        {
            "train_model_uri": NEVER,
            "state": NEVER,
            "eval_model_uri": lambda v: v is None,
            "device": one_of("cpu"),
            **OPTIONAL_SESSION,
            **of_session("session_options"),
        },
        costly=True,
        also=("nowhere", "There is no", "artifact"),
    ),
    "set_learning_rate": Door(
        rate, lambda: {"learning_rate": 0.1}, {"learning_rate": tensor_or(number(low=0))}, lambda made, name: made
    ),
    "LinearLRScheduler": Door(
        ondevice.LinearLRScheduler,
        lambda: {"optimizer": artifacts()[2], "warmup_step_count": 0, "total_step_count": 10, "initial_lr": 0.1},
        {
            "optimizer": NEVER,
            "warmup_step_count": whole(0, 10),
            "total_step_count": whole(0),
            "initial_lr": number(low=0),
        },
    ),
    "generate_artifacts": Door(
        functools.partial(ondevice.generate_artifacts, Classifier()),
        lambda: {"inputs": (torch.ones(2, 3), torch.tensor([0, 1])), "loss": "CrossEntropyLoss"},
        {
            "flavour": NEVER,
            "prefix": kind(str),
            "verify": FLAG,
            "nominal_checkpoint": FLAG,
            "requires_grad": optional(strings),
            "clip_grad_norm": optional(number(above=0)),
            "optimizer": optional(NEVER),
            "ort_format": FLAG,
            "custom_op_library": lambda v: v is None,
            "no_such": NEVER,
        },
        costly=True,
    ),
    "ORTArtifacts": Door(
        lightning_ort.ORTArtifacts,
        dict,
        {
            "flavour": NEVER,
            "no_such": NEVER,
            "artifact_directory": lambda v: (
                v is None or (isinstance(v, (str, Path)) and str(v) not in ("",) and "\0" not in str(v))
            ),
        },
    ),
}

# -- one draw ---------------------------------------------------------------------------------------------------------

REFUSALS = (ValueError, TypeError, AssertionError, NotImplementedError, FileNotFoundError)
SLIPS = (KeyError, ZeroDivisionError, OverflowError, RecursionError, UnicodeError)


class Hang(BaseException):
    """A call took too long."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def put(arguments: dict[str, Any], path: Any, value: Any) -> None:
    keys = path if isinstance(path, tuple) else (path,)
    for key in keys[:-1]:
        inside = arguments.get(key)
        arguments[key] = dict(inside) if isinstance(inside, dict) else {}
        arguments = arguments[key]
    arguments[keys[-1]] = value


@dataclasses.dataclass
class Draw:
    """What a seed stands for."""

    seed: int

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.name = chance.choice(sorted(DOORS))
        self.door = DOORS[self.name]
        paths = sorted(self.door.valid, key=repr)
        chosen = chance.sample(paths, min(len(paths), chance.choice((1, 1, 1, 2))))
        # what is inside of a changed argument would be lost
        flat = [p if isinstance(p, tuple) else (p,) for p in chosen]
        self.changes = [
            (p, chance.choice(VALUES))
            for p, f in zip(chosen, flat, strict=True)
            if not any(f is not g and f[: len(g)] == g for g in flat)
        ]

    def __str__(self) -> str:
        shown = ", ".join(f"{path!r}: {str(value)[:60]!r} ({type(value).__name__})" for path, value in self.changes)
        return f"seed {self.seed}: {self.name} with {shown}"

    def run(self) -> str | None:
        """What is wrong; ``None`` if all is well."""
        wrong = [path for path, value in self.changes if not _safely(self.door.valid[path], value)]
        if self.door.costly and not wrong:
            return None
        arguments = self.door.base()
        for path, value in self.changes:
            put(arguments, path, value)
        before = self.door.unchanged(arguments)
        try:
            with limited(SECONDS), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
                warnings.simplefilter("ignore")
                made = self.door.call(**arguments)
        except Hang:
            return "took too long"
        except BaseException as error:
            return self._refused(error, wrong) or self._changed(arguments, before)
        if wrong:
            return f"accepted {', '.join(map(repr, wrong))}"
        return self._without_effect(made)

    def _refused(self, error: BaseException, wrong: list[Any]) -> str | None:
        told = f"{type(error).__name__}: {error}"
        refusal = isinstance(error, REFUSALS) or type(error).__name__ in (
            "MisconfigurationException",
            "UnsupportedError",
        )
        refusal = refusal or (isinstance(error, RuntimeError) and "frozen_weights" in str(error))
        own = isinstance(error, AttributeError) and "TrainingParameters has no property" in str(error)
        if isinstance(error, SLIPS) or not (refusal or own):
            return f"raised {told}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"
        if not wrong and len(self.changes) < 2:
            return f"refused what is valid: {told}"
        named = [str(part) for path, _ in self.changes for part in (path if isinstance(path, tuple) else (path,))]
        if not any(name in str(error) for name in (*named, *self.door.also)):
            return f"did not name the argument: {told}"
        return None

    def _changed(self, arguments: dict[str, Any], before: Any) -> str | None:
        after = self.door.unchanged(arguments)
        if before is None or after is None:
            return None
        same = all(torch.equal(before[n][0], p) and before[n][1] == trained for n, (p, trained) in after.items())
        return None if same else "was refused, but has changed the module"

    def _without_effect(self, made: Any) -> str | None:
        for path, value in self.changes:
            if isinstance(path, tuple) or isinstance(value, (dict, list, tuple, set)) or value is None:
                continue
            kept = self.door.read(made, path)
            if kept is not NotImplemented and not (kept is value or kept == value or math.isinf(kept)):
                return f"accepted {path}={value!r}, but has kept {kept!r}"
        return None


def _safely(valid: Valid, value: Any) -> bool:
    try:
        return bool(valid(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return False


def run(seeds: Any, *, until: float = math.inf) -> tuple[int, list[str]]:
    """How many draws were made, and what is wrong with some of them."""
    count, failures = 0, []
    for seed in seeds:
        if time.monotonic() > until:
            break
        draw = Draw(seed)
        problem = draw.run()
        count += 1
        if problem is not None:
            failures.append(f"{draw}\n  {problem}")
    return count, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first draw")
    parser.add_argument("--count", type=int, default=sys.maxsize)
    given = parser.parse_args()
    os.chdir(tempfile.mkdtemp(prefix="options-"))
    count, failures = run(range(given.seed, given.seed + given.count), until=time.monotonic() + given.seconds)
    print("\n".join(failures))
    print(f"{count} draws, {len(failures)} wrong")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
