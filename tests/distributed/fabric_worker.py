"""One of several processes: the loop of a Fabric under its own "ddp" and under "ort"."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_ort


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12, affine=False), nn.Tanh(), nn.Linear(12, 3))

    def forward(self, x):
        return self.body(x)

    def loss(self, x, y):
        return F.cross_entropy(self(x), y)


def train(strategy: str, folder: Path) -> dict[str, Any]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, precision="64-true")
    fabric.launch()
    torch.manual_seed(0)
    module = Net()
    data = TensorDataset(torch.randn(96, 6), torch.randint(0, 3, (96,)))
    model, optimizer = fabric.setup(module, torch.optim.Adam(module.parameters(), 0.01))
    model.mark_forward_method("loss")
    assert isinstance(model._forward_module, DistributedDataParallel)
    loader = fabric.setup_dataloaders(DataLoader(data, 8, shuffle=True))
    seen = 0
    for _ in range(6):
        for i, (x, y) in enumerate(loader):
            seen += len(x)
            last = i % 2 == 1
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(F.cross_entropy(model(x), y) if last else model.loss(x, y))
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    fabric.save(folder / f"{strategy}.ckpt", {"model": model, "optimizer": optimizer})
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    fabric.load(folder / f"{strategy}.ckpt", {"model": model, "optimizer": optimizer})
    # running statistics are those of rank 0, which has written the file
    again = all(torch.equal(x, weights[name]) for name, x in model.state_dict().items() if "running" not in name)
    found = {
        "weights": weights,
        "seen": seen,
        "again": again,
        "names": list(torch.load(folder / f"{strategy}.ckpt")["model"]),
    }
    if strategy == "ort":
        found["steps"] = {
            name: (s.calls, s.graphs, s.graphs_in_torch, len(s.in_torch), len(s.graph_breaks))
            for name, s in fabric.strategy.report().items()
        }
    return found


def thaw() -> dict[str, Any]:
    """What is said of a layer that is trained although it was frozen at its set-up, and after another set-up."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ort", precision="64-true")
    fabric.launch()
    torch.manual_seed(0)
    module = Net()
    x, y = torch.randn(8, 6, dtype=torch.float64) + fabric.global_rank, torch.arange(8) % 3
    module.body[0].requires_grad_(False)
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), 0.1))

    def step() -> str:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        before = copy.deepcopy(module.state_dict())
        try:
            optimizer.step()
        except lightning_ort.UnsupportedError as error:
            assert all(torch.equal(v, before[name]) for name, v in module.state_dict().items())
            return str(error)
        return ""

    said = [step()]
    module.body[0].requires_grad_()
    said.append(step())
    model = fabric.setup_module(module)
    said.append(step())
    return {"said": said, "weights": {name: p.detach() for name, p in module.named_parameters()}}


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {strategy: train(strategy, folder) for strategy in ("ddp", "ort")}
    found["thawed"] = thaw()
    torch.save(found, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main()
