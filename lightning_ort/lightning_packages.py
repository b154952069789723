"""The packages that Lightning comes as: ``lightning`` and ``pytorch_lightning``, alike in all but their classes.

Nothing else chooses between them. ``pl`` is the one that this package's own Trainers and types are of: ``lightning``
where both are installed. What users hand over may be of either: :func:`everywhere` has one name of each, for
``isinstance``, and :func:`package_of` says which one an object is of.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

__all__ = [
    "PACKAGES", "Accelerator", "Callback", "MisconfigurationException", "Package", "TorchCheckpointIO", "Variant",
    "everywhere", "everywhere_in_fabric", "overrides", "package_of", "pl", "rank_zero_info", "rank_zero_warn",
]  # fmt: skip


@dataclass(frozen=True)
class Package:
    """Lightning by one of its names.

    Attributes:
        pytorch: the package with the Trainer.
        fabric: the package below it.
    """

    pytorch: str
    fabric: str

    def get(self, name: str) -> Any:
        """What ``"module:name"`` is in the package with the Trainer, such as ``"strategies:DDPStrategy"``."""
        return pkgutil.resolve_name(f"{self.pytorch}.{name}")

    def get_fabric(self, name: str) -> Any:
        """The same, in the package below it."""
        return pkgutil.resolve_name(f"{self.fabric}.{name}")

    def has(self, kind: type) -> bool:
        """Whether ``kind`` is defined there."""
        return f"{getattr(kind, '__module__', '')}.".startswith((f"{self.pytorch}.", f"{self.fabric}."))


PACKAGES = tuple(
    Package(pytorch, fabric)
    for pytorch, fabric in (("lightning.pytorch", "lightning.fabric"), ("pytorch_lightning", "lightning_fabric"))
    if importlib.util.find_spec(pytorch.partition(".")[0]) is not None
)
"""those that are installed, the preferred one first"""

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    _chosen_by_user = any(package.pytorch in sys.modules for package in PACKAGES)
    _log = rank_zero.log
    pl = importlib.import_module(PACKAGES[0].pytorch)
    if not _chosen_by_user:
        _log = rank_zero.log
    for _package in PACKAGES[1:]:
        importlib.import_module(_package.pytorch)
    # each package takes over the logger of both when it is imported; the user's one shall keep it
    rank_zero.log = _log


@functools.cache
def everywhere(name: str) -> tuple[Any, ...]:
    """What ``"module:name"`` is in each installed package."""
    return tuple(package.get(name) for package in PACKAGES)


@functools.cache
def everywhere_in_fabric(name: str) -> tuple[Any, ...]:
    """The same, in the packages below them."""
    return tuple(package.get_fabric(name) for package in PACKAGES)


def package_of(*objects: Any) -> Package:
    """The package that the first of ``objects`` is of that is of any; the preferred one if none is."""
    for x in objects:
        for kind in type(x).__mro__:
            for package in PACKAGES:
                if package.has(kind):
                    return package
    return PACKAGES[0]


def overrides(method: str, instance: Any) -> bool:
    """Whether the user's class has a ``method`` of its own, as Lightning sees it."""
    return bool(package_of(instance).get("utilities.model_helpers:is_overridden")(method, instance))


def _of_each_package(name: str) -> type:
    kinds = everywhere(name)
    return type(kinds[0])(kinds[0].__name__, kinds, {"__module__": __name__, "__doc__": kinds[0].__doc__})


# Trainers look whether what they are given is of their own package; classes without a state can be of each.
if TYPE_CHECKING:
    from lightning.fabric.plugins.io import TorchCheckpointIO
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
else:
    Accelerator = _of_each_package("accelerators:Accelerator")
    Callback = _of_each_package("callbacks:Callback")
    MisconfigurationException = _of_each_package("utilities.exceptions:MisconfigurationException")
    TorchCheckpointIO = _of_each_package("plugins.io:TorchCheckpointIO")


class Variant:
    """A class whose base is one of Lightning's, chosen per instance, and again when more is known.

    Plug-ins are made before anybody knows whose Trainer takes them, and strategies before it is known on how many
    devices. A subclass is written as if it had the base already; its instances are of a class that has both.
    """

    _written: type[Variant]
    """what the user's program calls the class"""

    @classmethod
    def _first_bases(cls) -> tuple[type, ...]:
        """Bases to begin with."""
        raise NotImplementedError

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(cls.made())

    @classmethod
    def made(cls) -> Any:
        """The class of new instances, a subclass of Lightning's own."""
        return _with_bases(cls.__dict__.get("_written", cls), cls._first_bases())

    @property
    def _bases(self) -> tuple[type, ...]:
        return type(self).__bases__[1:]

    def _change_bases(self, *bases: type) -> None:
        """Take other bases, whose state has to be made afterwards."""
        self.__class__ = _with_bases(self._written, bases)

    @classmethod
    def around(cls, instance: Any) -> Any:
        """The same as ``instance``, with its class as the base of this one."""
        made = object.__new__(_with_bases(cls, (type(instance),)))
        made.__dict__.update(instance.__dict__)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the class of an instance has no name that another process could import
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
        return _made_again, (self._written, self._bases), state


_VARIANTS: dict[Any, Any] = {}


def _with_bases(written: Any, bases: tuple[type, ...]) -> Any:
    if (written, bases) in _VARIANTS:
        return _VARIANTS[written, bases]
    names = {"_written": written, "__module__": written.__module__, "__doc__": written.__doc__}
    kind = type(bases[0])  # the metaclass of abstract classes
    _VARIANTS[written, bases] = kind(
        written.__name__, (written, *bases), names | {"__qualname__": written.__qualname__}
    )
    return _VARIANTS[written, bases]


def _made_again(written: type[Variant], bases: tuple[type, ...]) -> Any:
    return object.__new__(_with_bases(written, bases))
