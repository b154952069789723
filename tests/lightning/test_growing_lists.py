"""Lists that a step lets grow, in every way in which a step may use them, against eager."""

from __future__ import annotations

import copy
import heapq
import importlib
import json
import linecache
import pickle
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from modules import Regressor, curve
from parity import STRATEGY, assert_same_outcome, fit, step_report
from torch.utils._pytree import tree_leaves

from lightning_ort.lightning import growing_lists
from lightning_ort.lightning.growing_lists import GrowingList, GrowingLists
from lightning_ort.lightning.list_uses import uses_of_lists

pytestmark = pytest.mark.stock_only  # it is Dynamo's doing, on any ONNX Runtime

LISTS = ("a", "b", "best", "history", "window")
DICTIONARIES = ("outputs", "nested")


class Lists(Regressor):
    """A step that hands its lists to ``use``, and a hook that looks at what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.a: list[Any] = []
        self.b: list[Any] = []
        self.best: list[Any] = []
        self.history: list[Any] = []
        self.window: list[Any] = []
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self.nested: dict[str, Any] = {"a": [], "b": {"c": []}}
        self.seen = 0
        self.kinds: set[tuple[str, ...]] = set()
        self.returned: list[Any] = []
        self.prepare(self)

    @staticmethod
    def prepare(s):
        """What ``__init__`` does besides."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        return self.use(self, batch_idx, loss)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        held = [getattr(self, name) for name in LISTS]
        held += [entry for name in DICTIONARIES for entry in getattr(self, name).values()]
        held += [entry for entry in self.history if not isinstance(entry, (int, float, torch.Tensor))]
        held += [value for value in outputs.values() if not isinstance(value, torch.Tensor)]
        self.kinds.update((type(entry).__name__,) for entry in held)
        self.returned.append(copy.deepcopy({k: v for k, v in outputs.items() if k != "loss"}))


def leaves_collected(s, i, loss):
    s.a.append(loss.detach())
    return loss


def window(s, i, loss):
    s.window.append(i)
    if i % 3 == 2:
        s.history.append(s.window)
        s.window = []
    return loss


def alias(s, i, loss):
    s.a.append(i)
    s.seen += len(s.b)
    return loss


def asks_its_type(s, i, loss):
    s.a.append(i)
    return loss * 2 if isinstance(s.a, list) else loss


def copies(s, i, loss):
    s.a.append(i)
    s.best = copy.copy(s.a)
    s.a.append(-i)
    return loss


def returns(s, i, loss):
    s.a.append(i)
    return {"loss": loss, "a": s.a}


def renames(s, i, loss):
    s.a.append(i)
    if i == 1:
        s.best = s.a
        s.a = []
    return loss


def counts_leaves(s, i, loss):
    s.a.append(i)
    s.seen += len(tree_leaves(s.a))
    return loss


def adds_in_front(s, i, loss):
    s.a.append(i)
    s.b = [0] + s.a  # noqa: RUF005
    return loss


def repeats(s, i, loss):
    s.a.append(i)
    s.b = s.a * 2
    return loss


def writes_json(s, i, loss):
    s.a.append(i)
    s.history.append(float(len(json.dumps(s.a))))
    return loss


def keeps_a_heap(s, i, loss):
    s.a.append(100 - i)
    heapq.heappush(s.a, 3 + i)
    return loss


def compares(s, i, loss):
    s.a.append(i)
    return loss * 2 if s.a > [0] else loss


def stacks(s, i, loss):
    s.a.append(loss.detach())
    return loss / (1 + torch.stack(s.a).mean())


# -- those of which a stand-in is one ------------------------------------------------------------------------------


