"""Fabric's view of this package: a strategy whose modules run in ONNX Runtime."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort.checkpoints import ORTCheckpointIO
from lightning_ort.distributed.ranks import Ranks
from lightning_ort.errors import CheckpointError, UnsupportedError
from lightning_ort.lightning.devices import PRECISIONS, Devices, check_precision
from lightning_ort.lightning.engine import EngineOptions
from lightning_ort.lightning.parallel import ParallelOptions, module_arguments
from lightning_ort.lightning_packages import Package, everywhere_in_fabric, package_of

if TYPE_CHECKING:
    import onnxruntime
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
    from lightning.fabric.utilities.types import _DEVICE, _PATH

__all__ = ["ORTFabricStrategy"]

_OF_TRAINERS = ("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period")


class ORTFabricStrategy(EngineOptions, Devices):
    """Runs the modules of a Fabric in ONNX Runtime, and makes the updates of its optimizers there.

    ``Fabric(strategy="ort")`` makes one with default settings. Each call of a module is a graph of its outputs; their
    gradients are another one, which runs when ``fabric.backward`` has led to them. What the loop computes itself, such
    as the loss, is torch's.

    Args:
        device: where parameters and batches live; by default Fabric's accelerator decides.
        accelerator, parallel_devices, cluster_environment: filled in by Fabric.
        checkpoint_io: how checkpoints are read and written; by default files appear when they are complete.
        precision: one of Fabric's own plug-ins for full, half, double or mixed precision; filled in by Fabric.
        providers, provider_options, session_options, placement, on_unsupported, verify, optimizer: see
            :class:`~lightning_ort.ORTStrategy`.
        process_group_backend, timeout, start_method: for several devices, as Fabric's ``DDPStrategy`` has them.
        **kwargs: for several devices, those of ``torch.nn.parallel.DistributedDataParallel``, such as
            ``find_unused_parameters``, ``static_graph`` and ``bucket_cap_mb``.

    Raises:
        OnnxRuntimeImportError: no ONNX Runtime is installed, or several, or one older than 1.19.
        ProviderError: this ONNX Runtime lacks one of ``providers``, or an option of one.
        TypeError, ValueError: another argument is not as described.
        MisconfigurationException: Fabric asks for what this strategy does not do (the precision of another library).
    """

    _described = "modules executed"

    def __init__(
        self,
        device: _DEVICE | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
        providers: Sequence[str] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None = None,
        session_options: onnxruntime.SessionOptions | Mapping[str, Any] | None = None,
        placement: Literal[
            "fastest", "fastest+inductor", "onnxruntime", "torch", "torch-channels-last", "inductor"
        ] = "fastest",
        on_unsupported: Literal["torch", "error"] = "torch",
        verify: bool = True,
        optimizer: Literal["auto", "torch", "ort"] = "auto",
        *,
        cluster_environment: ClusterEnvironment | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] | None = None,
        **kwargs: Any,
    ) -> None:
        self._take_options(providers, provider_options, session_options, placement, on_unsupported, verify, optimizer)
        options = ParallelOptions(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            of_module=module_arguments(**kwargs),
            **ParallelOptions.asked_of(type(self)),
        )
        super().__init__(
            device, accelerator, parallel_devices, checkpoint_io, cluster_environment, options, precision=precision
        )
        self._names: Counter[str] = Counter()
        self._frozen: dict[int, tuple[str, weakref.ref[torch.nn.Parameter]]] = {}  # when their module was set up

    # -- devices --------------------------------------------------------------------------------------------------

    @staticmethod
    @override
    def _lightning(package: Package, name: str) -> Any:
        return package.get_fabric(name)

    @override
    def _of_several(self) -> dict[str, Any]:
        return {name: value for name, value in super()._of_several().items() if name not in _OF_TRAINERS}

    @override
    def _filled_in(self) -> dict[str, Any]:
        return {**super()._filled_in(), "precision": self._precision}

    @staticmethod
    @override
    def _others(host: str) -> Ranks:
        # nobody tears a Fabric down, and a script may make many
        return Ranks.of_group(host)

    def _set_world_ranks(self) -> None:
        """Called by Fabric, when all is known that it fills in."""
        self._take_bases(package_of(self.cluster_environment, self.accelerator))
        if self.several:
            super()._set_world_ranks()  # type: ignore[misc]

    @override
    def _configure_launcher(self) -> None:
        if self.several:
            super()._configure_launcher()

    @property
    def precision(self) -> Precision:
        """The plug-in for element types and loss scaling."""
        return super().precision  # type: ignore[misc]

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        kinds = [kind for name in PRECISIONS for kind in everywhere_in_fabric(f"plugins.precision:{name}")]
        check_precision(precision, kinds, "Fabric was given", "Use Fabric(precision=...) with one of these.")
        self._precision = precision

    # -- modules and optimizers -----------------------------------------------------------------------------------

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Called by ``fabric.setup``: what it returns runs ``module`` in ONNX Runtime."""
        # it needs ONNX Runtime, whose absence shall be explained and not break the import of this package
        from lightning_ort.lightning.fabric_module import CompiledModule

        self._resolve(self.root_device)
        for name, p in module.named_parameters():
            if self.several and not p.requires_grad:
                self._frozen[id(p)] = (name, weakref.ref(p))
            else:
                self._frozen.pop(id(p), None)
        # inside of DistributedDataParallel, which takes note of each pass, whatever is compiled
        return super().setup_module(CompiledModule(module, self))  # type: ignore[misc]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Called by ``fabric.setup``: ONNX Runtime makes the updates from now on, where it is asked for them."""
        self._hooked_optimizers.attach_for_good(optimizer)
        return optimizer

    @override
    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        if self._frozen:
            self._check_thawed(optimizer)
        self._before_update(optimizer)
        with self._hooked_optimizers.stepping(optimizer):
            return super().optimizer_step(optimizer, **kwargs)

    def _check_thawed(self, optimizer: Optimizer) -> None:
        """
        Raises:
            UnsupportedError: a gradient is of this process alone, since its parameter was frozen when
                ``DistributedDataParallel`` took note of those that have some.
        """
        for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
            name, known = self._frozen.get(id(p), ("", None))
            if known is not None and known() is p:
                raise UnsupportedError(
                    f"The parameter {name!r} has a gradient, but it was frozen at fabric.setup: processes do not "
                    "average it, and their weights would come apart. Expected parameters that want gradients at "
                    "fabric.setup. Freeze it after fabric.setup (with find_unused_parameters=True), or set its module "
                    "up again, unfrozen: model = fabric.setup_module(model.module)."
                )

    def name_of(self, module: torch.nn.Module) -> str:
        """What the report calls ``module``: its class, with a number from the second one of that class on."""
        name = type(module).__name__
        self._names[name] += 1
        return name if self._names[name] == 1 else f"{name} {self._names[name]}"

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = _FabricCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io


class _FabricCheckpointIO(ORTCheckpointIO):
    """Writes and reads whatever ``fabric.save`` is given."""

    @override
    def _checked(self, found: Any, path: _PATH) -> dict[str, Any]:
        return found

    @override
    def _load_trainer_file(self, stream: Any, path: _PATH) -> Any:
        raise CheckpointError(
            f"{path} is a checkpoint of ORTTrainer, which a Fabric has no place for. Load it into an ORTTrainer, whose "
            "module you can then give to fabric.setup, or go on with Trainer.fit(ckpt_path=...)."
        )


# before it has taken the base class that the Fabric at hand needs, it is a strategy all the same
for _strategy in everywhere_in_fabric("strategies:Strategy"):
    _strategy.register(ORTFabricStrategy)
