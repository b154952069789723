"""Checkpoint files of ONNX Runtime's on-device training, against files that it has written and what it reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from ondevice_wheel import DATA, WheelTraining, needs_wheel

from lightning_ort.checkpoints import ort_training as checkpoints
from lightning_ort.checkpoints.flatbuffer import decode, encode
from lightning_ort.checkpoints.ort_training import is_checkpoint, read_checkpoint, write_checkpoint
from lightning_ort.checkpoints.state import OptimizerState, TrainingState

FILES = sorted(str(p.relative_to(DATA)) for p in DATA.glob("*/*checkpoint*"))


def no_file() -> bytes:
    raise AssertionError("there is no external data")


@pytest.mark.parametrize("name", FILES)
def test_files_of_onnx_runtime_are_written_again_as_they_are(name):
    read = decode((DATA / name).read_bytes(), no_file)
    again = decode(encode(read), no_file)
    assert list(again.trained) == list(read.trained) and list(again.frozen) == list(read.frozen)
    for name_, tensor in (read.trained | read.frozen).items():
        assert torch.equal((again.trained | again.frozen)[name_], tensor)
    assert again.properties == read.properties and list(again.groups) == list(read.groups)
    for group, other in zip(again.groups.values(), read.groups.values(), strict=True):
        assert (group.step, group.learning_rate) == (other.step, other.learning_rate)
        assert all(torch.equal(t, other.moments[n][m]) for n, ms in group.moments.items() for m, t in ms.items())
    assert again.nominal == read.nominal == ("nominal" in name)


def test_what_onnx_runtime_has_written():
    state = read_checkpoint(DATA / "wheel_mlp" / "checkpoint_after")
    assert state.properties == {"epoch": 3, "rate": 0.5, "name": "hé"}
    assert state.trained == ("fc1.bias", "fc2.bias", "fc2.weight", "fc3.bias", "fc3.weight")
    assert {n: tuple(p.shape) for n, p in state.parameters.items()} == {
        "fc1.bias": (32,), "fc2.bias": (16,), "fc2.weight": (16, 32), "fc3.bias": (10,), "fc3.weight": (10, 16),
        "fc1.weight": (32, 20),
    }  # fmt: skip
    assert state.optimizer is not None
    assert (state.optimizer.kind, state.optimizer.step) == ("AdamW", 20)
    assert state.optimizer.learning_rate == np.float32(0.001)
    moments = state.optimizer.moments["fc2.weight"]
    assert list(moments) == ["moment_1", "moment_2"] and moments["moment_2"].min() >= 0
    assert moments["moment_1"].abs().max() > 0
    sgd = read_checkpoint(DATA / "wheel_cnn" / "checkpoint_after").optimizer
    assert sgd is not None and sgd.kind == "SGD" and sgd.step == 10 and sgd.moments["fc.weight"] == {}


def test_truncated_and_foreign_files(tmp_path):
    data = (DATA / "wheel_mlp" / "checkpoint_after").read_bytes()
    path = tmp_path / "cut"
    # the last bytes are padding
    for size in [0, 3, 4, 8, 9, *range(10, len(data) - 8, 211), len(data) - 9]:
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"Checkpoint '.*cut': (not a checkpoint|truncated or damaged|version)"):
            read_checkpoint(path)
    path.write_bytes(b"PK\x03\x04 something else entirely")
    assert not is_checkpoint(path)
    with pytest.raises(ValueError, match="not a checkpoint of ONNX Runtime's on-device training"):
        read_checkpoint(path)
    with pytest.raises(FileNotFoundError, match="There is no checkpoint file"):
        read_checkpoint(tmp_path / "none")
    damaged = 0
    for position in range(0, len(data), 97):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x5A]) + data[position + 1 :])
        try:
            read_checkpoint(path)
        except ValueError:
            damaged += 1
    assert damaged > 10  # and no other exception


def example() -> TrainingState:
    generator = torch.Generator().manual_seed(1)
    tensors = {"w": torch.randn(5, 7, generator=generator), "b": torch.randn(3, generator=generator)}
    tensors |= {"frozen": torch.randn(40, generator=generator), "scalar": torch.tensor(2.5)}
    buffers = {"mean": torch.randn(4, generator=generator), "count": torch.tensor(7)}
    moments = {n: {"moment_1": t + 1, "moment_2": t * t} for n, t in tensors.items() if n in ("w", "b")}
    optimizer = OptimizerState("Adam", 0.125, 9, moments)
    return TrainingState(tensors, ("w", "b"), buffers, {"epoch": -3, "loss": 0.25, "who": "ö"}, optimizer)


def assert_equal(a: TrainingState, b: TrainingState) -> None:
    assert list(a.tensors) == list(b.tensors) and a.trained == b.trained and a.properties == b.properties
    for name, tensor in a.tensors.items():
        assert tensor.dtype == b.tensors[name].dtype and torch.equal(tensor, b.tensors[name]), name
    assert (a.optimizer is None) == (b.optimizer is None)
    if a.optimizer is not None and b.optimizer is not None:
        left, right = a.optimizer, b.optimizer
        assert (left.kind, left.learning_rate, left.step) == (right.kind, right.learning_rate, right.step)
        assert left.moments.keys() == right.moments.keys()
        for name, moments in left.moments.items():
            assert all(torch.equal(t, right.moments[name][m]) for m, t in moments.items())


@pytest.mark.parametrize("external", [False, True], ids=["one file", "two files"])
def test_a_state_is_read_as_it_was_written(external, tmp_path, monkeypatch):
    if external:
        monkeypatch.setattr(checkpoints, "_EXTERNAL", 600)
    state, path = example(), tmp_path / "checkpoint"
    written = write_checkpoint(state, path, include_optimizer_state=True)
    assert written == ([path, tmp_path / "checkpoint.data"] if external else [path])
    assert sorted(tmp_path.iterdir()) == written
    assert_equal(read_checkpoint(path), state)
    if external:
        written[1].unlink()
        with pytest.raises(FileNotFoundError, match=r"there is no '.*checkpoint\.data'"):
            read_checkpoint(path)
        (tmp_path / "checkpoint.data").write_bytes(b"short")
        with pytest.raises(ValueError, match="truncated or damaged"):
            read_checkpoint(path)


def test_two_files_of_two_saves_are_refused(tmp_path, monkeypatch):
    """What a process leaves that dies between the two."""
    monkeypatch.setattr(checkpoints, "_EXTERNAL", 600)
    state, path, beside = example(), tmp_path / "checkpoint", tmp_path / "checkpoint.data"
    write_checkpoint(state, path, include_optimizer_state=True)
    old, old_beside = path.read_bytes(), beside.read_bytes()
    write_checkpoint(state, path, include_optimizer_state=True)
    path.write_bytes(old)
    with pytest.raises(ValueError, match=r"of another save than the parameters in 'checkpoint\.data'"):
        read_checkpoint(path)
    beside.write_bytes(old_beside)
    assert_equal(read_checkpoint(path), state)


def test_momentum_and_plain_descent(tmp_path):
    state = example()
    state.optimizer = OptimizerState("SGD", 0.5, 2, {n: {"momentum": state.parameters[n] + 1} for n in state.trained})
    write_checkpoint(state, tmp_path / "m", include_optimizer_state=True)
    assert_equal(read_checkpoint(tmp_path / "m"), state)
    state.optimizer = OptimizerState("SGD", 0.5, 2, {n: {} for n in state.trained})
    write_checkpoint(state, tmp_path / "m", include_optimizer_state=True)
    assert_equal(read_checkpoint(tmp_path / "m"), state)


def test_without_optimizer_state_the_learning_rate_stays(tmp_path):
    state = example()
    write_checkpoint(state, tmp_path / "c", include_optimizer_state=False)
    read = read_checkpoint(tmp_path / "c").optimizer
    assert read is not None and (read.kind, read.learning_rate, read.step, read.moments) == ("Adam", 0.125, 0, {})


def test_what_cannot_be_written(tmp_path):
    state = example()
    state.properties["lightning_ort.buffers"] = "mine"
    with pytest.raises(ValueError, match=r"Properties lightning_ort\.buffers are used by the format"):
        write_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    state = example()
    assert state.optimizer is not None
    del state.optimizer.moments["w"]["moment_2"]
    with pytest.raises(ValueError, match="lacks moments of 'w'"):
        write_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    assert list(tmp_path.iterdir()) == []


@needs_wheel
@pytest.mark.parametrize("external", [False, True], ids=["one file", "two files"])
def test_onnx_runtime_goes_on_from_what_was_written(external, tmp_path, monkeypatch):
    if external:
        monkeypatch.setattr(checkpoints, "_EXTERNAL", 9000)
    source = DATA / "wheel_mlp"
    state = read_checkpoint(source / "checkpoint_after")
    assert len(write_checkpoint(state, tmp_path / "c", include_optimizer_state=True)) == 1 + external
    theirs, ours = WheelTraining(source, source / "checkpoint_after"), WheelTraining(source, tmp_path / "c")
    assert ours.state.properties["name"] == "hé"
    x, y = np.random.default_rng(0).standard_normal((16, 20), dtype=np.float32), np.arange(16, dtype=np.int64) % 10
    assert [ours.step(x, y) for _ in range(3)] == [theirs.step(x, y) for _ in range(3)]
    for name, value in theirs.data().items():
        np.testing.assert_array_equal(ours.data()[name], value)
    ours.save(tmp_path / "again")
    again = read_checkpoint(tmp_path / "again").optimizer
    assert again is not None and again.step == 23 and again.kind == "AdamW"


@needs_wheel
def test_onnx_runtime_reads_a_nominal_checkpoint(tmp_path: Path):
    source = DATA / "wheel_mlp"
    state = read_checkpoint(source / "nominal_checkpoint")
    assert state.nominal and len(state.parameters) == 6
    write_checkpoint(state, tmp_path / "c", include_optimizer_state=True)
    complete = WheelTraining(source)
    nominal = WheelTraining(source, tmp_path / "c")
    flat = complete.module.get_contiguous_parameters(False)
    nominal.module.copy_buffer_to_parameters(flat, False)
    for name, value in complete.data().items():
        np.testing.assert_array_equal(nominal.data()[name], value)
