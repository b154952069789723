"""One of several processes fails or is killed: the others end and name it, and the last checkpoint is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .test_data_parallel import launch

SCRIPT = Path(__file__).parent / "failing.py"


@pytest.mark.parametrize(
    ("how", "rank", "step"), [("kill", 1, 6), pytest.param("kill", 0, 9, marks=pytest.mark.stock_only), ("raise", 1, 5)]
)
def test_the_others_name_the_rank(how, rank, step, tmp_path):
    processes = launch(2, SCRIPT, how, str(rank), str(step), str(tmp_path), timeout=120)
    survivor, failed = processes[1 - rank], processes[rank]
    assert survivor.returncode == 1, survivor.stdout[-2000:]
    if how == "kill":
        assert failed.returncode == -9
        assert f"RankError: rank {rank} of 2 has ended without a word" in survivor.stdout
    else:
        assert "ValueError: row 7 of the data is empty" in failed.stdout
        assert f"RankError: rank {rank} of 2 has failed: ValueError: row 7 of the data is empty" in survivor.stdout
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 4 * (step // 4)
