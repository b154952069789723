"""What a TrainingSession trains of a file of torch.onnx.export(dynamo=True)."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import torch
from test_training_session import parameters
from torch import Tensor, nn

from lightning_ort import TrainingSession

pytest.importorskip("onnxscript")


class Scaled(nn.Module):
    """A layer that is not trained, one that is, a buffer that the exporter transposes, and constants."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.linear = nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 4)
        self.register_buffer("codebook", torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.linear(torch.tanh(self.fixed(x))) @ self.codebook.t()) * 0.7 + 0.5).pow(2.0).mean()


def test_only_parameters_are_trained_and_what_the_user_names_is_not() -> None:
    """That a parameter has requires_grad=False is not in the file."""
    torch.manual_seed(0)
    module, x = Scaled().eval(), torch.randn(3, 2, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, (x,), dynamo=True, input_names=["x"], output_names=["loss"], verbose=False
        )  # fmt: skip
    assert program is not None
    model = program.model_proto
    assert set(TrainingSession(model, parameters("SGDOptimizer")).get_state()) >= {"fixed.bias", "linear.bias"}
    shapes = {i.name: tuple(i.dims) for i in model.graph.initializer}
    fixed = {name for name, shape in shapes.items() if name == "fixed.bias" or shape == (6, 5)}
    session = TrainingSession(model, parameters("SGDOptimizer", weights_not_to_train=fixed))
    expected = copy.deepcopy(module)
    optimizer = torch.optim.SGD([p for p in expected.parameters() if p.requires_grad], 0.1)
    for _ in range(5):
        (loss,) = session.run(["loss"], {"x": x.numpy(), "Learning_Rate": [0.1]})
        optimizer.zero_grad()
        wanted = expected(x)
        wanted.backward()
        optimizer.step()
        np.testing.assert_allclose(loss, wanted.item(), rtol=1e-4)
