"""The accounts that a report is made of."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from lightning_ort.report.figures import Figures, figures_of
from lightning_ort.report.timeline import Timing

__all__ = ["GraphBreak", "GraphReport", "InTorch", "OptimizerReport", "StepReport"]


@dataclasses.dataclass(frozen=True)
class GraphBreak:
    """A place where a step leaves the graph for plain Python and enters another one afterwards.

    Attributes:
        reason: why, in plain words.
        source: the user's line.
        expected: what asks for it, such as ``"manual optimization"``, where that is as it should be; else empty.
        dynamo: Dynamo's explanation, where it says more.
    """

    reason: str
    source: str
    expected: str = ""
    dynamo: str = ""


@dataclasses.dataclass(frozen=True)
class InTorch:
    """Something that torch executed because ONNX Runtime could not."""

    what: str
    reason: str
    source: str


@dataclasses.dataclass(eq=False)
class GraphReport:
    """Account of one compiled graph.

    Attributes:
        executor: who runs it: ``"onnxruntime"``, ``"onnxruntime-one-thread"``, ``"torch"`` (as one graph),
            ``"torch-channels-last"``, ``"inductor"``, or ``"eager"`` (torch, as it would without this package).
        why: why that one does, in words.
        part: ``"forward"`` or ``"backward"`` where gradients have a graph of their own; else empty.
        gradients: whether it computes gradients.
        calls: how many calls of torch the step makes in it, those for gradients not counted.
        begins: the user's line of the first one.
        ends: the user's line of the last one.
        inputs: tensors that it reads, without weights: the user's name to shape and type; open sizes have names.
        weights: how many tensors that want a gradient it reads.
        elements: how many numbers those have.
        segments: in how many pieces ONNX Runtime and torch run it, where that is ONNX Runtime.
        measured: executor to milliseconds of a run, where it was measured; of both parts in that of ``"forward"``.
        failed: executor to why it could not be measured: it does not run what ONNX Runtime runs.
        speed: how often as fast as eager it was measured to be, with its other part; ``None`` where it was not.
        gain: seconds that eager was measured to take longer, for both parts in that of ``"forward"``; likewise.
        seconds: it took to choose who runs it.
    """

    executor: str
    why: str = ""
    part: str = ""
    gradients: bool = False
    calls: int = 0
    begins: str = ""
    ends: str = ""
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    weights: int = 0
    elements: int = 0
    segments: tuple[int, int] = (0, 0)
    measured: Mapping[str, float] = dataclasses.field(default_factory=dict)
    failed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    speed: float | None = None
    gain: float | None = None
    seconds: float = 0.0


@dataclasses.dataclass
class StepReport:
    """Account of one step function.

    Attributes:
        name: such as ``training_step``.
        calls: how often it was called.
        graphs: graphs compiled for it (forward with gradients in one is one graph).
        graphs_in_torch: those of them that torch runs whole, by choice.
        each_graph: their accounts.
        measured: per graph that was run in turns to see who is the fastest, executor to milliseconds of a run; torch is
            missing where eager took more than twice as long as ONNX Runtime.
        recompilations: reasons why it was compiled again, one entry each.
        graph_breaks: places where it leaves the graph, without repetition.
        in_torch: what torch executed because ONNX Runtime could not, without repetition.
        preferred: operators that torch executed by choice, and in how many places of the graphs.
        on_cpu: ONNX operators of a step on a GPU that the CPU executes, and in how many places of the graphs.
        widened: 16-bit operators that compute in float32, for want of kernels: right, and not faster than float32.
        turns: milliseconds of a call, with its backward, ``"graphs"`` in these and ``"eager"`` as it is, where calls
            were made in turns to see which is faster.
        as_it_is: whether it is called as it is from then on.
        recompiled_calls: how many calls nearly in a row were compiled anew, where it is called as it is for their sake.
        compile_seconds: wall-clock seconds spent compiling and measuring.
        timing: the calls that were timed.
    """

    name: str
    calls: int = 0
    graphs: int = 0
    graphs_in_torch: int = 0
    each_graph: list[GraphReport] = dataclasses.field(default_factory=list)
    measured: list[Mapping[str, float]] = dataclasses.field(default_factory=list)
    recompilations: list[str] = dataclasses.field(default_factory=list)
    graph_breaks: list[GraphBreak] = dataclasses.field(default_factory=list)
    in_torch: list[InTorch] = dataclasses.field(default_factory=list)
    preferred: Counter[str] = dataclasses.field(default_factory=Counter)
    on_cpu: Counter[str] = dataclasses.field(default_factory=Counter)
    widened: int = 0
    turns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    as_it_is: bool = False
    recompiled_calls: int = 0
    compile_seconds: float = 0.0
    timing: Timing = dataclasses.field(default_factory=Timing, repr=False)

    @property
    def all_in_ort(self) -> bool:
        """Whether it ran in ONNX Runtime, and nothing of it in torch for want of support.

        Between graphs there may be plain Python, and operators that torch was preferred for do not count.
        """
        return self.graphs > self.graphs_in_torch and not (self.in_torch or self.as_it_is)

    def figures(self) -> Figures | None:
        """What a call costs, where its time goes and when compiling is paid back; ``None`` before any call was timed.

        **Time.** Some calls on the CPU are timed: the third, those that follow, then fewer and fewer, one in eight of
        those so far. None is in which something is compiled, measured or compared with torch. The clock is read where
        the step begins and ends, around each run of a graph and each of its pieces, around the backward and where the
        optimizer's step has ended, so that a call that is not timed costs nothing to speak of. The figures are means of
        the latest 32 such calls, without those that took more than three times as long as their median, because
        something else had the machine.

        **Shares.** ONNX Runtime has what its sessions take, and binding tensors to them. torch has the graphs and
        operators that it runs, the random numbers of a graph, its autograd in the backward, and the update where it
        makes it, gradient clipping and hooks before it included. Python has all the rest between the call and the end
        of its update: Dynamo's guards, what a step does outside of its graphs (torch's calls there included), logging,
        Lightning. What comes between two calls, such as the loader, is not counted.

        **Against torch.** When the executor of a graph was chosen, here or in an earlier run on this machine, its run
        was timed side by side with eager's. In torch a call would take longer by that difference; or by what its graphs
        take in the timed calls, times that ratio, where this is less: sizes may be others now, and among the rest of a
        step a graph takes longer than alone. Python around graphs is taken to be the same. That is an estimate:
        ``lightning-ort bench`` measures whole trainings. Where calls of the step were made in turns, their difference
        takes the place of that of the graphs. Nothing is known where a graph was not measured: on a GPU,
        under ``Trainer(deterministic=True)``, ``placement="onnxruntime"`` and the like.

        **Paid back** is compiling from the call on at which ``compile_seconds``, which include measuring, have been
        saved by what a call is faster.
        """
        return figures_of(self)


@dataclasses.dataclass
class OptimizerReport:
    """Account of one optimizer.

    Attributes:
        name: its class.
        in_ort: updates made by ONNX Runtime.
        in_torch: updates made by torch.
        graphs: ONNX graphs compiled for it.
        reasons: why torch made updates, without repetition.
        compile_seconds: wall-clock seconds spent compiling.
    """

    name: str
    in_ort: int = 0
    in_torch: int = 0
    graphs: int = 0
    reasons: list[InTorch] = dataclasses.field(default_factory=list)
    compile_seconds: float = 0.0
