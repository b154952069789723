"""The example that goes from Lightning to devices and back runs to its end, with both APIs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from ondevice_wheel import needs_wheel

EXAMPLE = Path(__file__).parents[2] / "examples" / "ondevice" / "round_trip.py"


@pytest.mark.parametrize("api", ["lightning_ort", pytest.param("onnxruntime", marks=needs_wheel)])
def test_devices_improve_what_lightning_has_trained(api):
    before, after, last = runpy.run_path(str(EXAMPLE))["main"](["--api", api, "--epochs", "2", "--rounds", "3"])
    assert 0.5 < before < 0.93
    assert after > before + 0.04 and after > 0.93
    assert last > 0.93
