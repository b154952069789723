"""What the strategy needs where several processes train together, beyond Lightning's ``DDPStrategy``."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.constants import default_pg_timeout
from torch.multiprocessing import ProcessExitedException
from torch.nn.parallel import DistributedDataParallel

from lightning_ort.distributed.sync_batchnorm import sync, unsync
from lightning_ort.errors import RankError
from lightning_ort.lightning_packages import TorchCheckpointIO, Variant
from lightning_ort.validation import choice, flag, number, shown

__all__ = ["ParallelOptions", "SyncedLayers", "WatchedLauncher", "module_arguments", "on_any_device", "redirected"]

_ARGUMENTS = [
    parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
    for name, parameter in inspect.signature(DistributedDataParallel).parameters.items()
    if name not in ("module", "device_ids", "output_device", "dim", "process_group", "device_mesh")
]
"""those of torch's module that are a user's to choose"""
_OF_MODULE = {parameter.name: parameter.default for parameter in _ARGUMENTS}
"""their defaults"""
_BUCKET = 25
"""torch's own size of a bucket, in MiB; given by name it holds for the first one too"""


def module_arguments(**kwargs: Any) -> dict[str, Any]:
    """Arguments of torch's ``DistributedDataParallel``, as they were given.

    LightningCLI finds here by which names a configuration may give them: it follows ``**kwargs`` to what is called with
    them, and reads its signature.
    """
    return kwargs


module_arguments.__signature__ = inspect.Signature(_ARGUMENTS)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class ParallelOptions:
    """Arguments of Lightning's ``DDPStrategy``, checked. The class ``owner`` was given them; ``own`` are its own.

    Raises:
        TypeError: one is of another type, or torch has none of that name.
        ValueError: one has a value that means nothing.
    """

    process_group_backend: str | None = None
    timeout: timedelta | None = None
    start_method: Literal["popen", "spawn", "fork", "forkserver"] | None = None
    ddp_comm_state: object | None = None
    ddp_comm_hook: Callable[..., Any] | None = None
    ddp_comm_wrapper: Callable[..., Any] | None = None
    model_averaging_period: int | None = None
    shard_optimizer: bool = False
    of_module: Mapping[str, Any] | None = None
    owner: str = ""
    own: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.start_method is not None:
            choice("start_method", self.start_method, ("popen", "spawn", "fork", "forkserver"))
        flag("shard_optimizer", self.shard_optimizer)
        for name in ("ddp_comm_hook", "ddp_comm_wrapper"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"{name}={shown(value)}: expected a function, or None.")
        for name in ("ddp_comm_state", "ddp_comm_wrapper"):
            if getattr(self, name) is not None and self.ddp_comm_hook is None:
                raise ValueError(f"{name} is for a ddp_comm_hook, of which none is given: pass both, or neither.")
        if self.model_averaging_period is not None and not isinstance(self.ddp_comm_state, PostLocalSGDState):
            raise ValueError(
                f"model_averaging_period={shown(self.model_averaging_period)} averages weights of local SGD: it goes "
                "with ddp_comm_state=PostLocalSGDState(...) and ddp_comm_hook=post_localSGD_hook."
            )
        if self.timeout is not None and not (isinstance(self.timeout, timedelta) and self.timeout > timedelta()):
            raise TypeError(f"timeout={shown(self.timeout)}: expected a positive datetime.timedelta, or None.")
        backend = self.process_group_backend
        if backend is not None and not (isinstance(backend, str) and backend):
            raise TypeError(f"process_group_backend={shown(backend)}: expected a name, such as 'gloo', or None.")
        unknown = sorted(set(self.of_module or ()) - _OF_MODULE.keys())
        if unknown:
            near = difflib.get_close_matches(unknown[0], [*self.own, *_OF_MODULE], 1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{self.owner} has no argument {unknown[0]!r}.{meant} It has "
                f"{', '.join(self.own)}, and those of torch's DistributedDataParallel, {', '.join(sorted(_OF_MODULE))}."
            )
        # on one device nobody else would look at them
        for name, value in (self.of_module or {}).items():
            if isinstance(_OF_MODULE[name], bool):
                flag(name, value)
            elif name == "bucket_cap_mb" and value is not None:
                number(name, value, above=0)

    @staticmethod
    def asked_of(strategy: type) -> dict[str, Any]:
        """The fields that say whose arguments they are."""
        names = inspect.signature(strategy).parameters
        return {"owner": strategy.__name__, "own": tuple(n for n, p in names.items() if p.kind != p.VAR_KEYWORD)}

    @property
    def group_timeout(self) -> timedelta:
        """The timeout of the process group."""
        return self.timeout or default_pg_timeout

    @property
    def is_plain(self) -> bool:
        """Whether each backward ends when all have their sums, and none depends on what the first one was like."""
        return self.ddp_comm_hook is None and not (self.of_module or {}).get("static_graph")

    def arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """Keyword arguments for ``DDPStrategy``, whose processes compute ``on_cpu`` or on GPUs."""
        # The gradients of a step that is one graph are there all at once: what torch sends ahead in a small bucket by
        # default is not earlier, and gloo takes about twice as long for two sums at a time as for one of them all.
        of_module = dict(self.of_module or {})
        if on_cpu and of_module.get("bucket_cap_mb") is None:  # a configuration gives all defaults by name
            of_module["bucket_cap_mb"] = _BUCKET
        return {
            "process_group_backend": self.process_group_backend,
            "timeout": self.group_timeout,
            # a notebook is no script that could be started again
            "start_method": self.start_method or ("fork" if hasattr(sys, "ps1") else "popen"),
            "ddp_comm_state": self.ddp_comm_state,
            "ddp_comm_hook": self.ddp_comm_hook,
            "ddp_comm_wrapper": self.ddp_comm_wrapper,
            "model_averaging_period": self.model_averaging_period,
            **of_module,
        }


