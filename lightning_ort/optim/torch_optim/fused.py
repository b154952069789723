"""Updates by torch's fused kernels on the CPU: whether they can make one, and one made without what precedes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from lightning_ort.optim.kinds import TORCH_STATES, known_class
from lightning_ort.optim.torch_optim.families import Group
from lightning_ort.optim.torch_optim.members import is_plain

__all__ = ["FusedUpdate", "GroupsOfOneStep", "fused_groups", "fused_kernel_fits", "is_in_order", "may_be_fused"]

_MOST_MISSES = 8
"""steps in a row that could not be made directly, after which none is tried any more"""


def fused_kernel_fits(optimizer: Optimizer) -> bool:
    """Whether the fused kernel can make the coming update, and makes the one that torch's other code makes.

    It does not look at what it is given: whether parameters, gradients and states lie in memory one like the other and
    are of one type, for one. So this does, each time.
    """
    seen = set[int]()
    for group in optimizer.param_groups:
        if not may_be_fused(group):
            return False
        begun = set[bool]()
        for p in group["params"]:
            gradient = p.grad
            if gradient is None:
                continue
            if id(p) in seen or not is_in_order(p) or not _is_like(gradient, p):
                return False
            seen.add(id(p))
            state = optimizer.state.get(p) or {}
            for name, value in state.items():
                if name == "step":
                    # all are counted first, so that one of two parameters would be counted twice
                    if type(value) is not Tensor or value.dtype is not torch.float32 or id(value) in seen:
                        return False
                    seen.add(id(value))
                elif isinstance(value, Tensor) and not _is_like(value, p):
                    return False
            begun.add(state.get("momentum_buffer") is not None)
        if group.get("momentum") and len(begun) > 1:  # it makes the buffers of all or of none
            return False
    return True


def may_be_fused(group: Group) -> bool:
    """Whether a fused kernel may make the update of ``group``, of which the user has said nothing."""
    return (
        _is_left_open(group)
        # a tensor of which the kernel takes the number, and other code rounds with
        and not any(isinstance(value, Tensor) for value in (*group.values(), *group.get("betas", ())))
        # it counts in float32
        and torch.get_default_dtype() is torch.float32
    )


def _is_left_open(group: Group) -> bool:
    """Whether the user asks for none of torch's implementations."""
    get = group.get
    return get("fused", False) is None and not (get("foreach") or get("differentiable") or get("capturable"))


def is_in_order(p: Tensor) -> bool:
    """Whether ``p`` is one that a fused kernel on the CPU reads as it lies in memory."""
    return is_plain(p) and p.is_cpu and p.is_contiguous()


def _is_like(x: Tensor, p: Tensor) -> bool:
    return is_in_order(x) and x.dtype is p.dtype and x.shape == p.shape


def fused_groups(groups: Iterable[Group]) -> list[Group]:
    """``groups`` with the flag that has torch take its fused kernel."""
    return [{**group, "fused": True} for group in groups]


class GroupsOfOneStep(list):
    """Stands in for the groups of an optimizer in the one loop over them that its ``step`` has.

    As that loop begins, the optimizer has its own groups again.

    Args:
        groups: what is looped over.
    """

    def __init__(self, optimizer: Optimizer, groups: Iterable[Group]) -> None:
        super().__init__()
        self._optimizer, self._own, self._groups = optimizer, optimizer.param_groups, groups

    def __iter__(self) -> Iterator[Any]:
        self.give_back()
        return iter(self._groups)

    def give_back(self) -> None:
        """Let the optimizer have its own groups."""
        self._optimizer.param_groups = self._own


class FusedUpdate:
    """Makes updates by the kernel that ``step`` of an optimizer with ``fused=True`` would call, and by nothing else.

    torch goes through all parameters in Python, looks up their states and sorts them by device and type before it
    calls the kernel: for small tensors that takes longer than the kernel. What it would find is remembered here, and
    is only looked at to be still the same.

    Args:
        optimizer: of any class.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._kernel = _KERNELS.get(known_class(optimizer) or Optimizer)
        self._misses = 0
        self._parts: list[_Part] = []
        self._state: Any = None
        self._entries, self._values = 0, list[Any]()

    @property
    def possible(self) -> bool:
        """Whether it is still to be expected that an update can be made here."""
        return self._kernel is not None and self._misses < _MOST_MISSES

    def ready(self) -> Callable[[], None] | None:
        """A function that makes the coming update, if it can be made here. Nothing is changed before."""
        if not self.possible:
            return None
        calls = self._calls()
        if calls is None:
            self._plan()
            calls = self._calls()
        self._misses = self._misses + 1 if calls is None else 0
        return None if calls is None else partial(_call_all, calls)

    def _calls(self) -> list[Callable[[], None]] | None:
        """The kernel's call for each group; ``None`` where something is not as it was."""
        optimizer, parts = self._optimizer, self._parts
        groups, state = optimizer.param_groups, optimizer.state
        if (
            not parts
            or len(groups) != len(parts)
            or state is not self._state
            or len(state) != self._entries
            or not _same([*chain.from_iterable(map(dict.values, state.values()))], self._values)
            or getattr(optimizer, "grad_scale", None) is not None
            or getattr(optimizer, "found_inf", None) is not None
        ):
            return None
        calls = [part.call(group) for part, group in zip(parts, groups, strict=True)]
        return None if None in calls else calls  # type: ignore[return-value]

    def _plan(self) -> None:
        self._parts = []
        optimizer, kernel = self._optimizer, self._kernel
        state = optimizer.state
        if kernel is None or not fused_kernel_fits(optimizer):
            return
        if not all(isinstance(entry, dict) for entry in state.values()):
            return
        self._state, self._entries = state, len(state)
        self._values = [*chain.from_iterable(map(dict.values, state.values()))]
        parts = [_Part(group, kernel, state) for group in optimizer.param_groups]
        if all(part.has_all for part in parts):
            self._parts = parts


