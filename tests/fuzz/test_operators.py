"""A few of torch's own samples; ``make fuzz`` has the rest. In a process of its own: torch's list changes settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.stock_only


@pytest.mark.parametrize(
    "options",
    [
        ["--dtype", "float32", "bfloat16", "--every", "40"],
        ["--autocast", "bfloat16", "--first", "7", "--every", "40"],
    ],
    ids=["types", "autocast"],
)
def test_operators(options):
    command = [sys.executable, "-m", "tests.fuzz.operators", "--samples", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-6]) >= 12, done.stdout
