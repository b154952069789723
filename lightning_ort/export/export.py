"""Write a module as an ONNX file for inference, and check the file."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import onnx_ir as ir
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from lightning_ort.compiler.distributions import unchecked_distributions
from lightning_ort.compiler.global_state import without_autocast
from lightning_ort.compiler.reference import Buffers, ForkedRNG
from lightning_ort.compiler.transformer_modules import transformers_in_graphs
from lightning_ort.environment import require_onnxruntime
from lightning_ort.errors import ExportError
from lightning_ort.export.checking import check
from lightning_ort.export.graph import make_graph
from lightning_ort.export.inputs import (
    DynamicAxes,
    InferenceModule,
    arguments_of_sample,
    bind,
    check_axes,
    default_axes,
    on_device,
)
from lightning_ort.files.onnx_models import check_target, save_onnx
from lightning_ort.runtime.tensors import NUMPY

__all__ = ["ExportedModel", "check_options", "export_onnx", "undisturbed", "weights_from"]

Dtype = Literal["float16", "float32", "float64"]
OPSETS = range(18, 22)


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """A file that :func:`export_onnx` has written and checked.

    Attributes:
        path: where it is.
        inputs: name to shape; open sizes are names.
        outputs: name to shape.
        difference: largest difference from the module's outputs, as a share of the largest entry of an output.
        checked: the open sizes that were compared, the sample's first.
        opset: version of the ONNX operators.
    """

    path: Path
    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    difference: float
    checked: list[dict[str, int]]
    opset: int

    def __repr__(self) -> str:
        def listed(tensors: Mapping[str, tuple[int | str, ...]]) -> str:
            return ", ".join(f"{name} [{' x '.join(map(str, shape))}]" for name, shape in tensors.items())

        return (
            f"<{type(self).__name__} {self.path}: {listed(self.inputs)} to {listed(self.outputs)}, opset {self.opset}, "
            f"within {self.difference:.1g} of the module>"
        )


def export_onnx(
    module: nn.Module,
    path: str | os.PathLike[str],
    sample: Any = None,
    *,
    method: str = "forward",
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic: DynamicAxes | None = None,
    dtype: Dtype | None = None,
    opset: int = 20,
    external_data: bool | None = None,
    tolerance: float | None = None,
) -> ExportedModel:
    """Write ``module`` in evaluation mode, with its present weights, as an ONNX file that ONNX Runtime 1.19 can read.

    The file is compared with the module, on the CPU, at the sizes of the sample and with each open size set to 1, 2, 3
    and one more, before it appears under its name. The module is left as it was.

    Args:
        module: a LightningModule, or another ``nn.Module``.
        path: of the file; one that exists is replaced at the end.
        sample: inputs: a tuple of positional arguments, a mapping of named ones, or the only argument; by default
            ``module.example_input_array``. For ``predict_step`` it is a batch. What is no tensor in it becomes a
            constant of the graph.
        method: what is exported: ``forward``, ``predict_step`` or another method.
        input_names: one per input tensor; by default the names of arguments, and keys of mappings in them. Inputs that
            no output depends on are not in the file.
        output_names: one per output tensor; by default ``output``, ``output_0`` ..., or keys of the mapping.
        dynamic: for all sizes that stay open, input name to dimension to the name of its size, or to a list of
            dimensions, of which each gets a name of its own. Dimensions of one name are equally long. By default
            ``"batch"``, the first dimension of the first input, and of the inputs that have the same size there.
        dtype: type of floating-point weights and inputs in the file, by default the module's own.
        opset: version of the ONNX operators, 18 to 21.
        external_data: put weights into a second file; by default where one file would exceed 2 GB.
        tolerance: by how much outputs may differ, as a share of the largest entry; by default 1e-6 for float64, 1e-4
            for float32, 1e-2 for float16. Whole numbers must be equal.

    Raises:
        TypeError: ``sample`` does not fit the method, or the module returns something else than tensors.
        ValueError: an argument is not as described.
        FileNotFoundError: the folder of ``path`` does not exist.
        ExportError: torch cannot trace the module, or ONNX Runtime cannot run the result.
        MismatchError: the file gives other results than the module.
        OnnxRuntimeImportError: there is no usable ONNX Runtime.
    """
    require_onnxruntime()
    target = check_target(path)
    check_options(module, method, dtype, opset, tolerance)
    args, kwargs = on_device(module, arguments_of_sample(module, method, sample))
    return export_call(
        module, target, args, kwargs, method=method, input_names=input_names, output_names=output_names,
        dynamic=dynamic, dtype=dtype, opset=opset, external_data=external_data, tolerance=tolerance,
    )  # fmt: skip


def check_options(
    module: nn.Module, method: str = "forward", dtype: str | None = None, opset: int = 20,
    tolerance: float | None = None, **others: Any,
) -> None:  # fmt: skip
    """Refuse what :func:`export_onnx` would refuse, before there is a sample.

    Raises:
        ValueError: an argument is not as described.
    """
    if not callable(getattr(module, method, None)):
        raise ValueError(f"method={method!r}: {type(module).__name__} has no such method.")
    if dtype is not None and dtype not in get_args(Dtype):
        raise ValueError(f"dtype={dtype!r}: expected {', '.join(map(repr, get_args(Dtype)))}.")
    if opset not in OPSETS:
        raise ValueError(f"opset={opset!r}: expected {OPSETS.start} to {OPSETS.stop - 1}.")
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance!r}: expected a share of the largest entry, such as 1e-4.")


def export_call(
    module: nn.Module,
    target: Path,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    method: str,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    dynamic: DynamicAxes | None,
    dtype: Dtype | None,
    opset: int,
    external_data: bool | None,
    tolerance: float | None,
) -> ExportedModel:
    """:func:`export_onnx` with the arguments of the method."""
    wanted = None if dtype is None else getattr(torch, dtype)
    with undisturbed(module), _in_dtype(module, wanted):
        call = bind(module, method, *pytree.tree_map(lambda x: _own(x, wanted), (tuple(args), kwargs)))
        names = _names("input_names", input_names, call.names)
        axes = default_axes(names, call.tensors) if dynamic is None else dynamic
        axes = check_axes(axes, names, call.tensors)
        function = InferenceModule(module, call).eval()
        results = function(*call.tensors)  # an error of the module's own comes from here, as it is
        outputs = _names("output_names", output_names, _distinct(function.outputs, names))
        _refuse_names(names, outputs)
        _refuse_types(names + outputs, call.tensors + results)
        doubts: list[ExportError] = []
        model = make_graph(function, names, outputs, call.tensors, axes, opset, doubts=doubts)
        if not model.graph.inputs:
            raise ExportError(f"No output of {type(module).__name__}.{method} depends on its inputs {names}.")
        difference, checked = save_onnx(
            model,
            target,
            external_data=external_data,
            check=lambda file: check(file, function, names, call.tensors, axes, tolerance, doubts),
        )
    return ExportedModel(target, _shapes(model.graph.inputs), _shapes(model.graph.outputs), difference, checked, opset)


def _own(leaf: Any, dtype: torch.dtype | None) -> Any:
    """A tensor that is no inference tensor, which torch cannot trace, in the type of the file."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to(dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype, copy=True)


