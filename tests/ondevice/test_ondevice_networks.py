"""Networks that train through portable artifacts as they do in torch, on one loop here and one of a stranger."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from ondevice_models import opened, strangers_training, train
from ondevice_networks import NETWORKS
from torch import nn

from lightning_ort.ondevice import OptimizerConfig, generate_artifacts


@pytest.mark.parametrize("name", NETWORKS)
def test_training_is_that_of_torch(name, tmp_path):
    kind, batch, loss, varies = NETWORKS[name]
    torch.manual_seed(0)
    network = kind()
    data = [batch(8 if varies and k % 5 == 4 else 6) for k in range(20)]
    generate_artifacts(
        network, tmp_path, inputs=data[0], loss=loss, optimizer=OptimizerConfig("AdamW", 0.01, weight_decay=0.01),
        dynamic_axes=None if varies else {},
    )  # fmt: skip
    if not varies:
        data = [batch(6) for _ in range(20)]
    for path in tmp_path.glob("*.onnx"):
        model = onnx.load(path)
        onnx.checker.check_model(model)
        assert model.ir_version == 10 and [(o.domain, o.version) for o in model.opset_import] == [("", 20)], path
    state, module, optimizer = opened(tmp_path)
    losses = train(module, optimizer, data)
    names = module.input_names()
    fed = [dict(zip(names, [t.numpy() for t in tensors], strict=True)) for tensors in data]
    others, tensors = strangers_training(tmp_path, fed, 0.01)

    reference = torch.optim.AdamW(network.parameters(), 0.01, weight_decay=0.01)
    function = F.mse_loss if loss == "MSELoss" else F.cross_entropy
    expected = []
    for x, y in data:
        reference.zero_grad()
        value = function(network(x), y)
        value.backward()
        reference.step()
        expected.append(value.item())
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(others, expected, rtol=0, atol=1e-5)
    buffers = dict(network.named_buffers())
    assert state.training_state.buffers.keys() == buffers.keys()
    for key, value in buffers.items():
        torch.testing.assert_close(state.training_state.buffers[key], value, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(np.asarray(tensors[key])), value, rtol=1e-4, atol=1e-5)

    # evaluation and inference use running statistics
    network.eval()
    x, y = data[0]
    with torch.no_grad():
        result = network(x)
        torch.testing.assert_close(module.eval()(x, y), function(result, y), rtol=0, atol=1e-4)
    session = onnxruntime.InferenceSession(tmp_path / "infer.onnx", providers=["CPUExecutionProvider"])
    feed = {i.name: tensors[i.name] for i in session.get_inputs() if i.name in tensors}
    (got,) = session.run(None, {**feed, names[0]: x.numpy()})
    np.testing.assert_allclose(got, result, rtol=0, atol=1e-3)


def test_dropout_scales_what_it_keeps_and_is_off_in_evaluation(tmp_path):
    class Dropped(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.dropout = nn.Parameter(torch.ones(200)), nn.Dropout(0.3)

        def forward(self, x):
            return self.dropout(x * self.scale)

    x, y = torch.full((50, 200), 2.0), torch.zeros(50, 200)
    generate_artifacts(
        Dropped(), tmp_path, inputs=(x, y), loss="L1Loss", optimizer=OptimizerConfig("SGD", 0.0),
        additional_output_names=["output"],
    )  # fmt: skip
    state, module, _ = opened(tmp_path)
    kept = []
    for _ in range(3):
        loss, output = module(x.numpy(), y.numpy())
        zeros = output == 0
        np.testing.assert_allclose(output[~zeros], 2 / 0.7, rtol=1e-6)
        assert abs(zeros.mean() - 0.3) < 0.03  # 10000 draws: six standard deviations
        assert abs(output.mean() - 2.0) < 0.1
        np.testing.assert_allclose(loss, output.mean(), rtol=1e-4)
        # the mask of the gradient is that of the output
        np.testing.assert_allclose(state.parameters["scale"].grad, output.sum(0) / output.size, rtol=1e-4)
        kept.append(zeros)
        module.lazy_reset_grad()
    assert not np.array_equal(kept[0], kept[1])
    _, output = module.eval()(x.numpy(), y.numpy())
    np.testing.assert_array_equal(output, 2.0)
