"""Lightning's precision plug-in for steps in ONNX Runtime."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_ort.amp.rules import GradScalerRule, ScaledStep, scale_rule
from lightning_ort.checkpoints.lightning import TRAINER_SCALER
from lightning_ort.compiler.loss_scale import LossScaling, all_finite
from lightning_ort.lightning_packages import MisconfigurationException, Package, everywhere, pl, rank_zero_info
from lightning_ort.validation import choice, flag

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import MixedPrecision, Precision

    _Base = Precision
else:
    # of each package, because Trainers and LightningCLI take no other plug-in
    _Base = type("Precision", everywhere("plugins.precision:Precision"), {"__module__": __name__})

__all__ = ["ORTPrecision"]

PrecisionName = Literal["32-true", "64-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]

_AUTOCAST = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
# where Lightning's own plug-in keeps its scaler in a checkpoint
_LIGHTNING = "MixedPrecision"


class ORTPrecision(_Base):
    """Precision of steps in ONNX Runtime; ``Trainer(strategy="ort", precision=...)`` makes one where it is needed.

    Args:
        precision: ``"16-mixed"`` and ``"bf16-mixed"`` compute under ``torch.autocast``, the others have parameters,
            batches and results of that type.
        scaler: how the loss of ``"16-mixed"`` is scaled: a ``torch.amp.GradScaler`` (by default one with its own
            defaults; one that is not enabled leaves losses as they are), a ``lightning_ort.amp.LossScaler``, or an
            object with ``loss_scale`` and ``update(info)``.
        log: write ``loss_scale`` and ``skipped_steps`` to the Trainer's loggers every ``log_every_n_steps`` steps and
            at each skipped one, and print a line then.

    Raises:
        ValueError: an unknown precision, or a scaler with another precision than ``"16-mixed"``.
        TypeError: ``scaler`` is none.

    Attributes:
        precision: as given.
        scaling: the loss scale that graphs read; ``None`` where losses are not scaled.
        skipped_steps: optimizer steps left out so far because a gradient was not finite.
    """

    def __init__(self, precision: PrecisionName = "32-true", scaler: Any = None, *, log: bool = False) -> None:
        choice("precision", precision, get_args(PrecisionName))
        flag("log", log)
        if scaler is not None and precision != "16-mixed":
            raise ValueError(
                f"scaler={scaler!r} with precision={precision!r}: only the losses of '16-mixed' are scaled (bfloat16 "
                "reaches as far as float32, and '16-true' has weights of 16 bits, which lose small updates whatever "
                "the scale). Leave the scaler out, or use '16-mixed'."
            )
        self.precision = precision
        self._kind: type[Precision] = pl.plugins.Precision
        self._device = "cpu"
        self._rule = scale_rule(scaler) if precision == "16-mixed" else None
        self.scaling = None if self._rule is None else LossScaling(self._rule.scale)
        self._log, self._steps, self.skipped_steps = log, 0, 0
        self._types: Precision = pl.plugins.Precision()
        if precision == "64-true":
            self._types = pl.plugins.DoublePrecision()
        elif precision in ("16-true", "bf16-true"):
            self._types = pl.plugins.HalfPrecision(precision)

    def of_package(self, package: Package) -> None:
        """Be a plug-in of ``package``, whose methods look whether modules and optimizers are of its own classes."""
        self._kind = package.get("plugins.precision:Precision")

    @classmethod
    def replacing(cls, plugin: MixedPrecision) -> ORTPrecision:
        """The same as Lightning's own plug-in for mixed precision."""
        scaler = plugin.scaler
        if scaler is not None and not scaler.is_enabled() and plugin.device == "cuda" and not torch.cuda.is_available():
            # Lightning takes any accelerator but its own "cpu" for CUDA, without which torch disables the scaler
            scaler = None
        return cls(plugin.precision, scaler)  # type: ignore[arg-type]

    @override
    def connect(self, model: torch.nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]) -> Any:
        """
        Raises:
            MisconfigurationException: the strategy is another than ``"ort"``, or losses are scaled for LBFGS.
        """
        module = model.module if isinstance(model, DistributedDataParallel) else model
        strategy = module.trainer.strategy if isinstance(module, everywhere("core.module:LightningModule")) else None
        if strategy is None or getattr(strategy, "strategy_name", None) != "ort":
            raise MisconfigurationException(
                f"ORTPrecision is for strategy='ort', but the strategy is {type(strategy).__name__}. Use "
                f"Trainer(strategy='ort', ...), or precision={self.precision!r} in the place of this plug-in."
            )
        self._device = strategy.root_device.type
        if self.scaling is not None and any(isinstance(o, LBFGS) for o in optimizers):
            raise MisconfigurationException(
                "precision='16-mixed' with LBFGS: it computes the loss several times in one step, which cannot be "
                "skipped any more when the gradients turn out not to be finite. Use 'bf16-mixed', or another optimizer."
            )
        return self._kind.connect(self, model, optimizers, lr_schedulers)

    # -- element types --------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        return self._types.convert_module(module)

    @override
    def tensor_init_context(self) -> AbstractContextManager:
        return self._types.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager:
        return self._types.module_init_context()

    @override
    def convert_input(self, data: Any) -> Any:
        return self._types.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._types.convert_output(data)

    @override
    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.precision in _AUTOCAST:
            with torch.autocast(self._device, dtype=_AUTOCAST[self.precision], cache_enabled=False):
                yield
        else:
            with self._types.forward_context():
                yield

    # -- loss scaling ---------------------------------------------------------------------------------------------

    @override
    def backward(  # type: ignore[override]
        self, tensor: torch.Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Gradients of the unscaled loss, whether a graph has scaled it or not."""
        scaling = self.scaling
        if scaling is None or (not kwargs.get("create_graph") and scaling.fits(tensor.dtype) and _is_closed(tensor)):
            self._kind.backward(self, tensor, model, optimizer, *args, **kwargs)
        else:
            with _unscaling_leaves(tensor, scaling.scale), scaling.multiplied():
                # a tensor, as a GradScaler has it: the product is of float32 whatever the loss is
                scale = torch.full((), scaling.scale, dtype=torch.float32, device=tensor.device)
                self._kind.backward(self, tensor * scale, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """The optimizer's step, left out if a gradient is not finite."""
        if self.scaling is None:
            return self._kind.optimizer_step(self, optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        # hooks and clipping come afterwards: a clipped infinity would be finite
        finite = all_finite([p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None])
        # gradients have been added up over all processes: what one of them has found is in all of them
        finite = model.trainer.strategy.reduce_boolean_decision(finite)
        self._after_closure(model, optimizer)
        if result is None and model.automatic_optimization:  # training_step returned None: there is nothing to do
            return result
        result = optimizer.step(**kwargs) if finite else None
        self._update(model, finite)
        return result

    def _update(self, model: pl.LightningModule, finite: bool) -> None:
        assert self._rule is not None and self.scaling is not None
        before = self.scaling.scale
        self._rule.update(ScaledStep(finite, self._steps - self.skipped_steps, self._steps))
        self._steps += 1
        self.skipped_steps += not finite
        self.scaling.scale = self._rule.scale
        if not self._log:
            return
        if not finite:
            rank_zero_info(
                f"optimizer step {self._steps} skipped: a gradient is not finite at loss scale {before:g}, which is "
                f"{self.scaling.scale:g} from now on"
            )
        trainer = model.trainer
        if not finite or self._steps % (getattr(trainer, "log_every_n_steps", 1) or 1) == 0:
            values = {"loss_scale": self.scaling.scale, "skipped_steps": float(self.skipped_steps)}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._rule is None:
            return {}
        return {"scaler": self._rule.state_dict(), "steps": self._steps, "skipped_steps": self.skipped_steps}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._rule is None or self.scaling is None:
            return
        self._rule.load_state_dict(state_dict["scaler"])
        self._steps, self.skipped_steps = state_dict["steps"], state_dict["skipped_steps"]
        self.scaling.scale = self._rule.scale

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the scaler where Lightning's own plug-in looks for it, to go on without ONNX Runtime."""
        if isinstance(self._rule, GradScalerRule):
            checkpoint[_LIGHTNING] = self._rule.state_dict()

    def scaler_summary(self) -> dict[str, Any] | None:
        """What a checkpoint tells an ORTTrainer about the loss scale; ``None`` where losses are not scaled."""
        return None if self._rule is None else {**self._rule.summary(), "skipped_steps": self.skipped_steps}

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the scaler of an ORTTrainer, or of a run under Lightning's own plug-in."""
        summary = checkpoint.get(TRAINER_SCALER)
        if summary is not None and self._rule is not None and self.scaling is not None:
            self._rule.resume(summary)
            self.skipped_steps = int(summary["skipped_steps"])
            self._steps = int(checkpoint["global_step"])
            self.scaling.scale = self._rule.scale
            return
        foreign = type(self).__qualname__ not in checkpoint and _LIGHTNING in checkpoint
        if foreign and self.scaling is not None and isinstance(self._rule, GradScalerRule):
            self._rule.load_state_dict(checkpoint[_LIGHTNING])
            self.scaling.scale = self._rule.scale


def _by_kind(name: str) -> Callable[..., Any]:
    def method(self: ORTPrecision, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._kind, name)(self, *args, **kwargs)

    return functools.update_wrapper(method, getattr(pl.plugins.Precision, name))


# what is not written above is as the package at hand has it
for _name, _method in vars(pl.plugins.Precision).items():
    if inspect.isfunction(_method) and _name not in vars(ORTPrecision):
        setattr(ORTPrecision, _name, _by_kind(_name))


def _is_closed(loss: torch.Tensor) -> bool:
    """Whether all gradients of ``loss`` are computed by graphs that scale their loss, and go to parameters at once.

    Otherwise gradients pass through torch, in 16 bits maybe, and the loss has to be scaled there.
    """
    # needs ONNX Runtime, whose absence shall be explained and not break the import of this package
    from lightning_ort.compiler.region import Region

    pending: list[tuple[Any, int]] = [(loss.grad_fn, loss.output_nr)]
    seen: set[Any] = set()
    graphs = 0
    while pending:
        node, output = pending.pop()
        if node is None:
            continue
        if not isinstance(getattr(node, "region", None), Region):
            if not node.next_functions:  # a parameter, reached by torch
                return False
            if node not in seen:
                seen.add(node)
                pending += node.next_functions
        else:
            # a graph of gradients by themselves has no loss to scale
            if not getattr(node, "scaled", False) or node.gradients is None:
                return False
            if node.positions.get(output) != node.loss or not _ends(node):
                return False
            graphs += 1
    return graphs > 0


def _ends(node: Any) -> bool:
    """Whether nothing but parameters comes after ``node``."""
    return all(after is None or not after.next_functions for after, _ in node.next_functions)


@contextlib.contextmanager
def _unscaling_leaves(loss: torch.Tensor, scale: float) -> Iterator[None]:
    """Unscale gradients as they reach the parameters of ``loss``, while its scaled ones are computed.

    Each parameter adds an unscaled gradient to what it has, from this or other ways.
    """
    # None where another result of the same node reaches the parameter, and this loss does not
    hooks = [p.register_hook(lambda g: None if g is None else g / scale) for p in _leaves(loss)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Parameters that the gradient of ``loss`` reaches."""
    pending, seen, leaves = [loss.grad_fn], set(), []
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        pending += [after for after, _ in node.next_functions]
    return leaves