class _Part:
    """What a kernel is given of one group: parameters that have a gradient, all of one type, and their states.

    Args:
        group: the group.
        kernel: the kernel.
        state: of the optimizer.
    """

    def __init__(self, group: Group, kernel: _Kernel, state: Any) -> None:
        self._group, self._kernel = group, kernel
        self._listed = list(group["params"])
        self._params = [p for p in self._listed if p.grad is not None]
        self._without = [p for p in self._listed if p.grad is None]
        self._names = kernel.states(group)
        self._states: list[list[Any]] = [[(state.get(p) or {}).get(name) for p in self._params] for name in self._names]
        self._dtypes, self._shapes = {p.dtype for p in self._params}, [p.shape for p in self._params]
        # all states are tensors and every type is the same, or no kernel can be given this
        self.has_all = len(self._dtypes) <= 1 and all(isinstance(t, Tensor) for t in chain.from_iterable(self._states))
        self._in_place: list[Any] = [*self._params, *chain.from_iterable(self._states)] if self.has_all else []
        self._memory = list(map(Tensor.data_ptr, self._in_place))

    def call(self, group: Group) -> Callable[[], None] | None:
        """The call of the kernel for the gradients that are there now, if nothing else has changed."""
        params, kernel = self._params, self._kernel
        gradients: list[Any] = [p.grad for p in params]
        numbers = kernel.numbers(group)
        as_before = (
            group is self._group
            and _is_left_open(group)
            and kernel.states(group) == self._names
            and _NUMBERS.issuperset(map(type, numbers))
            and _same(group["params"], self._listed)
            and all(p.grad is None for p in self._without)
            # as `_is_like` has it, in less time
            and _GRADIENTS.issuperset(map(type, gradients))
            and _STRIDED.issuperset(map(_LAYOUT, gradients))
            and self._dtypes.issuperset(map(_DTYPE, gradients))
            and all(map(Tensor.is_contiguous, gradients))
            and not any(map(Tensor.is_neg, gradients))
            and list(map(_SHAPE, params)) == self._shapes
            and not any(map(Tensor.is_neg, params))
            # whoever has changed something else has given them other memory
            and list(map(Tensor.data_ptr, self._in_place)) == self._memory
            and all(map(Tensor.is_contiguous, self._in_place))
        )
        if not as_before:
            return None
        return partial(kernel.call, group, numbers, params, gradients, *self._states) if params else _nothing


_LAYOUT, _DTYPE, _SHAPE = map(attrgetter, ("layout", "dtype", "shape"))
_STRIDED, _GRADIENTS, _NUMBERS = {torch.strided}, {Tensor}, {float, int}


def _same(found: Sequence[object], known: Sequence[object]) -> bool:
    return len(found) == len(known) and all(map(is_, found, known))


@torch.no_grad()
def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _nothing() -> None:
    """The update of a group without gradients."""


_Row = list[Tensor]


class _Kernel(NamedTuple):
    """A fused kernel.

    Attributes:
        states: torch's names of the states that it reads, for the settings of a group.
        numbers: the settings that are numbers.
        call: updates parameters: settings, numbers, parameters, gradients, and one list for each of the states.
    """

    states: Callable[[Group], tuple[str, ...]]
    numbers: Callable[[Group], tuple[Any, ...]]
    call: Callable[..., None]


def _adam_states(group: Group) -> tuple[str, ...]:
    return _ADAM_LARGEST if group["amsgrad"] else _ADAM


def _adam_numbers(group: Group) -> tuple[Any, ...]:
    return (group["lr"], *group["betas"], group["weight_decay"], group["eps"])


def _adam(group: Group, numbers: tuple[Any, ...], params: _Row, gradients: _Row, counts: _Row, *moments: _Row) -> None:
    first, second, *largest = moments
    lr, beta1, beta2, weight_decay, eps = numbers
    torch._foreach_add_(counts, 1)
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    kernel(
        params,
        gradients,
        first,
        second,
        largest[0] if largest else [],
        counts,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=group["amsgrad"],
        maximize=group["maximize"],
    )


def _sgd_states(group: Group) -> tuple[str, ...]:
    return _SGD if group["momentum"] != 0 else ()


def _sgd_numbers(group: Group) -> tuple[Any, ...]:
    return group["lr"], group["momentum"], group["dampening"], group["weight_decay"]


def _sgd(group: Group, numbers: tuple[Any, ...], params: _Row, gradients: _Row, *momenta: _Row) -> None:
    lr, momentum, dampening, weight_decay = numbers
    torch._fused_sgd_(
        params,
        gradients,
        momenta[0] if momenta else [],
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=dampening,
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
    )


_ADAM = ("step", TORCH_STATES["moment_1"], TORCH_STATES["moment_2"])
_ADAM_LARGEST = (*_ADAM, TORCH_STATES["largest_2"])
_SGD = (TORCH_STATES["momentum"],)

# torch's public functions of the same arguments, such as torch.optim.adamw.adamw, are those that sort
_KERNELS: dict[type[Optimizer], _Kernel] = {
    optim.Adam: _Kernel(_adam_states, _adam_numbers, _adam),
    optim.AdamW: _Kernel(_adam_states, _adam_numbers, _adam),
    optim.SGD: _Kernel(_sgd_states, _sgd_numbers, _sgd),
}
"""Class of torch to its kernel."""
