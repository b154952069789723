"""Objects that change between steps, by which a step chooses: no graph is taken that was made for another one."""

from __future__ import annotations

import datetime
import enum
import math
import os
import types
import typing

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage
from modules import table
from parity import assert_fit_parity, step_report
from torch import nn

from lightning_ort.lightning_packages import pl

# what Dynamo watches, whoever runs the graphs
pytestmark = pytest.mark.stock_only


class Phase(enum.Enum):
    WARMUP, MAIN = "warmup", "main"


class Mode(enum.IntEnum):
    PLAIN, SCALED = 1, 2


class Falling:
    """Has what it was not given, too."""

    def __getattr__(self, name):
        return 1.0


class Settings:
    def __init__(self, weight: float) -> None:
        self.weight = weight


class Plain: ...


class Careful: ...


def one(): ...


def other(): ...


class Base:
    def inherited(self):
        return 1.0

    def as_well(self):
        return 1.0

    def overridden(self):
        return 1.0

    @staticmethod
    def static():
        return 1.0

    @classmethod
    def of_class(cls):
        return 1.0

    @property
    def as_property(self):
        return 1.0

    def __call__(self):
        return 1.0

    def __getitem__(self, index):
        return 1.0

    def __len__(self):
        return 1


class Middle(Base): ...


class Tool(Middle):
    def overridden(self):
        return 2.0 * super().overridden()


class Layer(nn.Module):
    def forward(self, x):
        return x


class Hidden(Layer): ...


@typing.runtime_checkable
class Weighted(typing.Protocol):
    weight: float


class Known(type):
    def __instancecheck__(cls, instance):
        return vars(instance).get("weight") == 0.25


class Light(metaclass=Known): ...


TOOL, LAYER = Tool(), Hidden()
FIRST, SECOND = Settings(1.0), Settings(0.25)
WEIGHTS = {Phase.WARMUP: 1.0, Phase.MAIN: 0.25, (Phase.WARMUP, 1): 3.0, (Phase.MAIN, 1): 0.5, Plain: 1.0, Careful: 0.5}
RARE, LOSSES, STRENGTHS = {Phase.MAIN, Careful}, [1.0, 0.25], {"a": 1.0}
TENSOR = torch.tensor([1.0, 2.0, 3.0])
STAGES = {RunningStage.TRAINING: "train", RunningStage.VALIDATING: "val", RunningStage.SANITY_CHECKING: "sanity"}

CHOICES = {
    "entry": ([Phase.WARMUP, Phase.MAIN], lambda m: WEIGHTS[m.chosen]),
    "entry or default": ([Phase.WARMUP, Phase.MAIN], lambda m: WEIGHTS.get(m.chosen, 2.0)),
    "entry by a tuple": ([Phase.WARMUP, Phase.MAIN], lambda m: WEIGHTS[m.chosen, 1]),
    "in a dictionary": ([Phase.WARMUP, None], lambda m: 1.0 if m.chosen in WEIGHTS else 0.25),
    "in a set": ([Phase.WARMUP, Phase.MAIN], lambda m: 0.25 if m.chosen in RARE else 1.0),
    "a class in a set": ([Plain, Careful], lambda m: 0.25 if m.chosen in RARE else 1.0),
    "entry by a class": ([Plain, Careful], lambda m: WEIGHTS.get(m.chosen, 2.0)),
    "entry by a function": ([one, other], lambda m: {one: 1.0, m.chosen: 0.25}[one]),
    "object": ([FIRST, SECOND], lambda m: 1.0 if FIRST is m.chosen else 0.25),
    "attribute": ([FIRST, SECOND], lambda m: FIRST.weight + 2 * m.chosen.weight),
    "list": ([LOSSES, [3.0, 1.0]], lambda m: LOSSES[0] + m.chosen[0]),
    "dictionary": ([STRENGTHS, {"a": 0.25}], lambda m: STRENGTHS["a"] + m.chosen["a"]),
    "another list": ([LOSSES, [1.0, 0.25]], lambda m: 1.0 if LOSSES is not m.chosen else 0.25),
    "another set": ([RARE, {*RARE}], lambda m: 1.0 if RARE is not m.chosen else 0.25),
    "another dictionary": ([WEIGHTS, {**WEIGHTS}], lambda m: 1.0 if WEIGHTS is not m.chosen else 0.25),
    "equal object": ([FIRST, SECOND], lambda m: 1.0 if m.chosen == FIRST else 0.25),
    "tensor": ([TENSOR, torch.ones(3)], lambda m: (TENSOR * m.chosen).sum()),
    "listed keys": ([{"a": 1}, {"b": 1}], lambda m: 1.0 if list(m.chosen)[0] == "a" else 0.25),  # noqa: RUF015
    "order of keys": ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], lambda m: "ab".index([*m.chosen][0]) + 1),  # noqa: RUF015
    "text": ([FIRST, SECOND], lambda m: 1.0 if str(m.chosen) == str(FIRST) else 0.25),
    "kind": ([FIRST, SECOND], lambda m: 1.0 if isinstance(m.chosen, Light) else 0.25),
    "bound method": ([TOOL.inherited, TOOL.as_well], lambda m: 1.0 if m.chosen == TOOL.inherited else 0.25),
    "method of another": ([TOOL.inherited, Tool().inherited], lambda m: 1.0 if m.chosen != TOOL.inherited else 0.25),
    "one of two methods": ([TOOL.as_well, TOOL.of_class], lambda m: 1.0 if m.chosen in (1, TOOL.as_well) else 0.25),
}


