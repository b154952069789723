"""Processes that srun has started, by its variables."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest
import torch

from .ranks import Forked

SCRIPT = Path(__file__).parent / "slurm_worker.py"


def free_job() -> int:
    """A job whose port, 15000 and its last four digits, is free."""
    while True:
        job = random.randrange(1_000_000, 2_000_000)
        try:
            socket.create_server(("localhost", 15000 + job % 10_000)).close()
        except OSError:
            continue
        return job


@pytest.mark.either_build
@pytest.mark.parametrize(("nodes", "each"), [(1, 2), (2, 1)], ids=["one-node", "two-nodes"])
def test_tasks_of_srun(nodes, each, tmp_path):
    common = {
        "SLURM_JOB_ID": str(free_job()), "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(each), "SLURM_NNODES": str(nodes), "SLURM_NODELIST": "localhost,localhost",
        "OMP_NUM_THREADS": "1", "LIGHTNING_ORT_MEASURE": "0",
    }  # fmt: skip
    places = [divmod(rank, each) for rank in range(2)]
    files = [tmp_path / f"{rank}.out" for rank in range(2)]
    tasks = [
        Forked(
            [str(SCRIPT), str(tmp_path), str(nodes), str(each)],
            {
                **os.environ, **common,
                "SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local),
            },
            files[rank],
        )
        for rank, (node, local) in enumerate(places)
    ]  # fmt: skip
    try:
        codes = [task.wait(150) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert codes == [0, 0], "\n".join(file.read_text() for file in files)[-4000:]
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["of slurm"] and second["of slurm"]
    assert [first["rank"], second["rank"]] == [(rank, *place, 2) for rank, place in enumerate(places)]
    assert first["steps"] == second["steps"] == 2
    assert first["seen"] + second["seen"] == sum(range(16)) and first["seen"] != second["seen"]
    assert all(torch.equal(x, second["weights"][name]) for name, x in first["weights"].items())