def reads_entries(s, i, loss):
    s.a.append(i)
    s.seen += s.a[-1] + s.a[len(s.a) // 2] + sum(s.a[-2:])
    return loss


def asks_whether_empty(s, i, loss):
    if not s.a or i % 4 == 3:
        s.b.append(i)
    s.a.append(i)
    if s.b and i:
        s.seen += 1
    return loss


def iterates(s, i, loss):
    s.a.append(i)
    for value in s.a:
        s.seen += value
        if value == i and len(s.a) < 20:
            s.a.append(value + 0.5)
    s.seen += sum(value for value in s.a)
    return loss


def clears(s, i, loss):
    s.a.append(loss.detach())
    if len(s.a) == 3:
        s.a.clear()
    s.b.insert(0, i)
    s.window.append(i)
    if len(s.window) > 2:
        s.window.pop(0)
    return loss


def adds_in_place(s, i, loss):
    s.a += [i, i + 1]
    s.seen += 7 in s.a
    return loss


def sorts(s, i, loss):
    s.a.append(-i)
    s.a.sort()
    s.a.reverse()
    s.seen += s.a.index(-i) + s.a.count(0)
    return loss


def fills_dictionaries(s, i, loss):
    s.outputs["losses"].append(loss.detach())
    s.outputs[f"of_{i % 2}"].append(i)
    s.outputs.setdefault("late", []).extend([i, i])
    s.nested["b"]["c"].append(i)
    return loss


def asks_builtins(s, i, loss):
    s.a.append(i)
    s.b = sorted(s.a, reverse=True) + list(s.a) + [*tuple(s.a)] + s.a.copy()
    s.seen += min(s.a) + max(s.a) + sum(s.a) + any(s.a) + all(s.a) + len(set(s.a)) + bool(s.a)
    s.history = [value for value in s.a if value % 2]
    return loss


def changes_entries(s, i, loss):
    s.a.append(i)
    s.a.append(i)
    s.a[-1] += 10
    del s.a[0]
    s.b.extend(value for value in s.a)
    s.b[:] = s.b[-4:]
    s.a.remove(s.a[0])
    while len(s.a) > 3:
        s.a.pop()
    return loss


def binds_another(s, i, loss):
    s.a.append(i)
    if i % 2:
        s.a = []
        s.a.append(-i)
    s.seen += len(s.a)
    return loss


# -- those that reach their lists by other ways ----------------------------------------------------------------------


def keeps_an_entry(s, i, loss):
    s.outputs["x"].append(i)
    s.best = s.outputs["x"]
    return loss


def items(s, i, loss):
    s.outputs["x"].append(i)
    s.history = [value for _, value in s.outputs.items()]
    return loss


def by_name(s, i, loss):
    s.a.append(i)
    getattr(s, "abc"[0]).append(-i)
    s.b = getattr(s, "a")  # noqa: B009
    return loss


def others_by_a_made_name(s, i, loss):
    stage = "see"
    s.a.append(i)
    s.best.append(getattr(s, f"{stage}n"))
    return loss


def grows_by_a_made_name(s, i, loss):
    stage = "win"
    getattr(s, f"{stage}dow").append(i)
    return loss + 0 * len(getattr(s, f"{stage}dow"))


def kept_by_a_made_name(s, i, loss):
    stage = "win"
    s.window.append(i)
    if i % 3 == 2:
        s.best = getattr(s, f"{stage}dow")
        s.window = []
    return loss


def by_dictionary(s, i, loss):
    s.a.append(i)
    s.seen += sum(type(value) is list for value in vars(s).values())
    return loss


def _stacked(module):
    return torch.stack(module.a).mean()


def in_a_helper(s, i, loss):
    s.a.append(loss.detach())
    return loss + _stacked(s)


class _Keeper:
    def keep(self, module):
        module.best = module.a


def in_an_object(s, i, loss):
    s.a.append(i)
    s.keeper.keep(s)
    return loss


def in_a_closure(s, i, loss):
    def kept():
        return s.a

    s.a.append(i)
    s.best = kept()
    return loss


def swaps(s, i, loss):
    s.a.append(i)
    s.a, s.b = s.b, s.a
    return loss


def unpacks(s, i, loss):
    s.a.append(i)
    s.best = [*s.a, -1]
    return loss


def pickles(s, i, loss):
    s.a.append(i)
    s.best = pickle.loads(pickle.dumps(s.a))
    return loss


def _aliased(s):
    s.b = s.a


def _nested_alias(s):
    s.best = s.outputs["x"]


def _with_keeper(s):
    s.keeper = _Keeper()


def _with_a_queue(s):
    s.queue = deque([s.a])


def into_a_queue(s, i, loss):
    s.a.append(i)
    s.seen += len(s.queue[0])
    return loss


def entry_with_an_alias(s, i, loss):
    s.outputs["x"].append(i)
    s.seen += len(s.best)
    return loss


PREPARED: dict[Callable[..., Any], Callable[[Any], None]] = {
    alias: _aliased,
    entry_with_an_alias: _nested_alias,
    in_an_object: _with_keeper,
    into_a_queue: _with_a_queue,
}
STOOD_FOR = {
    leaves_collected: {"a"},
    asks_builtins: {"a"},
    binds_another: {"a"},
    changes_entries: {"a", "b"},
    reads_entries: {"a"},
    asks_whether_empty: {"a", "b"},
    iterates: {"a"},
    clears: {"a", "b", "window"},
    adds_in_place: {"a"},
    sorts: {"a"},
    fills_dictionaries: {"outputs"},
    into_a_queue: {"a"},  # by what the step does; but another holds it
    entry_with_an_alias: {"outputs"},
    alias: {"a"},
    others_by_a_made_name: {"a", "best"},
    grows_by_a_made_name: {"window"},
}
REAL = {
    adds_in_front: {"a"},
    asks_its_type: {"a"},
    by_dictionary: {"a"},
    by_name: {"a"},
    compares: {"a"},
    copies: {"a"},
    counts_leaves: {"a"},
    in_a_closure: {"a"},
    in_a_helper: {"a"},
    in_an_object: {"a"},
    items: {"outputs"},
    kept_by_a_made_name: {"window"},
    keeps_a_heap: {"a"},
    keeps_an_entry: {"outputs"},
    pickles: {"a"},
    renames: {"a"},
    repeats: {"a"},
    returns: {"a"},
    stacks: {"a"},
    swaps: {"a", "b"},
    unpacks: {"a"},
    window: {"window"},
    writes_json: {"a"},
}


def module_that(use: Callable[..., Any]) -> Lists:
    namespace = {"use": staticmethod(use)}
    if use in PREPARED:
        namespace["prepare"] = staticmethod(PREPARED[use])
    return type("Case", (Lists,), namespace)()


def plain(value: Any) -> Any:
    """Tensors as numbers that compare with a tolerance."""
    if isinstance(value, torch.Tensor):
        return pytest.approx(value.item(), rel=1e-4)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, dict):
        return {k: numbers(v) for k, v in value.items()}
    return [numbers(v) for v in value] if isinstance(value, list) else value