def with_or_without(place):
    """Objects of which the second has something that the first has not."""
    first, second = place(), place()
    (second.__setitem__ if isinstance(second, dict) else second.__setattr__)("weight", 0.25)
    return [first, second]


def attempted(module):
    try:
        return module.chosen.weight
    except AttributeError:
        return 1.0


def looked_up(module):
    try:
        return module.chosen["weight"]
    except KeyError:
        return 1.0


ABSENT = {
    "attribute": (with_or_without(types.SimpleNamespace), attempted),
    "attribute that a class makes up": (with_or_without(Falling), lambda m: m.chosen.weight),
    "key": (with_or_without(dict), looked_up),
    "name in __dict__": (
        with_or_without(types.SimpleNamespace),
        lambda m: 0.25 if "weight" in m.chosen.__dict__ else 1.0,
    ),
    "name of a protocol": (
        with_or_without(types.SimpleNamespace),
        lambda m: 1.0 if isinstance(m.chosen, Weighted) else 0.25,
    ),
    "number of names": (with_or_without(types.SimpleNamespace), lambda m: 1.0 + len(vars(m.chosen))),
}
VALUES = {
    "infinity": ([0.5, math.inf], lambda m: 0.25 if m.chosen == math.inf else 1.0),
    "whole number and member": ([1, 2], lambda m: 0.25 if m.chosen == Mode.SCALED else 1.0),
    "whole number among members": ([1, 2], lambda m: 0.25 if m.chosen in (Mode.SCALED,) else 1.0),
    "is True": ([1, 2], lambda m: 0.25 if (m.chosen > 1) is True else 1.0),
    "sentinel": ([object(), Plain], lambda m: 1.0 if m.chosen is SENTINELS[0] else 0.25),
    "date": ([datetime.date(2020, 1, 1), datetime.date(2020, 9, 1)], lambda m: 1.0 if m.chosen < DAY else 0.25),
    "text of a number": ([1, 2], lambda m: 0.25 if f"{m.chosen}" == "2" else 1.0),
    "object in a set": ([FIRST, SECOND], lambda m: 1.0 if m.chosen in CHOSEN else 0.25),
    "tensor": ([TENSOR, TENSOR.clone()], lambda m: 1.0 if m.chosen is TENSOR else 0.25),
}
SENTINELS, DAY, CHOSEN = VALUES["sentinel"][0], datetime.date(2020, 6, 1), {FIRST}


ALL = {**CHOICES, **{f"absent {k}": v for k, v in ABSENT.items()}, **{f"value: {k}": v for k, v in VALUES.items()}}


