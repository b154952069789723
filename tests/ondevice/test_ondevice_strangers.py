"""The examples that train portable artifacts without this package: in Python, and in JavaScript where it is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ondevice_models import config_of, opened, train
from orttrainer_models import Recording, batches, make
from safetensors.torch import save_file

from lightning_ort.ondevice import CheckpointState, Module, Optimizer, generate_artifacts

EXAMPLES = Path(__file__).parents[2] / "examples" / "ondevice"
ALONE = """
import runpy, sys
for name in ("torch", "lightning_ort", "onnx", "safetensors", "lightning"):
    sys.modules[name] = None  # importing it is an error
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Artifacts, their data, and the training that is expected of them."""
    directory = tmp_path_factory.mktemp("stranger")
    recording, data = Recording("enc_adam_lr1e-2"), batches("enc", 20)
    x, labels = data[0]
    generate_artifacts(
        make("enc"), directory, inputs={"x": x, "labels": labels}, loss="CrossEntropyLoss",
        optimizer=config_of(recording),
    )  # fmt: skip
    stacked = {"x": torch.stack([x for x, _ in data]), "labels": torch.stack([y for _, y in data])}
    save_file(stacked, directory / "data.safetensors")
    return directory, recording


def check(result, prepared, command, **environment):
    directory, recording = prepared
    arguments = [str(directory), str(directory / "data.safetensors"), "0.01", str(result)]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line) for line in done.stdout.split()]
    np.testing.assert_allclose(losses, recording.arrays["losses"], rtol=0, atol=2e-6)
    # what it wrote is a checkpoint, with which a training goes on as if it had been made here
    state = CheckpointState.load_checkpoint(result)
    for key, value in recording.arrays.items():
        if key.startswith("w/"):
            np.testing.assert_allclose(state.parameters[key[2:]].data, value, rtol=0, atol=5e-6 * np.abs(value).max())
    module = Module(directory / "train_step.onnx", state)
    optimizer = Optimizer(directory / "train_step.onnx", module)
    assert optimizer.step_count == 20
    _, own, own_optimizer = opened(directory)
    expected = train(own, own_optimizer, batches("enc", 24))[20:]
    np.testing.assert_allclose(train(module, optimizer, batches("enc", 24)[20:]), expected, rtol=0, atol=2e-6)


def test_python(prepared, tmp_path):
    example = EXAMPLES / "train.py"
    assert len(example.read_text().splitlines()) < 60
    check(tmp_path / "result", prepared, [sys.executable, "-c", ALONE, str(example)])


@pytest.mark.parametrize("package", ["onnxruntime-node", "onnxruntime-web"])
def test_javascript(package, prepared, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    found = subprocess.run([node, "-e", f"require.resolve('{package}')"], cwd=EXAMPLES, capture_output=True)
    if found.returncode:
        pytest.skip(f"{package} is not installed: run `npm install` in {EXAMPLES}")
    check(tmp_path / "result", prepared, [node, str(EXAMPLES / "train.js")], ORT=package)
