"""Python's and NumPy's own values, and calls of other processes, in code that Dynamo compiles.

Dynamo has stand-ins for NumPy's functions, for queues and for Python's random numbers. Some of them are other than the
real ones: sized draws come from torch's generator, numbers become arrays, a full ``deque(maxlen=...)`` keeps one entry
too many, ``random.uniform`` arrives in another type than the graph was made for. While steps are compiled, such code is
Python's, at the cost of a graph break; functions of numbers that are known when a step is compiled are computed then.

So are the collectives of ``torch.distributed``: all processes make each of them once a step, and a graph may run more
often, when it is compared and measured.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

# Private: Dynamo has no public way to leave a type to Python.
from torch._dynamo import symbolic_convert
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource, RandomValueSource, TensorPropertySource
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.base import AsPythonConstantNotImplementedError, VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable, GetAttrBuiltinVariable, HasAttrBuiltinVariable
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
from torch._dynamo.variables.lists import BaseListVariable, DequeVariable, TupleVariable
from torch._dynamo.variables.misc import AutogradFunctionVariable, DebuggingVariable, NumpyVariable, RandomVariable
from torch._dynamo.variables.tensor import SymNodeVariable, supported_comparison_ops
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedTupleVariable

from lightning_ort.compiler.dynamo_changes import LOST_CHANGES, changing
from lightning_ort.compiler.dynamo_comparisons import comparing, is_value, known, leave_to_python, of_numpy
from lightning_ort.compiler.dynamo_contents import writing
from lightning_ort.compiler.dynamo_mends import MENDS
from lightning_ort.compiler.dynamo_numbers import computing, taking_functions
from lightning_ort.compiler.dynamo_words import source_of

__all__ = ["SETTINGS", "as_declared", "left_to_python"]

SETTINGS = {"trace_numpy": False, "reorderable_logging_functions": {warnings.warn}}
"""Settings of ``torch._dynamo.config``: NumPy's functions get NumPy's arrays, and warnings are given behind a graph."""

_OF_NUMBERS = {np.prod, np.clip, np.round, np.float64, np.int64}
"""what is folded beside ufuncs"""
_NAMES = "add sub mul truediv floordiv mod pow neg pos abs invert iadd isub imul itruediv ifloordiv imod ipow"
_ARITHMETIC = {abs, *(getattr(operator, name) for name in _NAMES.split())}
_TELLING = {isinstance, type}
_TENSORS = (torch.tensor, torch.as_tensor, torch.asarray)
_BUFFER = getattr(torch.nn, "Buffer", None)  # since torch 2.5
_DERIVATIVES = {torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp}


@contextlib.contextmanager
def left_to_python() -> Iterator[None]:
    """Have Dynamo leave to Python, meanwhile, the values that it has no faithful stand-in for."""
    wrappers = VariableBuilder._type_dispatch_impl(SETTINGS["trace_numpy"])  # by type of value
    before = {kind: wrappers.get(kind) for kind in _WRAPPERS}
    handlers, originals = (
        BuiltinVariable.call_function_handler_cache,
        tuple([getattr(o, name) for o, name, _ in _PATCHES]),
    )
    mended = _mended(originals)
    comparisons = dict(symbolic_convert.compare_op_handlers)
    try:
        for (owner, name, _), function in zip(_PATCHES, mended, strict=True):
            setattr(owner, name, function)
        wrappers.update(_WRAPPERS)
        # they hold methods of before, or of ours
        BuiltinVariable.call_function_handler_cache = _HANDLERS
        # Dynamo holds methods of before
        symbolic_convert.compare_op_handlers.update(_comparisons(BuiltinVariable.call_function))
        yield
    finally:
        for kind, wrapper in before.items():
            if wrapper is None:
                wrappers.pop(kind, None)
            else:
                wrappers[kind] = wrapper
        for (owner, name, _), original in zip(_PATCHES, originals, strict=True):
            setattr(owner, name, original)
        BuiltinVariable.call_function_handler_cache = handlers
        symbolic_convert.compare_op_handlers.update(comparisons)


_HANDLERS: dict[Any, Any] = {}


@functools.lru_cache(maxsize=2)  # ORTTrainer asks at each step
def _mended(originals: tuple[Callable[..., Any], ...]) -> list[Callable[..., Any]]:
    return [make(original) for (*_, make), original in zip(_PATCHES, originals, strict=True)]


@functools.lru_cache(maxsize=2)
def _comparisons(call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {
        word: types.MethodType(call, BuiltinVariable(function)) for word, function in supported_comparison_ops.items()
    }


def as_declared(graph: fx.GraphModule, run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, given the numbers that Dynamo's ``graph`` was made for.

    Those that Python's ``random`` has drawn, and NumPy's of fewer bits, arrive in other types, NumPy's integers as they
    are.
    """
    convert: list[tuple[int, Callable[[Any], Any]]] = []
    for i, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        source, val = source_of(node), node.meta.get("example_value")  # none in a graph that is not Dynamo's
        if isinstance(val, torch.SymInt) and not isinstance(source, TensorPropertySource):
            convert.append((i, operator.index))
        elif (isinstance(source, RandomValueSource) and val.is_floating_point()) or _is_float(node):
            convert.append((i, functools.partial(torch.Tensor.to, dtype=val.dtype)))
    if not convert:
        return run

    def converted(*args: Any) -> Any:
        given = list(args)
        for i, to in convert:
            given[i] = to(given[i])
        return run(*given)

    return converted


