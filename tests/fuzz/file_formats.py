"""The files that the project reads: how a sound one is made, and what reading it gives."""

from __future__ import annotations

import dataclasses
import functools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from lightning_ort import (
    GradientGraphBuilder,
    ORTCheckpointIO,
    ORTTrainer,
    ORTTrainerOptions,
    TrainingParameters,
    TrainingSession,
    optim,
)
from lightning_ort.checkpoints import ort_training as ort_checkpoint
from lightning_ort.checkpoints.lightning import RECORD
from lightning_ort.checkpoints.state import TrainingState
from lightning_ort.ondevice import CheckpointState, Module, Optimizer, OptimizerConfig, generate_artifacts
from lightning_ort.onnx_reader import to_torch

__all__ = ["FORMATS", "Format"]

DATA = Path(__file__).parents[1] / "data"
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 0, 1])


@dataclasses.dataclass(frozen=True)
class Format:
    """One kind of files.

    Attributes:
        make: writes them into a folder; of another seed, other numbers of the same shapes.
        read: reads them as users do, and gives numbers that all of what was read has a part in.
        protected: endings of files that have a checksum, or whose checksum another has: damage to these is an error, or
            harmless.
        weight: how often it is chosen; those that take long to read have less.
    """

    make: Callable[[Path, int], None]
    read: Callable[[Path], Any]
    protected: tuple[str, ...] = ()
    weight: int = 4


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def cross_entropy(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(prediction, label)


def trainer_of(seed: int) -> ORTTrainer:
    description = {
        "inputs": [("x", [4, 3]), ("label", [4])],
        "outputs": [("loss", [], True), ("prediction", [4, 2])],
    }
    return ORTTrainer(
        network(seed),
        description,
        optim.AdamConfig(lr=0.01),
        cross_entropy,
        ORTTrainerOptions({"device": {"id": "cpu"}}),
    )


@functools.cache
def shared_trainer() -> ORTTrainer:
    return trainer_of(0)


def load_into_trainer(path: Path) -> Any:
    """What is loaded; what is refused has changed nothing."""
    trainer = shared_trainer()
    before = trainer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of files without an optimizer
        try:
            user_dict = trainer.load_checkpoint(path)
        except Exception:
            after = trainer.state_dict()
            np.testing.assert_equal(after, before, "a file that was refused has changed the trainer")
            raise
    return [trainer.state_dict(), user_dict]


# -- ORTTrainer and Lightning -----------------------------------------------------------------------------------------


def make_trainer_file(folder: Path, seed: int) -> None:
    trainer = trainer_of(seed)
    trainer.save_checkpoint(folder / "t.h5", {"epoch": seed, "array": np.arange(3), "of": (1, [2.5, None])})


def make_unsealed(folder: Path, seed: int) -> None:
    """As the original writes them: the same layout, without a checksum."""
    make_trainer_file(folder, seed)
    with h5py.File(folder / "t.h5") as old, h5py.File(folder / "unsealed", "w") as new:
        for key in old:
            old.copy(key, new)
    (folder / "unsealed").replace(folder / "t.h5")


def make_original(folder: Path, seed: int) -> None:
    name = "adam_mlp_10_steps.h5" if seed == 0 else "adam_mlp_10_steps_model_only.h5"
    shutil.copy(DATA / "orttrainer" / name, folder / "o.h5")


def read_original(folder: Path) -> Any:
    return ORTCheckpointIO().load_checkpoint(folder / "o.h5").state


def make_lightning(folder: Path, seed: int) -> None:
    model = network(seed)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.from_numpy(X)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    content = {
        "epoch": 1,
        "global_step": 1,
        "pytorch-lightning_version": "2.5",
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        RECORD: {
            "version": 1,
            "shared": {},
            "optimizers": [{"class": "torch.optim.Adam", "kind": "AdamOptimizer", "problem": "", "names": names}],
            "train_step_info": {"step": 1, "optimization_step": 1},
            "batches_per_epoch": None,
            "loss_scaler": None,
        },
    }
    ORTCheckpointIO().save_checkpoint(content, folder / "l.ckpt")


def read_lightning(folder: Path) -> Any:
    found = ORTCheckpointIO().load_checkpoint(folder / "l.ckpt", weights_only=True)
    return [found["state_dict"], load_into_trainer(folder / "l.ckpt")]


# -- on a device ------------------------------------------------------------------------------------------------------


def make_artifacts(flavour: str, folder: Path, seed: int) -> None:
    config = OptimizerConfig("AdamW", lr=0.1, weight_decay=0.01)
    inputs = (torch.from_numpy(X), torch.from_numpy(Y))
    generate_artifacts(
        network(seed), folder, inputs=inputs, loss="CrossEntropyLoss", optimizer=config, flavour=flavour, verify=False
    )


def read_artifacts(names: tuple[str, str, str, str], folder: Path) -> Any:
    checkpoint, train, evaluation, optimizer = (folder / name for name in names)
    state = CheckpointState.load_checkpoint(checkpoint)
    module = Module(train, state, evaluation)
    update = Optimizer(optimizer, module)
    loss = module(X, Y)
    update.step()
    module.eval()
    return [loss, module(X, Y), {name: p.data for name, p in state.parameters}]


def make_two_files(folder: Path, seed: int) -> None:
    model = network(seed)
    state = TrainingState({n: p.detach() for n, p in model.named_parameters()}, ("0.weight", "2.weight"))
    limit, ort_checkpoint._EXTERNAL = ort_checkpoint._EXTERNAL, 16
    try:
        ort_checkpoint.write_checkpoint(state, folder / "checkpoint", include_optimizer_state=True)
    finally:
        ort_checkpoint._EXTERNAL = limit


def read_checkpoint(name: str, folder: Path) -> Any:
    state = CheckpointState.load_checkpoint(folder / name)
    return [{n: p.data for n, p in state.parameters}, dict(state.properties), state.training_state.trained]


def make_portable_checkpoint(folder: Path, seed: int) -> None:
    model = network(seed)
    state = CheckpointState(
        TrainingState({n: p.detach() for n, p in model.named_parameters()}, ("0.weight",), {}, {"k": seed, "s": "é"})
    )
    CheckpointState.save_checkpoint(state, folder / "c.safetensors", include_optimizer_state=True)


# -- ONNX -------------------------------------------------------------------------------------------------------------


def onnx_model(seed: int) -> onnx.ModelProto:
    """A network with a function, a loop and a constant that is computed."""
    draw = np.random.default_rng(seed)
    weights = {"w1": (3, 4), "b1": (4,), "w2": (4, 2)}
    stored = [numpy_helper.from_array(draw.standard_normal(s).astype(np.float32), n) for n, s in weights.items()]
    stored.append(numpy_helper.from_array(np.array([4, 2]), "shape"))
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_on"]),
            helper.make_node("Mul", ["h", "h"], ["square"]),
            helper.make_node("Add", ["h", "square"], ["h_out"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h", TensorProto.FLOAT, [4, 2]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("h_out", TensorProto.FLOAT, [4, 2]),
        ],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("mine", 1)]
    dense = helper.make_function(
        "mine", "Dense", ["a", "w"], ["c"], [helper.make_node("MatMul", ["a", "w"], ["c"])], opsets[:1]
    )
    nodes = [
        helper.make_node("Dense", ["x", "w1"], ["h1"], "first", domain="mine"),
        helper.make_node("Add", ["h1", "b1"], ["h2"], "bias"),
        helper.make_node("Tanh", ["h2"], ["h3"], "tanh"),
        helper.make_node("MatMul", ["h3", "w2"], ["h4"], "second"),
        helper.make_node("Constant", [], ["count"], value=numpy_helper.from_array(np.array(2))),
        helper.make_node("Loop", ["count", "", "h4"], ["h5"], "loop", body=body),
        helper.make_node("ConstantOfShape", ["shape"], ["ones"], value=numpy_helper.from_array(np.ones(1, np.float32))),
        helper.make_node("Mul", ["h5", "ones"], ["logits"], "scale"),
        helper.make_node("SoftmaxCrossEntropyLoss", ["logits", "label"], ["loss"], "loss", reduction="mean"),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 3]),
        helper.make_tensor_value_info("label", TensorProto.INT64, [4]),
    ]
    outputs = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=opsets, functions=[dense], ir_version=8)