@pytest.mark.filterwarnings("ignore:.*recompile_limit.*")
@torch._dynamo.config.patch(recompile_limit=3)  # what has a graph per length is left to Python after these
@pytest.mark.parametrize("use", [*STOOD_FOR, *REAL], ids=lambda use: use.__name__)
def test_lists_are_as_in_eager(use):
    """While the step runs, in hooks, and afterwards."""
    eager, other = (
        fit(lambda: module_that(use), curve, strategy=s, max_epochs=1, max_steps=6) for s in ("auto", STRATEGY)
    )
    assert_same_outcome(eager, other)
    assert other.module.kinds == eager.module.kinds <= {("list",), ("dict",)}
    for name in (*LISTS, *DICTIONARIES, "seen", "returned"):
        assert numbers(getattr(other.module, name)) == plain(getattr(eager.module, name)), name
        assert type(getattr(other.module, name)) is type(getattr(eager.module, name))
    names = LISTS + DICTIONARIES
    shared = {(m, n) for m in names for n in names if getattr(eager.module, m) is getattr(eager.module, n)}
    assert all(getattr(other.module, m) is getattr(other.module, n) for m, n in shared)


@pytest.mark.parametrize(("use", "names"), [*STOOD_FOR.items()], ids=lambda value: getattr(value, "__name__", ""))
def test_lists_that_may_be_stood_in_for(use, names):
    module = module_that(use)
    uses = uses_of_lists(module, module.training_step)
    assert (uses.lists | uses.dictionaries) - {"seen"} == names


