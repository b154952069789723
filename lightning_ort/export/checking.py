"""An ONNX file beside the module it was made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.environment import require_onnxruntime
from lightning_ort.errors import ExportError, MismatchError
from lightning_ort.export.inputs import Axes, other_sizes, resized, sizes_of
from lightning_ort.verification import FILE, difference, distance, largest

__all__ = ["check", "open_session"]


def open_session(path: Path) -> Any:
    """The file in an ``onnxruntime.InferenceSession`` on the CPU, which all builds have."""
    import onnxruntime

    from lightning_ort.runtime.providers.cpu import cpu_session

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return cpu_session(path, options)


def check(
    path: Path,
    module: Callable[..., list[Tensor]],
    names: Sequence[str],
    tensors: Sequence[Tensor],
    axes: Axes,
    tolerance: float | None,
) -> tuple[float, list[dict[str, int]]]:
    """Run the file and the module on the sample, and on samples of other sizes.

    Args:
        path: of the file.
        module: what it was made of.
        names: of the inputs.
        tensors: the sample.
        axes: sizes that stay open.
        tolerance: instead of those in :data:`~lightning_ort.verification.FILE`.

    Returns:
        The largest difference as a share of the largest entry of its output, and the sizes that were compared. Sizes
        that the module itself does not compute are passed over.

    Raises:
        ExportError: ONNX Runtime does not load or run the file, or the module computes no other value of a size than
            the sample's.
        MismatchError: it gives other results than the module; the message names the output and the sizes.
    """
    try:
        session = open_session(path)
    except Exception as error:
        raise ExportError(
            f"ONNX Runtime {require_onnxruntime().version} does not load the exported model: {_first_line(error)} "
            "Its CPU kernels are for float32, some for float64, and none for bfloat16: export with dtype='float32', "
            "and without torch.autocast in the module."
        ) from error
    outputs = [o.name for o in session.get_outputs()]
    wanted_inputs = [i.name for i in session.get_inputs()]

    scales = [0.0] * len(outputs)  # a single entry may be small by chance

    def compare(inputs: Sequence[Tensor], expected: Sequence[Tensor], sizes: Mapping[str, int]) -> float:
        at = " at " + ", ".join(f"{k}={v}" for k, v in sizes.items()) if sizes else ""
        feed = {n: t.detach().cpu().numpy() for n, t in zip(names, inputs, strict=True) if n in wanted_inputs}
        try:
            got = session.run(outputs, feed)
        except Exception as error:
            raise ExportError(
                f"ONNX Runtime {require_onnxruntime().version} cannot run the exported model{at}: {_first_line(error)}"
            ) from error
        worst = 0.0
        for i, (name, result, reference) in enumerate(zip(outputs, got, expected, strict=True)):
            found, truth = torch.from_numpy(np.asarray(result)), reference.detach().cpu()
            share = FILE.get(truth.dtype, 0.0) if tolerance is None else tolerance
            scales[i] = max(scales[i], largest(truth))
            problem = difference(found, truth, allowed=share * scales[i])
            if problem is not None:
                raise MismatchError(
                    f"The exported model gives another {name!r} than the module{at}: {problem} (tolerance {share:g} "
                    "of the largest entry). A module that draws random numbers, or does something else for some "
                    "sizes, cannot be exported like this."
                )
            if truth.is_floating_point() and scales[i]:
                finite = torch.isfinite(truth)
                worst = max(worst, distance(found[finite].double(), truth[finite].double()) / scales[i])
        return worst

    there = sizes_of(axes, names, tensors)
    worst, compared = compare(tensors, module(*tensors), there), [there]
    computed = set()
    errors: dict[str, Exception] = {}
    for name, sizes in other_sizes(there):
        inputs = resized(axes, names, tensors, sizes)
        try:
            expected = module(*inputs)
        except Exception as error:
            errors[name] = error
            continue
        worst = max(worst, compare(inputs, expected, sizes))
        computed.add(name)
        compared.append(sizes)
    fixed = [name for name in there if name not in computed]
    if fixed:
        raise ExportError(
            f"The module itself computes nothing but {fixed[0]}={there[fixed[0]]}: {_first_line(errors[fixed[0]])} "
            f"Leave {fixed[0]!r} out of dynamic=, or give a sample that goes with other sizes."
        )
    return worst, compared


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text if text.endswith(".") else f"{text}."
