"""Objects that a step copies, or makes and keeps: with all of what is in them."""

from __future__ import annotations

import collections
import copy
import dataclasses

import pytest
import torch
from lightning.pytorch import LightningModule
from parity import make_trainer
from torch import nn

from lightning_ort import ORTStrategy

pytestmark = pytest.mark.stock_only


class Table(dict):
    pass


class Row(list):
    pass


class Names(set):
    pass


class Fixed(frozenset):
    pass


class Ordered(collections.OrderedDict):
    pass


class Queue(collections.deque):
    pass


class Plain:
    def __init__(self) -> None:
        self.a, self.weights, self.ordered = [1, 2], torch.ones(2), collections.OrderedDict(x=1)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


class SlotsAndMore(Slots):
    def __init__(self) -> None:
        super().__init__()
        self.c = 3


class Telling:
    def __init__(self) -> None:
        self.a, self.b = 1, 2

    def __getstate__(self):
        return {"a": 10 * self.a}


class Reducing:
    def __init__(self, a: int = 1) -> None:
        self.a = a

    def __reduce__(self):
        return Reducing, (self.a + 5,)


class Given:
    def __new__(cls, a: int = 1):
        made = super().__new__(cls)
        made.a = 2 * a
        return made

    def __getnewargs__(self):
        return (self.a,)


class Copying:
    def __init__(self) -> None:
        self.a = 1

    def __deepcopy__(self, memo):
        made = Copying()
        made.a = 7
        return made


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    b: list[int]


KINDS = {
    "OrderedDict": lambda x: collections.OrderedDict(a=x, b=2 * x),
    "OrderedDict of numbers": lambda x: collections.OrderedDict(a=1, b=2),
    "Counter": lambda x: collections.Counter("aab"),
    "deque with maxlen": lambda x: collections.deque([x, x], maxlen=3),
    "class of dict": lambda x: Table(a=x),
    "class of list": lambda x: Row([x, x]),
    "class of set": lambda x: Names([1, 2]),
    "class of frozenset": lambda x: Fixed([1, 2]),
    "class of OrderedDict": lambda x: Ordered(a=x),
    "class of deque": lambda x: Queue([1, x], maxlen=5),
    "plain object": lambda x: Plain(),
    "slots": lambda x: Slots(),
    "slots and more": lambda x: SlotsAndMore(),
    "__getstate__": lambda x: Telling(),
    "__reduce__": lambda x: Reducing(),
    "__getnewargs__": lambda x: Given(),
    "__deepcopy__": lambda x: Copying(),
    "dataclass": lambda x: Data(x, [1]),
}
HOW = {
    "kept": lambda it: it,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "nested": lambda it: copy.deepcopy({"k": [it]}),
    "method": lambda it: it.copy() if isinstance(it, (dict, list, set, collections.deque)) else it,
    "times": lambda it: it * 2 if isinstance(it, (list, collections.deque)) else it,
}


def shown(it):
    """``it`` as text: its class, what is in it and what it has."""
    name = type(it).__name__
    if isinstance(it, torch.Tensor):
        return str(it.tolist())
    if isinstance(it, dict):
        return name + str({k: shown(v) for k, v in it.items()})
    if isinstance(it, (list, tuple, collections.deque)):
        return name + str([shown(v) for v in it]) + str(getattr(it, "maxlen", ""))
    if isinstance(it, (set, frozenset)):
        return name + str(sorted(it))
    if isinstance(it, (int, float, str)):
        return name + str(it)
    slots = [n for kind in type(it).__mro__ for n in kind.__dict__.get("__slots__", ())]
    return name + str({n: shown(getattr(it, n)) for n in [*slots, *getattr(it, "__dict__", {})]})


class Keeping(LightningModule):
    """Keeps copies of an object that is there, or that the step makes."""

    def __init__(self, make, how, is_there) -> None:
        super().__init__()
        self.net, self.make, self.how, self.kept = nn.Linear(2, 1), make, how, None
        self.there = [make(torch.tensor(3.0))] if is_there else []

    def training_step(self, batch, index):
        it = self.there[0] if self.there else self.make(torch.tensor(3.0))
        self.kept = self.how(it)
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def trained(module, strategy):
    make_trainer(strategy, max_steps=1).fit(module, torch.utils.data.DataLoader(torch.ones(2, 2)))
    return module


@pytest.mark.parametrize("is_there", [True, False], ids=["there before", "made in the step"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_step_keeps_of_an_object(kind, is_there):
    for name, how in HOW.items():
        module = trained(Keeping(KINDS[kind], how, is_there), ORTStrategy(print_report=False))
        there = module.there[0] if is_there else KINDS[kind](torch.tensor(3.0))
        assert shown(module.kept) == shown(how(there)), name


class Anchored(LightningModule):
    """Is drawn to what its weights were some steps ago."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.anchor = nn.Linear(3, 1, dtype=torch.float64), None

    def training_step(self, batch, index):
        if index % 4 == 0:
            self.anchor = copy.deepcopy(self.net.state_dict())
        loss = self.net(batch).square().mean()
        if index % 4:
            loss = loss + sum((self.net.get_parameter(k) - v).square().sum() for k, v in self.anchor.items())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.arange(24, dtype=torch.float64).reshape(8, 3) / 24)


def test_a_snapshot_of_the_weights():
    weights = []
    for strategy in ("auto", ORTStrategy(print_report=False)):
        torch.manual_seed(0)
        module = Anchored()
        make_trainer(strategy, max_epochs=1).fit(module)
        weights.append(module.net.weight)
        assert list(module.anchor) == ["weight", "bias"]
    torch.testing.assert_close(*weights, rtol=1e-12, atol=0)
