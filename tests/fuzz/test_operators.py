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
        # what autocast leaves alone, though it becomes products, and products that it casts
        [
            *(f"nn.functional.{name}" for name in ("interpolate", "adaptive_avg", "linear", "conv")),
            "--autocast",
            "bfloat16",
        ],
        [
            *("copysign", "cum", "div", "floor", "heaviside", "logaddexp", "max", "nn.functional.adaptive"),
            *("nn.functional.interpolate", "nn.functional.batch_norm", "--layouts", "--dtype", "float64"),
        ],
    ],
    ids=["types", "autocast", "layouts"],
)
def test_operators(options):
    command = [sys.executable, "-m", "tests.fuzz.operators", *options, "--samples", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[-6]) >= 16, done.stdout
