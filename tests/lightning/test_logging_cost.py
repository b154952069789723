"""What ``self.log`` keeps is not moved, and with that copied, in every step."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from modules import FEATURES, curve
from parity import fit

from lightning_ort.lightning.logged import results_stay


class Logging(LightningModule):
    """Logs in each way in which Lightning keeps results."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(FEATURES, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = (self.net(x) - y).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _moves(strategy, monkeypatch):
    moves = []
    move = _ResultMetric.to

    def counted(self, *args, **kwargs):
        moves.append(args)
        return move(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(_ResultMetric, "to", counted)
        run = fit(Logging, curve, strategy=strategy, max_epochs=3)
        assert _ResultMetric.to is counted, "the strategy left its own method behind"
    return len(moves), run.trainer.callback_metrics


def test_results_are_not_moved_at_each_log(monkeypatch):
    eager_moves, eager = _moves("auto", monkeypatch)
    moves, metrics = _moves("ort", monkeypatch)
    assert eager_moves >= 2 * 18, "Lightning no longer moves results at each log: results_stay has nothing to do"
    assert moves <= 2, "moved at each log, and not only when the fit ended"
    assert metrics.keys() == eager.keys()
    for name, value in eager.items():
        torch.testing.assert_close(metrics[name], value, rtol=1e-5, atol=1e-6)


def test_a_result_on_another_device_is_moved(monkeypatch):
    moved = []
    monkeypatch.setattr(_ResultMetric, "to", lambda self, *args, **kwargs: moved.append(args) or self)
    result = _ResultMetric.__new__(_ResultMetric)
    result.is_tensor, result._defaults = True, {"value": torch.tensor(0.0)}
    result.value = torch.tensor(0.0)
    with results_stay(None):
        result.to(torch.device("cpu"))
        assert not moved
        result.to(torch.device("meta"))
    assert moved == [(torch.device("meta"),)]
