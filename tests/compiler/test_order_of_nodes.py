"""Nodes run in the order in which autograd wrote them, so that large values are used soon after they are made."""

from __future__ import annotations

import json

import torch
from torch import nn

from lightning_ort.compiler.backend import ORTBackend
from lightning_ort.runtime.config import RuntimeConfig


def test_columns_of_a_convolution_are_multiplied_before_those_of_the_next_are_made(tmp_path):
    """A node that ONNX Runtime makes of others runs last of all that can run; what waits for it waits in memory.

    The columns of a 3 x 3 convolution are nine times as large as its image.
    """
    blocks = [nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()) for _ in "abc"]
    net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(64 * 10 * 10, 3))
    made = []
    options = {"enable_profiling": True, "profile_file_prefix": str(tmp_path / "run")}
    config = RuntimeConfig(
        placement="onnxruntime", session_options=options, on_session=lambda session, _: made.append(session)
    )
    step = torch.compile(lambda x: net(x).square().mean(), backend=ORTBackend(config))
    step(torch.randn(2, 64, 10, 10)).backward()

    (session,) = made
    with open(session.inner.end_profiling(), encoding="utf-8") as file:
        names = [event["name"] for event in json.load(file) if event["name"].endswith("_kernel_time")]
    order = [
        (call, kind)
        for call, _, node in (name.partition("/") for name in names)
        for kind in ("Concat", "Gemm", "MatMul")
        if call.startswith("convolution_backward") and node.startswith(kind)
    ]
    calls = ["convolution_backward", "convolution_backward_1", "convolution_backward_2"]
    assert [call for call, kind in order if kind == "Concat"] == calls
    assert [call for call, _ in order] == [call for call in calls for _ in ("columns", "product")]
