"""The ``torch.compile`` backend: Dynamo's graphs go to ONNX Runtime, what cannot runs in torch and is reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_ort.compiler.autograd_functions import as_autograd_knows_it
from lightning_ort.compiler.checkpointing import as_in_eager
from lightning_ort.compiler.contest import measures
from lightning_ort.compiler.dynamo_numbers import as_tensors
from lightning_ort.compiler.dynamo_words import source_line
from lightning_ort.compiler.executors.executable import Account, timed_in_torch
from lightning_ort.compiler.functional_graph import Untraceable, bracket_bases
from lightning_ort.compiler.global_state import forget_frames, leaving_grad_mode, saved_tensors_have_hooks
from lightning_ort.compiler.handlers import LeftToPython, handled_call
from lightning_ort.compiler.kept import in_torch
from lightning_ort.compiler.loss_scale import LossScaling
from lightning_ort.compiler.nested_results import cut_at_results, run_in_parts
from lightning_ort.compiler.plain_values import as_declared
from lightning_ort.compiler.plan import Fallback
from lightning_ort.compiler.random import without_idle_dropouts
from lightning_ort.compiler.region import Region
from lightning_ort.compiler.symbolic_shapes import UnknownSize
from lightning_ort.compiler.user_errors import Located
from lightning_ort.environment import require_onnxruntime
from lightning_ort.errors import UnsupportedError
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.validation import choice, flag, shown

__all__ = ["ORTBackend", "backend"]

OnUnsupported = Literal["torch", "error"]

_CONFIG = ("providers", "provider_options", "session_options", "placement")


@dataclasses.dataclass
class ORTBackend:
    """A backend for ``torch.compile(step, backend=ORTBackend(...))``.

    Attributes:
        config: execution providers and session options.
        on_unsupported: ``"torch"`` runs in torch what ONNX Runtime cannot, ``"error"`` raises
            :class:`~lightning_ort.errors.UnsupportedError` instead, when the step is called.
        verify: check the first run of each graph against torch.
        scaling: the scale of the losses of graphs that compute gradients, against underflow in 16 bits.
        on_graph: called with each executable graph that is taken into use.
        on_fallback: called with the operators of one region that run in torch.
        may_leave: whether the step that is being compiled can still be made as it is, which whoever calls it does on
            :class:`~.LeftToPython`.
    """

    config: RuntimeConfig = dataclasses.field(default_factory=RuntimeConfig)
    on_unsupported: OnUnsupported = "torch"
    verify: bool = True
    scaling: LossScaling | None = None
    on_graph: Callable[[Account], None] = lambda executable: None
    on_fallback: Callable[[Sequence[Fallback]], None] = lambda fallbacks: None
    may_leave: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        if not isinstance(self.config, RuntimeConfig):
            raise TypeError(f"config={shown(self.config)}: expected a RuntimeConfig.")
        choice("on_unsupported", self.on_unsupported, get_args(OnUnsupported))
        flag("verify", self.verify)
        for name, value in (("on_graph", self.on_graph), ("on_fallback", self.on_fallback)):
            if not callable(value):
                raise TypeError(f"{name}={shown(value)}: expected a function.")
        if self.scaling is not None and not isinstance(self.scaling, LossScaling):
            raise TypeError(f"scaling={shown(self.scaling)}: expected a LossScaling, or None.")

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        require_onnxruntime()
        without_idle_dropouts(graph)
        if not any(n.op.startswith("call") for n in graph.graph.nodes):
            return as_declared(graph, graph.forward)
        bracket_bases(graph)
        try:
            handled = handled_call(graph) if self.may_leave() else None
            if handled is not None:
                self._fallback([handled])
                return _raising(LeftToPython())
            if saved_tensors_have_hooks():
                raise Untraceable("torch.autograd.graph.saved_tensors_hooks are called with what eager saves")
            if _is_transformed(_ends(graph, example_inputs)):
                raise Untraceable("it is called within a transform of torch.func, on tensors without memory")
            if _has_collectives(graph):
                raise Untraceable("a collective, which all processes make once, is in a graph that may run more often")
            unsupported = _unsupported_tensors(graph, example_inputs)
            if unsupported is not None:
                raise Untraceable(f"it computes with {unsupported}")
            as_in_eager(graph)
            as_tensors(graph)
            as_autograd_knows_it(graph)
            parts = cut_at_results(graph)
            if parts is not None:
                return run_in_parts(parts, self)
            _ = graph.code  # written now: a module that writes it when it is called prints it on errors
            device = _device(graph, example_inputs)
            region = Region(
                graph,
                example_inputs,
                # anew for each region: Dynamo compiles another one when a global setting of torch has changed
                SessionFactory(self._config(), device),
                scaling=self.scaling,
                verify=self.verify,
                on_chosen=self._report,
            )
            return Located(graph, as_declared(graph, leaving_grad_mode(graph, region)), device)
        except (Untraceable, UnknownSize) as reason:
            lines = [source_line(n) for n in graph.graph.nodes if n.op == "call_function"]
            fallback = Fallback("the whole region", str(reason), lines[-1] if lines else "")
            forget_frames(reason)
            try:
                self._fallback([fallback])
            except UnsupportedError as error:
                return _raising(error)
            return Located(graph, as_declared(graph, timed_in_torch(in_torch(graph))), torch.device("cpu"))
        except Exception as error:
            # Dynamo would wrap it in an exception of its own; raised at the call it keeps its type
            return _raising(error)

    def _config(self) -> RuntimeConfig:
        """How graphs are run: who refuses torch for what is missing gets no graph in torch for its speed either.

        Otherwise a process that knows from an earlier one that torch is faster would never find out what is missing.
        """
        return self.config if self.on_unsupported == "torch" else dataclasses.replace(self.config, measure=False)

    def measures(self) -> bool:
        """Whether who runs what is found out by measuring."""
        return self.scaling is None and measures(self._config())

    def _report(self, executable: Account) -> None:
        if executable.fallbacks:
            self._fallback(executable.fallbacks)
        self.on_graph(executable)

    def _fallback(self, fallbacks: Sequence[Fallback]) -> None:
        if self.on_unsupported == "error":
            listed = "\n".join(f"  {f.operator}: {f.reason}\n    {f.source}" for f in fallbacks)
            raise UnsupportedError(
                f"ONNX Runtime cannot run a part of this step, and on_unsupported='error' forbids torch:\n{listed}"
            )
        self.on_fallback(fallbacks)


def _raising(error: Exception) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


def _ends(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors with which the graph begins, and those with which it ends."""
    results = [n.meta.get("example_value") for n in graph.graph.output_node().all_input_nodes]
    return [x for x in [*example_inputs, *results] if isinstance(x, torch.Tensor)]


