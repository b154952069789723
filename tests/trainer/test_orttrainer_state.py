"""States and checkpoint files: ours, and those of the original."""

from __future__ import annotations

import copy
import io
import os
import pickle
import re

import h5py
import numpy as np
import pytest
import torch
from orttrainer_models import ADAM, DATA, LAMB, SGD, batches, make, trainer

from lightning_ort.checkpoint import aggregate_checkpoints
from lightning_ort.checkpoints import orttrainer
from lightning_ort.checkpoints.orttrainer import aggregate
from lightning_ort.checkpoints.user_dict import decode, encode
from lightning_ort.errors import CheckpointError

FILE = DATA / "adam_mlp_10_steps.h5"
USER = {"epoch": 3, "x": [1, "a"]}


def stepped(config=None, steps=3, **sections):
    found = trainer(config, **sections)
    for x, label in batches(count=steps):
        found.train_step(x, label)
    return found


@pytest.fixture(scope="module")
def state():
    return stepped().state_dict()


@pytest.fixture(scope="module")
def used():
    return stepped(steps=1)


def flat(state, prefix=""):
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def assert_same(a, b):
    a, b = dict(flat(a)), dict(flat(b))
    assert a.keys() == b.keys()
    for key, value in a.items():
        np.testing.assert_array_equal(value, b[key], err_msg=key)


def test_original_checkpoint_resumes_with_the_recorded_losses():
    found = trainer(ADAM(lr=0.01), utils={"grad_norm_clip": False})
    with pytest.raises(ValueError, match=r"is pickled.*allow_pickle=True"):
        found.load_checkpoint(str(FILE))
    user = found.load_checkpoint(str(FILE), allow_pickle=True)
    assert isinstance(user, dict)
    assert (found._train_step_info.step, found._train_step_info.optimization_step) == (10, 10)
    with np.load(DATA / "adam_mlp_10_steps_then.npz") as then:
        expected = then["losses"]
    losses = [float(found.train_step(x, label)[0]) for x, label in batches()[10:][: len(expected)]]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=2e-6)


def test_original_checkpoint_without_optimizer():
    found = trainer(ADAM(lr=0.01))
    with pytest.warns(UserWarning, match="Missing key: optimizer in state_dict"):
        found.load_checkpoint(DATA / "adam_mlp_10_steps_model_only.h5", allow_pickle=True)
    with h5py.File(FILE) as file:
        np.testing.assert_array_equal(
            found.state_dict()["model"]["full_precision"]["fc1.weight"], file["model/full_precision/fc1.weight"][()]
        )


def test_damaged_files():
    found = trainer()
    before = found.state_dict()
    with pytest.raises(ValueError, match=r"corrupt\.h5 is not an hdf5 file or a python file-like object"):
        found.load_checkpoint(DATA / "corrupt.h5")
    with pytest.raises(OSError, match="truncated file"):
        found.load_checkpoint(DATA / "truncated.h5")
    with pytest.raises(ValueError, match=r"none\.h5 is not an hdf5 .* object\. There is no file of"):
        found.load_checkpoint("none.h5")
    with pytest.raises(IndexError, match="needs the path of at least one file"):
        found.load_checkpoint()
    with pytest.raises(AssertionError, match="Expected number of files to load: 1, got 2"):
        found.load_checkpoint(FILE, FILE, allow_pickle=True)
    assert_same(found.state_dict(), before)


def layout(file):
    found = {}
    file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    return {name: (item.shape, h5py.check_string_dtype(item.dtype) or item.dtype) for name, item in found.items()}


def test_our_files_have_the_recorded_layout(tmp_path):
    path = tmp_path / "ours.h5"
    stepped().save_checkpoint(path, USER)
    with h5py.File(path) as ours, h5py.File(FILE) as theirs:
        assert layout(ours) == layout(theirs)
        assert not ours.attrs and ours["user_dict"][()].decode() == '{"epoch": 3, "x": [1, "a"]}'


@pytest.mark.parametrize("config", [ADAM(lr=0.01), LAMB(lr=0.01), SGD(lr=0.1)], ids=lambda c: c.name)
def test_resuming_is_exact(tmp_path, config):
    through = stepped(config, 2)
    path = tmp_path / "c.h5"
    through.save_checkpoint(path, USER)
    resumed = trainer(config)
    assert resumed.load_checkpoint(path) == USER
    assert_same(resumed.state_dict(), through.state_dict())
    for x, label in batches(seed=5, count=3):
        assert torch.equal(resumed.train_step(x, label)[0], through.train_step(x, label)[0])
    assert_same(resumed.state_dict(), through.state_dict())
    assert resumed._train_step_info.step == 5


def test_loading_into_a_trainer_in_use(state):
    found = stepped(steps=5)
    found.load_state_dict(state)
    assert_same(found.state_dict(), state)


