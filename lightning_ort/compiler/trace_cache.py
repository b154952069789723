"""Traces of this process, used again where the same graph is met: by a second Trainer, or the next run of a sweep."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_ort._version import __version__
from lightning_ort.compiler.global_state import GlobalState
from lightning_ort.compiler.torch_functions import are_replaced, lasting_name
from lightning_ort.compiler.trace import Traced
from lightning_ort.compiler.trace_files import NotWritable, decoded, encoded
from lightning_ort.files.cache import Cache, is_in_use
from lightning_ort.runtime.memory import storage_key

__all__ = ["TRACES", "TraceCache", "TraceKey", "copied", "size_facts"]

_LARGEST_CONSTANT = 1 << 14
"""entries of a tensor in a graph, up to which its values are compared"""
_NODES = 30_000
"""of all graphs that are kept"""


@dataclasses.dataclass(frozen=True)
class TraceKey:
    """All that a trace follows from.

    Attributes:
        parts: what is compared.
        targets: functions that the graph calls, which are compared by identity and so must live.
    """

    parts: Hashable
    targets: tuple[Any, ...] = dataclasses.field(compare=False)

    @functools.cached_property
    def name(self) -> str | None:
        """What later processes find the trace by; ``None`` where they could not tell that a function is the same."""
        if not all(map(lasting_name, self.targets)):
            return None
        return hashlib.sha256(repr((self.parts, _versions())).encode()).hexdigest()

    @classmethod
    def of(
        cls, graph: fx.GraphModule, fakes: Sequence[Any], global_state: GlobalState, *request: Any, gradients: bool
    ) -> TraceKey | None:
        """The key of Dynamo's ``graph``, or ``None`` where not all is known that a trace would depend on.

        Args:
            graph: Dynamo's.
            fakes: its inputs.
            global_state: what it is computed under.
            request: what is asked for.
            gradients: the trace has some. Without them, it is the same in inference mode, of data made in it, too:
                validation in a fit and ``Trainer.validate`` share one.
        """
        targets: list[Any] = []
        if are_replaced():
            return None
        try:
            code = _described_module(graph, targets)
            inputs = _described_inputs(fakes, gradients=gradients)
        except _UnknownError:
            return None
        settings = (
            torch.is_grad_enabled(),
            gradients and torch.is_inference_mode_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.mkldnn.enabled,
            torch.backends.cudnn.enabled,
            _capabilities(fakes),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.mha.get_fastpath_enabled(),
            (
                torch.backends.opt_einsum.is_available(),
                torch.backends.opt_einsum.enabled,
                torch.backends.opt_einsum.strategy,
            ),
            tuple(sorted(global_state.autocast.items(), key=str)),
            global_state.dtype,
            str(torch.get_default_device()),
        )
        return cls((code, inputs, settings, repr(request)), tuple(targets))


def _capabilities(fakes: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Of the GPUs that ``fakes`` are on: torch chooses kernels by them."""
    gpus = {x.device for x in fakes if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
    return tuple(torch.cuda.get_device_capability(gpu) for gpu in sorted(gpus, key=str))


class _UnknownError(Exception):
    """Something that cannot be compared."""


class _Function:
    """A function that a graph calls, equal to itself alone; its text is the same in later processes."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Function) and other._function is self._function

    def __hash__(self) -> int:
        return id(self._function)

    def __repr__(self) -> str:
        return lasting_name(self._function)


@functools.cache
def _versions() -> tuple[Any, ...]:
    """Who makes traces: these versions, on such a processor, by these lines."""
    folder = Path(__file__).parent
    files = [(path, path.stat()) for path in sorted(folder.rglob("*.py"))]
    lines = [(str(path.relative_to(folder)), status.st_size, status.st_mtime_ns) for path, status in files]
    return (
        __version__, torch.__version__, onnxruntime.__version__, sys.version, sys.platform,
        torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.is_available(), lines,
    )  # fmt: skip


def _described_module(module: fx.GraphModule, targets: list[Any]) -> Hashable:
    """Code, constants and the user's lines of a graph and of those inside of it."""
    rows: list[Hashable] = [module.code]
    for node in module.graph.nodes:
        rows.append(node.meta.get("stack_trace"))
        if node.op == "call_function":
            if not lasting_name(node.target) and not _is_own(node.target):
                raise _UnknownError  # what a user's function or operator computes follows from more than what it is
            targets.append(node.target)
            rows.append(_Function(node.target))
        elif node.op == "get_attr":
            rows.append(_described_attribute(module, node.target, targets))
        elif node.op == "call_module":
            raise _UnknownError
    return tuple(rows)


def _is_own(target: Any) -> bool:
    return isinstance(target, (OpOverload, OpOverloadPacket)) and str(target).partition(".")[0] == "lightning_ort"


def _described_attribute(module: torch.nn.Module, path: str, targets: list[Any]) -> Hashable:
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    if isinstance(value, fx.GraphModule):
        if value.meta.get("_checkpoint_context_fn") is not None:
            raise _UnknownError
        return _described_module(value, targets)
    if type(value) is not torch.Tensor or value.numel() > _LARGEST_CONSTANT or value.device.type != "cpu":
        raise _UnknownError
    return (*_geometry(value), str(value.tolist()))


def _described_inputs(fakes: Sequence[Any], *, gradients: bool) -> Hashable:
    storages: dict[int, int] = {}
    rows: list[Hashable] = []
    for x in fakes:
        if isinstance(x, torch.Tensor):
            if x.layout != torch.strided:
                raise _UnknownError
            storage = storages.setdefault(storage_key(x), len(storages))
            number = getattr(x, "item_memo", None) is not None
            kind = isinstance(x, torch.nn.Parameter)
            inference = gradients and x.is_inference()
            rows.append((*_geometry(x), storage, kind, number, x.requires_grad, x.is_conj(), x.is_neg(), inference))
        else:
            rows.append((type(x).__name__, str(x), *([x.node.hint] if hasattr(x, "node") else [])))
    return tuple(rows)


def _geometry(x: torch.Tensor) -> tuple[Hashable, ...]:
    """Also of open sizes, by name and present value."""
    sizes = [*x.shape, *x.stride(), x.storage_offset()]
    known = tuple((str(s), None if isinstance(s, int) else s.node.hint) for s in sizes)
    return x.dim(), known, x.dtype, str(x.device)


def size_facts(mode: Any) -> tuple[Any, ...]:
    """All that is known of open sizes, and has been assumed of them so far."""
    sizes = None if mode is None else mode.shape_env
    if sizes is None:
        return ()
    return (
        tuple(str(guard.expr) for guard in sizes.guards),
        tuple(sorted((str(a), str(b)) for a, b in sizes.replacements.items())),
        tuple(sorted((str(symbol), str(span)) for symbol, span in sizes.var_to_range.items())),
        len(sizes.deferred_runtime_asserts),
    )


class TraceCache:
    """Keeps copies of traces, the latest ones, and gives out copies: executors rewrite what they get.

    Those that have a form as text are kept on disk as well, for later processes.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[Hashable, tuple[TraceKey, Traced]] = OrderedDict()
        self._cache = Cache("traces", largest=16 << 20)

    def get(self, key: TraceKey, fakes: Sequence[Any], mode: FakeTensorMode | None) -> Traced | None:
        """A copy of the trace of ``key``, whose inputs are ``fakes`` of ``mode``, if there is one."""
        found = self._kept.get(key.parts)
        if found is not None:
            self._kept.move_to_end(key.parts)
            return copied(found[1])
        name = key.name if is_in_use() else None
        entry = None if name is None else self._cache.read(name)
        text = None if entry is None else entry.get("trace")
        if mode is None or entry is None or not isinstance(text, str) or entry.get("sum") != _sum(text):
            return None
        facts = size_facts(mode)
        try:
            traced = decoded(json.loads(text), fakes, mode)
        except (NotWritable, ValueError, RecursionError):
            return None
        if size_facts(mode) != facts:  # a trace that is kept assumes nothing about sizes
            return None
        self._keep(key, copied(traced))
        return traced

    def put(self, key: TraceKey, traced: Traced) -> None:
        """Keep ``traced``, which nobody may rewrite any more."""
        self._keep(key, traced)
        name = key.name if is_in_use() else None
        if name is not None:
            with contextlib.suppress(NotWritable, ValueError):
                text = json.dumps(encoded(traced))
                self._cache.write(name, {"trace": text, "sum": _sum(text)})

    def _keep(self, key: TraceKey, traced: Traced) -> None:
        self._kept[key.parts] = key, traced
        nodes = sum(len(kept.graph.nodes) for _, kept in self._kept.values())
        while nodes > _NODES and self._kept:
            _, (_, oldest) = self._kept.popitem(last=False)
            nodes -= len(oldest.graph.nodes)

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)


TRACES = TraceCache()


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def copied(traced: Traced) -> Traced:
    """A copy of a trace, with nodes of its own; constants and fake values are shared."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    results = graph.graph_copy(traced.graph, nodes)
    graph.output(results)
    graph.output_node().meta = dict(traced.graph.output_node().meta)

    def own(value: Any) -> Any:
        # what a draw was called with may be in no graph any more
        return fx.node.map_arg(value, lambda node: nodes.get(node, node))

    for node in nodes.values():
        if "draw" in node.meta:
            target, layout, args, kwargs = node.meta["draw"]
            node.meta["draw"] = target, layout, own(args), own(kwargs)
    return dataclasses.replace(
        traced,
        module=fx.GraphModule(traced.module, graph),
        inputs=own(traced.inputs),
        tangents=own(traced.tangents),
        draws=own(traced.draws),
        outputs=own(traced.outputs),
        gradients=own(traced.gradients),
        updates=own(traced.updates),
    )