def _is_transformed(ends: Sequence[torch.Tensor]) -> bool:
    """Whether this is within a transform of ``torch.func``, or on tensors that one has left to a later backward."""
    # private: there is no public way to tell
    functorch = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None or any(map(functorch.is_functorch_wrapped_tensor, ends))


_QUANTIZED = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}


def _unsupported_tensors(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> str | None:
    """What is no array of numbers, in words: anywhere, or, if graphs may hold it, where this one begins or ends."""
    if any(getattr(n.target, "__name__", "").startswith("quantize_per_") for n in graph.graph.nodes):
        return "quantized tensors"  # which Dynamo takes for others
    inner = [n.meta.get("example_value") for n in graph.graph.nodes]
    for x in (x for x in [*example_inputs, *inner] if isinstance(x, torch.Tensor)):
        if x.dtype in _QUANTIZED:
            return "quantized tensors"
        if x.is_mkldnn:
            return "tensors in a layout of oneDNN's"
        if x.is_meta:
            return "tensors without memory"
    for x in _ends(graph, example_inputs):
        if x.is_nested or is_traceable_wrapper_subclass(x):
            return f"tensors of the class {type(x).__name__}"
        if x.is_floating_point() and x.dtype.itemsize < 2:
            return f"tensors of {x.dtype}"
    return None


def _has_collectives(graph: fx.GraphModule) -> bool:
    """Whether it has operators by which processes exchange tensors, also in a graph inside of it."""
    graphs = [module.graph for module in graph.modules() if isinstance(module, fx.GraphModule)]
    return any("c10d_functional" in str(n.target) for g in graphs for n in g.nodes if n.op == "call_function")


def _device(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> torch.device:
    """Where the region is computed: on the one GPU that a tensor of it is on, else on the CPU."""
    devices = {x.device for x in example_inputs if isinstance(x, torch.Tensor)}
    for node in graph.graph.nodes:
        val = node.meta.get("example_value")
        if isinstance(val, torch.Tensor):
            devices.add(val.device)
    # some tensors are on the CPU in many a step on a GPU: Python floats, scalars, what a step moves by itself
    others = {d for d in devices if d.type != "cpu"}
    if len(others) > 1:
        raise Untraceable(f"tensors of one region are on several devices ({', '.join(sorted(map(str, others)))})")
    return others.pop() if others else torch.device("cpu")


def backend(graph: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """What ``torch.compile(step, backend="lightning_ort", options={...})`` calls.

    Options: ``providers``, ``provider_options``, ``session_options``, ``placement``, ``on_unsupported``, ``verify``.
    """
    options = dict(kwargs.get("options") or {})
    try:
        made = _from_options(options)
    except Exception as error:
        # Dynamo would wrap it in an exception of its own
        return _raising(error)
    return made(graph, example_inputs)


def _from_options(options: dict[str, Any]) -> ORTBackend:
    known = [*_CONFIG, "on_unsupported", "verify"]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ValueError(
            f"torch.compile(..., options=...) has {', '.join(map(repr, unknown))}. Options of backend='lightning_ort': "
            f"{', '.join(known)}."
        )
    require_onnxruntime()
    config = RuntimeConfig(**{k: options[k] for k in _CONFIG if k in options})
    config.check()
    return ORTBackend(config, **{k: options[k] for k in ("on_unsupported", "verify") if k in options})
