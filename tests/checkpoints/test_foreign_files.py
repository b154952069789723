"""Files from elsewhere: refused before they fill the memory, lead elsewhere, or are of two writings."""

from __future__ import annotations

import io
import multiprocessing
import resource
import time
import zipfile
from pathlib import Path

import h5py
import numpy as np
import onnx
import pytest
import torch
from fuzz.file_formats import FORMATS, onnx_model, read_checkpoint, read_gradients
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lightning_ort import CheckpointError, ORTCheckpointIO
from lightning_ort.checkpoints import ort_training as ort_checkpoint
from lightning_ort.checkpoints import orttrainer as trainer_files
from lightning_ort.checkpoints.portable import save_checkpoint
from lightning_ort.checkpoints.state import OptimizerState, TrainingState
from lightning_ort.checkpoints.user_dict import decode
from lightning_ort.errors import UnsupportedError
from lightning_ort.files.onnx_models import save_onnx
from lightning_ort.ondevice import CheckpointState
from lightning_ort.ondevice.formats import flavour_named

pytestmark = pytest.mark.stock_only

# -- one writing or the other -----------------------------------------------------------------------------------------


def state(number: int) -> TrainingState:
    weights = {"w": torch.full((60, 7), float(number)), "b": torch.full((40,), float(number))}
    return TrainingState(weights, ("w",), {}, {"number": number})


def write_forever(path: Path, flavour: str, limit: int, stop) -> None:
    ort_checkpoint._EXTERNAL = limit
    number = 0
    while not stop.value:
        number += 1
        flavour_named(flavour).save_checkpoint(state(number), path, include_optimizer_state=True)


@pytest.mark.parametrize(("flavour", "files"), [("portable", 1), ("ort-training", 1), ("ort-training", 2)])
def test_a_checkpoint_that_is_replaced_meanwhile_is_the_old_or_the_new_one(flavour, files, tmp_path, monkeypatch):
    limit = 600 if files == 2 else ort_checkpoint._EXTERNAL
    monkeypatch.setattr(ort_checkpoint, "_EXTERNAL", limit)
    path = tmp_path / "c"
    flavour_named(flavour).save_checkpoint(state(0), path, include_optimizer_state=True)
    assert len(list(tmp_path.iterdir())) == files
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning_ort.ondevice.formats"])
    stop = context.Value("i", 0)
    writer = context.Process(target=write_forever, args=(path, flavour, limit, stop), daemon=True)
    writer.start()
    seen = set()
    deadline = time.monotonic() + 60
    while len(seen) < 60:
        assert time.monotonic() < deadline and writer.is_alive()
        found = CheckpointState.load_checkpoint(path)
        numbers = {found.properties["number"], *(float(x) for _, p in found.parameters for x in set(p.data.ravel()))}
        assert len(numbers) == 1, "properties and weights are of two writings"
        seen |= numbers
    stop.value = 1
    writer.join()


def test_a_stranger_may_write_a_portable_checkpoint_again(tmp_path):
    """The checksums of its tensors are not taken over by those who change them, and so are not wrong."""
    path = tmp_path / "c.safetensors"
    FORMATS["portable_checkpoint"].make(tmp_path, 0)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor + 1 for name, tensor in load_file(path).items()}
    expected = read_checkpoint("c.safetensors", tmp_path)[0]
    save_file(tensors, path, metadata)
    found = read_checkpoint("c.safetensors", tmp_path)[0]
    assert all(np.array_equal(found[name], value + 1) for name, value in expected.items())


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('"kind": "AdamW"', '"kind": "x"', "the optimizer is 'x'; expected one of AdamW, Adam, SGD, Lamb"),
        ('"moment_2"', '"moment_3"', r"it has \['moment_3'\] of '.*'; expected some of moment_1, moment_2"),
    ],
)
def test_an_optimizer_that_nobody_knows(old, new, reason, tmp_path):
    """It is the file that is wrong, and not the optimizer that is given it later."""
    path = tmp_path / "c.safetensors"
    w = {"w": torch.ones(2)}
    moments = {"w": {"moment_1": torch.ones(2), "moment_2": torch.ones(2)}}
    state = TrainingState(w, ("w",), optimizer=OptimizerState("AdamW", 0.1, 3, moments))
    save_checkpoint(state, path, include_optimizer_state=True)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    (key,) = [k for k, text in metadata.items() if old in text]
    tensors = {name.replace("moment_2", new.strip('"')): tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata | {key: metadata[key].replace(old, new)})
    with pytest.raises(CheckpointError, match=rf"c\.safetensors.* does not fit together: {reason}"):
        CheckpointState.load_checkpoint(path)


