"""A step of an ONNX graph in torch, beside which its compiled form runs for the first time."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from lightning_ort.compiler.aot.forward import region_of
from lightning_ort.compiler.aot.joint import GRAD, NEW, Joint
from lightning_ort.compiler.mixed_precision import half_types
from lightning_ort.compiler.reference import ForkedRNG, evaluate
from lightning_ort.compiler.rounding import RoundingNoise
from lightning_ort.onnx_reader import OnnxModule
from lightning_ort.verification import Mismatch, Results, find_mismatch

__all__ = ["StepReference"]

_CPU = torch.device("cpu")


class StepReference:
    """Computes outputs, gradients and running statistics of an ONNX graph by torch's operators and autograd.

    Nothing of the traced graph is used, only the module that it was traced from.

    Args:
        module: the graph, in the mode in which ``joint`` was traced.
        joint: what is checked.
        differentiated: outputs whose gradients are taken.
        incoming: those of them whose own gradient is an input.
        wanted: initializers and inputs by which they are differentiated.
        statistics: running statistics that a step may change.

    Attributes:
        random: the step draws random numbers, so that torch's results are others.
    """

    def __init__(
        self,
        module: OnnxModule,
        joint: Joint,
        differentiated: Sequence[str],
        incoming: Sequence[str],
        wanted: Collection[str],
        statistics: Collection[str] = (),
    ) -> None:
        self.random = any(draw.users for draw in joint.traced.draws)
        self._module, self._training = module, module.training
        region = region_of(module, differentiated, incoming)
        self._region, self._tensors = region.module, region.tensors
        self._names = [*region.tensors, *module.input_names, *(f"{name}{GRAD}" for name in incoming)]
        self._outputs, self._wanted = module.output_names, [i for i, n in enumerate(self._names) if n in wanted]
        self._statistics = [i for i, n in enumerate(self._names) if n in statistics]
        self._half = half_types(joint.traced.graph)

    def results(
        self, values: Mapping[str, Tensor], dtype: torch.dtype | None = None, noise: int | None = None
    ) -> dict[str, Tensor]:
        """Outputs, ``<name>_grad`` and ``<name>_new`` by name.

        Args:
            values: inputs, incoming gradients, and those initializers that are no longer what the module has.
            dtype: compute in this type.
            noise: seed of rounding noise.

        Raises:
            RuntimeError, IndexError, ValueError: torch does not take the values.
        """
        args = [(self._tensors | dict(values))[name] for name in self._names]
        self._module.train(self._training)
        disturbed: contextlib.AbstractContextManager[object] | None = None
        if noise is not None:
            disturbed = RoundingNoise(noise, _CPU)
        roots: dict[int, Tensor | None] = {0: None} if self._wanted else {}
        with ForkedRNG(_CPU), torch.no_grad():
            found = evaluate(self._region, args, roots, self._wanted, dtype=dtype, noise=disturbed)
        named = {name: found.outputs[i] for i, name in enumerate(self._outputs, 1)}
        for i in self._wanted:
            gradient = found.gradients.get(i)
            named[f"{self._names[i]}{GRAD}"] = torch.zeros_like(args[i]) if gradient is None else gradient
        for i in self._statistics:
            named[f"{self._names[i]}{NEW}"] = found.updates.get(i, args[i])
        return named

    def mismatch(
        self, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> Mismatch | None:
        """What in ``got`` is not as in ``wanted``, the :meth:`results` of ``values``, unless rounding explains it.

        Args:
            got: what ONNX Runtime gave, by the same names; statistics that are not there have not changed.
        """
        unchanged = {f"{n}{NEW}": values.get(n, self._tensors[n]) for n in (self._names[i] for i in self._statistics)}
        referee = _Referee(self, values)
        return find_mismatch(
            referee.by_kind({n: t for n, t in {**unchanged, **got}.items() if n in wanted}),
            referee.by_kind(wanted),
            referee.words(wanted),
            referee,
            self._half,
        )


class _Referee:
    """Computes a step again; its results are numbered in the order of their names."""

    def __init__(self, reference: StepReference, values: Mapping[str, Tensor]) -> None:
        self._reference, self._values = reference, values
        self._outputs = set(reference._outputs)
        self._numbers: dict[str, int] = {}

    def evaluate(self, dtype: torch.dtype | None = None, noise: int | None = None) -> Results | None:
        try:
            return self.by_kind(self._reference.results(self._values, dtype, noise))
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return None

    def by_kind(self, named: Mapping[str, Tensor]) -> Results:
        found = Results({}, {}, {})
        for name, tensor in named.items():
            number = self._numbers.setdefault(name, len(self._numbers))
            self._kind(found, name)[number] = tensor
        return found

    def _kind(self, results: Results, name: str) -> dict[int, Tensor]:
        if name in self._outputs:
            return results.outputs
        return results.gradients if name.endswith(GRAD) else results.updates

    def words(self, named: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
        words: dict[str, dict[int, str]] = {"outputs": {}, "gradients": {}, "updates": {}}
        for name in named:
            number = self._numbers.setdefault(name, len(self._numbers))
            if name in self._outputs:
                words["outputs"][number] = f"output {name!r}"
            elif name.endswith(GRAD):
                words["gradients"][number] = f"the gradient of {name.removesuffix(GRAD)!r}"
            else:
                words["updates"][number] = f"the new value of {name.removesuffix(NEW)!r}"
        return words
