"""Which ONNX operator is computed by which torch function."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CONTRIB", "OPERATORS", "Operator", "operator"]

CONTRIB = "com.microsoft"


@dataclasses.dataclass(frozen=True)
class Operator:
    """One row of the table.

    Attributes:
        function: takes the node's inputs in order (``None`` for an omitted one) and its attributes by name; gives a
            tensor, or a tuple of them for several outputs.
        inputs: names of its parameters for the inputs; the last stands for all further ones when ``variadic``.
        sizes: parameters that are Python numbers or lists of them (shapes, axes, amounts), never tensors.
        constants: parameters that are not trained unless that is asked for, such as bounds and running statistics.
        attributes: attribute names it knows.
        extras: further keywords it wants: ``opset`` (version of the domain), ``n_outputs`` (how many have a name),
            ``n_read`` (how many there are up to the last that something reads), ``input_dtype`` (element type of the
            first input, where that is a number), ``label`` (how errors call the node), ``moved`` (which
            of ``state`` are initializers that are not trained).
        numbers: scalar constants are passed as Python numbers.
        random: it draws random numbers.
        state: inputs that training changes.
        module: it is a class of modules, one per node, whose ``train()`` and ``eval()`` count.
    """

    function: Callable[..., Any]
    inputs: tuple[str, ...]
    variadic: bool
    sizes: frozenset[str]
    constants: frozenset[str]
    attributes: frozenset[str]
    extras: frozenset[str]
    numbers: bool
    random: bool
    state: frozenset[str]
    module: bool

    def input_name(self, position: int) -> str:
        """Name of the parameter that takes the input at ``position``."""
        return self.inputs[min(position, len(self.inputs) - 1)] if self.variadic else self.inputs[position]


OPERATORS: dict[tuple[str, str], Operator] = {}
"""(domain, operator) to its row."""

_EXTRAS = frozenset({"opset", "n_outputs", "n_read", "input_dtype", "label", "moved"})


def operator(
    *names: str,
    domain: str = "",
    sizes: Sequence[str] = (),
    constants: Sequence[str] = (),
    numbers: bool = False,
    random: bool = False,
    state: Sequence[str] = (),
) -> Callable[[Any], Any]:
    """Register a function, or a module class whose ``forward`` is that function, for ONNX operators.

    Positional parameters are inputs, keyword-only parameters attributes with the defaults of the ONNX specification.
    See :class:`Operator` for the arguments.
    """

    def register(function: Any) -> Any:
        module = inspect.isclass(function)
        parameters = inspect.signature(function.forward if module else function).parameters.values()
        positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name != "self"]
        keywords = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
        row = Operator(
            function=function,
            inputs=tuple(p.name for p in positional),
            variadic=any(p.kind is p.VAR_POSITIONAL for p in positional),
            sizes=frozenset(sizes),
            constants=frozenset(constants) | frozenset(sizes) | frozenset(state),
            attributes=frozenset(keywords - _EXTRAS),
            extras=frozenset(keywords & _EXTRAS),
            numbers=numbers,
            random=random,
            state=frozenset(state),
            module=module,
        )
        for name in names:
            if (domain, name) in OPERATORS:
                raise ValueError(f"{name} is already read by {OPERATORS[domain, name].function.__qualname__}")
            OPERATORS[domain, name] = row
        return function

    return register
