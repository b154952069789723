"""Ways in which files are damaged, or made to do harm."""

from __future__ import annotations

import io
import json
import random
import shutil
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import onnx

__all__ = ["damage"]

EXTREMES = (0, 1, -1, 127, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, -(2**63))
JUNK = (b"", b"\0", b"\x80\x04\x95", b"PK\x03\x04", b"\x89HDF\r\n\x1a\n", b"{" * 9, b"[" * 100_000, b"\xff" * 64)


def flip(chance: random.Random, data: bytes, other: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 8, 64]) if found else 0):
        found[chance.randrange(len(found))] ^= 1 << chance.randrange(8)
    return bytes(found)


def flip_near_the_start(chance: random.Random, data: bytes, other: bytes) -> bytes:
    """Where most formats say what they hold."""
    size = min(len(data), 400)
    return flip(chance, data[:size], other) + data[size:]


def overwrite(chance: random.Random, data: bytes, other: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(chance.choice([1, 1, 4])):
        place = chance.randrange(len(found) + 1)
        number = chance.choice([*EXTREMES, chance.randrange(len(found) + 1)])
        width = chance.choice([1, 2, 4, 8])
        found[place : place + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(found)


def cut(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: chance.choice([chance.randrange(len(data) + 1), max(len(data) - chance.randrange(1, 100), 0)])]


def insert(chance: random.Random, data: bytes, other: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + chance.randbytes(chance.choice([1, 2, 8, 100])) + data[place:]


def leave_out(chance: random.Random, data: bytes, other: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    return data[:place] + data[place + chance.choice([1, 4, 100]) :]


def splice(chance: random.Random, data: bytes, other: bytes) -> bytes:
    place = chance.randrange(min(len(data), len(other)) + 1)
    return data[:place] + other[place:] if chance.random() < 0.7 else data[:place] + other


def foreign(chance: random.Random, data: bytes, other: bytes) -> bytes:
    return chance.choice([other, *JUNK, data + data, chance.randbytes(200)])


BYTES = (flip, flip, flip_near_the_start, overwrite, cut, insert, leave_out, splice, foreign)


def change_json(chance: random.Random, value: Any) -> Any:
    """A JSON value with one part of it changed."""
    if isinstance(value, (dict, list)) and value and chance.random() < 0.9:
        key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
        found = value.copy()
        if chance.random() < 0.1:
            del found[key]
        else:
            found[key] = change_json(chance, value[key])
        return found
    deep: Any = []
    for _ in range(50):
        deep = [deep]
    return chance.choice([None, True, *EXTREMES, 1e400, -0.5, "", "x", "../x", [], {}, [value], {"a": value}, deep])


def change_text(chance: random.Random, path: Path) -> None:
    """A JSON file, or the JSON at the start of a safetensors file, or in an HDF5 file."""
    data = path.read_bytes()
    if path.suffix == ".json":
        path.write_text(json.dumps(change_json(chance, json.loads(data))))
        return
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    if chance.random() < 0.5:
        for key in [key for key in metadata if metadata[key].startswith("{")]:
            metadata[key] = json.dumps(change_json(chance, json.loads(metadata[key])))
        for entry in header.values():
            entry.pop("crc32", None)
    else:
        header = change_json(chance, header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def change_hdf5(chance: random.Random, path: Path) -> None:
    """Another dataset in the place of one, in a file without a checksum."""
    copy = path.with_name("changed")
    with h5py.File(path) as old, h5py.File(copy, "w") as new:
        for key in old:
            old.copy(key, new)
        names: list[str] = []
        new.visititems(lambda name, item: names.append(name))
        name = chance.choice(names)
        value = new[name][()] if isinstance(new[name], h5py.Dataset) else 0.0
        del new[name]
        size = chance.choice([0, 1, 3, 2**20, 2**31, 2**40])
        makers: list[Callable[[], Any]] = [
            lambda: None,
            lambda: new.create_group(name),
            lambda: new.create_dataset(name, (size,), "f4"),
            lambda: new.create_dataset(name, (size + 1024,), "f8", chunks=(1024,), compression="gzip", fillvalue=1.0),
            lambda: new.create_dataset(name, (4,), "f4", external=[(str(path), 0, 16)]),
            lambda: new.__setitem__(name, h5py.SoftLink("/")),
            lambda: new.__setitem__(name, h5py.ExternalLink(str(path), "/")),
            lambda: new.__setitem__(name, new["/"]),
            lambda: new.__setitem__(name, chance.choice([np.nan, -1, True, "text", "{", "[" * 100_000, b"\xff"])),
            lambda: new.__setitem__(name, np.asarray(value).reshape(-1)[:-1]),
            lambda: new.__setitem__(name, np.asarray(value).astype("S3")),
            lambda: new.create_dataset(name, data=new.ref, dtype=h5py.ref_dtype),
            lambda: new.__setitem__(name, h5py.Empty("f4")),
        ]
        chance.choice(makers)()
    copy.replace(path)


def change_archive(chance: random.Random, path: Path) -> None:
    """Another content of one part of a zip archive, whose checksum is right."""
    parts = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            parts[info.filename] = archive.read(info)
    name = chance.choice(list(parts))
    kind = chance.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    other = chance.choice(list(parts.values()))
    parts[name] = bytes(10**8) if chance.random() < 0.05 else chance.choice(BYTES)(chance, parts[name], other)
    stream = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(stream, "w", kind) as archive:
        warnings.simplefilter("ignore", UserWarning)  # of two parts of one name
        for key, value in parts.items():
            archive.writestr(key, value)
        if chance.random() < 0.1:
            archive.writestr(name, other)
    path.write_bytes(stream.getvalue())


def change_onnx(chance: random.Random, path: Path) -> None:
    """Another value of one field of an ONNX model, somewhere in it."""
    model = onnx.load(path, load_external_data=False)
    message: Any = model
    while True:
        fields = [(field, value) for field, value in message.ListFields() if field.name != "raw_data"]
        if not fields:
            break
        field, value = chance.choice(fields)
        repeated = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if repeated and chance.random() < 0.1:
            entries = list(value)
            chance.shuffle(entries)
            message.ClearField(field.name)
            getattr(message, field.name).extend(
                entries[: chance.randrange(len(entries) + 1)] * chance.choice([1, 1, 2])
            )
            break
        if field.message_type is not None:
            message = chance.choice(list(value)) if repeated else value
            if chance.random() < 0.02:
                message.Clear()
                break
            continue
        new = other_value(chance, field)
        if not repeated:
            setattr(message, field.name, new)
        elif len(value):
            value[chance.randrange(len(value))] = new
        break
    path.write_bytes(model.SerializeToString())


def other_value(chance: random.Random, field: Any) -> Any:
    if field.cpp_type == field.CPPTYPE_STRING:
        text = chance.choice(["", "x", "w1", "h3", "loss", "../m.data", "/etc/passwd", "Relu", "é" * 300, "0", "-1"])
        return text.encode() if field.type == field.TYPE_BYTES else text
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return chance.choice([0.0, -1.0, float("nan"), float("inf"), 1e30])
    if field.cpp_type == field.CPPTYPE_ENUM:
        return chance.choice([v.number for v in field.enum_type.values])
    small = field.cpp_type in (field.CPPTYPE_INT32, field.CPPTYPE_UINT32)
    return chance.choice([n for n in (2, 3, 4, *EXTREMES) if not small or 0 <= n < 2**31])


def change_inside(chance: random.Random, path: Path) -> None:
    """A file of the right form with another content."""
    changes = {".h5": change_hdf5, ".ckpt": change_archive, ".onnx": change_onnx, ".json": change_text}
    change = changes.get(path.suffix, change_text if path.suffix == ".safetensors" else None)
    if change is None:
        path.write_bytes(flip(chance, path.read_bytes(), b""))
        return
    change(chance, path)


def replace(chance: random.Random, path: Path, folder: Path, others: Path) -> None:
    """Something else under the name of a file."""
    kind = chance.choice(["folder", "nothing", "link to itself", "another save", "another file", "swapped"])
    if kind == "swapped":
        second = chance.choice(sorted(folder.iterdir()))
        if second != path:
            path.rename(folder / "away")
            second.rename(path)
            (folder / "away").rename(second)
        return
    name = path.name
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link to itself":
        path.symlink_to(name)
    elif kind == "another save":
        shutil.copy(others / name, path)
    elif kind == "another file":
        shutil.copy(chance.choice(sorted(p for p in others.iterdir() if p.is_file())), path)


def damage(chance: random.Random, folder: Path, others: Path) -> tuple[list[str], bool]:
    """Damage one of the files of ``folder``.

    Args:
        folder: sound files.
        others: the same files of another save.

    Returns:
        The names of the files that are others than before; whether one of them was written anew, with checksums that
        are right.
    """
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    path = chance.choice(sorted(folder.iterdir()))
    way = chance.random()
    if way < 0.15:
        replace(chance, path, folder, others)
    elif way < 0.45:
        change_inside(chance, path)
    else:
        other = chance.choice([others / path.name, chance.choice(sorted(others.iterdir()))])
        path.write_bytes(chance.choice(BYTES)(chance, path.read_bytes(), other.read_bytes()))
    after = {p.name: p.read_bytes() if p.is_file() and not p.is_symlink() else None for p in folder.iterdir()}
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return changed, 0.15 <= way < 0.45 and path.suffix in (".h5", ".ckpt", ".safetensors")
