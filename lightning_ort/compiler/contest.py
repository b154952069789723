"""Which executor runs a graph fastest on this machine: measured on real inputs, and remembered."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import onnxruntime
import torch
from torch import fx

from lightning_ort._version import __version__
from lightning_ort.compiler.choice import MARGIN, Choice
from lightning_ort.compiler.executors.channels_last import CHANNELS_LAST
from lightning_ort.compiler.executors.onnxruntime import ONE_THREAD
from lightning_ort.compiler.global_state import GlobalState
from lightning_ort.compiler.symbolic_shapes import hint
from lightning_ort.files.cache import Cache, is_in_use
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.memory import release_free_memory
from lightning_ort.validation import first_line

__all__ = ["MEMORY", "Contest", "Key", "Memory", "learns", "measures", "race", "wait_for"]

_log = logging.getLogger(__name__)

_EXECUTORS = {"onnxruntime", ONE_THREAD, "torch", CHANNELS_LAST, "inductor", "eager", "graphs"}

_BUDGET = 0.15
"""seconds after which no further round of a race begins"""
_FEWEST, _MOST = 3, 40
"""rounds"""
_GLANCE = 0.05, 1
"""the budget and the fewest rounds of a race that only tells who is out of the question"""
_LONG = 0.05
"""seconds of a run that may have much in memory, and for which it matters little what ran before"""
_AT_ONCE = 0.25, 1
"""seconds, and runs before the last, after which another one is measured"""
_VERY_LONG = 2.0
"""seconds of a run to which its first time adds little"""
_PROMISING = 2.0
"""how often as long as ONNX Runtime eager may take for a graph in torch to be tried: one that eager's kernels run
without autograd saves a part of that, and compiling it takes time"""
_FAR = 5.0
"""how often as long as ONNX Runtime's a first run may take for another to follow: none takes that much longer than the
next"""
_CALL = 5e-6
"""seconds of Python in a call of one of torch's functions, which such a graph saves where there is no autograd"""


def measures(config: RuntimeConfig) -> bool:
    """Whether executors are to be compared by running them.

    The same run gives the same bits only if nothing is: see ``torch.use_deterministic_algorithms``.
    """
    return (
        config.by_speed
        and config.measure
        and config.on_session is None  # who looks at sessions wants them
        and learns()
    )


def learns() -> bool:
    """Whether what is compiled may follow from what was found on this machine, and not from the program alone."""
    return is_in_use() and not torch.are_deterministic_algorithms_enabled()


