"""One run of a gradient graph on generated inputs, beside torch's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch
from torch import Tensor

from lightning_ort.compiler.aot.inputs import usual_hints
from lightning_ort.compiler.aot.joint import Joint
from lightning_ort.compiler.aot.reference import StepReference
from lightning_ort.compiler.aot.sizes import independent, size_text, value_of
from lightning_ort.compiler.passes import has_doubles
from lightning_ort.compiler.placement import SMALL, operations
from lightning_ort.files.onnx_models import LARGEST_FILE
from lightning_ort.runtime.factory import SessionFactory
from lightning_ort.runtime.session import OrtSession
from lightning_ort.verification import Doubts, Mismatch

__all__ = ["compare_once"]

_OPERATIONS = 1e10
"""Floating-point operations of a graph that is run without being asked to: about a second on two cores."""

_BYTES = 1 << 29
"""Bytes of the weights of such a graph, which are copied to make a session."""

_SEEDS = 4
"""Inputs that are generated for each choice of the sizes that vary."""

_CLASSES = (2, 1)
"""Whole numbers are below these, in turn: indices of two classes, or of one where there is but one."""

_ADVICE = "Please report it with the model; build(verify=False) would skip this check."


def compare_once(reference: StepReference, joint: Joint, model: ir.Model, *, limited: bool) -> str | None:
    """Compare ``model`` with torch at generated inputs; why that was not done, or ``None`` if it was.

    Args:
        reference: what computes it in torch.
        joint: what ``model`` was written from.
        model: the graph with its weights.
        limited: leave out what takes long.

    Raises:
        MismatchError: an output or a gradient is not torch's.
    """
    if reference.random:
        return "it draws random numbers, which torch would not draw"
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)
    if size > LARGEST_FILE:
        return "its weights have more than 2 GB"
    if limited and (size > _BYTES or operations(joint.traced.graph.nodes) > _OPERATIONS):
        return "it is large; build(verify=True) takes the time"
    runs = _runs(reference, joint, model)
    first = next(runs, None)
    if first is None:
        return "torch does not compute finite numbers from generated inputs"
    try:
        session = _session(model, joint)
        got = _run(session, model, first[0])
    except Exception as error:  # no kernel on the CPU, or values that its kernels refuse
        return f"ONNX Runtime's CPU provider does not run it: {next(iter(str(error).splitlines()), '')}"
    mismatch = reference.mismatch(got, first[1], first[0])

    def again(_: int) -> Mismatch | None:
        other = next(runs, None)
        if other is None:
            raise ValueError("torch computes with no other inputs")
        values, wanted = other
        return reference.mismatch(_run(session, model, values), wanted, values)

    if mismatch is not None:
        Doubts(_ADVICE).settle(0, mismatch, again)
    return None


def _session(model: ir.Model, joint: Joint) -> OrtSession:
    return SessionFactory().session(
        ir.to_proto(model).SerializeToString(),
        double=has_doubles(model),
        small=operations(joint.traced.graph.nodes) < SMALL,
    )


def _run(session: OrtSession, model: ir.Model, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    arrays = session.run_unbound([values[name] for name in session.input_names])
    return {str(v.name): torch.from_numpy(a) for v, a in zip(model.graph.outputs, arrays, strict=True)}


def _runs(
    reference: StepReference, joint: Joint, model: ir.Model
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Inputs from which torch computes finite numbers, and what it computes."""
    names = independent(joint.infos)
    for sizes in usual_hints(names)[: None if names else 1]:
        for seed in range(_SEEDS):
            for classes in _CLASSES:
                try:
                    values = _generated(joint, model, sizes, seed, classes)
                    wanted = reference.results(values)
                except (RuntimeError, ValueError, IndexError, TypeError):
                    continue  # sizes that do not fit, or an index that is out of range
                if all(bool(torch.isfinite(t).all()) for t in wanted.values()):
                    yield values, wanted
                    break


def _generated(joint: Joint, model: ir.Model, sizes: Mapping[str, int], seed: int, classes: int) -> dict[str, Tensor]:
    """A tensor for each input: real numbers from 0 to 1, and whole ones below ``classes``, to be valid as indices."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, node in joint.inputs.items():
        if name in model.graph.initializers or name in joint.tensors:
            continue
        fake = node.meta["val"]
        texts = [size_text(s, joint.names) for s in fake.shape]
        shape = [s if isinstance(s, int) else sizes[s] if s in sizes else int(value_of(s, sizes)) for s in texts]
        if fake.is_floating_point():
            values[name] = torch.rand(shape, dtype=fake.dtype, generator=generator)
        else:
            values[name] = torch.randint(classes, shape, generator=generator).to(fake.dtype)
    return values