def _names(argument: str, given: Sequence[str] | None, found: list[str]) -> list[str]:
    if given is None:
        return found
    if isinstance(given, str) or len(given) != len(found):
        raise ValueError(f"{argument}={given!r}: expected {len(found)} names, which are {found} by default.")
    return list(given)


def _distinct(outputs: Sequence[str], inputs: Sequence[str]) -> list[str]:
    """Names of outputs that no input has, as one can that is returned again."""
    return [f"{name}_out" if name in inputs else name for name in outputs]


def _refuse_names(inputs: Sequence[str], outputs: Sequence[str]) -> None:
    names = [*inputs, *outputs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"input_names, output_names: {twice} are several tensors. The inputs are {list(inputs)}, the outputs "
            f"{list(outputs)}; give all of them names of their own."
        )


def _refuse_types(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype not in NUMPY:
            raise ExportError(
                f"{name!r} is of type {tensor.dtype}, which ONNX Runtime takes from or gives to nobody on the CPU. "
                "Export with dtype='float32'."
            )


def _shapes(values: Sequence[ir.Value]) -> dict[str, tuple[int | str, ...]]:
    """Name to shape; sizes without a name are question marks."""
    return {str(v.name): tuple(d if isinstance(d, int) else str(d.value or "?") for d in v.shape or ()) for v in values}


@contextlib.contextmanager
def _in_dtype(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """``module`` with floating-point parameters and buffers of another type; afterwards it has its own again."""
    if dtype is None:
        yield
        return
    tensors = [*module.parameters(), *module.buffers()]
    before = [(t, t.data) for t in tensors if t.is_floating_point() and t.dtype != dtype]
    try:
        for tensor, data in before:
            tensor.data = data.to(dtype)
        yield
    finally:
        for tensor, data in before:
            tensor.data = data


@contextlib.contextmanager
def weights_from(module: nn.Module, load: Callable[[], Any] | None) -> Iterator[None]:
    """``module`` with the weights that ``load()`` puts into it; afterwards it has its own again."""
    if load is None:
        yield
        return
    # what is no tensor is a module's extra state
    before = {n: x.clone() if isinstance(x, Tensor) else copy.deepcopy(x) for n, x in module.state_dict().items()}
    try:
        load()
        yield
    finally:
        module.load_state_dict(before)


@contextlib.contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and the random state are as before afterwards."""
    modes = [(m, m.training) for m in module.modules()]
    tensors = [*module.parameters(), *module.buffers()]
    device = next((t.device for t in tensors), torch.device("cpu"))
    put_back = Buffers(module).note()
    module.eval()
    try:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
            without_autocast(),
            transformers_in_graphs(),
            ForkedRNG(device),
            unchecked_distributions(),
        ):
            yield
    finally:
        with torch.inference_mode(False):
            put_back()
        for m, mode in modes:
            m.training = mode
