"""Sessions, execution providers and bindings; knows nothing of Lightning, optimizers or losses."""

from __future__ import annotations

import inspect
import logging
from types import FunctionType
from typing import Any

import torch.utils.checkpoint

_root = logging.getLogger()
_handlers = list(_root.handlers)

import onnxruntime  # noqa: E402, F401

# onnxruntime-training 1.19 configures the root logger when it is imported, which would show every message twice
for _handler in [h for h in _root.handlers if h not in _handlers]:
    _root.removeHandler(_handler)


def _give_signature_back() -> None:
    """Give ``torch.utils.checkpoint.checkpoint`` its signature back.

    onnxruntime-training puts functions in its place, one around the other, that take anything; Dynamo tells by the
    signature which arguments are the checkpoint's own, and breaks graphs where it has none.
    """
    present: Any = torch.utils.checkpoint.checkpoint
    inner = present
    while isinstance(inner, FunctionType):
        original = inspect.getclosurevars(inner).nonlocals.get("original_checkpoint")
        if original is None:
            break
        inner = original
    if inner is not present:
        present.__signature__ = inspect.signature(inner)


_give_signature_back()
