"""One of several processes fails or is killed: the others end and name it, and the last checkpoint is whole."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ort import RankError
from lightning_ort.distributed import rendezvous
from lightning_ort.distributed.rendezvous import fresh_part

from .kills import Fit, kill

pytestmark = pytest.mark.either_build  # how processes end is the same beside any ONNX Runtime

SCRIPT = Path(__file__).parent / "failing.py"


@pytest.mark.parametrize(
    ("how", "rank", "step"), [("kill", 0, 9), ("raise", 1, 5), ("gloo", 1, 5), ("leave", 1, 5), ("interrupt", 0, 5)]
)
def test_the_others_name_the_rank(how, rank, step, tmp_path):
    command = [str(SCRIPT), how, str(rank), str(step), str(tmp_path)]
    fit = Fit(tmp_path, 2, "torchrun", command, forked=how != "raise")
    try:
        assert fit.ended(120)
    finally:
        fit.close()
    codes, written = fit.codes(), fit.outputs()
    survivor, failed = written[1 - rank], written[rank]
    assert codes[1 - rank] == 1, survivor[-2000:]
    if how == "kill":
        assert codes[rank] == -9
        assert f"RankError: rank {rank} of 2 has ended without a word" in survivor
    elif how in ("leave", "interrupt"):
        words = "has left its program (SystemExit: 3)" if how == "leave" else "was interrupted (KeyboardInterrupt)"
        assert f"RankError: rank {rank} of 2 {words}" in survivor
    else:
        words = "ValueError: row 7 of the data is empty" if how == "raise" else "RuntimeError: my own words about gloo"
        assert words in failed and "RankError" not in failed
        assert f"RankError: rank {rank} of 2 has failed: {words}" in survivor
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["global_step"] == 4 * (step // 4)


@pytest.mark.parametrize(
    ("start", "how", "rank", "words"),
    [
        ("spawn", "kill", 1, "RankError: rank 1 of 2 has ended without a word (signal SIGKILL: killed, or"),
        ("fork", "exit", 0, "RankError: rank 0 of 2 has ended without a word (exit code 3), and its launcher"),
        ("fork", "raise", 1, "ValueError: row 7 of the data is empty"),
    ],
)
def test_the_launcher_of_functions_names_the_rank(start, how, rank, words, tmp_path):
    """It ends the others, and its error is the one of the script."""
    fit = Fit(tmp_path, 2, "script", [str(SCRIPT), how, str(rank), "5", str(tmp_path), start], forked=True)
    try:
        assert fit.ended(120)
    finally:
        fit.close()
    assert fit.codes() == [1]
    assert words in fit.outputs()[0], fit.outputs()[0][-3000:]
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 4


def test_who_is_late_learns_what_the_first_rank_has_found_out(tmp_path):
    """Rank 1 of 3 is killed; rank 0, which serves the store, has ended when rank 2 meets what is missing."""
    fit = Fit(tmp_path, 3, "torchrun", [str(SCRIPT), "late", "1", "5", str(tmp_path)], forked=True)
    try:
        assert fit.ended(120)
    finally:
        fit.close()
    assert fit.codes() == [1, -9, 1]
    for rank in (0, 2):
        assert "RankError: rank 1 of 3 has ended without a word" in fit.outputs()[rank]


@pytest.mark.parametrize(
    ("rank", "after", "launcher", "timeout", "forked"),
    [(1, 0.0, "torchrun", 3.0, True), (0, 6.0, "script", 20.0, False)],
)
def test_killed_at_any_moment(rank, after, launcher, timeout, forked, tmp_path):
    """Before the processes have met, and later, by a clock; ``python -m tests.distributed.kills`` tries more."""
    found = kill(rank, after, 2, launcher, tmp_path, timeout, forked=forked)
    assert found.right, found


def test_torchrun_starts_all_again(tmp_path):
    """After a kill in step 9; rank 0 is first to come back, and the fit goes on from the checkpoint of step 8."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    found = subprocess.run(
        [*command, str(SCRIPT), "kill", "1", "9", str(tmp_path)],
        env={**os.environ, "LIGHTNING_ORT_MEASURE": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "finished at step 20" in found.stdout
    assert "Restored all states from the checkpoint" in found.stderr + found.stdout


def test_meeting_where_others_have_met_before():
    """Each rank is alone with what has ended for a while, in all orders."""
    store = dist.HashStore()
    parts = []
    for late in (0, 1, 2, 0):
        with ThreadPoolExecutor(3) as pool:
            first = [
                pool.submit(fresh_part, store, rank, 3, timedelta(seconds=30)) for rank in range(3) if rank != late
            ]
            with pytest.raises(TimeoutError):
                first[0].result(0.3)
            last = pool.submit(fresh_part, store, late, 3, timedelta(seconds=30))
            found = [future.result() for future in (*first, last)]
        found[0].set("who", f"round {len(parts)}")
        assert all(part.get("who") == f"round {len(parts)}".encode() for part in found)
        parts.append(found[0])
    assert parts[0].get("who") == b"round 0"


@pytest.mark.parametrize("last", ["ends", "succeeds"])
def test_who_has_ended_between_the_meeting_and_the_first_step(last, monkeypatch):
    """Rank 0 and 1 fail; rank 2 has ended, or has been through before."""
    monkeypatch.setattr(rendezvous, "_ROLL", 1.0)
    store = dist.HashStore()

    def stage(rank: int, fails: bool) -> None:
        with rendezvous.naming_who_has_ended(store, "group", rank, 3):
            if fails:
                raise RuntimeError("[third_party/gloo/...] Connection closed by peer")

    if last == "succeeds":
        stage(2, False)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(stage, rank, True) for rank in (0, 1)]:
            words = r"^rank 2 of 3 has ended before" if last == "ends" else "^.third_party"
            with pytest.raises(RankError if last == "ends" else RuntimeError, match=words):
                future.result()


def test_meeting_that_somebody_does_not_come_to():
    store = dist.HashStore()
    with pytest.raises(RankError, match=r"rank 0 of 2 has waited 0 s for rank 1, which has not come"):
        fresh_part(store, 0, 2, timedelta(seconds=0.3))
    # nor does what is left of it count
    with pytest.raises(RankError, match=r"rank 1 of 2 has waited 0 s for rank 0, which has not come"):
        fresh_part(store, 1, 2, timedelta(seconds=0.3))