def _is_float(placeholder: fx.Node) -> bool:
    """Whether it stands for a Python float, which Dynamo gives to its graph as a tensor."""
    return getattr(placeholder.meta.get("grapharg"), "pass_arg_as_tensor", False)


def _wrap_number(builder: VariableBuilder, value: np.generic) -> Any:
    """A number that NumPy has computed is a number, and no array: arrays would widen a loss, and are not logged.

    Those of 64 bits compute as Python's do; those of fewer round, or go round, in ways of their own.
    """
    number = value.item()
    variable = (builder.wrap_symfloat if type(number) is float else builder.wrap_literal)(number)
    return _of_numpy(variable, type(value) if type(value) in _SHORT else np.float64)


def _wrap_truth(builder: VariableBuilder, value: np.bool_) -> Any:
    """Dynamo has no guard for one of NumPy's."""
    install_guard(builder.source.make_guard(functools.partial(is_value, value=value)))
    return _of_numpy(ConstantVariable(bool(value), source=builder.source))


def _wrap_queue(builder: VariableBuilder, value: collections.deque[Any]) -> Any:
    """A queue that exists knows how long it may be."""
    result = builder.wrap_listlike(value)
    if isinstance(result, DequeVariable):
        result.maxlen = ConstantVariable.create(value.maxlen)
    return result


_SHORT = (np.float32, np.float16, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8)
_WRAPPERS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((np.float64, np.int64, *_SHORT), _wrap_number),
    np.bool_: _wrap_truth,
    collections.deque: _wrap_queue,
}


def _of_numpy(number: Any, kind: type = np.float64) -> Any:
    """``number``, marked as one of NumPy's: of 64 bits, or of another ``kind``."""
    if isinstance(number, ConstantVariable) and isinstance(number.value, bool) and number.source is None:
        number = ConstantVariable(number.value)  # not the one that there is for all
    number.of_numpy = kind
    return number


def _is_number(value: Any) -> bool:
    return isinstance(known(value), (ConstantVariable, SymNodeVariable))


