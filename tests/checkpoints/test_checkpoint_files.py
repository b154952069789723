"""Checkpoint files: written whole or not at all, and read with one clear error where they are not in order."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import re
import time

import psutil
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from modules import Classifier, table
from orttrainer_models import DATA
from parity import fit, make_trainer, quiet, state_of

from lightning_ort import CheckpointError, ORTCheckpointIO, ORTStrategy
from lightning_ort.checkpoints import orttrainer as trainer_files
from lightning_ort.files.writing import write_file

# -- writing ----------------------------------------------------------------------------------------------------------


def save_forever(folder, start, done):
    """Two files of number n, n + 1 ...; ``done`` is the last number whose files are complete."""
    plugin, noise = ORTCheckpointIO(), torch.randn(1 << 18)
    number = start
    while True:
        content = {"state_dict": {"n": torch.tensor(number), "w": noise + number}, "pytorch-lightning_version": "2"}
        plugin.save_checkpoint(content, folder / "last.ckpt")
        trainer_files.write(folder / f"{number}.h5", {"trainer_options": {}, "w": (noise + number).numpy()}, {})
        done.value = number
        number += 1


def kill_during_a_save(pid, folder, delays):
    """What is seen while the process is stopped is what the kill leaves."""
    process, deadline = psutil.Process(pid), time.monotonic() + 60
    while True:
        time.sleep(delays.uniform(0, 0.01))
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.0005)
        if any(p.suffix == ".tmp" for p in folder.iterdir()):
            process.kill()
            return
        assert time.monotonic() < deadline, "it never saves"
        process.resume()


def test_last_checkpoint_survives_kill(tmp_path):
    """A process that does nothing but write checkpoints is killed at 6 random points, 3 of them during a save."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_ort.checkpoints", "lightning_ort.checkpoints.orttrainer"])
    delays = random.Random(0)
    done = context.Value("q", 0)
    for kill in range(6):
        before = done.value
        process = context.Process(target=save_forever, args=(tmp_path, before + 1, done), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while done.value == before:
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        if kill % 2:
            kill_during_a_save(process.pid, tmp_path, delays)
        else:
            time.sleep(delays.uniform(0, 0.1))
            process.kill()
        process.join()
        abandoned = [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]
        assert len(abandoned) <= 1, "what the process before has left is still there"
        assert abandoned or not kill % 2
        found = ORTCheckpointIO().load_checkpoint(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
        number = int(found["n"])
        assert number in (done.value, done.value + 1)
        weights = found["w"] - number
        for n in range(before + 1, number + 1):
            if n <= done.value or (tmp_path / f"{n}.h5").exists():
                state = trainer_files.read_state(tmp_path / f"{n}.h5")
                torch.testing.assert_close(torch.from_numpy(state["w"]) - n, weights, rtol=0, atol=1e-4)
        # an h5 file that was renamed before the kill would be in the way of its successor
        done.value = number


def test_a_file_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    target = tmp_path / "x.ckpt"
    plugin = ORTCheckpointIO()
    plugin.save_checkpoint({"n": 1}, target)
    with pytest.raises(Exception, match="pickle"):
        plugin.save_checkpoint({"n": lambda: 2}, target)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            plugin.save_checkpoint({"n": 2}, target)
    assert os.listdir(tmp_path) == ["x.ckpt"] and torch.load(target) == {"n": 1}
    plugin.save_checkpoint({"n": 3}, target)
    assert torch.load(target) == {"n": 3}
    assert target.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))
    plugin.remove_checkpoint(target)
    assert not os.listdir(tmp_path)


def test_temporary_files_are_no_checkpoints_to_lightning(tmp_path):
    """Neither "last" nor the newest of a cluster's restarts is looked for among them."""
    for name in ("last.ckpt", "hpc_ckpt_3.ckpt"):
        seen = []
        with write_file(tmp_path / name, replace=True):
            seen = [p.name for p in tmp_path.glob(".saving-*")]
        assert len(seen) == 1 and "last" not in seen[0] and "ckpt" not in seen[0]


class Files(ORTCheckpointIO):
    """Notes what is written."""

    def __init__(self):
        super().__init__()
        self.written = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        self.written.append(os.path.basename(path))


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "async"])
def test_model_checkpoint(tmp_path, wrapped):
    plugin = Files()
    plugins = [AsyncCheckpointIO(plugin) if wrapped else plugin]
    callback = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename="{step}", save_last=True, save_top_k=-1)
    run = fit(Classifier, table, max_epochs=1, callbacks=callback, enable_checkpointing=True, plugins=plugins)
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert set(plugin.written) == set(os.listdir(tmp_path))
    found = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(value, found[name]) for name, value in run.module.state_dict().items())
    loaded = Classifier.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in found.items())