class Choosing(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = nn.Linear(12, 4)
        self.objects, self.weight_of = ALL[name]
        self.chosen = self.objects[0]

    def on_train_batch_start(self, batch, index):
        self.chosen = self.objects[self.global_step // 3 % 2]

    def chosen_by(self):
        return 1.0

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean() * self.weight_of(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("name", ALL)
def test_what_a_step_chooses_by(name):
    """One graph for each of two objects, and none more but where a number is open from the second on."""
    _, other = assert_fit_parity(lambda: Choosing(name), table, max_steps=12)
    assert step_report(other.trainer, "training_step").graphs in ((2, 3) if name.startswith("value") else (2,))


class Remembers(Choosing):
    """Begins what it keeps in its first step."""

    def training_step(self, batch, index):
        try:
            self.steps += 1
            self.mean = 0.9 * self.mean + 0.1 * batch[0].square().mean()
        except AttributeError:
            self.steps, self.mean = 1, batch[0].square().mean()
        if "first" not in self.__dict__:
            self.first = batch[0].square().mean()
        return super().training_step(batch, index) * self.steps * self.mean.abs() * self.first.abs()


def test_what_a_step_begins_itself():
    eager, other = assert_fit_parity(lambda: Remembers("entry"), table, max_steps=12)
    assert eager.module.steps == other.module.steps == 12
    torch.testing.assert_close([other.module.mean, other.module.first], [eager.module.mean, eager.module.first])


MODULE = types.ModuleType("settings")


def attempted_of_module():
    try:
        return MODULE.weight
    except AttributeError:
        return 1.0


class Configured(Choosing):
    """Goes by a module of Python that has a name, and has it not."""

    def on_train_batch_start(self, batch, index):
        MODULE.__dict__.pop("weight", None)
        if self.global_step // 3 % 2:
            MODULE.weight = 0.25


MODULE_READERS = [attempted_of_module, lambda: getattr(MODULE, "weight", 1.0), lambda: 1.0 + hasattr(MODULE, "weight")]


@pytest.mark.parametrize("read", MODULE_READERS, ids=["attempted", "getattr", "hasattr"])
def test_names_that_a_module_of_python_gets_and_loses(read):
    def make():
        module = Configured("entry")
        module.weight_of = lambda _: read()
        return module

    _, other = assert_fit_parity(make, table, max_steps=12)
    assert step_report(other.trainer, "training_step").graphs == 2


class NamedByStage(Choosing):
    """Logs under names that tell what the Trainer is at, as pytorch-forecasting does."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log(f"{STAGES.get(self.trainer.state.stage)}_loss", loss.detach(), on_step=False, on_epoch=True)
        return loss

    validation_step = training_step


def test_names_of_stages():
    _, other = assert_fit_parity(lambda: NamedByStage("entry"), table, table, max_epochs=2)
    assert set(other.trainer.callback_metrics) == {"train_loss", "val_loss"}


METHODS = {
    "method": (Base, "inherited", lambda self: 0.25, lambda m: TOOL.inherited()),
    "method that a class gets": (Tool, "inherited", lambda self: 0.25, lambda m: TOOL.inherited()),
    "method that a class between gets": (Middle, "inherited", lambda self: 0.25, lambda m: TOOL.inherited()),
    "method by super": (Base, "overridden", lambda self: 0.25, lambda m: TOOL.overridden()),
    "method of a local object": (Base, "inherited", lambda self: 0.25, lambda m: Tool().inherited()),
    "method by its class": (Base, "inherited", lambda self: 0.25, lambda m: Tool.inherited(TOOL)),
    "bound method": (Base, "inherited", lambda self: 0.25, lambda m: (lambda f: f())(TOOL.inherited)),
    "static method": (Base, "static", staticmethod(lambda: 0.25), lambda m: TOOL.static()),
    "static method by its class": (Base, "static", staticmethod(lambda: 0.25), lambda m: Tool.static()),
    "class method": (Base, "of_class", classmethod(lambda cls: 0.25), lambda m: TOOL.of_class()),
    "class method by its class": (Base, "of_class", classmethod(lambda cls: 0.25), lambda m: Tool.of_class()),
    "property": (Base, "as_property", property(lambda self: 0.25), lambda m: TOOL.as_property),
    "call": (Base, "__call__", lambda self: 0.25, lambda m: TOOL()),
    "entry": (Base, "__getitem__", lambda self, index: 0.25, lambda m: TOOL[0]),
    "length": (Base, "__len__", lambda self: 3, lambda m: 1.0 + len(TOOL)),
    "layer": (Layer, "forward", lambda self, x: x.cos(), lambda m: LAYER(TENSOR).sum()),
    "layer that gets a forward": (Hidden, "forward", lambda self, x: x.cos(), lambda m: LAYER(TENSOR).sum()),
    "layer of torch": (nn.Linear, "forward", lambda self, x: x[..., :4] * self.weight.sum(), lambda m: 1.0),
    "of the module": (Choosing, "chosen_by", lambda self: 0.25, lambda m: m.chosen_by()),
    "attribute of a function": (one, "weight", 0.25, lambda m: getattr(one, "weight", 1.0)),
    "whether a function has one": (one, "weight", 0.25, lambda m: 1.0 if hasattr(one, "weight") else 0.5),
    "variable of the environment": (os.environ, "WEIGHT", "0.25", lambda m: float(os.getenv("WEIGHT", "1.0"))),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_of_classes(name, monkeypatch):
    """A class gets another method, and its own one again, or a function an attribute: two graphs."""
    owner, method, replacement, read = METHODS[name]

    class Patching(Choosing):
        def on_train_batch_start(self, batch, index):
            monkeypatch.undo()
            if self.global_step // 3 % 2:
                if owner is os.environ:
                    monkeypatch.setenv(method, replacement)
                else:
                    monkeypatch.setattr(owner, method, replacement, raising=False)

    def make():
        module = Patching("entry")
        module.weight_of = read
        return module

    _, other = assert_fit_parity(make, table, max_steps=12)
    monkeypatch.undo()
    assert step_report(other.trainer, "training_step").graphs == 2
