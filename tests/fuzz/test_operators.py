"""A few of torch's own samples; ``make fuzz`` has the rest. In a process of its own: torch's list changes settings."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.stock_only


def test_operators():
    command = [sys.executable, "-m", "tests.fuzz.operators", "--dtype", "float32", "bfloat16"]
    done = subprocess.run([*command, "--samples", "1", "--every", "40"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-6]) >= 16, done.stdout
