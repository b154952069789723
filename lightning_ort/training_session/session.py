"""Training of a forward ONNX file: gradients, accumulation, clipping and the optimizer, in ONNX Runtime."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

from lightning_ort.checkpoints.names import SHARED
from lightning_ort.compiler.aot.joint import GRAD
from lightning_ort.distributed.processes import join
from lightning_ort.errors import UnsupportedError
from lightning_ort.onnx_reader import to_torch
from lightning_ort.onnx_reader.initializers import state_initializers, trainable_initializers
from lightning_ort.onnx_reader.load import Model, load, name_of, using
from lightning_ort.runtime.factory import SessionFactory, factory_of
from lightning_ort.runtime.memory import Packed
from lightning_ort.runtime.providers.cpu import CPU
from lightning_ort.runtime.tensors import ONNX, owning
from lightning_ort.training_session.binding import TrainingBinding, as_feed, as_scalar, as_tensor
from lightning_ort.training_session.graph import TrainingGraph, save_graphs
from lightning_ort.training_session.optimizer import WeightUpdate
from lightning_ort.training_session.parameters import (
    ACCUMULATED,
    ALL_FINITE,
    TrainingParameters,
    check_names,
    check_types,
    check_weights,
    trained_weights,
    why_none,
)
from lightning_ort.training_session.signature import SessionInfo, signature_session
from lightning_ort.validation import flag, names, shown

__all__ = ["TrainingSession"]


class TrainingSession(SessionInfo):
    """Trains the weights of a forward ONNX graph, on any ONNX Runtime.

    Each :meth:`run` computes the outputs, the gradients of the loss and, after every
    ``gradient_accumulation_steps`` runs, one update of the weights. Outputs are those before the update; the update
    is complete when ``run`` returns. A run with ``RunOptions.only_execute_path_to_fetches`` evaluates instead: no
    gradient, no update, Dropout off, running statistics used and not changed.

    Args:
        path_or_bytes: a path, a serialized model, or an ``onnx.ModelProto``, opset 13 to 26. It is not changed.
        parameters: names the loss, the weights, the optimizer; they are copied.
        sess_options: as for ``onnxruntime.InferenceSession``; or a mapping of option names to values.
        providers: execution providers in order of preference, names or tuples of name and options.
        provider_options: one mapping per provider.
        verify: compare the first run that trains and the first one that evaluates with the same computation in torch.
            A run that draws random numbers, as Dropout does in training, cannot be compared.

    Raises:
        FileNotFoundError, ValueError: no such file, not an ONNX model, unknown names, or a property that contradicts
            the model.
        UnsupportedError: an operator that cannot be read or differentiated, named with its node; or weights of a type
            that the optimizer does not update; or a weight that is called like a state of the optimizer.
        ProviderError: a provider that this ONNX Runtime does not have.
        ValueError: ``world_rank`` and ``world_size`` are not those of the process group.
    """

    def __init__(
        self,
        path_or_bytes: Model,
        parameters: TrainingParameters,
        sess_options: Any = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Mapping[str, Any]] | None = None,
        *,
        verify: bool = True,
    ) -> None:
        if not isinstance(parameters, TrainingParameters):
            raise TypeError(f"parameters is a {type(parameters).__name__}; expected lightning_ort.TrainingParameters.")
        parameters = copy.copy(parameters)
        sessions = factory_of(providers, provider_options, sess_options)
        self._verify = flag("verify", verify)
        self._processes = join(
            parameters.world_rank,
            parameters.world_size,
            parameters.data_parallel_size,
            torch.device("cpu"),
            adasum=parameters.enable_adasum,
            option="TrainingParameters.{}",
        )
        self._replicated, self._loads = self._processes is None, 0
        self._parameters, self._proto, self._name = parameters, load(path_or_bytes), name_of(path_or_bytes)
        self._forward_outputs = [o.name for o in self._proto.graph.output]
        check_names(self._proto, parameters)
        self._loss: str = parameters.loss_output_name
        check_weights(self._proto, parameters)
        with using(self._name):
            trained = trained_weights(self._proto, parameters)
        if not trained:
            raise ValueError(f"No weight is trained: {why_none(self._proto, parameters)}")
        with using(self._name):
            if parameters.training_optimizer_name:
                check_types(self._proto, trained, parameters.training_optimizer_name)
            self._module = to_torch(self._proto, trained)
        by_name = {onnx_name: path for path, onnx_name in self._module.parameter_names.items()}
        tensors = dict(self._module.named_parameters())
        self._weights = {n: tensors[by_name[n]].detach() for n in trained}
        buffers = dict(self._module.named_buffers())
        stored = [i.name for i in self._proto.graph.initializer]
        kept = {*trainable_initializers(self._proto, stored), *state_initializers(self._proto)}
        self._buffers = {n: buffers[p] for p, n in self._module.buffer_names.items() if p in buffers and n in kept}
        self._pending: dict[str, torch.Tensor] = {}
        self._n_accumulated = 0
        self._fallback = True
        self._options = sess_options
        self._make(sessions)
        states = self._flat_names()
        clash = [n for n in self._weights | self._buffers if n in states or (states and n == SHARED)]
        if clash:
            raise UnsupportedError(
                f"{clash[0]!r} is a name in the ONNX file, and that of an optimizer's state in get_state(); expected "
                "another one. Rename that value of the file."
            )
        if self._updates is not None and parameters._initial_state:
            self._updates.assign(self._updates.check(parameters._initial_state))
        save_graphs(self._proto, parameters, self._loss, list(self._weights), self._updates, verify=verify)

    def _make(self, sessions: SessionFactory) -> None:
        """Make all that runs; what runs now stays where that fails."""
        gradients = Packed(self._weights)
        train = self._graph(gradients.views, sessions)
        update = None
        if self._parameters.training_optimizer_name:
            share = self._processes if self._parameters.deepspeed_zero_stage else None
            update = WeightUpdate(self._parameters, self._weights, sessions, share)
        old = getattr(self, "_updates", None)
        if update is not None and old is not None:
            update.assign(update.check(old.state()))
        extra = [helper.make_tensor_value_info(n, TensorProto.BOOL, [1]) for n in self._flags()]
        if self._parameters.set_gradients_as_graph_outputs:
            for name, tensor in self._weights.items():
                dtype = int(ONNX[tensor.dtype])
                extra.append(helper.make_tensor_value_info(f"{name}_grad", dtype, list(tensor.shape)))
        rate = self._parameters.lr_params_feed_name if update is not None else None
        with using(self._name):
            self._signature = signature_session(self._proto, rate, extra)
        self._sessions, self._gradients, self._train, self._infos = sessions, gradients, train, train.infos
        self._updates: WeightUpdate | None = update
        self._evaluation: TrainingGraph | None = None
        self._output_names = [o.name for o in self._signature.get_outputs()]

    def _graph(self, gradients: Mapping[str, torch.Tensor], sessions: SessionFactory) -> TrainingGraph:
        tensors = self._weights | self._buffers
        with using(self._name):
            return TrainingGraph(
                self._proto, self._module, self._loss, gradients, tensors, sessions, verify=self._verify
            )

    def _flags(self) -> list[str]:
        flags = [ALL_FINITE] if self._parameters.loss_scale else []
        return flags + ([ACCUMULATED] if self._parameters.gradient_accumulation_steps > 1 else [])

    # -- running ----------------------------------------------------------------------------------------------------

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None
    ) -> list[np.ndarray]:
        """One step.

        Args:
            output_names: names of the wanted outputs; ``None`` or an empty list for all.
            input_feed: name to numpy array, OrtValue or torch tensor, of the element type and shape that the file
                declares. With an optimizer it must hold the learning rate, one float, under ``lr_params_feed_name``;
                an evaluation needs none.
            run_options: an ``onnxruntime.RunOptions``; with ``only_execute_path_to_fetches`` set, evaluate.

        Returns:
            The outputs as numpy arrays of their own memory.

        Raises:
            TypeError: an argument of another kind; nothing has been changed then.
            ValueError: an unknown output, or a feed that does not fit; nothing has been changed then.
            MismatchError: a first run gives something else than torch, named in the words of the file; nothing has
                been changed then.
        """
        return self._run(output_names, input_feed, run_options)

    def _run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any,
        check: Callable[[Mapping[str, np.ndarray]], None] | None = None,
    ) -> list[np.ndarray]:
        """:meth:`run`; what ``check`` raises about the results leaves all as it was before."""
        if run_options is not None and not isinstance(run_options, onnxruntime.RunOptions):
            raise TypeError(f"run_options={shown(run_options)}: expected an onnxruntime.RunOptions, or None.")
        evaluate = run_options is not None and run_options.only_execute_path_to_fetches
        known = self._forward_outputs if evaluate else self._output_names
        wanted = [] if output_names is None else names("output_names", output_names)
        unknown = [n for n in wanted if n not in known]
        if unknown:
            raise ValueError(f"The session has no output {', '.join(map(repr, unknown))}. It has: {', '.join(known)}.")
        given = _mapping("input_feed", input_feed, "input names to arrays")
        rate_name = self._parameters.lr_params_feed_name
        lr = None
        if self._updates is not None and rate_name in given:
            lr = as_scalar(rate_name, given.pop(rate_name))
        if lr is None and self._updates is not None and not evaluate:
            raise ValueError(f"The feed lacks the learning rate, one float under {rate_name!r}.")
        feed = as_feed(self._infos, given)
        if evaluate:
            found = self._forward(feed, 1.0, evaluate=True)
            if check is not None:
                check(found)
        else:
            found = self._step(feed, lr, check)
        return [found[n] for n in wanted or known]

    def _forward(
        self, feed: Mapping[str, torch.Tensor], scale: float, *, evaluate: bool = False
    ) -> dict[str, np.ndarray]:
        if evaluate and self._evaluation is None:
            self._evaluation = self._graph({}, self._sessions)
        graph = self._evaluation if evaluate and self._evaluation is not None else self._train
        try:
            return graph(feed, scale)
        except Exception as error:
            if not (self._fallback and type(error).__name__ == "EPFail"):
                raise
            warnings.warn(f"The execution provider failed ({error}); going on with the CPU's.", stacklevel=5)
            self.set_providers([CPU.name])
            return self._forward(feed, scale, evaluate=evaluate)

    def _step(
        self,
        feed: Mapping[str, torch.Tensor],
        lr: float | None,
        check: Callable[[Mapping[str, np.ndarray]], None] | None,
    ) -> dict[str, np.ndarray]:
        scale = float(self._parameters.loss_scale) or 1.0
        self._replicate()
        before: dict[str, torch.Tensor] = {}
        if check is not None:
            tensors = self._weights | self._buffers
            before = {n: tensors[n].clone() for n in self._train.runner.graph.updates}
        found = self._forward(feed, scale)
        gradients = self._gradients.views
        if self._parameters.set_gradients_as_graph_outputs:
            found |= {f"{n}{GRAD}": (g / scale).numpy() for n, g in gradients.items()}
        if check is not None:
            try:
                check(found | {n: np.array([False]) for n in self._flags()})
            except ValueError:
                for name, statistic in before.items():
                    tensors[name].copy_(statistic)
                raise
        steps = self._parameters.gradient_accumulation_steps
        updated = True
        finite = None if self._parameters.loss_scale else True
        if self._updates is not None:
            complete = self._accumulated(gradients, steps)
            updated = complete is not None
            if complete is not None and lr is not None:
                finite = self._updates.run(complete, lr, 1.0 / (steps * scale))
        if finite is None:
            finite = all(bool(torch.isfinite(g).all()) for g in gradients.values())
        flags = {ALL_FINITE: finite, ACCUMULATED: not updated}
        return found | {n: np.array([flags[n]]) for n in self._flags()}

    def _accumulated(self, gradients: dict[str, torch.Tensor], steps: int) -> dict[str, torch.Tensor] | None:
        """Sums of the gradients of ``steps`` runs when they are complete, else ``None``."""
        each = not self._parameters.allreduce_post_accumulation
        if steps == 1 or each:
            gradients = self._combined(gradients)
        if steps == 1:
            return gradients
        if not self._pending:
            self._pending = {n: g.clone() for n, g in gradients.items()}
        else:
            for name, gradient in gradients.items():
                self._pending[name].add_(gradient)
        self._n_accumulated += 1
        if self._n_accumulated < steps:
            return None
        complete, self._pending, self._n_accumulated = self._pending, {}, 0
        return complete if each else self._combined(complete)

    def _combined(self, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return gradients if self._processes is None else self._processes.combine(gradients, self._weights)

    def _replicate(self) -> None:
        """Give all processes the state of rank 0 before the first run that trains, and after a loading."""
        if self._processes is None or self._replicated or self._updates is None:
            return
        self._updates.replicate(self._processes, self._weights | self._buffers, self._loads)
        self._replicated = True

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[onnxruntime.OrtValue]:
        """:meth:`run` with OrtValues in and out."""
        results = self.run(output_names, input_dict_ort_values, run_options)
        return [owning(r) for r in results]

    def io_binding(self) -> TrainingBinding:
        """A binding for :meth:`run_with_iobinding`."""
        return TrainingBinding([i.name for i in self.get_inputs()], self.get_outputs())

    def run_with_iobinding(self, iobinding: TrainingBinding, run_options: Any = None) -> None:
        """:meth:`run` with what is bound; the results go to the bound outputs.

        Raises:
            TypeError: ``iobinding`` is none of :meth:`io_binding`; nothing has been changed then.
            ValueError: as :meth:`run`; or no output is bound, or memory of another shape than that of the result;
                nothing has been changed then.
        """
        if not isinstance(iobinding, TrainingBinding):
            raise TypeError("iobinding is not from io_binding() of a TrainingSession.")
        if not iobinding.targets:
            raise ValueError("No output is bound; bind one by bind_output or bind_ortvalue_output.")
        iobinding.store(self._run(list(iobinding.targets), iobinding.inputs, run_options, iobinding.check))

    # -- state ------------------------------------------------------------------------------------------------------

    def get_state(self) -> dict[str, np.ndarray]:
        """Weights, running statistics and optimizer states, flat: ``w``, ``Moment_1_w``, ``Update_Count_w``."""
        state = dict(self.get_model_state()["full_precision"])
        for weight, values in self.get_optimizer_state().items():
            for name, array in values.items():
                state[_flat(weight, name)] = array
        return state

    def load_state(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Take over a state from :meth:`get_state`.

        Of several processes all load, at the same run; what they go on with is then rank 0's. With stage 1 of ZeRO they
        load the states of all, or each its own.

        Gradients that were accumulated for an update still to come are dropped: the next run is the first of its
        ``gradient_accumulation_steps``.

        Args:
            state_dict: name to array.
            strict: raise if a name is missing.

        Raises:
            TypeError: ``state_dict`` is no mapping.
            ValueError: an unknown name (whether strict or not), a missing one, or a wrong shape or element type.
                Nothing has been changed then.
        """
        state_dict = _mapping("state_dict", state_dict, "names to arrays, as get_state gives")
        flat = self._flat_names()
        own = self.get_state()
        unknown, missing = sorted(set(state_dict) - set(own) - set(flat)), sorted(set(own) - set(state_dict))
        if unknown or (strict and missing):
            raise ValueError(
                f"The state does not fit: unknown names {unknown}, missing names {missing if strict else []}."
            )
        tensors = self._weights | self._buffers
        assignments: list[tuple[torch.Tensor, torch.Tensor]] = []
        optimizer: dict[str, dict[str, Any]] = {}
        for name, value in state_dict.items():
            tensor = as_tensor(name, value)
            if name in tensors:
                target = tensors[name]
                if tensor.shape != target.shape or tensor.dtype != target.dtype:
                    raise ValueError(
                        f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; expected {target.dtype} of shape "
                        f"{tuple(target.shape)}."
                    )
                assignments.append((target, tensor))
            else:
                weight, state = flat[name]
                optimizer.setdefault(weight, {})[state] = tensor
        checked = self._updates.check(optimizer) if self._updates is not None else []
        for target, tensor in assignments:
            target.copy_(tensor)
        if self._updates is not None:
            self._updates.assign(checked)
        self._pending, self._n_accumulated = {}, 0
        self._loads += 1
        self._replicated = self._processes is None

    def _flat_names(self) -> dict[str, tuple[str, str]]:
        """What :meth:`get_state` calls the states of the optimizer, to weight and state."""
        layout = {} if self._updates is None else self._updates.layout()
        return {_flat(weight, name): (weight, name) for weight, values in layout.items() for name in values}

    def get_model_state(self, include_mixed_precision_weights: bool = False) -> dict[str, dict[str, np.ndarray]]:
        """``{"full_precision": {name: array}}`` of weights, trained or not, and running statistics, as copies.

        Scalars that are not trained are constants of the graph and not among them.

        There are no mixed-precision weights, so ``include_mixed_precision_weights`` adds an empty mapping.
        """
        state = {"full_precision": {n: t.numpy().copy() for n, t in (self._weights | self._buffers).items()}}
        return state | ({"mixed_precision": {}} if include_mixed_precision_weights else {})

    def get_optimizer_state(self) -> dict[str, dict[str, np.ndarray]]:
        """Per weight ``Moment_1``, ``Moment_2`` and ``Update_Count`` (for LAMB one ``Step``), as copies.

        With stage 1 of ZeRO it has the weights that fall to this process.
        """
        if self._updates is None:
            return {}
        return {w: {n: t.numpy().copy() for n, t in v.items()} for w, v in self._updates.state().items()}

    def get_partition_info_map(self) -> dict[str, dict[str, list[int]]]:
        """Which weights are cut, and how: none is, also where processes share out the optimizer's states."""
        return {}

    def is_output_fp32_node(self, output_name: str) -> bool:
        """Whether an output is float32."""
        found = {o.name: o.type for o in self.get_outputs()}
        if output_name not in found:
            raise ValueError(f"The session has no output {output_name!r}. It has: {', '.join(found)}.")
        return found[output_name] == "tensor(float)"

    def set_providers(
        self, providers: Sequence[Any] | None = None, provider_options: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Make the sessions anew with these providers; weights and states are kept."""
        self._make(factory_of(providers, provider_options, self._options))


def _flat(weight: str, state: str) -> str:
    return state if weight == SHARED else f"{state}_{weight}"


def _mapping(name: str, value: Any, expected: str) -> dict[str, Any]:
    """A copy of a mapping.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={shown(value)}: expected a mapping from {expected}.")
    return dict(value)
