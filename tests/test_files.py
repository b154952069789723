"""Files that are complete when they appear, and what is left of those that do not."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

from lightning_ort import export_onnx
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.files.writing import write_file, write_path
from lightning_ort.ondevice import CheckpointState, generate_artifacts

pytestmark = pytest.mark.stock_only

X = torch.linspace(-1, 1, 12).reshape(4, 3)


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_ort.export", "lightning_ort.ondevice.artifacts"])
    return context


def killed_at(call: int, function, *args, **kwargs) -> None:
    """``function``, whose process is killed just before it gives the ``call``-th file its name."""
    replace, calls = os.replace, 0

    def killing(old, new):
        nonlocal calls
        calls += not Path(new).parent.name.startswith(".saving-")  # onnx_ir renames within that folder
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(old, new)

    os.replace = killing
    function(*args, **kwargs)


def kill(context, call: int, function, *args) -> None:
    process = context.Process(target=killed_at, args=(call, function, *args))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def export(path: Path) -> None:
    export_onnx(network(), path, X, external_data=True)


def generate(folder: Path, flavour: str) -> None:
    inputs = (X, torch.zeros(4, dtype=torch.int64))
    generate_artifacts(network(), folder, inputs=inputs, loss="CrossEntropyLoss", flavour=flavour, verify=False)


def add(path: Path, number: float, external: bool) -> None:
    weight = ir.tensor(np.full(3, number, np.float32), name="w")
    x, w = ir.val("x", ir.DataType.FLOAT, [3]), ir.val("w", ir.DataType.FLOAT, [3], const_value=weight)
    node = ir.node("Add", [x, w])
    node.outputs[0].name = "y"
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 20}, name="g")
    save_onnx(ir.Model(graph, ir_version=10), path, external_data=external)


def added(path: Path) -> float:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return float(session.run(None, {"x": np.zeros(3, np.float32)})[0][2])


@pytest.mark.parametrize("call", [1, 2], ids=["before the weights have their name", "before the model has"])
def test_a_killed_writing_leaves_the_old_model_and_the_next_one_cleans_up(context, call, tmp_path):
    path = tmp_path / "m.onnx"
    add(path, 1.0, True)
    before = set(os.listdir(tmp_path))
    kill(context, call, add, path, 2.0, True)
    left = set(os.listdir(tmp_path)) - before
    assert len(left) == call and added(path) == 1.0
    # of another target, but in the same folder
    add(tmp_path / "n.onnx", 3.0, False)
    assert set(os.listdir(tmp_path)) == before | {"n.onnx"} and added(path) == 1.0
    add(path, 4.0, True)
    assert len(os.listdir(tmp_path)) == 3 and added(path) == 4.0 and added(tmp_path / "n.onnx") == 3.0


def test_killed_exports_and_artifacts_leave_nothing_for_ever(context, tmp_path):
    path = tmp_path / "m.onnx"
    kill(context, 2, export, path)
    assert len(os.listdir(tmp_path)) == 2 and not path.exists()
    export(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    np.testing.assert_allclose(got, network()(X).detach(), rtol=0, atol=1e-6)
    data, _ = sorted(os.listdir(tmp_path))
    assert re.fullmatch(r"m\.[0-9a-f]{8}\.data", data)

    for flavour, checkpoint in (("portable", "checkpoint.safetensors"), ("ort-training", "checkpoint")):
        folder, whole = tmp_path / flavour, tmp_path / f"{flavour}, not killed"
        generate(whole, flavour)
        for call in range(1, len(os.listdir(whole)) + 1, 3):
            kill(context, call, generate, folder, flavour)
            found = os.listdir(folder)
            assert len(found) == call and sum(name.startswith(".saving-") for name in found) == 1
        generate(folder, flavour)
        assert sorted(os.listdir(folder)) == sorted(os.listdir(whole))
        one, other = (CheckpointState.load_checkpoint(f / checkpoint).parameters for f in (folder, whole))
        assert len(one) == 4 and all(np.array_equal(p.data, other[name].data) for name, p in one)


def test_only_what_was_abandoned_is_removed(tmp_path):
    """What another save, still going on, has written so far stays; so does all that is not ours."""
    old = tmp_path / ".saving-0123abcd.tmp"
    old.mkdir()
    (old / "m.onnx").write_bytes(b"of a process that died")
    for name in ("m.0123abcd.data", "m.01234567.data", "mine.tmp", ".saving-mine.tmp"):
        (tmp_path / name).write_bytes(b"")
    with write_file(tmp_path / "a", replace=True) as first:
        first.write(b"first")
        assert not old.exists() and not (tmp_path / "m.0123abcd.data").exists()
        with write_path(tmp_path / "b", replace=False) as second:
            second.write_bytes(b"second")
        assert len(list(tmp_path.glob(".saving-????????.tmp"))) == 1
    assert sorted(os.listdir(tmp_path)) == [".saving-mine.tmp", "a", "b", "m.01234567.data", "mine.tmp"]
    assert (tmp_path / "a").read_bytes() == b"first" and (tmp_path / "b").read_bytes() == b"second"
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))
    with pytest.raises(FileExistsError, match="b exists"), write_path(tmp_path / "b", replace=False):
        pass
    with pytest.raises(FileNotFoundError, match=r"The folder of .*c does not exist"), write_path(tmp_path / "no" / "c"):
        pass