def test_which_checkpoint_io():
    assert type(Trainer(strategy="ort", logger=False).strategy.checkpoint_io) is ORTCheckpointIO
    wrapper = AsyncCheckpointIO()
    assert Trainer(strategy="ort", logger=False, plugins=[wrapper]).strategy.checkpoint_io is wrapper
    assert type(wrapper.checkpoint_io) is ORTCheckpointIO
    own = TorchCheckpointIO()
    wrapper = AsyncCheckpointIO(own)
    strategy = ORTStrategy(checkpoint_io=wrapper)
    assert strategy.checkpoint_io is wrapper and wrapper.checkpoint_io is own


def test_other_file_systems_are_left_to_lightning():
    plugin = ORTCheckpointIO()
    content = {"state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2.6"}
    plugin.save_checkpoint(content, "memory://folder/x.ckpt")
    assert torch.equal(plugin.load_checkpoint("memory://folder/x.ckpt")["state_dict"]["w"], torch.ones(3))
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint(content, "memory://folder/x.ckpt", storage_options={"a": 1})


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The bytes of one checkpoint."""
    path = tmp_path_factory.mktemp("written") / "x.ckpt"
    fit(Classifier, table, strategy="auto", max_epochs=1).trainer.save_checkpoint(path)
    return path.read_bytes()


def damaged(content):
    """Name to content of files that are not in order, with a part of the error."""
    weight = torch.load(io.BytesIO(content))["state_dict"]["net.0.weight"]
    middle = bytearray(content)
    middle[content.index(weight.numpy().tobytes())] ^= 1
    return {
        "empty": (b"", "is empty"),
        "text": (b"# a readme\n", "begins with b'# a read'"),
        "cut": (content[: len(content) // 2], "cut short or damaged"),
        "cut_at_the_end": (content[:-1], "cut short or damaged"),
        "flipped": (bytes(middle), "the checksum of its part"),
        "half_h5": ((DATA / "truncated.h5").read_bytes(), "truncated file"),
        "other_h5": ((DATA / "corrupt.h5").read_bytes(), "is no checkpoint"),
    }


@pytest.mark.parametrize("kind", ["cut", "cut_at_the_end", "empty", "flipped", "half_h5", "other_h5", "text"])
def test_files_that_are_not_in_order(tmp_path, written, kind):
    content, message = damaged(written)[kind]
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.ckpt.*{re.escape(message)}"):
        ORTCheckpointIO().load_checkpoint(path)


FOREIGN = {
    "weights": (
        {f"{i}.weight": torch.ones(2) for i in range(8)},
        "dictionary of 0.weight, 1.weight.* .8 in all., and lacks",
    ),
    "tensor": (torch.ones(3), "a Tensor, and lacks state_dict or pytorch-lightning_version"),
    "nothing": ({}, "a dictionary of nothing"),
}


@pytest.mark.parametrize("kind", sorted(FOREIGN))
def test_files_of_others(tmp_path, kind):
    content, message = FOREIGN[kind]
    torch.save(content, tmp_path / "x.ckpt")
    trainer, module = make_trainer(max_epochs=1), Classifier()
    before = state_of(module)
    with quiet(), pytest.raises(CheckpointError, match=rf"no checkpoint of Lightning: it holds .*{message}"):
        trainer.fit(module, table(), ckpt_path=tmp_path / "x.ckpt")
    assert all(torch.equal(value, before[name]) for name, value in state_of(module).items())
    assert trainer.global_step == 0


def test_random_damage_is_noticed_or_harmless(tmp_path, written):
    """One flipped bit anywhere: an error, or the same content (in the padding between the parts)."""
    path, chance, noticed = tmp_path / "x.ckpt", random.Random(0), 0
    expected = torch.load(io.BytesIO(written))
    for _ in range(60):
        content = bytearray(written)
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        try:
            found = ORTCheckpointIO().load_checkpoint(path)
        except CheckpointError:
            noticed += 1
        else:
            assert list(found) == list(expected)
            assert all(torch.equal(v, expected["state_dict"][k]) for k, v in found["state_dict"].items())
    assert noticed > 40


def test_missing_file():
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: none\.ckpt"):
        ORTCheckpointIO().load_checkpoint("none.ckpt")


def test_objects_need_the_consent_of_weights_only(tmp_path, written):
    """torch's own message says what to do: the file is in order."""
    content = torch.load(io.BytesIO(written))
    torch.save({**content, "hyper_parameters": {"rule": random.Random}}, tmp_path / "x.ckpt")
    with pytest.raises(Exception, match="weights_only"):
        ORTCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")
    assert ORTCheckpointIO().load_checkpoint(tmp_path / "x.ckpt", weights_only=False)["hyper_parameters"]
