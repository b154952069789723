"""Interpolation by scale factors, of images so small that a factor leaves their size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from parity import needs_ort

from lightning_ort.compiler import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig

MODES = {
    "linear": {"mode": "linear"},
    "bilinear": {"mode": "bilinear"},
    "aligned": {"mode": "bilinear", "align_corners": True},
    "bicubic": {"mode": "bicubic"},
    "trilinear": {"mode": "trilinear"},
    "nearest": {"mode": "nearest"},
    "nearest, a line": {"mode": "nearest"},
    "nearest, a volume": {"mode": "nearest"},
    "exact": {"mode": "nearest-exact"},
    "smoothed": {"mode": "bilinear", "antialias": True},
    "smoothed, bicubic": {"mode": "bicubic", "antialias": True},
}
DIMENSIONS = {"linear": 1, "nearest, a line": 1, "trilinear": 3, "nearest, a volume": 3}


@needs_ort
@pytest.mark.parametrize("placement", ["onnxruntime", "torch"])
@pytest.mark.parametrize("name", MODES)
def test_factors_that_leave_a_size(name, placement):
    """Some of torch's kernels give the pixels as they are then, and some do not."""
    dims = DIMENSIONS.get(name, 2)
    weights = torch.arange(1.0, 40)
    for factor in (1.3, 1.2, (2.0, 1.2, 1.3)[:dims], 0.7):

        def step(x, factor=factor):
            y = F.interpolate(1.5 * x, scale_factor=factor, **MODES[name])
            return (y.square() * weights[: y.shape[-1]]).sum()

        x = torch.linspace(-1, 2, 6 * 60).view(2, 3, 60)[..., : (3 * 4 * 5 if dims == 3 else 12 if dims == 2 else 3)]
        x = x.reshape(2, 3, *(3, 4, 5)[:dims]).double().requires_grad_()
        torch._dynamo.reset()
        compiled = torch.compile(step, backend=ORTBackend(RuntimeConfig(placement=placement)))
        results = [torch.autograd.grad(f(x), x)[0] for f in (step, compiled)]
        torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-8)
