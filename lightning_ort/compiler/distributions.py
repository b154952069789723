"""Checks of ``torch.distributions``, which Dynamo would switch off for the whole process.

A parameter that is out of range, or a sample that no distribution of its kind has, is a ``ValueError`` in eager. That
depends on values and would break the graph; there it is an assertion of the graph instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

# Private: switches the checks off, when Dynamo compiles first; from then on it does nothing.
from torch._dynamo.eval_frame import TorchPatcher
from torch.distributions import Distribution, constraints
from torch.distributions.utils import lazy_property

__all__ = ["checked_distributions", "unchecked_distributions"]


@contextlib.contextmanager
def checked_distributions() -> Iterator[None]:
    """Have distributions check what they are given, in graphs as outside of them."""
    checks = Distribution._validate_args
    TorchPatcher.patch()
    Distribution._validate_args = checks
    # and neither another's patch nor ours
    is_torchs = Distribution.__init__ is _init and Distribution._validate_sample is _validate_sample
    if is_torchs:
        Distribution.__init__, Distribution._validate_sample = init, validate_sample  # type: ignore[method-assign]
    try:
        yield
    finally:
        if is_torchs:
            Distribution.__init__ = _init  # type: ignore[method-assign]
            Distribution._validate_sample = _validate_sample  # type: ignore[method-assign]


@contextlib.contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Have distributions check nothing, while they are traced for a graph that has no place for it."""
    checks = Distribution._validate_args
    Distribution._validate_args = False
    try:
        yield
    finally:
        Distribution._validate_args = checks


_NONE = torch.Size()
_DEPENDENT = type(constraints.dependent)  # Dynamo does not look into `constraints.is_dependent`
_init, _validate_sample = Distribution.__init__, Distribution._validate_sample


def init(
    self: Distribution,
    batch_shape: torch.Size = _NONE,
    event_shape: torch.Size = _NONE,
    validate_args: bool | None = None,
) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _init(self, batch_shape, event_shape, validate_args)
        return
    checks = type(self)._validate_args if validate_args is None else validate_args
    _init(self, batch_shape, event_shape, False)
    if not checks:
        return
    self._validate_args = True
    lazy = _lazy_names(type(self))
    for name, constraint in self.arg_constraints.items():
        if not isinstance(constraint, _DEPENDENT) and (name in self.__dict__ or name not in lazy):
            torch._assert_async(
                _fits(constraint, getattr(self, name)),
                f"Expected parameter {name} of distribution {type(self).__name__} to satisfy the constraint "
                f"{_name(constraint)}, but found invalid values.",
            )


@torch.compiler.assume_constant_result
def _lazy_names(kind: type[Distribution]) -> tuple[str, ...]:
    """Parameters that are computed when they are asked for first."""
    return tuple(n for base in kind.__mro__ for n, value in vars(base).items() if isinstance(value, lazy_property))


def _fits(constraint: Any, value: torch.Tensor) -> torch.Tensor:
    """Whether all of ``value`` satisfies ``constraint``, also where torch would leave out a part of the check."""
    if constraint is constraints.positive_definite or constraint is constraints.positive_semidefinite:
        if value.size(-1) != value.size(-2):
            return torch.zeros((), dtype=torch.bool)
        symmetric = torch.isclose(value, value.mT, atol=1e-6).all()
        if constraint is constraints.positive_definite:
            return symmetric & torch.linalg.cholesky_ex(value).info.eq(0).all()
        return symmetric & torch.linalg.eigvalsh(value).ge(0).all()
    return constraint.check(value).all()


def validate_sample(self: Distribution, value: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():
        _validate_sample(self, value)
        return
    if not isinstance(value, torch.Tensor):
        raise ValueError("The value argument to log_prob must be a Tensor")
    shape, event = self._batch_shape + self._event_shape, self._event_shape
    ends_alike = value.shape[value.dim() - len(event) :] == event
    if not ends_alike or any(
        i not in (1, j) and j != 1 for i, j in zip(reversed(value.shape), reversed(shape), strict=False)
    ):
        raise ValueError(
            f"A value of shape {tuple(value.shape)} is not broadcastable with batch_shape + event_shape, "
            f"{tuple(shape)}, of distribution {type(self).__name__}."
        )
    try:
        support = self.support
    except NotImplementedError:  # of a class that does not say
        return
    torch._assert_async(
        _fits(support, value),
        f"Expected value argument to be within the support {_name(support)} of distribution {type(self).__name__}, "
        "but found invalid values.",
    )


def _name(constraint: Any) -> str:
    return type(constraint).__name__.removeprefix("_")