@pytest.mark.parametrize(("use", "names"), [*REAL.items()], ids=lambda value: getattr(value, "__name__", ""))
def test_lists_that_stay(use, names):
    module = module_that(use)
    uses = uses_of_lists(module, module.training_step)
    assert not (uses.lists | uses.dictionaries) & names


@pytest.mark.parametrize("use", [leaves_collected, adds_in_place], ids=lambda use: use.__name__)
def test_a_growing_list_is_no_reason_to_compile_again(use):
    other = fit(lambda: module_that(use), curve, strategy=STRATEGY, max_epochs=3, max_steps=18)
    assert len(step_report(other.trainer, "training_step").recompilations) <= 2


def test_a_list_that_stays_compiles_up_to_the_limit_and_is_reported():
    eager, other = (fit(lambda: module_that(returns), curve, strategy=s, max_epochs=2) for s in ("auto", STRATEGY))
    assert_same_outcome(eager, other)
    assert other.module.returned == eager.module.returned
    assert other.module.a == eager.module.a
    (entry,) = step_report(other.trainer, "training_step").in_torch
    assert "compiled too often" in entry.reason


class Hooked(Lists):
    """Optimizes by itself: hooks of the module run within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.__private: list[int] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        optimizer = self.optimizers()
        loss = F.mse_loss(self(x), y)
        self.a.append(batch_idx)
        self.b.append(batch_idx)
        self.__private.append(batch_idx)
        self.window.append(self.first)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss.detach()}

    @property
    def first(self):
        return len(self.best or self.best + self.b)

    def on_before_optimizer_step(self, optimizer):
        self.seen += sum(self.a + [1])  # noqa: RUF005


def test_hooks_properties_and_private_names_are_read():
    module = Hooked()
    uses = uses_of_lists(module, module.training_step)
    assert uses.lists - {"seen"} == {"_Hooked__private", "window"}
    eager, other = (fit(Hooked, curve, strategy=s, max_epochs=1) for s in ("auto", STRATEGY))
    assert_same_outcome(eager, other)
    for name in ("a", "b", "window", "seen", "_Hooked__private"):
        assert getattr(other.module, name) == getattr(eager.module, name)


class HookedByLambda(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.head.register_forward_hook(lambda m, i, o: self.seen.append(o.detach().mean()))


def test_a_hook_that_is_a_lambda_is_read():
    eager, other = (fit(HookedByLambda, curve, strategy=s, max_epochs=1) for s in ("auto", STRATEGY))
    assert_same_outcome(eager, other)
    assert type(other.module.seen) is list
    torch.testing.assert_close(torch.stack(other.module.seen), torch.stack(eager.module.seen))
    assert not step_report(other.trainer, "training_step").recompilations


def test_a_stand_in_that_escapes_stays_a_list_of_its_list():
    """Nothing that is read allows it; what is not read must not do harm for longer than a step."""
    module = module_that(leaves_collected)
    lists = GrowingLists(module)
    lists.expect("training_step", module.training_step)
    lists.place("training_step")
    escaped, holder = module.a, [module.a]
    module.best = module.a
    module.a.append(1)
    assert type(escaped) is GrowingList
    lists.remove()
    assert type(module.a) is list
    assert module.a is module.best
    holder[0].append(2)
    assert module.a == [1, 2]
    module.a = []
    lists.place("training_step")
    assert type(module.a) is list
    lists.remove()
    assert escaped == [1, 2]


def test_a_stand_in_has_the_operators_of_a_list():
    standin = GrowingList()
    standin.real = [2, 1]
    standin.append(3)
    assert standin == [2, 1, 3]
    assert [0] + standin == [0, 2, 1, 3]  # noqa: RUF005
    assert standin + [4] == [2, 1, 3, 4]  # noqa: RUF005
    assert standin * 2 == 2 * standin == [2, 1, 3, 2, 1, 3]
    assert standin > [0]
    assert standin <= standin
    assert repr(standin) == "[2, 1, 3]"
    for twin in (copy.copy(standin), copy.deepcopy(standin), pickle.loads(pickle.dumps(standin))):
        assert type(twin) is list
        assert twin == [2, 1, 3]
        assert twin is not standin.real
    standin *= 2
    assert standin.real == [2, 1, 3, 2, 1, 3]


def test_a_step_within_a_step_sees_lists():
    module = module_that(leaves_collected)
    lists = GrowingLists(module)
    lists.expect("training_step", module.training_step)
    lists.place("training_step")
    module.a.append(1)
    lists.place("training_step")
    assert type(module.a) is list
    assert module.a == [1]
    lists.remove()
    module.a.append(2)
    lists.remove()
    assert module.a == [1, 2]


def test_a_step_without_source_leaves_its_lists():
    module = module_that(leaves_collected)
    space: dict[str, Any] = {}
    exec("def use(s, i, loss):\n    s.a.append(loss)\n    return loss", space)
    type(module).use = staticmethod(space["use"])
    assert not uses_of_lists(module, module.training_step).lists


class LateFunction(Lists):
    """Has a function that is given to it when steps have been compiled."""

    @staticmethod
    def prepare(s):
        s.late = None

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.late is None else loss * self.late(batch_idx)

    @staticmethod
    def use(s, batch_idx, loss):
        s.history.append(loss.detach())
        return loss


class GivesAFunction(Callback):
    def __init__(self, make):
        self._make = make

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3:
            pl_module.late = self._make(pl_module)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: lambda i: 2.0 if isinstance(m.history, list) else 0.5,
        lambda m: lambda i: torch.stack(m.history).mean(),
        lambda m: lambda i: float(len(m.history)),
    ],
)
def test_functions_that_come_later_are_read(make):
    eager, other = (
        fit(LateFunction, curve, strategy=s, max_epochs=1, callbacks=[GivesAFunction(make)]) for s in ("auto", STRATEGY)
    )
    assert_same_outcome(eager, other)
    assert all(type(entry) is torch.Tensor for entry in other.module.history)


class Breaking(Regressor):
    """Is compiled in several parts, and lets no list grow."""

    def training_step(self, batch, batch_idx):
        h = self(batch[0])
        torch._dynamo.graph_break()
        h = h * 1.5
        torch._dynamo.graph_break()
        h = h + 0.5
        torch._dynamo.graph_break()
        h = h.exp()
        torch._dynamo.graph_break()
        return F.mse_loss(h, batch[1])


def test_a_step_is_read_once_however_many_parts_are_compiled(monkeypatch):
    read = []
    monkeypatch.setattr(growing_lists, "uses_of_lists", lambda *a: read.append(a) or uses_of_lists(*a))
    other = fit(Breaking, curve, strategy=STRATEGY, max_epochs=1, max_steps=4)
    report = step_report(other.trainer, "training_step")
    assert report.graphs > 4 and len(read) <= 3


SOURCE = """
from test_growing_lists import Lists

class Edited(Lists):
    @staticmethod
    def use(s, batch_idx, loss):
        s.history.append(loss.detach())
        return loss * (2.0 if {condition} else 0.5)
"""


def test_a_file_that_was_changed_since_it_was_imported(tmp_path, monkeypatch):
    file = tmp_path / "edited.py"
    file.write_text(SOURCE.format(condition="len(s.history) < 99"))
    monkeypatch.syspath_prepend(tmp_path)
    before = importlib.import_module("edited").Edited
    assert uses_of_lists(before(), before.training_step).lists >= {"history"}
    file.write_text(SOURCE.format(condition="isinstance(s.history, list)"))
    monkeypatch.delitem(sys.modules, "edited")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    running = importlib.import_module("edited").Edited
    file.write_text(SOURCE.format(condition="len(s.history) < 99"))
    linecache.clearcache()
    assert "history" not in uses_of_lists(running(), running.training_step).lists