def test_files_are_not_overwritten_and_appear_complete(tmp_path, monkeypatch):
    found = stepped(steps=1)
    path = tmp_path / "c.h5"
    found.save_checkpoint(str(path))
    content = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"c\.h5 exists"):
        found.save_checkpoint(str(path))
    with pytest.raises(FileNotFoundError, match="The folder of"):
        found.save_checkpoint(str(tmp_path / "none" / "c.h5"))

    def crash(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        found.save_checkpoint(tmp_path / "d.h5")
    assert [p.name for p in tmp_path.iterdir()] == ["c.h5"] and path.read_bytes() == content


def test_without_optimizer_states_and_to_a_stream():
    found = stepped(steps=1)
    stream = io.BytesIO()
    found.save_checkpoint(stream, USER, include_optimizer_states=False)
    stream.seek(0)
    with h5py.File(stream) as file:
        assert "optimizer" not in file
    fresh = trainer()
    with pytest.warns(UserWarning, match="Missing key: optimizer"):
        assert fresh.load_checkpoint(stream) == USER
    assert fresh._train_step_info.step == 1


def changed(state, *path, value=None):
    """A copy of the state with one entry replaced or, without a value, removed."""
    copied = copy.deepcopy(state)
    group = copied
    for key in path[:-1]:
        group = group[key]
    if value is None:
        del group[path[-1]]
    else:
        group[path[-1]] = value
    return copied


W = ("model", "full_precision")
STRICT = [
    ((*W, "fc1.bias"), None, "Missing keys: ['fc1.bias'] in state_dict[model][full_precision]"),
    ((*W, "zzz"), np.zeros(3), "Unexpected keys: ['zzz'] in state_dict[model][full_precision]"),
    (("optimizer", "fc1.bias"), None, "Missing keys: ['fc1.bias'] in state_dict[optimizer]"),
    (("optimizer", "fc1.bias", "Moment_1"), None, "Missing keys: ['Moment_1'] in state_dict[optimizer][fc1.bias]"),
]


@pytest.mark.parametrize(("path", "value", "message"), STRICT, ids=[m for *_, m in STRICT])
@pytest.mark.parametrize("fresh", [True, False])
def test_strict_loading_names_keys(state, used, path, value, message, fresh):
    found = trainer() if fresh else used
    before = found.state_dict()
    broken = changed(state, *path, value=value)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        found.load_state_dict(broken)
    assert_same(found.state_dict(), before)
    found.load_state_dict(broken, strict=False)
    expected = dict(flat(state))
    if value is None:
        key = "/".join(path)
        expected |= {k: v for k, v in flat(before) if k.startswith(key)}
    assert_same(found.state_dict(), expected)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("given", [{}, make().state_dict()], ids=["empty", "a module's"])
def test_a_state_of_which_nothing_is_known_is_refused(used, given, strict):
    with pytest.raises(RuntimeError, match=r"^state_dict has none of the keys model, optimizer, train_step_info"):
        used.load_state_dict(given, strict=strict)


def test_unexpected_sections_are_named(used, state):
    with pytest.raises(RuntimeError, match=r"^Unexpected keys: \['fc1.bias'\] in state_dict$"):
        used.load_state_dict({**state, "fc1.bias": np.zeros(32)})
    used.load_state_dict({**state, "fc1.bias": np.zeros(32)}, strict=False)
    flat_weights = {"model": state["model"]["full_precision"]}
    with pytest.raises(RuntimeError, match=r"Missing keys: \['full_precision'\] in state_dict\[model\]; it has 'fc1"):
        used.load_state_dict(flat_weights, strict=False)
    renamed = {f"module.{n}": w for n, w in state["model"]["full_precision"].items()}
    with pytest.raises(RuntimeError, match=r"No key of .* is a weight of the model\. Its keys: 'module\.fc1"):
        used.load_state_dict({**state, "model": {"full_precision": renamed}}, strict=False)
    assert_same(used.state_dict(), state)


@pytest.mark.parametrize("paths", [(None,), (FILE, 3), ([FILE],)])
def test_what_is_no_path_is_no_checkpoint(used, paths):
    with pytest.raises(TypeError, match=r"^path=.*: expected the path of a checkpoint, or an open binary file\.$"):
        used.load_checkpoint(*paths)


MISMATCHED = [
    (
        (*W, "fc1.bias"),
        np.zeros(5),
        RuntimeError,
        "state_dict[model][full_precision][fc1.bias] has shape [5]; expected [32]",
    ),
    (
        ("optimizer", "fc1.bias", "Moment_2"),
        np.zeros((2, 2)),
        RuntimeError,
        "state_dict[optimizer][fc1.bias][Moment_2] has shape [2, 2]; expected [32]",
    ),
    (
        ("trainer_options", "optimizer_name"),
        "LambOptimizer",
        AssertionError,
        "Optimizer mismatch: expected AdamOptimizer, got LambOptimizer",
    ),
]


@pytest.mark.parametrize(("path", "value", "kind", "message"), MISMATCHED, ids=[m for *_, m in MISMATCHED])
@pytest.mark.parametrize("strict", [True, False])
def test_states_that_do_not_fit_leave_the_trainer_usable(state, path, value, kind, message, strict):
    found = trainer()
    with pytest.raises(kind, match=re.escape(message)):
        found.load_state_dict(changed(state, *path, value=value), strict=strict)
    assert_same(found.state_dict(), trainer().state_dict())


def test_state_of_another_optimizer(state):
    found = trainer(SGD())
    with pytest.raises(RuntimeError, match=r"Unexpected keys: \['fc1.weight'.* in state_dict\[optimizer\]"):
        found.load_state_dict(state)
    assert found.state_dict()["optimizer"] == {}


@pytest.mark.parametrize(("key", "quiet"), [("model", True), ("optimizer", True), ("train_step_info", False)])
def test_missing_groups_are_warned_of(state, key, quiet):
    found = trainer()
    with pytest.warns(UserWarning, match=f"Missing key: {key} in state_dict"):
        found.load_state_dict(changed(state, key))
    if quiet:
        found.load_state_dict(changed(state, key), strict=False)
    with pytest.raises(TypeError, match="'state_dict' must be a dict, not list"):
        found.load_state_dict([1])


def test_a_file_without_options_is_no_checkpoint(tmp_path):
    with h5py.File(tmp_path / "f.h5", "w") as file:
        file["a"] = 1
    with pytest.raises(CheckpointError, match=r"f\.h5.*holds no 'trainer_options'"):
        trainer().load_checkpoint(tmp_path / "f.h5")


def test_user_data_survives():
    data = {
        "text": "a", "none": None, "pair": (1, [2.5, (True,)]), 3: "three", "$odd": {"x": float("inf")},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "tensor": torch.ones(2, 2), "number": np.float32(1.5),
    }  # fmt: skip
    back = decode(encode(data), "it", allow_pickle=False)
    assert back.keys() == data.keys() and back["pair"] == data["pair"] and back["$odd"] == data["$odd"]
    assert back["array"].dtype == np.int16 and np.array_equal(back["array"], data["array"])
    assert torch.equal(back["tensor"], data["tensor"]) and back["number"] == 1.5
    with pytest.raises(TypeError, match=re.escape("user_dict['a'][0] is a object, which a checkpoint cannot hold")):
        encode({"a": [object()]})
    with pytest.raises(TypeError, match="'user_dict' must be a dict"):
        encode([1])


def test_pickles_are_read_only_when_allowed():
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("it was unpickled",))

    with pytest.raises(ValueError, match="allow_pickle=True"):
        decode(pickle.dumps({"a": Trap()}).hex(), "it", allow_pickle=False)
    assert decode(pickle.dumps({}).hex(), "it", allow_pickle=False) == {}
    assert decode(pickle.dumps(USER).hex(), "it", allow_pickle=True) == USER