def test_graphs_of_two_writings_are_refused(tmp_path):
    for seed, folder in enumerate(("a", "b")):
        FORMATS["portable"].make(tmp_path / folder, seed)
    constant = onnx.load(tmp_path / "b" / "eval_step.onnx")
    constant.doc_string = "changed"
    onnx.save(constant, tmp_path / "a" / "eval_step.onnx")
    with pytest.raises(CheckpointError, match=r"eval_step\.onnx' is damaged, was changed, or is of other artifacts"):
        FORMATS["portable"].read(tmp_path / "a")


# -- what leads elsewhere ---------------------------------------------------------------------------------------------

HDF5 = {
    "external": (lambda f, p: f.create_dataset("w", (2,), "f4", external=[(str(p), 0, 8)]), "lie in another file"),
    "soft": (lambda f, p: f.__setitem__("w", h5py.SoftLink("/trainer_options")), "is a link to somewhere else"),
    "outer": (lambda f, p: f.__setitem__("w", h5py.ExternalLink(str(p), "/")), "is a link to somewhere else"),
    "again": (lambda f, p: f.__setitem__("w", f["trainer_options"]), "second name of something else"),
    "circle": (lambda f, p: f["trainer_options"].__setitem__("w", f["trainer_options"]), "second name"),
    "unwritten": (lambda f, p: f.create_dataset("w", (2**31,), "f4"), "would take 8.0 GiB in memory"),
    "filled": (lambda f, p: f.create_dataset("w", (2**31,), "f4", compression="gzip", fillvalue=1), "8.0 GiB"),
    "objects": (lambda f, p: f.create_dataset("w", (2,), h5py.vlen_dtype("f4")), "expected numbers, or one text"),
    "text": (lambda f, p: f.__setitem__("user_dict", "[" * 100_000), "is pickled"),
    "deep": (lambda f, p: f.__setitem__("user_dict", '{"a":' + "[" * 100_000), "nested too deeply"),
}


def virtual(file: h5py.File, path: Path) -> None:
    layout = h5py.VirtualLayout((2,), "f4")
    layout[:] = h5py.VirtualSource(path, "w", (2,))
    file.create_virtual_dataset("w", layout)


