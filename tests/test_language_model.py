"""The example that trains, saves, resumes and exports a transformer through ORTTrainer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import onnx
import onnx.numpy_helper
import pytest

pytestmark = pytest.mark.either_build

EXAMPLE = Path(__file__).parents[1] / "examples" / "language_model.py"


def test_example_runs_to_its_end(tmp_path):
    command = [sys.executable, str(EXAMPLE), "--steps", "40", "--folder", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=EXAMPLE.parents[1])
    assert run.returncode == 0, run.stderr
    assert "Resumed at step 20" in run.stdout and "logits are within" in run.stdout
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", run.stdout)]
    # a model that knows the frequencies of characters, but not what follows what, reaches 3.1
    assert len(losses) == 6 and losses[-1] < 3.0
    with h5py.File(tmp_path / "language_model.h5") as file:
        assert file["train_step_info/step"][()] == 20
        half_way = file["model/full_precision/positions"][()]
    # main() has compared the logits of the exported file with the module's; its weights are those of the last step
    stored = {t.name: t for t in onnx.load(tmp_path / "language_model.onnx").graph.initializer}
    (positions,) = [onnx.numpy_helper.to_array(t) for name, t in stored.items() if name.endswith("positions")]
    assert positions.shape == half_way.shape and not np.allclose(positions, half_way, atol=1e-3)
