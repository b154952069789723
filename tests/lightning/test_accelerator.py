"""accelerator="ort": chooses a device, says what there is when asked for more, and belongs to strategy="ort"."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from modules import Regressor, curve
from parity import assert_in_ort, assert_same_outcome, fit, make_trainer, needs_ort, quiet

from lightning_ort import ORTAccelerator, ORTPrecision

pytestmark = needs_ort

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="counts the devices of a machine without GPU")


def test_trains_as_under_the_name_of_the_device():
    eager = fit(Regressor, curve, strategy="auto", max_steps=6)
    other = fit(Regressor, curve, strategy="ort", accelerator="ort", max_steps=6)
    assert isinstance(other.trainer.accelerator, ORTAccelerator)
    assert_same_outcome(eager, other)
    assert_in_ort(other.trainer, "training_step")


@on_cpu
@pytest.mark.parametrize("devices", ["auto", 1, "1", [0], -1])
def test_devices(devices):
    with quiet():
        trainer = make_trainer("ort", accelerator="ort", devices=devices)
    assert (trainer.num_devices, trainer.strategy.root_device) == (1, torch.device("cpu"))


@on_cpu
@pytest.mark.parametrize("devices", [2, "3", [0, 1], "0,1"])
def test_processes_of_the_cpu_are_as_many_as_asked_for(devices):
    with quiet():
        trainer = make_trainer("ort", accelerator="ort", devices=devices)
    assert trainer.num_devices == (3 if devices == "3" else 2)
    assert trainer.strategy.root_device == torch.device("cpu")


@on_cpu
@pytest.mark.parametrize("devices", [[-2], "two", -3, 1.5])
def test_what_is_no_number_of_devices(devices):
    with quiet(), pytest.raises(Exception, match=r"devices=.*(1|number)") as error:
        make_trainer("ort", accelerator="ort", devices=devices)
    assert repr(devices) in str(error.value)


def test_a_gpu_is_for_one_process(monkeypatch):
    monkeypatch.setattr("lightning_ort.lightning.accelerator._kind", lambda: "cuda")
    monkeypatch.setattr(ORTAccelerator, "auto_device_count", staticmethod(lambda: 2))
    assert ORTAccelerator.parse_devices([1, 0]) == [1, 0]
    with pytest.raises(Exception, match=r"devices=\[0, 0\]: expected each GPU once"):
        ORTAccelerator.parse_devices([0, 0])


def test_belongs_to_the_strategy():
    module = Regressor()
    with quiet(), pytest.raises(Exception, match=r"strategy='ort'.*SingleDeviceStrategy"):
        make_trainer("auto", accelerator="ort").fit(module, curve())
    assert "ort" in AcceleratorRegistry.available_accelerators()


def test_statistics_of_the_device(monkeypatch):
    """They are those of Lightning's own accelerator for it (which needs psutil on the CPU)."""
    monkeypatch.setattr(CPUAccelerator, "get_device_stats", lambda self, device: {"cpu_percent": 3.0})
    assert ORTAccelerator().get_device_stats("cpu") == {"cpu_percent": 3.0}


@on_cpu
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled, but CUDA is not available")
def test_real_float16_by_name():
    """Lightning takes the name of the accelerator for a GPU's, and leaves 16-mixed alone."""
    run = fit(Regressor, curve, strategy="ort", accelerator="ort", precision="16-mixed", max_steps=2)
    plugin = run.trainer.precision_plugin
    assert isinstance(plugin, ORTPrecision)
    assert (plugin.precision, plugin.scaling.scale) == ("16-mixed", 2.0**16)


@needs_gpu
def test_gpu():
    run = fit(Regressor, curve, strategy="ort", accelerator="ort", max_steps=6)
    assert run.trainer.strategy.root_device.type == "cuda"
    assert_in_ort(run.trainer, "training_step")
