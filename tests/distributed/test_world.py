"""What depends on how many processes there are: averages of weights, metrics, last batches, resuming, reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_ort import ORTArtifacts, ORTExport, ORTStrategy

from .ranks import launch
from .test_data_parallel import assert_close, assert_ranks_equal

pytestmark = pytest.mark.stock_only

SCRIPT = Path(__file__).parent / "world_worker.py"


def run(world: int, folder: Path, *scenarios: str) -> list[dict[str, Any]]:
    for rank, process in enumerate(launch(world, SCRIPT, str(folder), *scenarios)):
        assert process.returncode == 0, f"rank {rank}: {process.stdout[-3000:]}"
    return [torch.load(folder / f"{rank}-{world}.pt", weights_only=False) for rank in range(world)]


def of_network(found: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in found.items() if name.startswith("net")}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    return run(2, folder, "ema", "swa", "uneven", "finder", "reported", "memory")


@pytest.mark.parametrize("scenario", ["ema", "swa", "uneven"])
def test_weights_and_metrics_of_ddp(ranks, scenario):
    """Averaged weights, and last batches of five rows and a half per rank; accuracy and losses are of all ranks."""
    for rank in ranks:
        assert_close(rank[scenario]["ort"], rank[scenario]["eager"], 1e-9)
    assert {"metric accuracy", "metric loss_epoch", "metric largest"} <= ranks[0][scenario]["ort"].keys()
    assert_ranks_equal([of_network(rank[scenario]["ort"]) for rank in ranks])


def test_batch_sizes_are_not_looked_for(ranks):
    for rank in ranks:
        assert rank["finder"]["ort"] == rank["finder"]["eager"]
        assert "not supported with distributed strategies" in rank["finder"]["ort"]


def test_report_of_all_ranks(ranks):
    first, second = (rank["reported"] for rank in ranks)
    assert second["ranks"] == second["later"] == {}
    mine, theirs = (first["ranks"][rank]["training_step"] for rank in (0, 1))
    assert (mine.calls, theirs.calls) == (6, 6)
    assert theirs.graph_breaks == mine.graph_breaks + 1 and theirs.graphs > mine.graphs
    assert "ranks: 2, of which 1 are known to be alike" in first["text"]
    assert f"graph breaks {theirs.graph_breaks} instead of {mine.graph_breaks}" in first["text"]
    assert first["later"][1]["validation_step"].calls > first["ranks"][1]["validation_step"].calls


def test_memory_of_states_in_parts(ranks):
    """AdamW has two numbers per weight."""
    for rank in ranks:
        found = rank["memory"]
        assert found["whole"] == 2 * found["parameters"]
        assert 0.4 < found["parts"] / found["whole"] < 0.6
    assert sum(rank["memory"]["parts"] for rank in ranks) == ranks[0]["memory"]["whole"]


def test_resumed_by_other_numbers_of_ranks(tmp_path):
    """4, 1 and 2, an epoch each, with batches of as many rows in sum: the losses of a run in one piece."""
    four = run(4, tmp_path, "epoch 0", "memory")
    (one,) = run(1, tmp_path, "epoch 1", "whole")
    two = run(2, tmp_path, "epoch 2")
    losses = [x for found in (four[0], one, two[0]) for n in found if n.startswith("epoch") for x in found[n]["losses"]]
    assert losses == pytest.approx(one["whole"]["losses"], rel=1e-9)
    assert_ranks_equal([rank["epoch 2"]["ort"] for rank in two])
    assert_close(of_network(two[0]["epoch 2"]["ort"]), of_network(one["whole"]["eager"]), 1e-9)
    for rank in four:
        assert 0.2 < rank["memory"]["parts"] / rank["memory"]["whole"] < 0.3


@pytest.mark.parametrize("callback", [ORTExport(), ORTArtifacts()])
def test_all_ranks_ask_where_to_write(callback):
    """Lightning's ``log_dir`` is a broadcast: who leaves it out makes rank 0 wait, which writes."""

    class Second:
        is_global_zero, asked = False, 0

        @property
        def log_dir(self):
            self.asked += 1
            return "runs"

    trainer = Second()
    callback.on_fit_end(trainer, None)
    assert trainer.asked == 1


@pytest.mark.parametrize(
    ("given", "device", "found"), [({}, "cpu", 25), ({"bucket_cap_mb": 4}, "cpu", 4), ({}, "cuda", None)]
)
def test_one_bucket_for_gradients_that_are_there_at_once(given, device, found):
    """Unless its size is named, torch's first bucket is of 1 MiB."""
    strategy = ORTStrategy(**given, parallel_devices=[torch.device(device, i) for i in range(2)])
    assert strategy._of_several().get("bucket_cap_mb") == found


def test_size_of_buckets_reaches_lightning():
    strategy = Trainer(strategy="ort", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False).strategy
    assert strategy._ddp_kwargs["bucket_cap_mb"] == 25
