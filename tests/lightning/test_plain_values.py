"""NumPy, queues and Python's random numbers in a step: what eager computes, and what it leaves behind."""

from __future__ import annotations

import collections
import math
import random
import time
import warnings

import numpy as np
import pytest
import torch
from parity import fit, step_report
from torch import nn
from torch._dynamo import symbolic_convert
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
from torch._dynamo.variables.lists import DequeVariable
from torch._dynamo.variables.misc import NumpyVariable, RandomVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import OrderedDictVariable, UserDefinedTupleVariable
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from lightning_ort import ORTStrategy
from lightning_ort.compiler import dynamo_changes, dynamo_mends, plain_values
from lightning_ort.compiler.plain_values import left_to_python
from lightning_ort.lightning_packages import pl

# what Dynamo makes of them, whoever runs the graphs
pytestmark = pytest.mark.stock_only


class Stepping(pl.LightningModule):
    """Calls ``step(self, batch, index)``."""

    calls = 0

    def __init__(self, step) -> None:
        super().__init__()
        self.net, self.step, self.width = nn.Linear(3, 1), step, 4
        self.queue = collections.deque([torch.ones(()), torch.zeros(())], maxlen=3)
        self.numbers, self.seen = [], []
        self.whole, self.part, self.flags = np.int64(2), np.float32(0.5), [np.bool_(True), np.bool_(False)]
        self.codes, self.parts = np.arange(200, 204, dtype=np.uint8), np.linspace(0.1, 0.4, 4, dtype=np.float32)
        self.table = {"a": 1, "b": 2, "c": 3}
        self.dice, self.recent = random.Random(3), collections.OrderedDict(a=1, b=2, c=3)

    def training_step(self, batch, index):
        return self.step(self, batch, index)

    def on_train_batch_end(self, outputs, batch, index):
        state = [float(v) for v in (*self.queue, *self.numbers)]
        self.seen += [outputs["loss"].item(), *state, *(v.item() for v in self.trainer.callback_metrics.values())]
        self.dtype_of_loss = outputs["loss"].dtype

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def loss_of(module, x):
    return module.net(x).square().mean()


def sized_draws(self, x, i):
    return loss_of(self, x + torch.from_numpy(np.random.randn(*x.shape)).float()) + np.random.normal(size=2).sum()


def seeded_draws(self, x, i):
    np.random.seed(i)
    return loss_of(self, x) * np.random.rand() * np.random.uniform(1, 2, size=3).max()


def mixed_up(self, x, i):
    share = np.random.beta(0.4, 0.4)
    order = np.random.permutation(len(x))
    return loss_of(self, share * x + (1 - share) * x[order])


def statistics(self, x, i):
    self.log("median", float(np.median(x.numpy())))
    self.log("share", np.percentile(x.numpy(), 30))
    return loss_of(self, x)


def scheduled(self, x, i):
    factor = 2 / (1 + np.exp(-10 * float(i + 1) / 4)) - 1
    self.log("factor", factor)
    self.numbers.append(factor)
    return {"loss": loss_of(self, x) * factor, "factor": factor}


def computed_with(self, x, i):
    mean = np.mean(x.numpy())
    self.log_dict({"double": mean * 2, "largest": x.numpy().max() - 1.0})
    return loss_of(self, x) + mean * self.net.weight.sum()


def known_numbers(self, x, i):
    scaled = self.net(x) / np.sqrt(self.width) - 0.5 * np.log(2 * np.pi)
    return scaled.reshape(int(np.prod(scaled.shape))).square().mean() * (1 + np.cos(np.pi / 5))


def uniform(self, x, i):
    self.log("u", random.uniform(0, 1))
    return loss_of(self, x) * random.uniform(0.8, 1.2)


def flipped(self, x, i):
    return loss_of(self, x.flip(1) if random.uniform(0, 1) < 0.5 else x)


def drawn(self, x, i):
    return loss_of(self, x) * random.randint(1, 5) + random.choice([1.0, 2.0]) + random.gauss(0, 1)


def functions_of_a_counter(self, x, i):
    self.width += 1
    n = self.width
    factor = 0.5 * (1 + math.cos(math.pi * n / 9)) + math.exp(-n / 3) + math.log2(n) + math.tanh(n) + math.sqrt(n)
    return loss_of(self, x) * (factor + (n & 3) + (n << 1) + (n ^ 5) + round(n / 3, 1) + math.asin(n / 20))


