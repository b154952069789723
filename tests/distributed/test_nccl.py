"""Two processes that exchange what is on a GPU by NCCL, both on the same GPU: part of ``make test-gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from .ranks import launch
from .test_data_parallel import assert_close, assert_ranks_equal, weights

there = torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not there, reason="needs a GPU that torch and ONNX Runtime reach")]

HERE = Path(__file__).parent


def results(folder: Path, scenario: str) -> list[Any]:
    """What both ranks have found."""
    for rank, process in enumerate(launch(2, HERE / "worker.py", str(folder), scenario, timeout=120, on_gpu=True)):
        assert process.returncode == 0, f"rank {rank}: {process.stdout[-3000:]}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False)[scenario] for rank in range(2)]


# torch's convolutions round to TF32 by default; its kernels draw the dropout of attention themselves in float32
@pytest.mark.parametrize(
    ("scenario", "tolerance"),
    {
        "images": 1e-9, "images32": 5e-3, "text": 1e-9, "recurrent": 1e-9, "adversaries": 1e-9,
        "synced as torch": 1e-9, "combined": 1e-9, "centred": 1e-9,
    }.items(),
)  # fmt: skip
def test_weights(tmp_path, scenario, tolerance):
    ranks = results(tmp_path, scenario)
    assert_ranks_equal([rank["ort"] for rank in ranks])
    for rank in ranks:
        assert_close(rank["ort"], rank["eager"], tolerance)
        assert rank.get("graphs", 1) > 0


def test_communication_hooks(tmp_path):
    ranks = results(tmp_path, "hooks")
    for hook, near in {"float16": 5e-3, "bfloat16": 2e-2, "powersgd": None, "adasum": None, "local": None}.items():
        assert_ranks_equal([rank[hook] for rank in ranks])
        plain, hooked = ({n: x.double() for n, x in weights(ranks[0][name]).items()} for name in ("plain", hook))
        assert any(not torch.equal(hooked[name], x) for name, x in plain.items()), hook
        if near is not None:
            assert_close(hooked, plain, near)


def test_optimizer_states_in_parts(tmp_path):
    ranks = results(tmp_path, "sharded")
    assert_ranks_equal([rank["ort"] for rank in ranks])
    for rank in ranks:
        assert_close(rank["ort"], rank["eager"], 1e-9)
        assert_close(rank["images"], rank["whole images"], 1e-9)


def test_steps_are_left_out_by_both(tmp_path):
    first, second = results(tmp_path, "overflowing")
    assert first["scale"] == second["scale"]
    assert [skipped for _, skipped in first["scale"]] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert_ranks_equal([first["ort"], second["ort"]])
    assert all(x.isfinite().all() for x in weights(first["ort"]).values())


@pytest.mark.parametrize("case", ["plain", "zero"])
def test_orttrainer(tmp_path, case):
    """Half of the batches on each are whole ones on one."""
    ranks = results(tmp_path, f"orttrainer, {case}")
    assert_ranks_equal([rank["ort"] for rank in ranks])
    for rank in ranks:
        assert_close(rank["ort"], rank["eager"], 1e-9)