def race(
    runs: Mapping[str, Callable[[], object]], *, budget: float = _BUDGET, fewest: int = _FEWEST
) -> dict[str, float]:
    """Seconds of one run of each, run in turns, which has each begin with the threads of the others still about.

    No further round begins once ``fewest`` were run and ``budget`` seconds have passed. The first run of each does not
    count: kernels are chosen and memory is found then. Long ones come one after the other and few times, and give their
    memory back: it would not be there twice in a training.
    """
    first, *others = runs
    warm = _timed(runs[first])
    if warm > _LONG:
        seconds = {first: _alone(runs[first], warm)}
        for name in others:
            at_first = _timed(runs[name]) if warm < _VERY_LONG else 0.0
            if at_first > _FAR * seconds[first]:  # as torch's in 16 bits on some processors
                seconds[name] = at_first
                release_free_memory()
            else:
                seconds[name] = _alone(runs[name], warm)
        return seconds
    for name in others:
        runs[name]()
    times: dict[str, list[float]] = {name: [] for name in runs}
    began = time.perf_counter()
    for done in range(1, _MOST + 1):
        for name, run in runs.items():
            times[name].append(_timed(run))
        if done >= fewest and time.perf_counter() - began > budget:
            break
    # what else the machine does only ever adds to a run
    return {name: sorted(row)[len(row) // 4] for name, row in times.items()}


def _alone(run: Callable[[], object], expected: float) -> float:
    """Seconds of the fastest of a few runs, the fewer the longer one is expected to take."""
    enough, most = _AT_ONCE
    seconds = min(_timed(run) for _ in range(1 + min(most, int(enough / expected))))
    release_free_memory()
    return seconds


def _measure_again(runs: Mapping[str, Callable[[], object]], seconds: dict[str, float]) -> None:
    """Take long ones that may be the fastest once more, later: something else may have slowed all runs of one down."""
    fastest = min(seconds.values())
    close = [name for name, time in seconds.items() if time < _PROMISING * fastest]
    if fastest < _VERY_LONG and len(close) > 1:
        for name in close:
            again = _alone(runs[name], seconds[name])
            seconds[name] = min(seconds[name], again)


def wait_for(device: torch.device) -> None:
    """Return when a GPU that Python has left work to has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _completed(run: Callable[..., object], device: torch.device) -> Callable[..., object]:
    """``run``, until the device has done it."""

    def complete(*args: Any) -> None:
        run(*args)
        wait_for(device)

    return complete if device.type == "cuda" else run


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


Unit = TypeVar("Unit")


class Contest(Generic[Unit]):
    """What ONNX Runtime runs against the same in torch.

    Args:
        key: of the choice.
        rivals: executor to what compiles the same for it.
        device: what computes.
    """

    def __init__(self, key: Key, rivals: Mapping[str, Callable[[], Unit]], device: torch.device) -> None:
        self._key, self._rivals, self._device = key, rivals, device

    def settle(
        self,
        unit: Unit,
        run: Callable[[Unit], object],
        eager: Callable[[], object],
        *,
        eager_counts: bool = True,
        calls: float = math.inf,
    ) -> tuple[Unit | None, Choice] | None:
        """The fastest one, and the choice; ``None`` if these inputs are refused, which the next run will explain.

        In the place of a unit, ``None`` stands for eager: it has kernels, of recurrent layers say, that no graph has.

        Args:
            unit: what ONNX Runtime runs.
            run: runs a unit.
            eager: computes the same by Dynamo's graph.
            eager_counts: eager may be chosen.
            calls: of torch's functions in eager, where there are no gradients.
        """
        run, eager = _completed(run, self._device), _completed(eager, self._device)
        units = {"onnxruntime": unit}
        failed: dict[str, str] = {}
        budget, fewest = _GLANCE
        try:
            seconds = race({"onnxruntime": lambda: run(unit), "eager": eager}, budget=budget, fewest=fewest)
        except Exception as error:
            _log.debug("Nothing was measured", exc_info=error)
            return None
        is_long = seconds["onnxruntime"] > _LONG
        hopeless = {"torch", CHANNELS_LAST} if seconds["eager"] > _PROMISING * seconds["onnxruntime"] else set()
        if eager_counts and calls * _CALL < MARGIN * seconds["eager"]:
            hopeless.add("torch")  # the same kernels: it would have to save more than it can
        if is_long:  # a second thread is waited for in vain only where there is little for it to do
            hopeless.add(ONE_THREAD)
        for name, make in self._rivals.items():
            if name == "torch" and is_long and seconds.get(CHANNELS_LAST, math.inf) < seconds["eager"]:
                hopeless.add(name)  # long runs in the usual layout take what eager takes, but for a few percent
            if name not in hopeless:
                # what ONNX Runtime can and another cannot is no reason to stop
                try:
                    made = make()
                    run(made)
                    units[name] = made
                    if is_long:
                        again = functools.partial(run, made)
                        seconds[name] = _alone(again, seconds["onnxruntime"])
                except Exception as error:
                    _log.info("%s does not run a graph that ONNX Runtime runs: %s", name, error)
                    failed[name] = first_line(error)
                    units.pop(name, None)
        runs: dict[str, Callable[[], object]] = {n: functools.partial(run, u) for n, u in units.items()}
        runs["eager"] = eager
        if is_long:
            _measure_again(runs, seconds)
        elif len(units) > 1:
            seconds = race(runs)
        if not eager_counts:
            del seconds["eager"]
        choice = dataclasses.replace(Choice.among(seconds, "onnxruntime"), failed=failed)
        choice = MEMORY.agreed(self._key, choice)
        MEMORY.put(self._key, choice)
        if choice.executor in self._rivals and choice.executor not in units:
            units[choice.executor] = self._rivals[choice.executor]()
        return units.get(choice.executor), choice


@dataclasses.dataclass(frozen=True)
class Key:
    """What a choice depends on.

    Attributes:
        graph: the operators, their types, what is differentiated, the machine, its threads and the versions, as a hash.
        sizes: all of that and the sizes of the data, as a hash.
        elements: how many elements the data have.
        program: all but the machine, as a hash: what is the same for all processes that train one model.
    """

    graph: str
    sizes: str
    elements: int
    program: str

    @classmethod
    def of(
        cls, graph: fx.GraphModule, fakes: Sequence[Any], kind: str, global_state: GlobalState, config: RuntimeConfig
    ) -> Key:
        """Take it from Dynamo's ``graph`` and its inputs, to be computed under ``global_state``.

        Args:
            graph: Dynamo's.
            fakes: its inputs.
            kind: which gradients are computed.
            global_state: what it is computed under.
            config: of the sessions.
        """
        tensors = [x for x in fakes if isinstance(x, torch.Tensor)]
        calls = [n for n in graph.graph.nodes if n.op.startswith("call")]
        is_open = [not isinstance(size, int) for x in tensors for size in x.shape]
        common = [
            [getattr(n.target, "__qualname__", None) or str(n.target) for n in calls],
            [(x.dim(), x.dtype, str(x.device), tuple(map(hint, x.shape)) if x.requires_grad else ()) for x in tensors],
            [kind, global_state.autocast, global_state.dtype],
        ]
        sizes = [[hint(size) for size in x.shape] for x in tensors]
        elements = sum(math.prod(row) for x, row in zip(tensors, sizes, strict=True) if not x.requires_grad)
        whole = [common, graph.code, sizes, is_open]
        means = _means(config, *{x.device for x in tensors})
        return cls(_hashed([common, means]), _hashed([whole, means]), elements, _hashed(whole))

    @classmethod
    def of_update(cls, optimizer: type, parts: Any, elements: int, config: RuntimeConfig) -> Key:
        """Take it from the class of an optimizer and the ``parts`` that make its update what it is, sizes included."""
        whole = ["update", optimizer.__module__, optimizer.__qualname__, parts]
        name = _hashed([whole, _means(config)])
        return cls(name, name, elements, _hashed(whole))

    @classmethod
    def of_step(cls, name: str, parts: Any, elements: int, config: RuntimeConfig, device: torch.device) -> Key:
        """Take it from the ``name`` of a step function and the ``parts`` that make it what it is, but for sizes."""
        whole = ["step", name, parts]
        means = _means(config, device)
        return cls(_hashed([whole, means]), _hashed([whole, elements, means]), elements, _hashed([whole, elements]))


def _means(config: RuntimeConfig, *devices: torch.device) -> list[Any]:
    """What the time of everything depends on that is computed on ``devices``."""
    options = [config.providers, config.provider_options, _described(config.session_options), config.placement]
    gpus = [_gpu(device) for device in devices if device.type == "cuda"]
    return [options, torch.get_num_threads(), _machine(), *gpus]


def _gpu(device: torch.device) -> list[Any]:
    """What the time of a graph depends on where a GPU runs it."""
    settings = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.benchmark
    return [torch.cuda.get_device_name(device), *settings]


def _hashed(parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


class Memory:
    """Choices of earlier runs: those of this process, and those of earlier ones by a file each.

    What a process has measured for one size of the data holds for smaller ones, and for up to twice as large ones, as
    well: batches of sentences and a last batch that is smaller would otherwise each be compiled twice.

    Attributes:
        agreement: called with a key and a choice where several processes train one model; returns what all use.
    """

    def __init__(self) -> None:
        self._known: dict[str, Choice] = {}
        self._similar: dict[str, tuple[int, Choice]] = {}
        self._cache = Cache("choices")
        self.agreement: Callable[[str, str], str] | None = None

    def agreed(self, key: Key, choice: Choice) -> Choice:
        """``choice``, or what another process has chosen before where several train one model."""
        if self.agreement is None:
            return choice
        return dataclasses.replace(choice, executor=self.agreement(f"executor/{key.program}", choice.executor))

    def get(self, key: Key) -> Choice | None:
        """What was chosen for ``key`` or data of about that size, if anything was that can be read."""
        choice = self._known.get(key.sizes) or self._read(key.sizes)
        if choice is not None:
            choice = self.agreed(key, choice)
            self._similar.setdefault(key.graph, (key.elements, choice))
            return choice
        elements, similar = self._similar.get(key.graph, (0, None))
        if similar is not None and key.elements <= 2 * elements:
            self._keep(key, similar)  # a later process may meet the sizes in another order
            return similar
        return None

    def put(self, key: Key, choice: Choice) -> None:
        """Remember ``choice``, also where the disk cannot be written to."""
        self._similar[key.graph] = key.elements, choice
        self._keep(key, choice)

    def _keep(self, key: Key, choice: Choice) -> None:
        self._known[key.sizes] = choice
        self._cache.write(key.sizes, {"executor": choice.executor, "milliseconds": dict(choice.milliseconds)})

    def forget(self) -> None:
        """Forget what this process knows; what is on disk stays."""
        self._known.clear()
        self._similar.clear()

    def _read(self, name: str) -> Choice | None:
        found = self._cache.read(name)
        milliseconds = (found or {}).get("milliseconds")
        if not isinstance(milliseconds, dict) or not milliseconds.keys() <= _EXECUTORS:
            return None
        if not all(isinstance(t, float) and 0 <= t < math.inf for t in milliseconds.values()):
            return None
        executors = [name for name in milliseconds if found and found.get("executor") == name]
        return Choice(executors[0], milliseconds) if executors else None


MEMORY = Memory()


def _described(options: onnxruntime.SessionOptions | Mapping[str, Any] | None) -> Any:
    if isinstance(options, onnxruntime.SessionOptions):
        names = [name for name in dir(options) if not name.startswith("_")]
        return [(name, str(x)) for name in names if not callable(x := getattr(options, name))]
    return sorted(map(str, options.items())) if options is not None else None


@functools.cache
def _machine() -> tuple[str, ...]:
    versions = (__version__, torch.__version__, onnxruntime.__version__, platform.python_version())
    return (*versions, _processor(), str(os.cpu_count()))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = {line.split(":")[0].strip(): line.split(":")[-1].strip() for line in lines if ":" in line}
    return " ".join(told.get(name, "") for name in ("vendor_id", "cpu family", "model", "model name", "flags"))
