"""Random operators: torch draws their values before each run, in the order and memory layout of eager."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx

from lightning_ort.compiler.allocation import place_of
from lightning_ort.compiler.bernoulli import draw_bernoulli
from lightning_ort.compiler.symbolic_shapes import Sizes, is_number

__all__ = ["DRAWS", "drawer", "dropout_factor", "layout_of", "without_idle_dropouts"]

aten = torch.ops.aten

Draw = Callable[..., torch.Tensor]

DRAWS: dict[Any, Draw] = {}
"""Overload to ``draw(memory, *args)``, which gives the numbers that eager would draw: in ``memory``, or elsewhere.

Shape, strides and dtype of ``memory`` are those of :func:`layout_of`; ``args`` are the node's own with symbolic numbers
resolved, tensors among them are not read and may be anything.
"""

_IN_PLACE = {
    aten.bernoulli.p: "bernoulli_",
    aten.uniform.default: "uniform_",
    aten.normal_functional.default: "normal_",
    aten.exponential.default: "exponential_",
    aten.cauchy.default: "cauchy_",
    aten.geometric.default: "geometric_",
    aten.log_normal.default: "log_normal_",
    aten.random.default: "random_",
    aten.random.to: "random_",
    getattr(aten.random, "from"): "random_",
}
"""Functional forms of draws into the first argument."""


_DROPOUTS = (torch.nn.functional.dropout, torch.dropout)


def without_idle_dropouts(region: fx.GraphModule) -> None:
    """Have dropout that drops nothing give, in Dynamo's graph, what it was given: that very tensor, as in eager.

    Torch traces a copy of it, which shares neither memory nor gradients with what it is a copy of.
    """
    idle = [n for n in region.graph.nodes if n.op == "call_function" and n.target in _DROPOUTS and _is_idle(n)]
    for node in idle:
        (x,) = node.args[:1]
        assert isinstance(x, fx.Node)
        node.replace_all_uses_with(x)
        region.graph.erase_node(node)
    if idle:
        region.recompile()


def _is_idle(dropout: fx.Node) -> bool:
    given = {**dict(zip(("input", "p", "training"), dropout.args, strict=False)), **dropout.kwargs}
    training, p = given.get("training", given.get("train", True)), given.get("p", 0.5)
    return bool(dropout.args) and (training is False or (not isinstance(p, fx.Node) and p == 0))


def layout_of(node: fx.Node) -> torch.Tensor:
    """Fake tensor with the shape, strides and dtype of the memory into which eager draws for ``node``.

    The order of the numbers follows the strides. An in-place draw has those of its argument; its functional form may
    declare others (``bernoulli.p``: contiguous).
    """
    source = node.args[0] if node.target in _IN_PLACE else node
    assert isinstance(source, fx.Node)
    val = source.meta["val"]
    # the copies of an entry of an expanded tensor are drawn each
    return torch.empty_like(val) if 0 in [step for step in val.stride() if isinstance(step, int)] else val


@torch.library.custom_op("lightning_ort::dropout_factor", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_factor(x: torch.Tensor, p: float) -> torch.Tensor:
    """What dropout on a GPU multiplies ``x`` by; its kernel draws the mask by the layout and type of ``x``."""
    return aten.native_dropout(torch.ones_like(x), p, True)[0]


@dropout_factor.register_fake
def _(x: torch.Tensor, p: float) -> torch.Tensor:
    return torch.empty_like(x)


def _in_place(name: str) -> Draw:
    method = getattr(torch.Tensor, name)
    return lambda out, like, *args: method(out, *args)


DRAWS.update({overload: _in_place(name) for overload, name in _IN_PLACE.items()})
DRAWS.update({
    aten.rand.default: lambda out, *args: out.uniform_(),
    aten.rand_like.default: lambda out, *args: out.uniform_(),
    aten.randn.default: lambda out, *args: out.normal_(),
    aten.randn_like.default: lambda out, *args: out.normal_(),
    aten.normal.float_float: lambda out, mean, std, *args: out.normal_(mean, std),
    aten.randint.default: lambda out, high, *args: out.random_(0, high),
    aten.randint.low: lambda out, low, high, *args: out.random_(low, high),
    aten.randint_like.default: lambda out, like, high, *args: out.random_(0, high),
    aten.randint_like.low_dtype: lambda out, like, low, high, *args: out.random_(low, high),
    torch.ops.lightning_ort.dropout_factor.default: lambda out, like, p: dropout_factor(out, p),
    aten.randperm.default: lambda out, *args: torch.randperm(out.shape[0], out=out),
})  # fmt: skip


def drawer(
    draws: Sequence[fx.Node], sizes: Sizes, device: torch.device, *, in_place: bool = False
) -> Callable[[Sequence[Any]], list[torch.Tensor]]:
    """Function from the inputs of a run to the random tensors of the placeholders ``draws``, drawn in that order.

    Args:
        draws: placeholders.
        sizes: evaluates symbolic sizes.
        device: what computes.
        in_place: no tensor is needed any more when the next ones are drawn: those of fixed sizes have the same memory.
    """
    steps = [_step(node, sizes, device, in_place=in_place) for node in draws]

    def draw(inputs: Sequence[Any]) -> list[torch.Tensor]:
        return [step(inputs) for step in steps]

    return draw


def _step(
    node: fx.Node, sizes: Sizes, device: torch.device, *, in_place: bool
) -> Callable[[Sequence[Any]], torch.Tensor]:
    target, layout, args, kwargs = node.meta["draw"]
    function, divisor, rank, dtype = DRAWS[target], node.meta["divisor"], layout.dim(), layout.dtype
    place = place_of(layout, device)
    flat, spec = pytree.tree_flatten((args, kwargs))
    values = [_argument(a) for a in flat]
    numbers = [*layout.shape, *layout.stride(), *[v for v in values if not isinstance(v, _Constant)]]

    def empty(shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=place)

    def drawn(memory: torch.Tensor, given: Sequence[Any]) -> torch.Tensor:
        if target is aten.bernoulli.p:
            return draw_bernoulli(memory, given[1], divisor)
        tensor = function(memory, *given)
        return tensor if divisor is None else tensor.div_(divisor)

    if all(isinstance(n, int) for n in numbers[: 2 * rank]) and len(numbers) == 2 * rank:
        shape, stride = numbers[:rank], numbers[rank:]
        given, _ = pytree.tree_unflatten([v.value for v in values], spec)
        memory = empty(shape, stride) if in_place else None
        return lambda inputs: drawn(empty(shape, stride) if memory is None else memory, given)
    geometry = sizes.evaluator(numbers)

    def step(inputs: Sequence[Any]) -> torch.Tensor:
        found = geometry(inputs)
        rest = iter(found[2 * rank :])
        resolved = [v.value if isinstance(v, _Constant) else next(rest) for v in values]
        given, _ = pytree.tree_unflatten(resolved, spec)
        return drawn(empty(found[:rank], found[rank : 2 * rank]), given)

    return step


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An argument of a draw that is the same in every run."""

    value: Any


def _argument(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        # a tensor is there for its shape only
        return argument.meta["val"] if is_number(argument) else _Constant(None)
    return _Constant(argument)