def beyond_64_bits(self, x, i):
    self.large = getattr(self, "large", 10**30) + 1
    return loss_of(self, x) * (self.large % 7)


def taken_from_the_end(self, x, i):
    last = self.table.popitem()
    self.table = dict([last]) | self.table
    return loss_of(self, x) * last[1]


def hooked(self, x, i):
    y = self.net(x)
    y.register_hook(lambda grad: grad * 3)
    return {"loss": y.square().mean(), "raw": y}


def own_dice(self, x, i):
    order = list(range(len(x)))
    self.dice.shuffle(order)
    return loss_of(self, x[order][:2]) * self.dice.random() + self.dice.randint(1, 6) * self.net.bias.sum()


def least_recently_used(self, x, i):
    if len(self.recent) > 3:
        self.recent.popitem(last=False)
    self.recent[f"k{i}"] = i
    return loss_of(self, x) * sum((k + 1) * value for k, value in enumerate(self.recent.values()))


def of_the_class(self, x, i):
    type(self).calls = i + 1
    return loss_of(self, x) * self.calls


def appended(self, x, i):
    self.queue.append(x.mean())
    return loss_of(self, x) + torch.stack(list(self.queue)).sum() * self.net.bias.sum()


def appended_left(self, x, i):
    y = x.sin()
    self.queue.appendleft(x.mean())
    return loss_of(self, y) * self.queue[-1] + len(self.queue) + self.queue[0]


def extended(self, x, i):
    self.queue += [x.mean(), x.std()]
    self.queue.rotate(1)
    return loss_of(self, x) + sum(self.queue) * self.net.bias.sum()


def own_queue(self, x, i):
    queue = collections.deque(maxlen=2)
    for k in range(4):
        queue.append(x * k)
    return loss_of(self, sum(queue))


class Pair(collections.namedtuple("Pair", "x y")):
    __slots__ = ()

    def __new__(cls, x, y=None):
        return super().__new__(cls, x, y)


def replaced(self, x, i):
    self.pair = Pair(x, x.sum())._replace(x=x * 2)
    if i:
        assert len(self.pair) == 2
    return loss_of(self, self.pair.x) + self.pair.y * self.net.bias.sum()


def packed(self, x, i):
    sequence = pack_sequence([x[:3], x[3:]])
    sequence = sequence._replace(data=sequence.data.sin())
    padded, lengths = pad_packed_sequence(sequence)
    return loss_of(self, padded.flatten(0, 1)) + lengths.sum() * self.net.bias.sum()


def cut(self, x, i):
    """As CutMix does, with a graph break between."""
    left, right = np.clip(np.random.randint(4) - 1, 0, 3), np.clip(np.random.randint(4) + 1, 0, 3)
    kept = 1 - (right - left) / 9
    if random.random() < 0.5:
        x = torch.cat([x[:, :left], x.flip(0)[:, left:right], x[:, right:]], 1)[:, :3]
    loss = kept * loss_of(self, x)
    self.log("kept", kept)
    return loss


def picked(self, x, i):
    number = np.argmax(np.random.rand(4)) + 1
    total = sum(loss_of(self, x) for _ in range(number))
    return (
        total * torch.tensor(number) + [1.0, 2.0, 3.0, 4.0, 5.0][number] * self.net(x[:number]).abs().mean() ** number
    )


def flagged(self, x, i):
    flag = np.random.rand() < np.float64(0.5)
    y = self.net(x) * flag + (~flag) * 0.5
    return y.square().mean() * (2 if flag else 3) * torch.tensor(flag) + self.net.bias.sum()


def short_numbers(self, x, i):
    factor, number = np.random.rand(3).astype(np.float32)[0], np.random.randint(1, 4, 2).astype(np.int32)[0]
    self.log("factor", factor)
    return (1 - factor * 3) * loss_of(self, x * number) * torch.tensor(factor)


def tensors_of_numbers(self, x, i):
    """Of 64 bits, which a loss takes over."""
    constants = torch.tensor([np.sqrt(self.width) / 3, 0.1]).sum() + torch.as_tensor(np.log(2 * np.pi))
    self.share = np.random.choice([0.5, 0.25])
    return loss_of(self, x).double() * (constants + torch.tensor(1 - self.share / 3) + torch.tensor(0.1))


