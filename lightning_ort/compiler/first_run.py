"""The first run of each graph of a region, beside torch's."""

from __future__ import annotations

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import fx

from lightning_ort.compiler.dynamo_words import name_of_source, place_of
from lightning_ort.compiler.executors.executable import Executable
from lightning_ort.compiler.global_state import GlobalState, drawing_as_traced
from lightning_ort.compiler.loss_scale import all_finite
from lightning_ort.compiler.reference import ForkedRNG, evaluate
from lightning_ort.compiler.rounding import RoundingNoise
from lightning_ort.errors import MismatchError
from lightning_ort.lightning_packages import rank_zero_info
from lightning_ort.report import timeline
from lightning_ort.report.announcement import Announcement
from lightning_ort.runtime.memory import release_free_memory
from lightning_ort.verification import Doubts, Mismatch, Results, find_mismatch, has_nan, varied

__all__ = ["FirstRun"]

Incoming = Mapping[int, torch.Tensor | None]
"""Output number to incoming gradient; ``None`` stands for 1 (the loss)."""

_ADVICE = (
    "Nothing was updated. Please report it with the model. Meanwhile it trains in torch (Trainer(strategy='auto'); "
    "without Lightning: no torch.compile), and verify=False, an option of ORTStrategy and of "
    "torch.compile(..., options={...}), would skip this check."
)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _announced(check: Callable[Concatenate[FirstRun, _P], _T]) -> Callable[Concatenate[FirstRun, _P], _T]:
    """A check that says so where it takes long: torch may be far slower than what is checked."""

    @functools.wraps(check)
    def announced(self: FirstRun, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        what = f"the first run of {self._place}"
        with Announcement(rank_zero_info, f"Comparing {what} with PyTorch ...", f"Compared {what} in {{seconds}}."):
            return check(self, *args, **kwargs)

    return announced


class FirstRun:
    """Runs graphs of a region for the first time and compares what they give with torch's results.

    Args:
        graph: Dynamo's graph of the region.
        wanted: numbers of the inputs that want a gradient.
        device: what computes; tensors live there or on the CPU.
        global_state: what the region is computed under.

    Attributes:
        changed: numbers of the inputs that the region changes.
    """

    def __init__(
        self, graph: fx.GraphModule, wanted: Sequence[int], device: torch.device, global_state: GlobalState
    ) -> None:
        self.changed: Collection[int] = ()
        self._graph, self._wanted, self._device, self._global_state = graph, wanted, device, global_state
        self._names, self._place = _names(graph), place_of(graph)
        self._exact = all(map(_is_exact, graph.graph.nodes))
        self._done: weakref.WeakSet[Executable] = weakref.WeakSet()
        self._overflows: weakref.WeakSet[Executable] = weakref.WeakSet()
        self._doubts = Doubts(_ADVICE)

    def input_name(self, number: int) -> str:
        """The user's name of an input."""
        return self._names["inputs"][number]

    def is_due(self, executable: Executable) -> bool:
        """Whether ``executable`` has not been compared yet."""
        return executable not in self._done

    @_announced
    def run(
        self, executable: Executable, args: Sequence[Any], incoming: Incoming, scale: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Results of ``executable``, or those of torch where it cannot be told yet whether the former are right.

        A difference that rounding does not explain is an error of the graph if it is there with other weights too, see
        :class:`~lightning_ort.verification.Doubts`.

        Args:
            executable: the graph.
            args: inputs of the region.
            incoming: the loss, if the graph computes its gradients.
            scale: of the loss, if it is scaled.

        Raises:
            MismatchError: they are not torch's.
        """
        timeline.spoil()
        start = ForkedRNG.state(self._device)
        with ForkedRNG(self._device):
            reference = self._evaluate(args, incoming, scale)
            end = ForkedRNG.state(self._device)
        release_free_memory()
        results = executable.run(args if scale is None else [*args, scale])
        for _, p in executable.updates:  # which another run would write
            results[p] = results[p].clone()
        overflow = executable.scaled and self._overflow(executable, reference, results)
        try:
            if not all(torch.equal(a, b) for a, b in zip(end, ForkedRNG.state(self._device), strict=True)):
                raise MismatchError("the step draws other random numbers in ONNX Runtime than in torch")
            compared = dataclasses.replace(reference, gradients={}) if overflow else reference
            mismatch = self._mismatch(executable, results, compared, args, incoming, start, scale)
            if mismatch is not None:

                def again(seed: int) -> Mismatch | None:
                    other = varied(args, self._wanted, seed)
                    with ForkedRNG(self._device, start):
                        reference = self._evaluate(other, incoming, scale)
                    with ForkedRNG(self._device, start):
                        results = executable.run(other if scale is None else [*other, scale])
                    return self._mismatch(executable, results, reference, other, incoming, start, scale)

                self._doubts.settle(id(executable), mismatch, again, diverged=has_nan(args, self._wanted))
                _write(executable, args, reference, results)
        except MismatchError:
            ForkedRNG(self._device).restore(start)
            raise
        if not overflow and mismatch is None:
            self._done.add(executable)
        del reference, compared
        release_free_memory()
        return results

    def _mismatch(
        self,
        executable: Executable,
        results: Sequence[torch.Tensor],
        reference: Results,
        args: Sequence[Any],
        incoming: Incoming,
        start: Sequence[torch.Tensor],
        scale: torch.Tensor | None,
    ) -> Mismatch | None:
        given = {i: o for i, o in reference.outputs.items() if executable.outputs[i] is not None}
        got = Results(
            {i: results[p] for i, p in enumerate(executable.outputs) if p is not None},
            {i: results[p] for i, p in executable.gradients},
            {i: results[p] for i, p in executable.updates},
        )
        referee = _Referee(self, args, incoming, start, scale)
        wanted = dataclasses.replace(reference, outputs=given)
        return find_mismatch(got, wanted, self._names, referee, executable.half, exact=self._exact)

    # a gradient asked for between two regions arrives while Dynamo watches, which must not compile the graph again
    @torch.compiler.disable
    @_announced
    def check_backward(
        self,
        executable: Executable,
        args: Sequence[Any],
        start: Any,
        incoming: Mapping[int, torch.Tensor],
        got: Sequence[torch.Tensor | None],
        again: Callable[[Sequence[Any]], Sequence[torch.Tensor | None]],
    ) -> tuple[list[torch.Tensor | None], bool]:
        """Gradients of a backward graph or, where it cannot be told whether those are right, torch's.

        Args:
            executable: the backward graph.
            args: inputs of the region.
            start: the random state of its run.
            incoming: the gradients that arrived, by output number.
            got: the gradients to check, one per wanted input.
            again: computes them from other inputs of the region.

        Returns:
            The gradients, and whether they are the graph's.

        Raises:
            MismatchError: they are not torch's.
        """

        def compared(args: Sequence[Any], got: Sequence[torch.Tensor | None]) -> tuple[Results, Mismatch | None]:
            with ForkedRNG(self._device, start):
                reference = self._evaluate(args, incoming)
            found = {i: g for i, g in zip(self._wanted, got, strict=True) if g is not None}
            referee = _Referee(self, args, incoming, start, None)
            wanted = Results({}, reference.gradients, {})
            return wanted, find_mismatch(Results({}, found, {}), wanted, self._names, referee, executable.half)

        timeline.spoil()
        wanted, mismatch = compared(args, got)
        if mismatch is None:
            return list(got), True

        def differs(seed: int) -> Mismatch | None:
            other = varied(args, self._wanted, seed)
            with ForkedRNG(self._device, start):
                found = again(other)
            return compared(other, found)[1]

        self._doubts.settle(id(executable), mismatch, differs, diverged=has_nan(args, self._wanted))
        return [wanted.gradients.get(i) for i in self._wanted], False

    def _evaluate(
        self,
        args: Sequence[Any],
        incoming: Incoming,
        scale: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        noise: RoundingNoise | None = None,
    ) -> Results:
        """torch's results; with a ``scale``, gradients are those of the scaled loss, unscaled where the graph does."""
        scaled = incoming if scale is None else dict.fromkeys(incoming, scale)
        with drawing_as_traced(self._graph, self._device):
            results = evaluate(
                self._graph,
                args,
                scaled,
                self._wanted,
                dtype=dtype,
                changed=self.changed,
                global_state=self._global_state,
                noise=noise,
            )
        if scale is None:
            return results
        wide = {i: g / scale for i, g in results.gradients.items() if args[i].dtype.itemsize >= 4}
        return dataclasses.replace(results, gradients=results.gradients | wide)

    def _overflow(self, executable: Executable, reference: Results, results: Sequence[torch.Tensor]) -> bool:
        """Whether a scaled loss has gradients beyond 16 bits, which cannot be compared: those of the next run can.

        That they are in ONNX Runtime but not in torch may come of rounding, once.
        """
        if not all_finite([*reference.gradients.values()]):
            return True
        if all_finite([results[p] for _, p in executable.gradients]) or executable in self._overflows:
            return False
        self._overflows.add(executable)
        return True


@dataclasses.dataclass(frozen=True)
class _Referee:
    """Computes one run of a region again."""

    first_run: FirstRun
    args: Sequence[Any]
    incoming: Incoming
    start: Any
    scale: torch.Tensor | None

    def evaluate(self, dtype: torch.dtype | None = None, noise: int | None = None) -> Results | None:
        device = self.first_run._device
        disturbed = None if noise is None else RoundingNoise(noise, device)
        release_free_memory()  # of the run that is checked
        with ForkedRNG(device, self.start):
            try:
                return self.first_run._evaluate(self.args, self.incoming, self.scale, dtype, disturbed)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                return None


def _write(executable: Executable, args: Sequence[Any], source: Results, results: Sequence[torch.Tensor]) -> None:
    """Put torch's results in the place of those of ``executable``; what only its backward graph reads stays."""
    for i, p in enumerate(executable.outputs):
        if p is not None:
            results[p].copy_(source.outputs[i])
    for i, p in executable.updates:
        results[p].copy_(source.updates.get(i, args[i]))
    for i, p in executable.gradients:
        if i in source.gradients:
            results[p].copy_(source.gradients[i])
        else:
            results[p].zero_()


def _is_exact(node: fx.Node) -> bool:
    """Whether ``node`` is known to have whole numbers and truth values alone."""
    if node.op == "output":
        return True
    if "example_value" not in node.meta:  # a branch of torch.cond, say, which may compute with any
        return False
    return all(
        not (v.is_floating_point() or v.is_complex())
        if isinstance(v, torch.Tensor)
        else isinstance(v, int | torch.SymInt)
        for v in pytree.tree_leaves(node.meta["example_value"])
    )


def _names(graph: fx.GraphModule) -> dict[str, dict[int, str]]:
    """Users' names of inputs (as gradients and as changed tensors) and outputs."""
    sources = [name_of_source(n) for n in graph.graph.nodes if n.op == "placeholder"]
    inputs = dict(enumerate(_as_users_write(sources)))
    results = graph.graph.output_node().args[0]
    return {
        "inputs": inputs,
        "gradients": {i: f"the gradient of {n}" for i, n in inputs.items()},
        "updates": {i: f"the new value of {n}" for i, n in inputs.items()},
        "outputs": {i: f"output {i} ({getattr(r, 'name', r)})" for i, r in enumerate(results)},
    }


_SOURCE = re.compile(r"([LG])\['(\w+)'\](.*)", re.DOTALL)
_MEMBER = re.compile(r"\._(?:modules|parameters|buffers)\['([^']*)'\]")


def _as_users_write(sources: Sequence[str]) -> list[str]:
    """Turn ``L['self']._modules['net']._parameters['weight']`` and the like into ``net.weight``.

    The name of a module is left out if it is the only local one, as it is in a method of that module.
    """
    parsed = [_SOURCE.fullmatch(s) for s in sources]
    modules = {m[2] for m in parsed if m and m[1] == "L" and _MEMBER.match(m[3])}
    names = []
    for source, m in zip(sources, parsed, strict=True):
        if m is None:
            names.append(source)
            continue
        path = _MEMBER.sub(r".\1", m[3])
        names.append(path[1:] if modules == {m[2]} and path.startswith(".") else m[2] + path)
    return names
