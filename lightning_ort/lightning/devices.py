"""The devices that a strategy trains on, and whose Trainer it belongs to: all that Lightning fills in."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from typing_extensions import override

from lightning_ort.checkpoints import ORTCheckpointIO
from lightning_ort.distributed.ranks import Ranks
from lightning_ort.distributed.rendezvous import init_process_group, naming_who_has_ended
from lightning_ort.distributed.sharding import sharded
from lightning_ort.lightning.parallel import ParallelOptions, SyncedLayers, WatchedLauncher, on_any_device
from lightning_ort.lightning.precision import ORTPrecision
from lightning_ort.lightning_packages import (
    PACKAGES,
    MisconfigurationException,
    Package,
    Variant,
    everywhere,
    everywhere_in_fabric,
    package_of,
    pl,
)
from lightning_ort.validation import shown

if TYPE_CHECKING:
    from lightning.fabric.accelerators import Accelerator
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.strategies import _StrategyRegistry
    from lightning.fabric.utilities.types import _DEVICE
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy

    class _Base(Variant, DDPStrategy):
        """What several devices have; one has less."""
else:
    _Base = Variant

__all__ = ["PRECISIONS", "Devices", "OnDevices", "check_precision"]

PRECISIONS = ("Precision", "DoublePrecision", "HalfPrecision", "MixedPrecision")


def check_precision(plugin: Any, kinds: Sequence[type], argument: str, instead: str) -> None:
    """Raise if ``plugin`` is of none of ``kinds``, nor ``None``: subclasses may do what nobody here knows of.

    Args:
        plugin: what Lightning, or a user, gives the strategy.
        kinds: types.
        argument: of what it is, as the user would write it.
        instead: what else the user can do.

    Raises:
        MisconfigurationException: it is something else.
    """
    if plugin is not None and type(plugin) not in kinds:
        name = getattr(plugin, "precision", plugin)
        raise MisconfigurationException(
            "strategy='ort' computes in precision='32-true', '64-true', '16-mixed', 'bf16-mixed', '16-true' or "
            f"'bf16-true', but {argument} precision={name!r} ({type(plugin).__name__}). {instead}"
        )


def _check_kinds(
    device: Any,
    accelerator: Any,
    parallel_devices: Any,
    checkpoint_io: Any,
    cluster_environment: Any,
    accelerators: tuple[type, ...],
) -> None:
    """Raise if an argument that Lightning fills in was given by hand and is something else."""
    # private, but what all wrappers of such objects inherit from
    io = (*everywhere("plugins.io:CheckpointIO"), *everywhere("plugins.io.wrapper:_WrappingCheckpointIO"))
    for name, value, kind in (
        ("accelerator", accelerator, accelerators),
        ("checkpoint_io", checkpoint_io, io),
        ("cluster_environment", cluster_environment, everywhere_in_fabric("plugins.environments:ClusterEnvironment")),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name}={shown(value)}: expected an object of that kind, or None.")
    if device is not None and not isinstance(device, (str, int, torch.device)):
        raise TypeError(f"device={shown(device)}: expected 'cpu', 'cuda:0' or a torch.device.")
    try:
        torch.device(device if device is not None else "cpu")
    except RuntimeError as error:
        raise ValueError(f"device={shown(device)}: {error}") from None
    if parallel_devices is not None and not (
        isinstance(parallel_devices, (list, tuple)) and all(isinstance(d, torch.device) for d in parallel_devices)
    ):
        raise TypeError(f"parallel_devices={shown(parallel_devices)}: expected a list of torch.device.")


class Devices(_Base):
    """One of Lightning's strategies: ``SingleDeviceStrategy``, or ``DDPStrategy`` where there are several devices, of
    the package whose Trainer or Fabric it is given to.

    Args:
        device, accelerator, parallel_devices, checkpoint_io, cluster_environment: see
            :class:`~lightning_ort.ORTStrategy`.
        options: for several devices.
        **precision: the precision plug-in, by the name that Lightning's strategy has for it.

    Attributes:
        ranks: the other processes, while there are several.
    """

    strategy_name = "ort"
    _described = "steps executed"

    def __init__(
        self,
        device: _DEVICE | None,
        accelerator: Accelerator | None,
        parallel_devices: Sequence[torch.device] | None,
        checkpoint_io: CheckpointIO | None,
        cluster_environment: ClusterEnvironment | None,
        options: ParallelOptions,
        **precision: Any,
    ) -> None:
        accelerators = tuple(self._lightning(package, "accelerators:Accelerator") for package in PACKAGES)
        _check_kinds(device, accelerator, parallel_devices, checkpoint_io, cluster_environment, accelerators)
        self._device, self._parallel = device, options
        self._num_nodes = 1
        self._layer_sync = None
        self._parallel_devices: list[torch.device] | None = None
        self.ranks: Ranks | None = None
        self._begin(cluster_environment, accelerator=accelerator, checkpoint_io=checkpoint_io, **precision)
        self.parallel_devices = parallel_devices

    @staticmethod
    def _lightning(package: Package, name: str) -> Any:
        """What ``"module:name"`` is in the part of ``package`` that the strategy is for."""
        return package.get(name)

    @classmethod
    @override
    def _first_bases(cls) -> tuple[type, ...]:
        return (cls._lightning(PACKAGES[0], "strategies:SingleDeviceStrategy"),)

    def _begin(self, cluster_environment: ClusterEnvironment | None, **common: Any) -> None:
        """What the base class keeps, at first."""
        self.cluster_environment = cluster_environment
        if not self.several:
            super().__init__(device=self._device or "cpu", **common)
            return
        for name in ("global_rank", "local_rank", "world_size"):  # several devices ask their environment
            self.__dict__.pop(name, None)
        # the base class resets them
        nodes, layers = self._num_nodes, self._layer_sync
        super().__init__(
            parallel_devices=self._parallel_devices,
            cluster_environment=cluster_environment,
            **common,
            **self._of_several(),
        )
        self._num_nodes, self._layer_sync = nodes, layers

    def _of_several(self) -> dict[str, Any]:
        """Arguments of Lightning's ``DDPStrategy``."""
        devices = self._parallel_devices or []
        return self._parallel.arguments(on_cpu=all(device.type == "cpu" for device in devices))

    def _filled_in(self) -> dict[str, Any]:
        """What Lightning has filled in, past properties that have something in the place of what is missing."""
        return {"accelerator": self._accelerator, "checkpoint_io": self._checkpoint_io}

    @property
    def several(self) -> bool:
        """Whether this is one of several processes, each with a device, that train together."""
        return self._num_nodes * len(self._parallel_devices or ()) > 1

    def _take_bases(self, package: Package) -> None:
        """Be a strategy of ``package``, for one device or for several."""
        name = "DDPStrategy" if self.several else "SingleDeviceStrategy"
        base = self._lightning(package, f"strategies:{name}")
        if self._bases == (base,):
            return
        self._change_bases(base)
        self._begin(self.cluster_environment, **self._filled_in())

    @property
    @override
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine that Lightning's accelerator chose."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        if devices and len(devices) > 1 and self._device is not None:
            raise MisconfigurationException(
                f"{type(self).__name__}(device={str(self._device)!r}) trains there, but Lightning was given "
                f"{len(devices)} devices. Leave device out, or use devices=1."
            )
        self._parallel_devices = None if devices is None else list(devices)
        if devices and self._device is None:
            self._root_device = devices[0]

    @property
    @override
    def root_device(self) -> torch.device:
        return super().root_device if self.several else self._root_device

    @property
    @override
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ORTCheckpointIO()
        elif isinstance(self._checkpoint_io, everywhere("plugins.io.wrapper:_WrappingCheckpointIO")):
            # such as AsyncCheckpointIO(); ignored by one that has been given another
            self._checkpoint_io.checkpoint_io = ORTCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        variants: dict[str, dict[str, Any]] = {
            "": {},
            "_spawn": {"start_method": "spawn"},
            "_fork": {"start_method": "fork"},
            "_notebook": {"start_method": "fork"},
            "_find_unused_parameters_true": {"find_unused_parameters": True},
        }
        for name, arguments in variants.items():
            what = "".join(f", {k}={v!r}" for k, v in arguments.items())
            strategy_registry.register(
                f"{cls.strategy_name}{name}", cls, description=f"{cls._described} by ONNX Runtime{what}", **arguments
            )

    # -- several processes ----------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        meeting = self._meet() if self.several and not dist.is_initialized() else None
        super().setup_environment()
        if self.several:
            from lightning_ort.compiler.contest import MEMORY

            assert self.cluster_environment is not None
            met: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if meeting is not None:
                met = naming_who_has_ended(meeting, "ranks", self.global_rank, self.world_size)
            try:
                with met:
                    self.ranks = self._others(self.cluster_environment.main_address)
            except dist.DistError as error:
                # it trains all the same
                warnings.warn(
                    f"This process does not reach rank 0 at {self.cluster_environment.main_address} on a port of its "
                    f"own choice ({error}). If another process fails, the error will not name it.",
                    stacklevel=2,
                )
            else:
                MEMORY.agreement = self.ranks.agreed

    @staticmethod
    def _others(host: str) -> Ranks:
        """The processes that have met, until :meth:`teardown`."""
        return Ranks(host)

    def _meet(self) -> dist.Store | None:
        """Make the process group, which Lightning's strategy then takes as it is, and return where all have met."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        device = self.root_device
        backend = self.process_group_backend or dist.get_default_backend_for_device(device)
        if backend == dist.Backend.MPI:  # its own launcher has brought them together
            return None
        self.accelerator.setup_device(device)
        environment = self.cluster_environment
        # which those ignore that know it already
        environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        environment.set_world_size(self.num_nodes * self.num_processes)
        host, port = environment.main_address, environment.main_port
        # Lightning has it there too, where others may look for it
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(port)
        return init_process_group(
            backend,
            host,
            port,
            self.global_rank,
            self.world_size,
            self._parallel.group_timeout,
            device_id=None if device.type == "cpu" else device,
        )

    def _part(self) -> None:
        """Take no more notice of the others, and give them no more signs of life."""
        if self.ranks is not None:
            from lightning_ort.compiler.contest import MEMORY

            self.ranks.close()
            self.ranks = MEMORY.agreement = None

    @override
    def teardown(self) -> None:
        self._part()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "ranks": None}


class OnDevices(Devices):
    """A strategy of a Trainer: what it has beyond that of a Fabric."""

    @override
    def _filled_in(self) -> dict[str, Any]:
        return {**super()._filled_in(), "precision_plugin": self._precision_plugin}

    @override
    def set_world_ranks(self) -> None:
        """Called by the Trainer, when all is known that it fills in."""
        # an environment is always of the package of the Trainer; accelerators and plug-ins may be of both
        self._take_bases(package_of(self.cluster_environment, self.accelerator))
        if isinstance(self._precision_plugin, ORTPrecision):
            self._precision_plugin.of_package(package_of(self))
        if self.several:
            super().set_world_ranks()
            if type(self._layer_sync) in everywhere("plugins.layer_sync:TorchSyncBatchNorm"):
                self._layer_sync = SyncedLayers.around(self._layer_sync)

    @override
    def _configure_launcher(self) -> None:
        if self.several:
            super()._configure_launcher()
            self._launcher = WatchedLauncher.around(self._launcher)
        else:
            self._launcher = None

    @property
    def is_distributed(self) -> bool:
        """What Lightning asks before it gives each process its part of the data."""
        return self.several

    @property
    @override
    def precision_plugin(self) -> Precision:
        known = self._precision_plugin  # asked for several times in each step
        return super().precision_plugin if known is None else known

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if not isinstance(precision_plugin, ORTPrecision):
            own = [kind for name in PRECISIONS for kind in everywhere(f"plugins.precision:{name}")]
            instead = "Use one of these, or plugins=[ORTPrecision(...)]."
            check_precision(precision_plugin, own, "the Trainer was given", instead)
        if isinstance(precision_plugin, everywhere("plugins.precision:MixedPrecision")):
            precision_plugin = ORTPrecision.replacing(precision_plugin)
        self._precision_plugin = precision_plugin

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        if self._parallel.shard_optimizer and self.several:
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            self.optimizers = [sharded(optimizer, schedulers) for optimizer in self.optimizers]

    @override
    def configure_ddp(self) -> None:
        """Called by Lightning, and anew when parameters thaw: wrap the module, and note whose gradients are reduced."""
        super().configure_ddp()
        assert self.lightning_module is not None
        self._reduced = {id(p) for p in self.lightning_module.parameters() if p.requires_grad}

    def _take_in_thawed(self) -> None:
        """Wrap the module anew if parameters want gradients that were frozen, as by ``BackboneFinetuning``.

        A ``DistributedDataParallel`` reduces the gradients of those that are not frozen when it is made.
        """
        reduced = self._reduced
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        if all(id(p) in reduced or not p.requires_grad for group in groups for p in group["params"]):
            return
        self.model = self.lightning_module
        gc.collect()  # the other one's hooks go with it
        state = self._ddp_comm_state
        if isinstance(state, PowerSGDState):  # what was left out, by number of a bucket
            for left in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                left.clear()
        given = self._ddp_kwargs
        # ranks of local SGD have weights of their own
        self._ddp_kwargs = {**given, "init_sync": not isinstance(state, PostLocalSGDState)}
        try:
            self.configure_ddp()
        finally:
            self._ddp_kwargs = given

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning's own registers hooks on GPUs alone, and says nothing of it
        register = package_of(self).get("overrides.distributed:_register_ddp_comm_hook")
        hook = self._ddp_comm_hook
        if hook is not None and self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        state = self._ddp_comm_state
        if isinstance(state, PostLocalSGDState) and state.subgroup is None and self.root_device.type == "cpu":
            # those of one machine, as torch takes them where it counts GPUs
            state.subgroup, _ = dist.new_subgroups(group_size=self.num_processes)
        register(self.model, state, on_any_device(hook) if self.root_device.type == "cpu" else hook)