def test_files_of_several_ranks_are_put_together(tmp_path, state):
    parts = []
    for rank in (1, 0):
        part = copy.deepcopy(state)
        part["trainer_options"] |= {"world_rank": rank, "world_size": 2, "zero_stage": 1}
        for name in ("fc1.bias", "fc2.bias"):  # whole on one rank
            if (name == "fc1.bias") == bool(rank):
                del part["optimizer"][name]
        half = slice(0, 320) if rank == 0 else slice(320, None)  # cut in two
        for moment in ("Moment_1", "Moment_2"):
            values = part["optimizer"]["fc1.weight"]
            values[moment] = values[moment].ravel()[half]
        part["partition_info"] = {"fc1.weight": {"original_dim": np.array([32, 20])}}
        orttrainer.write(tmp_path / f"{rank}.h5", part, {})
        parts.append(tmp_path / f"{rank}.h5")
    found = trainer()
    found.load_checkpoint(*parts)
    assert_same(found.state_dict(), state)
    whole = aggregate_checkpoints(parts, pytorch_format=False)
    assert whole["trainer_options"]["world_size"] == 1 and whole["user_dict"] == {}
    second = trainer()
    second.load_state_dict(whole)
    assert_same(second.state_dict(), state)
    module = make()
    module.load_state_dict(aggregate_checkpoints([str(p) for p in parts]))
    np.testing.assert_array_equal(module.fc1.bias.detach(), state["model"]["full_precision"]["fc1.bias"])
    with pytest.raises(TypeError, match=r"paths='x.h5': expected a list of paths"):
        aggregate_checkpoints("x.h5")
    with pytest.raises(AssertionError, match="Expected number of files to load: 2, got 1"):
        found.load_checkpoint(parts[0])
    with pytest.raises(AssertionError, match=r"Expected the files of ranks 0 to 1, one of each; got ranks \[0, 0\]"):
        found.load_checkpoint(parts[1], parts[1])
    other = copy.deepcopy(state)
    other["trainer_options"] |= {"world_rank": 1, "optimizer_name": "LambOptimizer"}
    with pytest.raises(AssertionError, match="do not belong together: they differ in optimizer_name"):
        aggregate([state, other])
