"""Trainer(devices=N): the weights of Lightning's own "ddp", on all ranks the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ondevice_wheel import WHEEL

from .ranks import launch

HERE = Path(__file__).parent


def results(world: int, folder: Path, *scenarios: str) -> list[dict[str, Any]]:
    for rank, process in enumerate(launch(world, HERE / "worker.py", str(folder), *scenarios)):
        assert process.returncode == 0, f"rank {rank}: {process.stdout[-3000:]}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


SCENARIOS = ("images", "images32", "text", "text32", "recurrent", "adversaries", "synced")
# what the strategy does around graphs, whoever runs them
AROUND = (
    "hooks",
    "combined",
    "sharded",
    "overflowing",
    "agreement",
    "centred",
    "noted",
    "in turns",
    "thawed",
    "own statistics",
)
OF_FOUR = ("images", "synced", "combined")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return results(2, tmp_path_factory.mktemp("two"), *SCENARIOS, *(() if WHEEL else AROUND))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return results(4, tmp_path_factory.mktemp("four"), *OF_FOUR)


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    return results(1, tmp_path_factory.mktemp("one"), "synced", "thawed")[0]


def weights(found: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: x for name, x in found.items() if "running" not in name and not name.startswith("metric")}


def assert_close(got: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, x in wanted.items():
        scale = max(float(x.abs().max()), 1e-3)
        assert float((got[name] - x).abs().max()) <= tolerance * scale, name


def assert_ranks_equal(ranks: list[dict[str, Any]]) -> None:
    for name, x in weights(ranks[0]).items():
        assert all(torch.equal(other[name], x) for other in ranks[1:]), name


@pytest.mark.parametrize("scenario", ["images", "images32", "text", "text32", "recurrent", "adversaries"])
def test_weights_of_two_ranks(of_two, scenario):
    assert_ranks_equal([rank[scenario]["ort"] for rank in of_two])
    for rank in of_two:
        found = rank[scenario]
        assert_close(found["ort"], found["eager"], 1e-4 if scenario.endswith("32") else 1e-9)
        assert found["graphs"] > 0


@pytest.mark.stock_only
def test_weights_of_four_ranks(of_four):
    assert_ranks_equal([rank["images"]["ort"] for rank in of_four])
    for rank in of_four:
        assert_close(rank["images"]["ort"], rank["images"]["eager"], 1e-9)


def test_batch_norm_over_two_ranks(of_one, of_two):
    """One process with the batches of all."""
    for rank in of_two:
        assert_close(rank["synced"]["ort"], of_one["synced"]["ort"], 1e-9)


@pytest.mark.stock_only
def test_batch_norm_over_four_ranks(of_one, of_four):
    for rank in of_four:
        assert_close(rank["synced"]["ort"], of_one["synced"]["ort"], 1e-9)


@pytest.mark.stock_only
def test_adasum(of_two):
    for rank in of_two:
        assert_close(rank["combined"]["ort"], rank["combined"]["eager"], 1e-12)


@pytest.mark.stock_only
def test_adasum_of_four(of_four):
    for rank in of_four:
        assert_close(rank["combined"]["ort"], rank["combined"]["eager"], 1e-12)


@pytest.mark.stock_only
@pytest.mark.parametrize(
    ("hook", "near"), [("float16", 2e-3), ("bfloat16", 2e-2), ("powersgd", None), ("adasum", None), ("local", None)]
)
def test_communication_hooks(of_two, hook, near):
    """They take effect, and leave all ranks with the same weights."""
    assert_ranks_equal([rank["hooks"][hook] for rank in of_two])
    plain, hooked = of_two[0]["hooks"]["plain"], of_two[0]["hooks"][hook]
    assert any(not torch.equal(hooked[name].double(), x.double()) for name, x in weights(plain).items())
    if near is not None:
        assert_close(
            {k: v.double() for k, v in weights(hooked).items()},
            {k: v.double() for k, v in weights(plain).items()},
            near,
        )


@pytest.mark.stock_only
def test_local_sgd_takes_the_processes_of_a_machine_for_a_group(of_two):
    """As torch does with GPUs. On one machine nothing is left to be averaged."""
    found = of_two[0]["hooks"]
    assert_close(weights(found["local, by machine"]), weights(found["plain"]), 1e-5)


@pytest.mark.stock_only
def test_optimizer_states_in_parts(of_two, tmp_path):
    assert_ranks_equal([rank["sharded"]["ort"] for rank in of_two])
    for rank in of_two:
        found = rank["sharded"]
        assert_close(found["ort"], found["eager"], 1e-12)
        assert_close(found["images"], found["whole images"], 1e-12)
    kept = [rank["sharded"]["kept"] for rank in of_two]
    whole = sum(x.numel() for name, x in of_two[0]["sharded"]["images"].items() if name.endswith(("weight", "bias")))
    assert sum(kept) == whole
    assert max(kept) < whole


@pytest.mark.stock_only
def test_steps_are_left_out_by_all_ranks(of_two):
    first, second = (rank["overflowing"] for rank in of_two)
    assert first["scale"] == second["scale"]
    assert [skipped for _, skipped in first["scale"]] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert_ranks_equal([first["ort"], second["ort"]])
    assert all(x.isfinite().all() for x in weights(first["ort"]).values())


@pytest.mark.stock_only
@pytest.mark.parametrize("fit", ["ort", "sharded", "powersgd"])
def test_parameters_that_were_frozen_when_processes_began(of_one, of_two, fit):
    """Their gradients are those of one process with the batches of all, which "ddp" does not see to."""
    assert_ranks_equal([rank["thawed"][fit] for rank in of_two])
    if fit != "powersgd":
        assert_close(of_two[0]["thawed"][fit], of_one["thawed"]["ort"], 1e-9)


@pytest.mark.stock_only
def test_evaluation_by_the_statistics_of_a_batch_exchanges_nothing(of_two):
    for rank in of_two:
        found = rank["own statistics"]
        torch.testing.assert_close(found["ort"], found["eager"], rtol=0, atol=1e-6)


@pytest.mark.stock_only
def test_one_choice_for_all_ranks(of_two):
    first, second = (rank["agreement"]["seen"] for rank in of_two)
    assert first == second


@pytest.mark.stock_only
def test_tensors_that_ranks_exchange_in_a_step(of_two):
    for rank in of_two:
        for found in (rank["centred"], rank["centred"]["again"]):
            assert_close(found["ort"], found["eager"], 1e-9)
            assert found["graphs"] > 0


@pytest.mark.stock_only
def test_hooks_of_parameters_meet_those_of_other_ranks(of_two):
    for rank in of_two:
        assert_close(rank["noted"]["ort"], rank["noted"]["eager"], 1e-9)
    assert of_two[1]["noted"]["graphs"] > of_two[0]["noted"]["graphs"]


@pytest.mark.stock_only
@pytest.mark.parametrize("fit", ["images", "synced", "adversaries", "accumulated", "again", "known to one"])
def test_calls_in_turns(of_two, fit):
    """Each is made in the same way by all ranks, and so are those that follow, whatever each has measured."""
    first, second = (rank["in turns"][fit] for rank in of_two)
    assert first["ways"] == second["ways"]
    assert first["turns"] == second["turns"] == {"graphs": 1.5, "eager": 1.25}
    assert len(first["ways"]) == 104 and all(first["ways"][-8:]) and not any(first["ways"][:16])
    measured = fit != "again"
    assert [bool(rank["measured"]) for rank in (first, second)] == [measured, measured]
    assert_ranks_equal([first["ort"], second["ort"]])
    for rank in (first, second):
        # of one rank's batches torch's own synchronized batch norm refuses the CPU
        if fit != "synced":
            assert_close(rank["ort"], rank["eager"], 1e-9)


@pytest.mark.stock_only
def test_calls_in_turns_with_batch_norm_over_ranks(of_two):
    """As those in graphs alone."""
    for rank in of_two:
        assert_close(rank["in turns"]["synced"]["ort"], rank["in turns"]["synced"]["in graphs"], 1e-9)
