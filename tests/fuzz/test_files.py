"""A fixed selection of damaged files, other ones on each build of ONNX Runtime; `make fuzz` has the rest."""

from __future__ import annotations

import importlib.util

from . import files
from .file_formats import FORMATS

_FIRST = 0 if importlib.util.find_spec("onnxruntime.training") is None else 5_000
_QUICK = ("trainer", "unsealed", "original", "lightning", "portable_checkpoint", "two_files", "module", "external")


def faults(first: int, count: int, formats: tuple[str, ...]) -> tuple[list[files.Outcome], set[str]]:
    found = list(files.explore(iter(range(first, first + count)), formats))
    return [f for f in found if f[2] not in ("read", "refused")], {f"{name} {what}" for _, name, what, _ in found}


def test_damaged_files_are_read_or_refused_by_name():
    wrong, kinds = faults(_FIRST, 250, _QUICK)
    assert not wrong
    assert kinds == {f"{name} {what}" for name in _QUICK for what in ("read", "refused")}


def test_damaged_files_of_sessions():
    wrong, kinds = faults(_FIRST, 15, ("portable", "ort_training", "gradients", "session"))
    assert not wrong
    assert any(kind.endswith("refused") for kind in kinds)


def test_that_the_tester_sees_an_unclear_error_and_other_numbers(tmp_path):
    assert "unclear" in files.fault_of(UnicodeDecodeError("utf-8", b"", 0, 1, str(tmp_path)), tmp_path)
    assert "unclear" in files.fault_of(RecursionError(str(tmp_path)), tmp_path)
    assert "no file" in files.fault_of(ValueError("something"), tmp_path)
    assert "no cause" in files.fault_of(ValueError(f"{tmp_path} is damaged: "), tmp_path)
    assert not files.fault_of(ValueError(f"{tmp_path} is damaged: its checksum is wrong."), tmp_path)
    for seed in (0, 1):
        (tmp_path / str(seed)).mkdir()
        FORMATS["two_files"].make(tmp_path / str(seed), seed)
    one, other = (FORMATS["two_files"].read(tmp_path / str(seed)) for seed in (0, 1))
    assert files._equal(one, one) and not files._equal(one, other)
