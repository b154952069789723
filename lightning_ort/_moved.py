"""Import paths of earlier versions: they import what they named, and warn with the new path."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

MOVED = {
    "accelerator": "lightning.accelerator",
    "examination": "lightning.examine",
    "onnx_gradients": "training_session.gradient_graph",
    "onnx_training": "training_session",
    "optimizer_steps": "optim.torch_optim",
    "precision": "lightning.precision",
    "scaled_backward": "lightning.precision",
    "scalers": "amp.rules",
    "standins": "lightning.steps",
    "steps": "lightning.steps",
    "strategy": "lightning.strategy",
    "updates": "optim.rules",
}
"""Old module to new module, both in this package."""


class _Moved(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        return ModuleSpec(fullname, self) if package == __package__ and name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        new = f"{__package__}.{MOVED[module.__name__.partition('.')[2]]}"
        warnings.warn(f"{module.__name__} is now {new}.", FutureWarning, stacklevel=2)
        found = vars(importlib.import_module(new))
        vars(module).update({k: v for k, v in found.items() if not (k.startswith("__") and k.endswith("__"))})


def install() -> None:
    """Let Python look here for modules of this package that it finds nowhere else."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