def make_onnx(folder: Path, seed: int) -> None:
    onnx.save(onnx_model(seed), folder / "m.onnx")


def make_external(folder: Path, seed: int) -> None:
    model = onnx_model(seed)
    onnx.save(model, folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)


def read_module(folder: Path) -> Any:
    module = to_torch(folder / "m.onnx")
    # what is stored: a damaged shape may ask for more of one number than there is memory for, when it is run
    tensors = [t.detach() for t in [*module.parameters(), *module.buffers()]]
    stored = [t.untyped_storage().nbytes() // t.element_size() for t in tensors]
    return [(tuple(t.shape), t.as_strided((n,), (1,), 0).numpy()) for t, n in zip(tensors, stored, strict=True)]


def read_gradients(folder: Path) -> Any:
    builder = GradientGraphBuilder(folder / "m.onnx", {"loss"}, {"w1", "b1"}, "loss")
    builder.build()
    return len(builder.get_model())


def read_session(folder: Path) -> Any:
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", "SGDOptimizer"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = TrainingSession(folder / "m.onnx", parameters, options)
    feed = {"x": X, "label": Y, "Learning_Rate": np.array([0.1], np.float32)}
    return session.run(["loss"], feed)


PORTABLE = ("checkpoint.safetensors", "train_step.onnx", "eval_step.onnx", "train_step.onnx")
ORT_TRAINING = ("checkpoint", "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx")

FORMATS: dict[str, Format] = {
    "trainer": Format(make_trainer_file, lambda d: load_into_trainer(d / "t.h5"), (".h5",)),
    "unsealed": Format(make_unsealed, lambda d: load_into_trainer(d / "t.h5")),
    "original": Format(make_original, read_original),
    "lightning": Format(make_lightning, read_lightning, (".ckpt",)),
    "portable": Format(
        functools.partial(make_artifacts, "portable"),
        functools.partial(read_artifacts, PORTABLE),
        ("checkpoint.safetensors", ".onnx"),
        2,
    ),
    "portable_checkpoint": Format(
        make_portable_checkpoint, functools.partial(read_checkpoint, "c.safetensors"), (".safetensors",)
    ),
    "ort_training": Format(
        functools.partial(make_artifacts, "ort-training"),
        functools.partial(read_artifacts, ORT_TRAINING),
        ("checkpoint",),
        2,
    ),
    "two_files": Format(make_two_files, functools.partial(read_checkpoint, "checkpoint"), ("checkpoint", ".data")),
    "module": Format(make_onnx, read_module, (), 6),
    "external": Format(make_external, read_module),
    "gradients": Format(make_onnx, read_gradients, (), 1),
    "session": Format(make_external, read_session, (), 1),
}
"""Name to format."""