def _marking(call: Callable[..., Any]) -> Callable[..., Any]:
    """What is computed of NumPy's numbers is one of them."""

    def method(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.fn in _ARITHMETIC and all(map(_is_number, args)):
            kinds = set(map(of_numpy, args))
            if self.fn is operator.invert or kinds != {None}:
                truths = all(a.python_type() is bool for a in args) and (None not in kinds or len(args) == 1)
                if truths or not kinds <= {np.float64, None}:
                    leave_to_python(f"{self.fn.__name__} of a number of NumPy's")
                result = call(self, tx, args, kwargs)
                return _of_numpy(result) if _is_number(result) else result
        if self.fn in _TELLING and (reason := _tells(self, tx, args)):
            leave_to_python(reason)
        return call(self, tx, args, kwargs)

    return method


def _making_tensors(call: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors of NumPy's numbers have their type, those of Python's the default one; buffers and seeds are Python's."""

    def method(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value is torch.seed:  # another number at each call
            leave_to_python("torch.seed")
        if self.value is _BUFFER:  # Dynamo makes a tensor, which no module would register
            leave_to_python("torch.nn.Buffer")
        if self.value in _TENSORS and "dtype" not in kwargs:
            kinds = {kind for data in args for kind in _kinds_in(data)}
            if not kinds <= {np.float64, None}:
                leave_to_python(f"torch.{self.value.__name__} of a number of NumPy's")
            if np.float64 in kinds:
                kwargs = {**kwargs, "dtype": ConstantVariable.create(torch.float64)}
        return call(self, tx, args, kwargs)

    return method


def _kinds_in(data: Any) -> Iterator[type | None]:
    """Of the numbers with a fraction, and of those of fewer bits."""
    there = known(data)
    if isinstance(there, BaseListVariable):
        for item in there.items:
            yield from _kinds_in(item)
    elif _is_number(there) and (there.python_type() is float or of_numpy(there) is not np.float64):
        yield of_numpy(there)


def _breaking(original: Callable[..., Any], whys: Sequence[Callable[..., str | None]]) -> Callable[..., Any]:
    """``original``, but for a graph break where one of ``whys`` has a reason for one."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        for why in whys:
            reason = why(self, *args)
            if reason is not None:
                leave_to_python(reason)
        return original(self, *args, **kwargs)

    return method


def _call_numpy(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Fold what is computed of constants alone, such as ``np.sqrt(width)`` and ``np.log(2 * np.pi)``."""
    if (isinstance(self.value, np.ufunc) or self.value in _OF_NUMBERS) and not kwargs:
        given = [known(a) for a in args]
        if all(a.is_python_constant() for a in given):
            result = self.value(*(a.as_python_constant() for a in given))
            if isinstance(result, (np.float64, np.int64, np.bool_)):
                return _of_numpy(ConstantVariable.create(result.item()))
    leave_to_python(f"np.{self.value.__name__}")


def _no_constant(value_of: Callable[..., Any]) -> Callable[..., Any]:
    """What an array holds, and how long it is, is watched by no guard; and what is computed while a graph is made, such
    as ``self.counts += 1``, is computed once more by Python."""

    def as_python_constant(self: Any) -> Any:
        if isinstance(self.value, np.ndarray):
            raise AsPythonConstantNotImplementedError(self)
        return value_of(self)

    return as_python_constant


def _of_array(read: Callable[..., Any]) -> Callable[..., Any]:
    """How large an array is tells a guard; what else it has is read, and its methods are called, by Python."""

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if not isinstance(self.value, np.ndarray) or callable(getattr(self.value, name, None)):
            return read(self, tx, name)
        if name not in ("shape", "size", "ndim") or self.source is None:
            leave_to_python(f"{name} of an array of NumPy's")
        size = getattr(self.value, name)
        install_guard(AttrSource(self.source, name).make_guard(functools.partial(is_value, value=size)))
        return VariableTracker.build(tx, size)

    return var_getattr


def _begun(begin: Callable[..., None]) -> Callable[..., None]:
    """A tuple of a class with a ``__new__`` of its own, such as a ``PackedSequence`` by ``_replace``, is made of the
    entries that it has: what it was made of may have been an iterator, which has no more when the graph has run."""

    def method(self: Any, value: Any, *entries: Any, **kwargs: Any) -> None:
        begin(self, value, *entries, **kwargs)
        if not entries and kwargs.get("tuple_vt") is None and kwargs.get("items") is None:
            # the variable is its own tuple in torch 2.15
            self.init_args = [self._base_vt if hasattr(self, "_base_vt") else TupleVariable(self.items)]

    return method


def _draws(dice: Any, tx: Any, name: str, *_: Any) -> str | None:
    """Each call of a graph would draw the same numbers."""
    return f"{name} of a random.Random" if dice.source is not None else None


def _tells(function: Any, tx: Any, args: Any, *_: Any) -> str | None:
    """It is no number of Python's, which ``hasattr`` and the like would say of what stands for it."""
    is_numpys = args and _is_number(args[0]) and of_numpy(args[0]) is not None
    return f"{function.fn.__name__} of a number of NumPy's" if is_numpys else None


def _is_drawn(builder: Any, value: Any) -> str | None:
    """It would be a float64 tensor in a graph made for float32."""
    drawn = isinstance(value, float) and isinstance(builder.get_source(), RandomValueSource)
    return "a random number with a fraction" if drawn else None


def _behind_the_graph(call: Callable[..., Any]) -> Callable[..., Any]:
    """A warning is given when the graph has run, and so is what else the user has said may be. Dynamo forgets those of
    functions that the step calls, and a warning of a tensor would tell of it as it is by then."""

    def call_function(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        given = [known(x) for x in [*args, *kwargs.values()]]
        if self.value is warnings.warn and not all(isinstance(x, ConstantVariable) for x in given):
            leave_to_python("warnings.warn of anything but a text")
        before = len(tx.debug_locals)
        result = call(self, tx, args, kwargs)
        root = tx.output.root_tx
        if tx is not root:
            root.debug_locals += tx.debug_locals[before:]
        return result

    return call_function


def _is_collective(function: Any, *_: Any) -> str:
    return f"torch.distributed.{function.fn.__name__}"


def _is_differentiated(self: Any, *args: Any) -> str | None:
    """Within ``torch.func.grad`` and the like Dynamo takes the gradient of its ``forward`` instead of its own."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    if any(level.key() in _DERIVATIVES for level in levels):
        return f"{self.fn_cls.__name__}, a torch.autograd.Function within a transform of torch.func"
    return None


def _is_finalized(self: Any, tx: Any, *args: Any) -> str | None:
    """Dynamo makes objects of its own to look at, without ``__init__``, and none of those that the step lets go of."""
    return f"an object of {self.value.__name__}, whose class has __del__," if hasattr(self.value, "__del__") else None


def _reasons() -> dict[tuple[type, str], list[Callable[..., str | None]]]:
    """What may be reasons for a graph break, by the method that is called."""
    found: dict[tuple[type, str], list[Callable[..., str | None]]] = {}
    for owner, name, why in _FAITHLESS:
        found.setdefault((owner, name), []).append(why)
    return found


_FAITHLESS: list[tuple[type, str, Callable[..., str | None]]] = [
    (VariableBuilder, "wrap_unspecialized_primitive", _is_drawn),
    (CollectiveFunctionRewriteVariable, "call_function", _is_collective),
    (GetAttrBuiltinVariable, "call_function", _tells),
    (HasAttrBuiltinVariable, "call_function", _tells),
    (RandomVariable, "call_method", _draws),
    (AutogradFunctionVariable, "call_apply", _is_differentiated),
    (UserDefinedClassVariable, "call_function", _is_finalized),
    *LOST_CHANGES,
]
"""Methods of Dynamo, and what says whether a call of one is to be a graph break, by the call's arguments."""
_REPLACED: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    (NumpyVariable, "call_function", lambda original: _call_numpy),
    (NumpyVariable, "as_python_constant", _no_constant),
    (NumpyVariable, "var_getattr", _of_array),
    (NumpyVariable, "python_type", lambda original: lambda self: type(self.value)),
    (BuiltinVariable, "call_function", lambda original: _marking(changing(writing(comparing(computing(original)))))),
    (TorchInGraphFunctionVariable, "call_function", lambda original: _making_tensors(taking_functions(original))),
    (UserDefinedTupleVariable, "__init__", _begun),
    (DebuggingVariable, "call_function", _behind_the_graph),
    *MENDS,
]
"""Functions of Dynamo by their owners, and what makes the one that takes their place."""
_PATCHES: list[tuple[Any, str, Callable[..., Callable[..., Any]]]] = [
    *((owner, name, functools.partial(_breaking, whys=whys)) for (owner, name), whys in _reasons().items()),
    *_REPLACED,
]