@pytest.mark.parametrize("name", [*HDF5, "virtual"])
def test_hdf5_of_strangers(name, tmp_path):
    change, message = HDF5.get(name, (virtual, "is a virtual dataset"))
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["trainer_options/world_size"] = 1
        change(file, tmp_path / "secret")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"x\.h5.*{message}"):
        trainer_files.read(path, allow_pickle=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_compressed_file_is_read_unless_it_grows_beyond_reason(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["trainer_options/world_size"] = 1
        file.create_dataset("w", data=np.zeros(10_000), compression="gzip")
    assert trainer_files.read_state(tmp_path / "x.h5")["w"].shape == (10_000,)
    stream = io.BytesIO()
    torch.save({"state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2"}, stream)
    with zipfile.ZipFile(stream) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for size, message in ((3, ""), (2**27, "would take 128.0 MiB in memory")):
        with zipfile.ZipFile(tmp_path / "x.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
            for name, part in parts.items():
                archive.writestr(name, bytes(size) if size > 3 and name.endswith("data/0") else part)
        if not message:
            assert torch.equal(ORTCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")["state_dict"]["w"], torch.ones(3))
            continue
        with pytest.raises(CheckpointError, match=rf"x\.ckpt.*{message}"):
            ORTCheckpointIO().load_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize("text", ['{"$array": ["<f4", [1000000000000], ""]}', '{"$dict": [[[], 1]]}', "zz"])
def test_a_damaged_user_dict(text):
    with pytest.raises(CheckpointError, match=r"the user_dict of x\.h5 is damaged: "):
        decode(text, "the user_dict of x.h5", allow_pickle=True)


# -- ONNX -------------------------------------------------------------------------------------------------------------


def chain(model: onnx.ModelProto) -> None:
    nodes = [helper.make_node("Neg", [f"n{i}" if i else "x"], [f"n{i + 1}"]) for i in range(20_000)]
    model.graph.node.extend(nodes)


def nested(model: onnx.ModelProto) -> None:
    loop = next(n for n in model.graph.node if n.op_type == "Loop")
    body = next(a.g for a in loop.attribute if a.name == "body")
    inner = onnx.GraphProto()
    inner.CopyFrom(body)
    for node in inner.node:
        node.output[0] = f"inner_{node.output[0]}"
        node.input[:] = [f"inner_{name}" for name in node.input]
    for value in [*inner.input, *inner.output]:
        value.name = f"inner_{value.name}"
    count = next(n for n in model.graph.node if n.op_type == "Constant")
    count.attribute[0].t.CopyFrom(numpy_helper.from_array(np.array(999)))
    body.node.insert(0, helper.make_node("Loop", ["count", "", "h"], ["h_in"], body=inner))
    body.node[2].input[:] = ["h_in", "h_in"]


def doubling(model: onnx.ModelProto) -> None:
    for i in range(30):
        inner = "MatMul" if not i else f"F{i - 1}"
        domain = "mine" if i else ""
        nodes = [helper.make_node(inner, ["a", "w"], [out], domain=domain) for out in ("b", "c")]
        model.functions.append(helper.make_function("mine", f"F{i}", ["a", "w"], ["c"], nodes, model.opset_import))
    model.graph.node.append(helper.make_node("F29", ["x", "w1"], ["more"], domain="mine"))


def external(location: str, model: onnx.ModelProto) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)


def constant(model: onnx.ModelProto) -> None:
    next(i for i in model.graph.initializer if i.name == "shape").CopyFrom(
        numpy_helper.from_array(np.array([2**20, 2**12]), "shape")
    )


ONNX = {
    "chain": (chain, UnsupportedError, "more than 16384 nodes"),
    "nested": (nested, UnsupportedError, "more than 16384 nodes when its loops are written out"),
    "doubling": (doubling, UnsupportedError, "more than 16384 nodes"),
    "constant": (constant, UnsupportedError, "ConstantOfShape .*a tensor of 4294967296 elements"),
    "huge": (lambda m: m.graph.initializer[0].dims.__setitem__(0, 2**31), CheckpointError, r"shape \[2147483648, 4\]"),
    "negative": (lambda m: m.graph.initializer[0].dims.__setitem__(0, -3), CheckpointError, r"shape \[-3, 4\]"),
    "twice": (lambda m: m.graph.initializer.append(m.graph.initializer[0]), CheckpointError, "have the name 'w1'"),
    "absolute": (lambda m: external("/etc/hosts", m), CheckpointError, "outside of the folder of the model"),
    "above": (lambda m: external("../secret", m), CheckpointError, "outside of the folder of the model"),
    "link": (lambda m: external("link", m), CheckpointError, "outside of the folder of the model"),
    "missing": (lambda m: external("none", m), CheckpointError, "there is no 'none' beside it"),
}  # fmt: skip


@pytest.mark.parametrize("name", ONNX)
def test_onnx_of_strangers(name, tmp_path):
    change, kind, message = ONNX[name]
    model = onnx_model(0)
    change(model)
    (tmp_path / "link").symlink_to("/etc/hosts")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(kind, match=rf"m\.onnx'.*{message}"):
        read_gradients(tmp_path)
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


# -- a full disk ------------------------------------------------------------------------------------------------------


def small_disk(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_file_that_cannot_be_written_is_named_and_leaves_the_old_one(tmp_path):
    """By the largest size that the system allows for a file, which fails as a full disk does."""
    import onnx_ir as ir

    def model(size: int) -> ir.Model:
        weight = ir.tensor(np.ones(size, np.float32), name="w")
        x, w = ir.val("x", ir.DataType.FLOAT, [size]), ir.val("w", ir.DataType.FLOAT, [size], const_value=weight)
        node = ir.node("Add", [x, w])
        return ir.Model(
            ir.Graph([x], node.outputs, nodes=[node], initializers=[w], opset_imports={"": 20}), ir_version=10
        )

    def checkpoint(flavour: str, size: int) -> None:
        weights = TrainingState({"w": torch.ones(size)}, ("w",))
        flavour_named(flavour).save_checkpoint(weights, tmp_path / flavour, include_optimizer_state=True)

    writers = {
        "x.ckpt": lambda n: ORTCheckpointIO().save_checkpoint({"w": torch.ones(n)}, tmp_path / "x.ckpt"),
        "x.onnx": lambda n: save_onnx(model(n), tmp_path / "x.onnx"),
        "portable": lambda n: checkpoint("portable", n),
        "ort-training": lambda n: checkpoint("ort-training", n),
        "x.h5": lambda n: trainer_files.write(tmp_path / "x.h5", {"trainer_options": {}, "w": np.ones(n)}, {}),
    }
    for name, write in writers.items():
        if name != "x.h5":
            write(10)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    small_disk(100_000)
    try:
        for name, write in writers.items():
            with pytest.raises(OSError, match=rf"File too large\. Nothing has been written.*{name}"):
                write(100_000)
    finally:
        small_disk(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
