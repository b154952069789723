"""ONNX files that are complete when they appear, with their weights inside or beside them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir

from lightning_ort.files.writing import companion, write_path

__all__ = ["LARGEST_FILE", "check_target", "save_onnx"]

LARGEST_FILE = 2**31 - 2**25
"""bytes of values in one message: protobuf allows for 2 GiB, and the graph itself needs a little"""


def check_target(path: str | os.PathLike[str]) -> Path:
    """``path``, if a file can be written there.

    Raises:
        FileNotFoundError: its folder does not exist.
        IsADirectoryError: it is a folder itself.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"path={os.fspath(path)!r} is a folder. Name a file, such as 'model.onnx'.")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path={os.fspath(path)!r}: the folder {str(target.parent)!r} does not exist.")
    return target


def save_onnx(
    model: ir.Model,
    target: Path,
    *,
    external_data: bool | None = None,
    check: Callable[[Path], Any] = lambda file: None,
) -> Any:
    """Write ``model`` and ``check`` the file before it gets its name; what ``check`` returns.

    Args:
        model: what to write.
        target: where; a file of that name is replaced, together with its external data if this function wrote them.
        external_data: put weights into a second file, ``<stem>.<number>.data``; ``None`` does where one would exceed
            2 GB. The number is another each time, so that the old file stays whole until the new one is complete.
        check: called with the path of the written file.

    Raises:
        ValueError: one file is asked for, and the weights are too large for it.
        FileNotFoundError: the folder of ``target`` does not exist.
    """
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if external_data is False and size > LARGEST_FILE:
        raise ValueError(
            f"external_data=False, but the weights are {size / 2**30:.1f} GiB and a file without external data holds "
            "less than 2 GiB. Leave it out."
        )
    outdated = _data_file(target)
    with write_path(target) as temporary:
        if external_data or size > LARGEST_FILE:
            try:
                ir.save(model, temporary, external_data=companion(temporary, ".data").name, size_threshold_bytes=0)
            except OSError as error:
                if error.errno is not None:
                    raise
                # numpy has written less than it was to and has removed that, without a word of why
                number = errno.ENOSPC if shutil.disk_usage(target.parent).free < size else errno.EIO
                raise OSError(number, os.strerror(number)) from error
        else:
            ir.save(model, temporary)
        result = check(temporary)
    if outdated is not None:
        outdated.unlink(missing_ok=True)
    return result


def _data_file(target: Path) -> Path | None:
    """The external data that :func:`save_onnx` wrote for the model that has the name ``target`` now."""
    name = re.escape(target.stem) + r"\.[0-9a-f]{8}\.data"
    try:
        values = ir.load(target).graph.initializers.values()
    except Exception:  # no file, or another content
        return None
    for value in values:
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and re.fullmatch(name, str(tensor.location)):
            return target.with_name(str(tensor.location))
    return None
