"""An ONNX file beside the module it was made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_ort.environment import require_onnxruntime
from lightning_ort.errors import ExportError, MismatchError
from lightning_ort.export.inputs import Axes, other_sizes, resized, sizes_of
from lightning_ort.validation import first_line
from lightning_ort.verification import FILE, TRAINED_FILE, difference, distance, largest

__all__ = ["check", "check_sample"]


def _open_session(path: Path) -> Any:
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
    doubts: Sequence[ExportError] = (),
) -> tuple[float, list[dict[str, int]]]:
    """Run the file and the module on the sample, and on samples of other sizes.

    Args:
        path: of the file.
        module: what it was made of.
        names: of the inputs.
        tensors: the sample.
        axes: sizes that stay open.
        tolerance: instead of those in :data:`~lightning_ort.verification.FILE`.
        doubts: why the file may not hold for all sizes. Those around the numbers in it are looked at, too, and it is
            raised where the file does not agree.

    Returns:
        The largest difference as a share of the largest entry of its output, and the sizes that were compared. Sizes
        that the module itself does not compute are passed over.

    Raises:
        ExportError: ONNX Runtime does not load or run the file, or the module computes no other value of a size than
            the sample's.
        MismatchError: it gives other results than the module; the message names the output and the sizes.
    """
    comparison = _Comparison(path, names, tolerance)
    there = sizes_of(axes, names, tensors)
    comparison.add(tensors, module(*tensors), there)
    compared = [there]
    errors: dict[str, Exception] = {}
    computed = set()
    for name, sizes in other_sizes(there, _sizes_in(doubts)):
        inputs = resized(axes, names, tensors, sizes)
        try:
            expected = module(*inputs)
        except Exception as error:
            errors[name] = error
            continue
        try:
            comparison.add(inputs, expected, sizes)
        except (ExportError, MismatchError) as error:
            raise doubts[0] if doubts else error  # noqa: B904 - it is the cause of what is seen here
        computed.add(name)
        compared.append(sizes)
    fixed = [name for name in there if name not in computed]
    if fixed:
        raise ExportError(
            f"The module itself computes nothing but {fixed[0]}={there[fixed[0]]}: {_sentence(errors[fixed[0]])} "
            f"Leave {fixed[0]!r} out of dynamic=, or give a sample that goes with other sizes."
        )
    return comparison.worst, compared


def check_sample(
    path: Path, names: Sequence[str], tensors: Sequence[Tensor], expected: Sequence[Tensor] | None
) -> None:
    """Load the file of a model with its loss, run it on one sample, and compare what it gives.

    Args:
        path: of the file.
        names: of the inputs.
        tensors: the sample.
        expected: what the module gives, with tolerances of :data:`~lightning_ort.verification.TRAINED_FILE`; ``None``
            compares nothing, and runs nothing.

    Raises:
        ExportError: ONNX Runtime does not load or run the file.
        MismatchError: it gives other results.
    """
    comparison = _Comparison(path, names, TRAINED_FILE, least=1.0)
    if expected is not None:
        comparison.add(tensors, expected, {})


_LARGEST = 512  # of sizes that are looked at because torch doubts


def _sizes_in(doubts: Sequence[ExportError]) -> set[int]:
    """Sizes at which something may change by conditions such as ``size // 2 - 1 != 1`` or ``size <= 20``."""
    numbers = {int(n) for doubt in doubts for n in re.findall(r"\b\d+\b", str(doubt))}
    found = {n + step for n in numbers for step in (-1, 0, 1)}
    found |= set(range(1, 2 * sum(n for n in numbers if n <= 8)))
    return {n for n in found if 1 <= n <= _LARGEST}


class _Comparison:
    """Results of the file at ``path`` beside those of the module.

    Args:
        path: of the file.
        names: of the inputs.
        tolerance: by type, or one instead of those in :data:`~lightning_ort.verification.FILE`.
        least: what the largest entry of an output counts at least.

    Attributes:
        worst: the largest difference so far, as a share of the largest entry of its output.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        tolerance: Mapping[torch.dtype, float] | float | None,
        *,
        least: float = 0.0,
    ) -> None:
        try:
            self._session = _open_session(path)
        except Exception as error:
            raise ExportError(
                f"ONNX Runtime {require_onnxruntime().version} does not load the exported model: {_sentence(error)} "
                "Its CPU kernels are for float32, some for float64, and none for bfloat16: export a "
                "module of float32 (module.float(), or dtype='float32' of export_onnx) without torch.autocast in it."
            ) from error
        self._names, self._tolerance = names, FILE if tolerance is None else tolerance
        self._inputs = {i.name for i in self._session.get_inputs()}
        self._outputs = [o.name for o in self._session.get_outputs()]
        self._scales = [least] * len(self._outputs)  # a single entry may be small by chance
        self.worst = 0.0

    def add(self, inputs: Sequence[Tensor], expected: Sequence[Tensor], sizes: Mapping[str, int]) -> None:
        """Run the file on ``inputs``.

        Raises:
            ExportError: it does not run.
            MismatchError: it gives something else than ``expected``.
        """
        at = " at " + ", ".join(f"{k}={v}" for k, v in sizes.items()) if sizes else ""
        feed = {n: t.detach().cpu().numpy() for n, t in zip(self._names, inputs, strict=True) if n in self._inputs}
        try:
            got = self._session.run(self._outputs, feed)
        except Exception as error:
            raise ExportError(
                f"ONNX Runtime {require_onnxruntime().version} cannot run the exported model{at}: {_sentence(error)}"
            ) from error
        for i, (result, reference) in enumerate(zip(got, expected, strict=True)):
            found, truth = torch.from_numpy(np.asarray(result)), reference.detach().cpu()
            share = self._tolerance
            share = share.get(truth.dtype, 0.0) if isinstance(share, Mapping) else share
            scale = self._scales[i] = max(self._scales[i], largest(truth))
            problem = difference(found, truth, allowed=share * scale)
            if problem is not None:
                raise MismatchError(
                    f"The exported model gives another {self._outputs[i]!r} than the module{at}: {problem} (tolerance "
                    f"{share:g} of the largest entry). A module that draws random numbers, or does something else for "
                    "some sizes, cannot be exported like this."
                )
            if truth.is_floating_point() and scale:
                finite = torch.isfinite(truth)
                self.worst = max(self.worst, distance(found[finite].double(), truth[finite].double()) / scale)


def _sentence(error: BaseException) -> str:
    text = first_line(error)
    return text if text.endswith(".") else f"{text}."
