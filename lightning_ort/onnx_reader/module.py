"""An ONNX model as a torch module."""

from __future__ import annotations

import re
from collections.abc import Collection

import onnx
import torch
from torch import fx, nn

from lightning_ort.onnx_reader import operators  # noqa: F401  (fills the table)
from lightning_ort.onnx_reader.initializers import state_initializers, trainable_initializers
from lightning_ort.onnx_reader.load import Model, load, name_of, using
from lightning_ort.onnx_reader.reader import Reader, identifier, is_plain
from lightning_ort.onnx_reader.values import tensor_from

__all__ = ["OnnxModule", "to_torch"]


class OnnxModule(fx.GraphModule):
    """The module of an ONNX graph, made by :func:`to_torch`.

    ``forward`` takes the graph's inputs in order or by name (characters that Python does not allow in a name are
    ``_``) and returns a tuple of its outputs. In ``train()`` mode, which is the one it starts in, Dropout and
    BatchNormalization do what their attributes say; ``eval()`` turns both to their inference form.
    """

    @property
    def parameter_names(self) -> dict[str, str]:
        """Name of each parameter of this module to the name of its ONNX initializer."""
        return self.meta["parameter_names"]

    @property
    def buffer_names(self) -> dict[str, str]:
        """Name of each buffer that came from an ONNX initializer to the initializer's name."""
        return self.meta["buffer_names"]

    @property
    def input_names(self) -> list[str]:
        """ONNX names of the inputs, in the order of ``forward``."""
        return self.meta["input_names"]

    @property
    def output_names(self) -> list[str]:
        """ONNX names of the results of ``forward``, in order."""
        return self.meta["output_names"]


def to_torch(model: Model, parameters: Collection[str] | None = None, *, frozen: Collection[str] = ()) -> OnnxModule:
    """Read a forward ONNX graph, opset 13 to 26, as a torch module.

    Args:
        model: an ``onnx.ModelProto``, its bytes, or a path (with its external data beside it).
        parameters: names of the initializers that become ``nn.Parameter``; all other initializers are buffers. By
            default the float initializers, except those that are sizes, bounds, scales, class weights or running
            statistics, and except constants where torch's exporter has marked what was a parameter.
        frozen: names of parameters that the caller does not train.

    Returns:
        A module in train mode. Names of parameters are those of the initializers where Python allows that (dots make
        submodules, as in the module that was exported).

    Raises:
        FileNotFoundError, ValueError: no such file, not an ONNX model, or a name in ``parameters`` that is no float
            initializer.
        UnsupportedError: an operator, attribute or opset that cannot be read, named with its node; or, without
            ``parameters``, an initializer of which torch's exporter has left unclear whether it was a parameter.
    """
    proto = load(model)
    with using(name_of(model)):
        return _module(proto, trainable_initializers(proto, frozen) if parameters is None else parameters)


def _module(proto: onnx.ModelProto, parameters: Collection[str]) -> OnnxModule:
    tensors = {i.name: i for i in proto.graph.initializer}
    trained = list(dict.fromkeys(parameters))
    unknown = [name for name in trained if name not in tensors]
    if unknown:
        raise ValueError(f"The model has no initializer {', '.join(map(repr, unknown))}. It has: {', '.join(tensors)}.")
    state = [name for name in state_initializers(proto) if name not in trained]
    root = nn.Module()
    paths = _paths([*trained, *state])
    for name in trained:
        tensor = tensor_from(tensors[name])
        if not tensor.is_floating_point():
            raise ValueError(f"Initializer {name!r} is {tensor.dtype}; only floating-point ones can be trained.")
        _attach(root, paths[name], nn.Parameter(tensor))
    for name in state:
        _attach(root, paths[name], tensor_from(tensors[name]))
    reader = Reader(proto, root, paths)
    module = OnnxModule(root, reader.graph, class_name="OnnxModule")
    own = dict(module.named_parameters(remove_duplicate=False))
    module.meta["parameter_names"] = {path: name for name, path in paths.items() if path in own}
    module.meta["buffer_names"] = {path: name for name, path in paths.items() if path not in own}
    module.meta["input_names"] = [i.name for i in proto.graph.input if i.name not in tensors]
    module.meta["output_names"] = [o.name for o in proto.graph.output]
    return module


_RESERVED = re.compile(r"self|constant_\d+|node_\d+_\w*(?<!_)")
"""what the reader calls what it puts on a module itself"""


def _paths(names: list[str]) -> dict[str, str]:
    """An attribute path for each name: the name itself where torch has nothing of that name and no part is a tensor."""
    reserved = {*dir(OnnxModule), *dir(fx.GraphModule(nn.Module(), fx.Graph()))}
    reserved_inside = set(dir(nn.Module()))
    tensors: set[str] = set()
    modules: set[str] = set()
    paths: dict[str, str] = {}
    for name in names:
        first, *rest = name.split(".")
        plain = all(map(is_plain, (first, *rest))) and reserved_inside.isdisjoint(rest)
        path = name if plain else identifier(name)
        if plain and rest and (first in reserved or _RESERVED.fullmatch(first) or tensors & _prefixes(name)):
            path = identifier(name)
        while path in tensors | modules | reserved or _RESERVED.fullmatch(path):
            path = identifier(path) + "_"
        tensors.add(path)
        modules |= _prefixes(path)
        paths[name] = path
    return paths


def _prefixes(path: str) -> set[str]:
    """The modules on the way to a tensor."""
    parts = path.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}


def _attach(root: nn.Module, path: str, tensor: torch.Tensor) -> None:
    *parts, last = path.split(".")
    for part in parts:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(last, tensor)
    else:
        root.register_buffer(last, tensor)
