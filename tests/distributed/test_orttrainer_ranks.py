"""ORTTrainer and TrainingSession on two processes: the weights of one process with the batches of both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from orttrainer_models import SGD, batches, trainer

from lightning_ort import TrainingParameters
from lightning_ort.checkpoint import aggregate_checkpoints
from lightning_ort.distributed.processes import join

from .ranks import launch
from .test_data_parallel import assert_close, assert_ranks_equal

pytestmark = pytest.mark.stock_only

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder):
    for rank, process in enumerate(launch(2, HERE / "orttrainer_worker.py", str(folder))):
        assert process.returncode == 0, f"rank {rank}: {process.stdout[-3000:]}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value) for name, value in state.items()}


def nested_equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(nested_equal(one[k], other[k]) for k in one)
    return np.array_equal(one, other)


CASES = ["adam", "lamb", "sgd", "adam32", "lamb32", "sgd32", "clipped", "each", "post"]
ZERO = ["zero adam", "zero lamb", "zero sgd", "zero post"]


@pytest.mark.parametrize("case", [*CASES, *ZERO])
def test_half_batches_on_two_ranks_are_whole_ones_on_one(ranks, case):
    found = [rank[case] for rank in ranks]
    assert_ranks_equal([rank["ours"] for rank in found])
    assert_close(found[0]["ours"], found[0]["one"], 1e-5 if case.endswith("32") else 1e-9)


def test_moments_of_zero_are_shared_out(ranks):
    for case in ("zero adam", "zero lamb", "zero post"):
        held, whole = [rank[case]["kept"] for rank in ranks], ranks[0][case]["kept by one"]
        assert sum(held) == whole and max(held) < 0.56 * whole, case
    assert [rank["adam"]["kept"] for rank in ranks] == [ranks[0]["adam"]["kept by one"]] * 2


def test_a_share_without_elements(ranks):
    found = [rank["empty"] for rank in ranks]
    assert [rank["share"] for rank in found] == [["linear.weight"], ["none"]]
    trained, one = ({"linear.weight": found[0][which]["linear.weight"]} for which in ("ours", "one"))
    assert_ranks_equal([rank["ours"] for rank in found])
    assert_close(trained, one, 1e-5)


def test_all_ranks_begin_with_the_state_of_rank_0(ranks):
    found = [rank["starts"] for rank in ranks]
    assert_ranks_equal([rank["ours"] for rank in found])
    assert_close(found[0]["ours"], found[0]["one"], 1e-9)
    assert all(rank["counts"] == {"optimization_step": 5, "step": 5} for rank in found)


def test_all_ranks_begin_with_the_buffers_of_rank_0(ranks):
    found = [rank["buffers"] for rank in ranks]
    assert len(found[0]["held"]) == 6 and {x.unique().item() for x in found[0]["held"].values()} == {1.0, 2.0}
    assert_ranks_equal([rank["held"] for rank in found])
    assert_ranks_equal([rank["ours"] for rank in found])
    assert_close(found[0]["ours"], found[0]["one"], 1e-5)
    message = r"ValueError: .* same weight 8, but rank 0 has \('own', \(1,\), 'torch.float32', .*, and rank 1 .*\(2,\)"
    assert all(re.match(message, rank["other"]) for rank in found)


def test_a_step_that_fails_in_one_rank_changes_nothing(ranks):
    errors = [rank["interrupted"]["errors"] for rank in ranks]
    assert not errors[0] and len(errors[1]) == 3 and all("train_step failed" in error for error in errors[1])
    for rank in ranks:
        assert all(torch.equal(rank["each"]["ours"][n], x) for n, x in rank["interrupted"]["ours"].items())


@pytest.mark.parametrize("case", ["half", "zero half"])
def test_an_update_is_left_out_by_all_ranks(ranks, case):
    found = [rank[case] for rank in ranks]
    expected = [(1024.0, 1), (1024.0, 2), (1024.0, 3), (512.0, 3), (512.0, 4), (512.0, 5), (512.0, 6), (512.0, 7)]
    assert found[0]["seen"] == found[1]["seen"] == expected
    assert [rank["state"] for rank in found] == [1, 1]
    assert_ranks_equal([rank["ours"] for rank in found])
    assert_close(ranks[0]["half"]["ours"], ranks[0]["zero half"]["ours"], 1e-5)


def test_adasum(ranks):
    found = [rank["adasum"] for rank in ranks]
    assert_ranks_equal([rank["ours"] for rank in found])
    assert_close(found[0]["ours"], found[0]["one"], 1e-9)
    assert not torch.allclose(found[0]["ours"]["fc1.weight"], ranks[0]["sgd"]["ours"]["fc1.weight"], rtol=1e-3)


def test_adasum_of_accumulated_gradients(ranks):
    """Of sums it is another than the sum of those of each step."""
    for name in ("adasum each", "adasum post"):
        found = [rank[name] for rank in ranks]
        assert_ranks_equal([rank["ours"] for rank in found])
        assert_close(found[0]["ours"], found[0]["one"], 1e-9)
    each, post = (ranks[0][f"adasum {when}"]["ours"]["fc1.weight"] for when in ("each", "post"))
    assert not torch.allclose(each, post, rtol=1e-3)


@pytest.mark.parametrize("stage", [0, 1])
def test_checkpoints(ranks, folder, stage):
    found = [rank[f"stage {stage}"] for rank in ranks]
    for rank, state in enumerate(found):
        # a training that went through, bit for bit
        for name, x in state["through"].items():
            assert torch.equal(state["ours"][name], x) and torch.equal(state["own"][name], x), name
        assert state["told"] == {"epoch": 3}
        assert state["options"]["world_rank"] == rank and state["options"]["zero_stage"] == stage
        assert state["options"]["world_size"] == state["options"]["data_parallel_size"] == 2
        # one process goes on from it, and its state is loaded by two
        assert_close(state["ours"], state["one"], 1e-9)
        mine = {n: v for n, v in state["alone"].items() if n in state["optimizer"]}
        assert nested_equal(state["back"], mine)
    names = [set(state["optimizer"]) for state in found]
    if stage:
        assert not names[0] & names[1] and names[0] | names[1] == set(found[0]["alone"])
        assert all(
            state["too few"].startswith("AssertionError: Expected number of files to load: 2") for state in found
        )
        assert all("RuntimeError: Missing keys: ['fc" in state["missing"] for state in found)
        message = (
            "ValueError: The processes must have the same number of loaded states, but rank 0 has 1, and rank 1 0."
        )
        assert all(state["one loads"] == message for state in found)
    else:
        assert names[0] == names[1] == set(found[0]["alone"])
    paths = sorted(folder.glob(f"stage{stage}.*.h5"))
    assert len(paths) == (2 if stage else 1)
    whole = aggregate_checkpoints(paths, pytorch_format=False)
    both = {**found[0]["optimizer"], **found[1]["optimizer"]}
    assert nested_equal(whole["optimizer"], {n: both[n] for n in whole["optimizer"]})
    assert whole["train_step_info"] == {"optimization_step": 5, "step": 5} and set(both) == set(whole["optimizer"])


GROUP = "but this process is rank {rank} of 2 in the process group of torch.distributed. Give the same to both."
REFUSED = {
    "rank": r"ValueError: options\['distributed.world_rank'\] = {other}, " + GROUP,
    "size": r"ValueError: options\['distributed.world_size'\] = 3, " + GROUP,
    "session": r"ValueError: TrainingParameters.world_size = 4, " + GROUP,
    "steps": r"ValueError: .* same options\['batch.gradient_accumulation_steps'\], but rank 0 has 1, and rank 1 2",
    "frozen": r"ValueError: .* same weight 1, but rank 0 has \('fc1.bias', .*'trained'\), and rank 1 .*'not trained'",
}

SAME = {
    "lr": "optim_config.lr, but rank 0 has 0.1, and rank 1 1.1",
    "alpha": "optim_config's alpha of 'fc1.weight', but rank 0 has 0.5, and rank 1 0.75",
    "group": "optim_config's lambda of 'fc2.bias', but rank 0 has 0.0, and rank 1 0.1",
    "mode": "optim_config's weight_decay_mode of 'fc1.weight', but rank 0 has <DecayMode.BEFORE_WEIGHT_UPDATE: 0>",
    "no schedule": "options['lr_scheduler'], but rank 0 has None, and rank 1 'LinearWarmupLRScheduler'",
    "schedule": "options['lr_scheduler'], but rank 0 has 'ConstantWarmupLRScheduler', and rank 1 'LinearWarmup",
    "steps of it": "options['lr_scheduler'].total_steps, but rank 0 has 10, and rank 1 11",
    "attributes": "attributes of 'net.fc1.bias', but rank 0 has OptimizerSettings(kind='AdamW'",
    "scaler": "options['mixed_precision.loss_scaler'].up_scale_window, but rank 0 has 10, and rank 1 11",
}
REFUSED |= {case: "ValueError: The processes must have the same " + re.escape(words) for case, words in SAME.items()}


@pytest.mark.parametrize("case", REFUSED)
def test_processes_that_do_not_fit_together(ranks, case):
    for rank, found in enumerate(ranks):
        assert re.match(REFUSED[case].format(rank=rank, other=1 - rank), found["refused"][case])


def test_what_is_no_setting_may_differ(ranks):
    assert [rank["refused"]["of their own"] for rank in ranks] == ["", ""]


def test_gradients_that_not_all_ranks_have(ranks):
    for rank in ranks:
        found = rank["parts"]["found"]
        assert list(found) == ["a", "b"] and rank["parts"]["in place"]
        assert torch.equal(found["a"], torch.full((2, 3), 2.0))
        assert torch.equal(found["b"], torch.full((2, 3), 1.5, dtype=torch.float64))


def test_tensors_of_all_types_are_exchanged(ranks):
    """Also those that gloo does not know."""
    for rank in ranks:
        assert {"torch.int16", "torch.uint16", "torch.float8_e5m2"} < rank["types"].keys()
        for name, x in rank["types"].items():
            assert torch.equal(x, torch.ones(3, 2, dtype=torch.complex64)), name


@pytest.mark.parametrize("case", ["adam", "lamb", "each", "post", "zero", "resumed"])
def test_sessions(ranks, case):
    found = [{k: tensors(state) for k, state in rank["sessions"][case].items()} for rank in ranks]
    trained = [{n: x for n, x in rank["ours"].items() if n.startswith("net.")} for rank in found]
    assert len(trained[0]) == 6
    assert_ranks_equal(trained)
    for rank in found:
        assert rank["ours"].keys() <= rank["one"].keys()
        assert_close(rank["ours"], {n: rank["one"][n] for n in rank["ours"]}, 1e-5)
    moments = [{n for n in rank["ours"] if n.startswith("Moment")} for rank in found]
    if case in ("lamb", "zero", "resumed"):
        assert not moments[0] & moments[1]
    assert moments[0] | moments[1] == {n for n in found[0]["one"] if n.startswith("Moment")}
    if case == "resumed":
        assert all(torch.equal(rank["ours"][n], x) for rank in found for n, x in rank["through"].items())


def test_the_older_class(ranks):
    assert_ranks_equal([rank["older"]["ours"] for rank in ranks])
    assert_close(ranks[0]["older"]["ours"], ranks[0]["older"]["one"], 1e-5)
    found = [rank["older"] for rank in ranks]
    whole = found[0]["states"] | found[1]["states"]
    assert found[0]["states"].keys() != whole.keys() == found[0]["loaded"].keys()
    for rank in found:
        assert rank["told"] == [{"epoch": 2}] * 2
        assert all(torch.equal(x, rank["loaded"][name]) for name, x in whole.items())
        assert rank["again"].keys() == rank["states"].keys()
        assert all(torch.equal(x, rank["again"][name]) for name, x in rank["states"].items())
        assert "ORT_checkpoint.ZeRO.0.1.ort.pt; expected the file of each rank of one training" in rank["missing"]


def test_a_rank_that_ends_is_reported(ranks):
    message = "RankError: rank 0 of 2 could not exchange gradients: another rank has failed or ended"
    assert ranks[0]["death"].startswith(message) and ranks[0]["unchanged"]


# -- one process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_environment(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_process_group(no_environment):
    message = (
        r"options\['distributed.world_size'\] = 2, but torch.distributed has no process group, and MASTER_ADDR and"
    )
    with pytest.raises(ValueError, match=message):
        trainer(distributed={"world_size": 2})
    no_environment.setenv("MASTER_ADDR", "localhost")
    no_environment.setenv("MASTER_PORT", "1")
    no_environment.setenv("RANK", "0")
    no_environment.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"world_size'\] = 2, but this process is rank 0 of 4 in the environment"):
        trainer(distributed={"world_size": 2})


CONTRADICTIONS = [
    ({"world_rank": 1}, r"options\['distributed.world_rank'\] = 1, but .*world_size'\] = 1: ranks are 0 to 0"),
    ({"world_rank": 2, "world_size": 2}, r"world_rank'\] = 2, but .*world_size'\] = 2: ranks are 0 to 1"),
    ({"data_parallel_size": 2}, r"options\['distributed.data_parallel_size'\] = 2, but .*world_size'\] = 1"),
]


@pytest.mark.parametrize(("distributed", "message"), CONTRADICTIONS)
def test_numbers_that_contradict_each_other(no_environment, distributed, message):
    with pytest.raises(ValueError, match=message):
        trainer(distributed=distributed)


@pytest.mark.parametrize(
    "distributed", [{"horizontal_parallel_size": 2}, {"pipeline_parallel": {"pipeline_parallel_size": 2}}]
)
def test_models_are_not_cut(distributed):
    with pytest.raises(NotImplementedError, match="every process trains a copy of the whole model"):
        trainer(distributed={**distributed, "world_size": 2})


def test_a_smaller_data_parallel_size_is_not_heeded(no_environment):
    with (
        pytest.warns(UserWarning, match="data_parallel_size = 2 is taken for 3"),
        pytest.raises(ValueError, match="no process group"),
    ):
        join(0, 3, 2, torch.device("cpu"), adasum=False, option="{}")


def test_one_process_takes_the_options_of_several():
    x, label = batches(count=1)[0]
    one, other = trainer(SGD(lr=0.1)), trainer(SGD(lr=0.1), distributed={"enable_adasum": True, "local_rank": 3})
    for found in (one, other):
        found.train_step(x, label)
    assert all(torch.equal(t, one._weights[name]) for name, t in other._weights.items())


@pytest.mark.parametrize(("name", "value"), [("world_size", 0), ("world_rank", -1), ("data_parallel_size", 0)])
def test_properties_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"TrainingParameters.{name} must be at least"):
        setattr(TrainingParameters(), name, value)
