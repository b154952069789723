"""A report that nobody can read ends no training."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from modules import Classifier, table
from parity import fit

from lightning_ort import ORTStrategy
from lightning_ort.files.output import printed

pytestmark = pytest.mark.stock_only


def test_characters_that_an_output_lacks(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    fit(Classifier, table, strategy=ORTStrategy(), max_steps=1)
    out.seek(0)
    assert "training_step" in out.read()


@pytest.mark.parametrize("out", [None, open(os.devnull)], ids=["none", "not writable"])  # noqa: SIM115
def test_no_output(monkeypatch, out):
    monkeypatch.setattr(sys, "stdout", out)
    printed("a report")


def test_who_reads_has_gone():
    reading, writing = os.pipe()
    os.close(reading)
    code = "from lightning_ort.files.output import printed; printed('a'); print('b')"
    with open(writing, "w") as pipe:
        ended = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE)
    assert ended.returncode == 0 and not ended.stderr
