"""Sessions, execution providers and bindings; knows nothing of Lightning, optimizers or losses."""

from __future__ import annotations

import logging

_root = logging.getLogger()
_handlers = list(_root.handlers)

import onnxruntime  # noqa: E402, F401

# onnxruntime-training 1.19 configures the root logger when it is imported, which would show every message twice
for _handler in [h for h in _root.handlers if h not in _handlers]:
    _root.removeHandler(_handler)