def told_from_pythons(self, x, i):
    factor = 2.0 if isinstance(self.part, float) else 3.0
    factor *= 5.0 if isinstance(self.whole, np.integer) else 7.0
    factor *= 0.5 if type(self.whole) is np.int64 and hasattr(self.part, "dtype") else 0.25
    return loss_of(self, x) * factor


def made_pythons(self, x, i):
    code, part = int(self.codes[i % 4]), float(self.parts[i % 4])
    torch._dynamo.graph_break()
    generator = torch.Generator().manual_seed(code)
    factor = 2.0 if type(code) is int and type(part) is float else 3.0
    return loss_of(self, x) * factor * ((code + 100) * part) * torch.rand((), generator=generator)


def truths(self, x, i):
    if self.flags[0] and not isinstance(self.flags[1], bool):
        self.log("first", 1.0)
    return loss_of(self, x) * (2.0 if self.flags[1] else 0.5)


class Span:
    """Says when it is made, and when it has gone."""

    def __init__(self, told):
        self.told = told
        told.append(1.0)

    def __del__(self):
        self.told.append(-1.0)


def let_go_of(self, x, i):
    span = Span(self.numbers)
    return loss_of(self, x) * len(span.told)


STEPS = [
    sized_draws, seeded_draws, mixed_up, statistics, scheduled, computed_with, known_numbers,
    functions_of_a_counter, beyond_64_bits, taken_from_the_end, hooked, uniform, flipped, drawn, own_dice,
    least_recently_used, of_the_class, appended, appended_left, extended, own_queue, replaced, packed,
    cut, picked, flagged, short_numbers, tensors_of_numbers, told_from_pythons, truths,
    made_pythons, let_go_of,
]  # fmt: skip


def trained(step, strategy):
    data = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    np.random.seed(7)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    run = fit(lambda: Stepping(step), lambda: loader, strategy=strategy, max_epochs=1)
    return run, [np.random.rand(), random.random(), torch.rand(()).item()]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_steps(step):
    eager, left = trained(step, "auto")
    other, also_left = trained(step, ORTStrategy(placement="onnxruntime"))
    assert also_left == left
    assert other.module.seen == pytest.approx(eager.module.seen, rel=1e-4, abs=1e-5)
    assert other.module.dtype_of_loss == eager.module.dtype_of_loss
    torch.testing.assert_close(other.module.state_dict(), eager.module.state_dict(), rtol=1e-4, atol=1e-5)


def test_tensors_of_numbers_are_exact():
    eager, _ = trained(tensors_of_numbers, "auto")
    for options in ({"verify": False}, {"placement": "onnxruntime"}):
        other, _ = trained(tensors_of_numbers, ORTStrategy(**options))
        assert other.module.seen == pytest.approx(eager.module.seen, rel=3e-7)


def test_numbers_that_are_known_break_no_graph():
    run, _ = trained(known_numbers, ORTStrategy())
    report = step_report(run.trainer, "training_step")
    assert report.graphs == 1 and not report.graph_breaks


def test_breaks_are_reported_in_plain_words():
    run, _ = trained(statistics, ORTStrategy())
    reasons = [entry.reason for entry in step_report(run.trainer, "training_step").graph_breaks]
    assert "a tensor becomes an array of NumPy" in reasons
    run, _ = trained(appended, ORTStrategy())
    (entry,) = step_report(run.trainer, "training_step").graph_breaks
    assert entry.reason == "append of a deque with maxlen is left to Python"


def test_a_call_that_dynamo_cannot_look_into_is_no_warning():
    def timed(self, x, i):
        began = time.time()
        loss = loss_of(self, x)
        return loss + 0 * (time.time() - began)

    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run, _ = trained(timed, ORTStrategy())
    assert not [w for w in caught if "Dynamo" in str(w.message)]
    assert any("time.time" in entry.reason for entry in step_report(run.trainer, "training_step").graph_breaks)
    assert list(warnings.filters) == before


def _warn(text, *category):
    warnings.warn(text, *category)