def on_any_device(hook: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """``hook`` in a form that torch takes on the CPU as well.

    It asks by the names of the hooks for bfloat16 whether there is NCCL; gloo reduces that type as well.
    """
    if getattr(hook, "__name__", "") not in ("bf16_compress_hook", "bf16_compress_wrapper_hook"):
        return hook

    def bfloat16_hook(state, bucket):  # torch takes no annotations that are strings
        assert hook is not None
        return hook(state, bucket)

    return bfloat16_hook


_STEP = "_lightning_ort_step"
"""what a module's step is called while it is on its way through the wrapper's ``forward``"""


def redirected(
    redirection: Callable[..., Any],
    wrapper: torch.nn.Module | None,
    module: torch.nn.Module,
    step: Callable[..., Any],
    args: Any,
    kwargs: Mapping[str, Any],
) -> Any:
    """Call ``step`` within the ``forward`` of ``wrapper``, which takes note of each pass.

    Args:
        redirection: Lightning's, which calls a method of a module by its name.
        wrapper: torch's ``DistributedDataParallel`` around ``module``.
        module: the LightningModule.
        step: what to call.
        args: for it.
        kwargs: for it.
    """
    namespace = module.__dict__
    own = namespace.get("forward")

    def enter(*args: Any, **kwargs: Any) -> Any:
        # Lightning leaves a bound method here, for which Dynamo would compile the step anew each time
        leave()
        return step(*args, **kwargs)

    def leave() -> None:
        namespace.pop(_STEP, None)
        if own is None:
            namespace.pop("forward", None)
        else:
            namespace["forward"] = own

    namespace[_STEP] = enter
    try:
        return redirection(wrapper, module, _STEP, *args, **kwargs)
    finally:
        leave()


class SyncedLayers(Variant):
    """Lightning's plug-in for ``sync_batchnorm=True``, with layers that work on the CPU as well."""

    def apply(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change the layers of ``model``."""
        sync(model)
        return model

    def revert(self, model: torch.nn.Module) -> torch.nn.Module:
        """Change them back."""
        unsync(model)
        return model


_GRACE = 20.0
"""seconds that processes have to say what has happened before they are killed"""


class WatchedLauncher(Variant):
    """One of Lightning's launchers, whose processes learn why another has ended."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` in each process, as Lightning's own launcher does.

        Raises:
            RankError: a process that was spawned or forked has ended without an error of Python.
        """
        watched = functools.partial(_watched, function, trainer)
        try:
            return super().launch(watched, *args, trainer=trainer, **kwargs)  # type: ignore[misc]
        except ProcessExitedException as error:
            strategy = self._strategy  # type: ignore[attr-defined]
            count = strategy.num_processes
            rank, how = strategy.node_rank * count + error.error_index, f"exit code {error.exit_code}"
            if error.signal_name is not None:
                how = f"signal {error.signal_name}: killed, or out of memory?"
            raise RankError(
                f"rank {rank} of {count * strategy.num_nodes} has ended without a word ({how}), and its launcher has "
                "ended the others. Its own output may say more. Go on from the last checkpoint: "
                "trainer.fit(..., ckpt_path='last')."
            ) from error

    def _recover_results_in_main_process(self, *args: Any) -> None:
        # private: what processes hand back is a file of weights alone, which is no checkpoint
        strategy = self._strategy  # type: ignore[attr-defined]
        io, strategy.checkpoint_io = strategy.checkpoint_io, TorchCheckpointIO()
        try:
            super()._recover_results_in_main_process(*args)  # type: ignore[misc]
        finally:
            strategy.checkpoint_io = io


def _watched(function: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    for thread in threading.enumerate():
        # private: of the launcher that starts processes, it kills all of them when one has ended, often before the
        # others have found that out, and so without a word
        if thread.name == "child-process-observer" and not isinstance(thread._terminate_all, _Patient):  # type: ignore[attr-defined]
            thread._terminate_all = _Patient(thread._terminate_all)  # type: ignore[attr-defined]
    try:
        return function(*args, **kwargs)
    except Exception as error:
        ranks = None if trainer is None else trainer.strategy.ranks
        if ranks is not None:
            ranks.explain(error)
        raise


class _Patient:
    """Lets time pass before it calls ``kill``."""

    def __init__(self, kill: Callable[[], None]) -> None:
        self._kill = kill

    def __call__(self) -> None:
        time.sleep(_GRACE)
        self._kill()
