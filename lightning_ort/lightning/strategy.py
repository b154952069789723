"""Lightning's view of this package: a strategy whose steps run in ONNX Runtime."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_ort.checkpoints.lightning import RECORD, TrainerFile, make_record
from lightning_ort.checkpoints.resume import Restoring
from lightning_ort.errors import CheckpointError
from lightning_ort.files.output import printed
from lightning_ort.lightning.devices import OnDevices
from lightning_ort.lightning.engine import EngineOptions
from lightning_ort.lightning.parallel import ParallelOptions, module_arguments, redirected
from lightning_ort.lightning_packages import everywhere, pl
from lightning_ort.report import timeline
from lightning_ort.report.ranks import from_text, to_text
from lightning_ort.validation import flag

if TYPE_CHECKING:
    import onnxruntime
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.fabric.utilities.types import _DEVICE, _PATH
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.plugins.precision import Precision

    from lightning_ort.export import ExportedModel
    from lightning_ort.lightning.steps import CompiledSteps
    from lightning_ort.ondevice.formats import Artifacts


__all__ = ["ORTStrategy"]


class ORTStrategy(EngineOptions, OnDevices):
    """Trains, validates, tests and predicts in ONNX Runtime; the LightningModule stays as it is.

    ``Trainer(strategy="ort")`` makes one with default settings.

    Args:
        device: where parameters and batches live; by default the Trainer's accelerator decides.
        accelerator: filled in by the Trainer.
        parallel_devices: filled in by the Trainer.
        checkpoint_io: how checkpoints are read and written, by default :class:`~lightning_ort.ORTCheckpointIO`.
        precision_plugin: an :class:`~lightning_ort.ORTPrecision`, or one of Lightning's own for full, half, double or
            mixed precision (the last is replaced by the former); filled in by the Trainer.
        providers: execution providers in order of preference, as ONNX Runtime names them; by default the one
            that belongs to the device.
        provider_options: one mapping per provider, or a mapping from provider name to its options.
        session_options: an ``onnxruntime.SessionOptions``, or a mapping from its attributes (such as
            ``intra_op_num_threads``) and configuration keys (such as ``session.intra_op.allow_spinning``) to values.
        placement: ``"fastest"`` measures on the CPU, with the first batch of each graph, whether ONNX Runtime or torch
            runs it faster, then on calls of a short step whether graphs pay for what is around them, and remembers both
            for later runs (``LIGHTNING_ORT_CACHE_DIR``). Nothing is measured under
            ``Trainer(deterministic=True)``, on a GPU, or if the environment variable ``LIGHTNING_ORT_MEASURE`` is 0:
            then rules of the graph alone move large convolutions to torch. ``"onnxruntime"`` leaves to torch only what
            ONNX Runtime cannot run; ``"torch"`` runs the graphs of all steps in torch, with its own kernels, 16-bit
            ones among them, and no ONNX Runtime; ``"torch-channels-last"`` does with images in that memory format,
            which convolutions are faster in; ``"inductor"`` has torch's compiler make one C++ function of each, which
            takes long and needs a C++ compiler; ``"fastest+inductor"`` measures that as well.
        on_unsupported: ``"torch"`` runs in torch what ONNX Runtime cannot and reports it; ``"error"`` raises
            :class:`~lightning_ort.errors.UnsupportedError`.
        verify: check the first run of each graph against torch and raise
            :class:`~lightning_ort.errors.MismatchError` if it differs.
        print_report: print the report when a fit has ended.
        optimizer: who updates the parameters: ``"ort"`` (ONNX Runtime; torch where it cannot, which is reported),
            ``"torch"``, or ``"auto"``, which measures what is fastest, torch's fused kernels included, and remembers
            it. The states are torch's in any case.
        start_method: how several processes of one machine are started, as ``DDPStrategy`` has it; by default
            ``"fork"`` in a notebook, and as scripts of their own (``"popen"``) elsewhere.
        cluster_environment: who has started the processes of several devices or nodes. This argument and those that
            follow are Lightning's of ``DDPStrategy``, but for ``shard_optimizer``.
        process_group_backend: by default gloo on CPUs and nccl on GPUs.
        timeout: of the process group, by default torch's.
        ddp_comm_state, ddp_comm_hook, ddp_comm_wrapper: how gradients are exchanged; on the CPU as well.
        model_averaging_period: steps between averages of the weights, for local SGD.
        shard_optimizer: with several devices, each keeps the states of a part of the parameters and updates it, by
            torch's ``ZeroRedundancyOptimizer``; checkpoints have all of them.
        **kwargs: for several devices, those of ``torch.nn.parallel.DistributedDataParallel``, such as
            ``find_unused_parameters``, ``static_graph`` and ``bucket_cap_mb``.

    Raises:
        OnnxRuntimeImportError: no ONNX Runtime is installed, or several, or one older than 1.19.
        ProviderError: this ONNX Runtime lacks one of ``providers``, or an option of one.
        TypeError, ValueError: another argument is not as described.
        MisconfigurationException: the Trainer asks for what this strategy does not do (the precision of another
            library).
    """

    def __init__(
        self,
        device: _DEVICE | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: Sequence[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        providers: Sequence[str] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | Mapping[str, Mapping[str, Any]] | None = None,
        session_options: onnxruntime.SessionOptions | Mapping[str, Any] | None = None,
        placement: Literal[
            "fastest", "fastest+inductor", "onnxruntime", "torch", "torch-channels-last", "inductor"
        ] = "fastest",
        on_unsupported: Literal["torch", "error"] = "torch",
        verify: bool = True,
        print_report: bool = True,
        optimizer: Literal["auto", "torch", "ort"] = "auto",
        *,
        cluster_environment: ClusterEnvironment | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_hook: Callable[..., Any] | None = None,
        ddp_comm_wrapper: Callable[..., Any] | None = None,
        model_averaging_period: int | None = None,
        shard_optimizer: bool = False,
        **kwargs: Any,
    ) -> None:
        self._take_options(providers, provider_options, session_options, placement, on_unsupported, verify, optimizer)
        flag("print_report", print_report)
        options = ParallelOptions(
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            shard_optimizer=shard_optimizer,
            of_module=module_arguments(**kwargs),
            **ParallelOptions.asked_of(type(self)),
        )
        super().__init__(
            device,
            accelerator,
            parallel_devices,
            checkpoint_io,
            cluster_environment,
            options,
            precision_plugin=precision_plugin,
        )
        self._print_report = print_report
        self._steps: CompiledSteps | None = None
        self._trainer: weakref.ref[pl.Trainer] | None = None
        self._restoring: Restoring | None = None
        self._loop_in_no_grad: Any = None

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return self._optimizers

    @optimizers.setter
    @override
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        # a property has no other way to its base's setter
        super(ORTStrategy, type(self)).optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        self._hooked_optimizers.attach(optimizers)
        if self._steps is not None:
            self._steps.set_optimizers(optimizers)

    # -- life cycle -----------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        from lightning_ort.lightning.steps import CompiledSteps

        self._trainer = weakref.ref(trainer)
        self._resolve(self.root_device)
        super().setup(trainer)
        assert self.lightning_module is not None
        if self._restoring is not None and trainer.state.fn == "fit":
            self._restoring.complete(self.optimizers)
        if self._steps is None or self._steps.module is not self.lightning_module:
            scaling = getattr(self.precision_plugin, "scaling", None)
            self._steps = CompiledSteps(self.lightning_module, self._backend(scaling), self._report)
        self._steps.set_trainer(trainer)
        self._steps.set_optimizers(self.optimizers)
        self._steps.note_edits()
        self._steps.install()
        loop = trainer.validate_loop
        if trainer.state.fn == "validate" and loop.inference_mode and self._steps.has_run("validation_step"):
            # as in a fit, which has it compiled: data made in inference mode are compiled for anew
            loop.inference_mode, self._loop_in_no_grad = False, loop

    @override
    def teardown(self) -> None:
        # what was compiled is kept: Trainer.test after Trainer.fit is a new setup of the same module
        if self._steps is not None:
            self._steps.remove()
        self._hooked_optimizers.remove()
        self._restoring = None
        if self._loop_in_no_grad is not None:
            self._loop_in_no_grad.inference_mode, self._loop_in_no_grad = True, None
        self._tell_report()
        super().teardown()

    def __getstate__(self) -> dict[str, Any]:
        # whoever copies or saves a callback copies its Trainer; what has been compiled cannot leave the process
        return {**super().__getstate__(), "_steps": None, "_trainer": None, "_loop_in_no_grad": None}

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        assert self._steps is not None
        self._steps.expect_backward(self.precision_plugin)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._tell_report()
        if self._print_report and self.is_global_zero:
            printed(self._report)

    def _tell_report(self) -> None:
        """Have rank 0 know the reports of all, where there are several and none has failed."""
        if self.ranks is not None:
            texts = self.ranks.collected(to_text(self._report))
            self._report.ranks = {rank: None if text is None else from_text(text) for rank, text in texts.items()}

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        assert self.lightning_module is not None
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        # by its own reference: a module may have lost its Trainer, as one that was copied or pickled has
        trainer = None if self._trainer is None else self._trainer()
        if trainer is not None:
            checkpoint = {**checkpoint, RECORD: make_record(trainer, self.lightning_module, optimizers)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of Lightning or of ORTTrainer for the module that is connected.

        Raises:
            CheckpointError: the file is damaged, of another kind, or does not fit the module; or it is of ORTTrainer,
                and no module is connected yet.
        """
        found = super().load_checkpoint(checkpoint_path, weights_only)
        module = self.lightning_module
        if module is None or module._trainer is None:  # the property raises an error
            # some look into a checkpoint before they fit; there is nothing yet that would be put back
            if isinstance(found, TrainerFile):
                raise CheckpointError(
                    f"{checkpoint_path} is a checkpoint of ORTTrainer, which is translated for the module that it is "
                    "loaded into, but the Trainer has none yet. Give it as ckpt_path to fit, validate, test or predict."
                )
            return found
        self._restoring = Restoring(module, found, weights_only)
        return self._restoring.checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._restoring is not None:
            self._restoring.check(self.optimizers)
        super().load_optimizer_state_dict(checkpoint)
        if self._restoring is not None:
            self._restoring.advance()

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._restoring is not None:
            self._restoring.undo()
            self._restoring = None
        # of what is no error, Lightning ends the process and raises nothing
        if self.ranks is not None and not isinstance(exception, Exception):
            self.ranks.explain(exception)
        self._part()  # the others may not come to the end, where they would be waited for
        super().on_exception(exception)
        if any("DDPStrategy(find_unused" in str(arg) for arg in exception.args):  # Lightning has added that
            exception.args = tuple(_in_own_words(arg) if isinstance(arg, str) else arg for arg in exception.args)

    # -- steps ----------------------------------------------------------------------------------------------------

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        scaling = getattr(self.precision_plugin, "scaling", None)
        if scaling is not None:  # Lightning divides the loss after the step, and callbacks may say by how many
            assert self.lightning_module is not None
            scaling.batches = self.lightning_module.trainer.accumulate_grad_batches

    def _call(
        self, name: str, context: Callable[[], contextlib.AbstractContextManager[None]], *args: Any, **kwargs: Any
    ) -> Any:
        assert self._steps is not None, "the strategy is not set up"
        assert self.lightning_module is not None
        if self._steps.leaves(name):
            return getattr(super(), name)(*args, **kwargs)
        self._restoring = None
        with context():
            if self.model is self.lightning_module:
                return self._steps(name, *args, **kwargs)
            step = functools.partial(self._steps, name)
            return redirected(self._forward_redirection, self.model, self.lightning_module, step, args, kwargs)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # with several devices, what reduces gradients waits for them in autograd
        alone = self.model is self.lightning_module
        if not alone:
            self._take_in_thawed()
        output = self._call("training_step", self.precision_plugin.train_step_context, *args, **kwargs)
        if alone:
            assert self._steps is not None
            self._steps.note_loss(output)
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("validation_step", self.precision_plugin.val_step_context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("test_step", self.precision_plugin.test_step_context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call("predict_step", self.precision_plugin.predict_step_context, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            return self._optimizer_step_by_hand(optimizer, closure, model, **kwargs)
        with self._hooked_optimizers.stepping(optimizer):
            began = perf_counter()
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        timeline.update_ends(began)
        return result

    # Inside of a step Dynamo would take the update into the graph, where it comes out differently in the last digits;
    # what the closure computes belongs into a graph all the same.
    @torch.compiler.disable(reason="updates are no part of a graph")
    def _optimizer_step_by_hand(
        self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any
    ) -> Any:
        assert self._steps is not None
        self._before_update(optimizer)
        with self._hooked_optimizers.stepping(optimizer):
            began = perf_counter()
            result = super().optimizer_step(optimizer, self._steps.compile_closure(closure), *args, **kwargs)
        timeline.update_ends(began)
        return result

    @override
    def backward(self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Any:
        module, steps = self.lightning_module, self._steps
        assert module is not None and steps is not None
        timeline.backward_begins()
        if args or kwargs:
            closure_loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        else:
            self.pre_backward(closure_loss)
            closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
            if not steps.hand_out(closure_loss):
                self.precision_plugin.backward(closure_loss, module, optimizer)
            closure_loss = self.precision_plugin.post_backward(closure_loss, module)
            self.post_backward(closure_loss)
        timeline.backward_ends()
        steps.note_backward()
        return closure_loss

    @property
    def waits_each_step(self) -> bool:
        """Whether several processes exchange gradients as torch does by itself, so that all make as many steps."""
        return self.model is not self.lightning_module and self._parallel.is_plain

    def export(self, path: str | os.PathLike[str], sample: Any = None, **options: Any) -> ExportedModel:
        """Write the module for inference as an ONNX file, checked against the module.

        Arguments, result and errors are those of :func:`~lightning_ort.export.export_trained`, without the Trainer.
        """
        # an import that the strategy itself has no use for
        from lightning_ort.export import export_trained

        if self.lightning_module is None:
            raise ValueError("The strategy has no module yet. Export after fit, validate, test or predict.")
        return export_trained(self.lightning_module.trainer, path, sample, **options)

    def export_artifacts(self, artifact_directory: str | os.PathLike[str], **options: Any) -> Artifacts:
        """Write the module and its optimizer as artifacts for training on a device.

        Arguments, result and errors are those of :func:`~lightning_ort.ondevice.trained.trained_artifacts`, without
        the Trainer.
        """
        from lightning_ort.ondevice.trained import trained_artifacts

        if self.lightning_module is None:
            raise ValueError("The strategy has no module yet. Export artifacts during or after fit.")
        return trained_artifacts(self.lightning_module.trainer, artifact_directory, **options)


# before it has taken the base class that the Trainer at hand needs, it is a strategy all the same
for _strategy in everywhere("strategies:Strategy"):
    _strategy.register(ORTStrategy)


def _in_own_words(message: str) -> str:
    return message.replace("ddp_find_unused", "ort_find_unused").replace("DDPStrategy(find_un", "ORTStrategy(find_un")