def test_warnings_break_no_graph():
    """They are given once a step, also by a function that it calls; of a text alone, which is there from the start."""

    def warned(self, x, i):
        warnings.warn("by the step", stacklevel=1)
        hidden = self.net(x)
        _warn("by a function")
        return hidden.square().mean()

    texts = []
    for strategy in ("auto", ORTStrategy()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run, _ = trained(warned, strategy)
        texts.append([str(w.message) for w in caught if w.filename == __file__])
    assert texts[0] == ["by the step", "by a function"] * 6
    assert sorted(texts[1]) == sorted(texts[0])
    step = step_report(run.trainer, "training_step")
    assert (step.graphs, step.graph_breaks) == (1, [])


@pytest.mark.parametrize("asked", ["a tensor", "a category"])
def test_warnings_that_break_one(asked):
    def warned(self, x, i):
        hidden = self.net(x)
        if asked == "a tensor":
            _warn(f"the mean is {hidden.mean():.6f}")
        else:
            _warn("deprecated", DeprecationWarning)
        hidden += 1
        return hidden.square().mean()

    found = []
    for strategy in ("auto", ORTStrategy()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(warned, strategy)
        found.append([(str(w.message), w.category) for w in caught if w.filename == __file__])
    assert len(found[0]) == 6
    assert found[1] == found[0]


def test_what_else_may_be_behind_a_graph_stays_the_users_choice(capsys):
    def printed(self, x, i):
        hidden = self.net(x)
        print("a line")
        return hidden.square().mean()

    with torch._dynamo.config.patch(reorderable_logging_functions={print}):
        run, _ = trained(printed, ORTStrategy())
        assert torch._dynamo.config.reorderable_logging_functions == {print}
    assert capsys.readouterr().out.count("a line") == 6
    assert step_report(run.trainer, "training_step").graphs == 1


def test_a_warning_that_is_an_error():
    def warned(self, x, i):
        _warn("too much")
        return self.net(x).square().mean()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "too much")
        with pytest.raises(UserWarning, match="too much"):
            trained(warned, ORTStrategy())


def test_a_step_that_takes_a_new_seed_gives_it_to_the_generator():
    taken, found = [], []

    def reseeded(self, x, i):
        taken.append(torch.seed())
        loss = loss_of(self, x) * torch.rand(())
        found.append(torch.initial_seed())
        return loss

    run, _ = trained(reseeded, ORTStrategy(placement="onnxruntime"))
    assert len(set(taken)) == 6, "the seed of one step is that of another"
    assert found == taken
    assert not step_report(run.trainer, "training_step").in_torch


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(()), torch.ones(3, dtype=torch.float64)], ids=str)
def test_without_the_strategy_numbers_drawn_have_their_types(x):
    """Dynamo gives a float64 tensor to a graph that it has made for float32."""

    def step(x):
        return x.sin() * random.uniform(1, 2) + random.uniform(0, 1) * random.randint(1, 9)

    found = []
    for function in (step, torch.compile(step, backend="lightning_ort")):
        random.seed(0)
        found.append([function(x) for _ in range(3)])
    torch.testing.assert_close(found[1], found[0])


def test_dynamo_is_left_as_it_was():
    places = [(kind, "call_method") for kind in (DequeVariable, OrderedDictVariable, RandomVariable)]
    classes = (NumpyVariable, BuiltinVariable, TorchInGraphFunctionVariable, CollectiveFunctionRewriteVariable)
    places += [*((kind, "call_function") for kind in classes), (SideEffects, "store_attr")]
    places += [(VariableBuilder, "wrap_unspecialized_primitive"), (UserDefinedTupleVariable, "__init__")]
    places += [(owner, name) for owner, name, _ in [*dynamo_mends.MENDS, *dynamo_changes.LOST_CHANGES]]
    places += [(NumpyVariable, name) for name in ("as_python_constant", "python_type", "var_getattr")]
    places += [(BuiltinVariable, "call_function_handler_cache")]
    assert len(dynamo_mends.MENDS) == len(dynamo_mends._ALL) - 1, "Dynamo names a function otherwise"
    patched = [(owner, name) for owner, name, _ in plain_values._PATCHES]
    assert len(set(patched)) == len(patched), "of two patches of one function, the second would take the other's place"

    def state():
        tables = VariableBuilder._type_dispatch_impl(False), symbolic_convert.compare_op_handlers
        return [getattr(*place) for place in places], *map(dict, tables)

    before = state()
    with left_to_python():
        inside = state()
        assert all(a is not b for a, b in zip(inside[0], before[0], strict=True)) and inside[1] != before[1]
        with left_to_python():
            pass
        assert state() == inside
    assert state() == before
