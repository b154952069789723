"""Fabric(devices=2, strategy="ort"): the weights of Fabric's own "ddp", on both ranks the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .kills import Fit
from .ranks import launch
from .test_data_parallel import assert_close

pytestmark = pytest.mark.stock_only


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fabric")
    for rank, process in enumerate(launch(2, Path(__file__).parent / "fabric_worker.py", str(folder), timeout=200)):
        assert process.returncode == 0, f"rank {rank}: {process.stdout[-3000:]}"
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def test_weights_of_two_ranks(ranks):
    """Each half of the data, accumulated without and with the sum over ranks, and clipped."""
    for rank in ranks:
        assert rank["ort"]["seen"] == rank["ddp"]["seen"] == 6 * 48
        assert_close(rank["ort"]["weights"], rank["ddp"]["weights"], 1e-9)
    for name, x in ranks[0]["ort"]["weights"].items():
        assert "running" in name or torch.equal(x, ranks[1]["ort"]["weights"][name]), name


def test_all_ran_in_onnx_runtime(ranks):
    for rank in ranks:
        steps = rank["ort"]["steps"]
        assert {name: (calls, in_torch) for name, (calls, _, *in_torch) in steps.items()} == {
            name: (18, [0, 0, 0]) for name in ("Net.forward", "Net.loss")
        }
        assert all(graphs > 0 for _, graphs, *_ in steps.values())


def test_checkpoints_have_the_names_of_the_module(ranks):
    for rank in ranks:
        assert rank["ort"]["again"] and rank["ort"]["names"] == rank["ddp"]["names"] == list(rank["ort"]["weights"])


def test_gradients_that_processes_do_not_average_are_refused(ranks):
    first, second = (rank["thawed"] for rank in ranks)
    for frozen, thawed, again in (first["said"], second["said"]):
        assert frozen == again == ""
        assert "The parameter 'body.0.weight' has a gradient, but it was frozen at fabric.setup" in thawed
    assert all(torch.equal(x, second["weights"][name]) for name, x in first["weights"].items())


def test_the_script_ends(tmp_path):
    """One thread for all Fabrics, which has ended before the interpreter does."""
    fit = Fit(tmp_path, 2, "torchrun", [str(Path(__file__).parent / "fabric_exit.py"), "8"])
    try:
        assert fit.ended(120)
    finally:
        fit.close()
    for code, written in zip(fit.codes(), fit.outputs(), strict=True):
        assert code == 0, written[-2000:]
        assert "threads of all Fabrics: 1\n" in written and "threads at the end: 0\n" in written, written[-2000:]
