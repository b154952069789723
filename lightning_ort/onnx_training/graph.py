"""The ONNX Runtime session of one step: outputs, gradients and new running statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch

from lightning_ort.onnx_gradients.inputs import input_infos
from lightning_ort.onnx_gradients.joint import GRAD, trace_joint
from lightning_ort.onnx_gradients.writing import written
from lightning_ort.onnx_reader import OnnxModule
from lightning_ort.runtime.config import RuntimeConfig
from lightning_ort.runtime.providers import choose_providers
from lightning_ort.runtime.refusals import refusal

__all__ = ["TrainingGraph"]

# these fail on gradients of weighted means and of doubles in ONNX Runtime 1.19
_DISABLED = ["DivMulFusion", "MatMulScaleFusion", "MatmulTransposeFusion"]


class TrainingGraph:
    """Runs a forward graph on weights that change, with the gradients of its loss where ``wanted`` is not empty.

    Args:
        proto: the forward graph.
        module: the same, read.
        loss: the output that is differentiated.
        wanted: initializers by which it is differentiated; without any, the graph evaluates.
        tensors: weights and running statistics by name, read at each run.
        config: how the session is made.
    """

    def __init__(
        self,
        proto: onnx.ModelProto,
        module: OnnxModule,
        loss: str,
        wanted: Sequence[str],
        tensors: Mapping[str, torch.Tensor],
        config: RuntimeConfig,
    ) -> None:
        self._trains = bool(wanted)
        module.train(self._trains)
        joint = trace_joint(
            module, input_infos(proto), [loss], [loss] if wanted else [], wanted, statistics=self._trains
        )
        model = ir.to_proto(written(joint, proto, fed=tensors)).SerializeToString()
        self.session = onnxruntime.InferenceSession(
            model,
            config.make_session_options(),
            providers=choose_providers(torch.device("cpu"), config.providers, config.provider_options),
            disabled_optimizers=_DISABLED,
        )
        self.session.disable_fallback()
        self._names = [o.name for o in self.session.get_outputs()]
        inputs = {i.name for i in self.session.get_inputs()}
        self._tensors = {n: t for n, t in tensors.items() if n in inputs}
        self._loss_grad, self._loss_type = f"{loss}{GRAD}", joint.results[loss].meta["val"]

    def __call__(self, feed: Mapping[str, torch.Tensor], scale: float) -> dict[str, np.ndarray]:
        """Results by name; gradients are those of ``scale`` times the loss.

        Raises:
            RefusedValueError: a node does not take the values that it was given.
        """
        arrays = {n: t.numpy() for n, t in [*feed.items(), *self._tensors.items()]}
        if self._trains:
            like = self._loss_type
            arrays[self._loss_grad] = torch.full(like.shape, scale, dtype=like.dtype, device="cpu").numpy()
        try:
            results = self.session.run(None, arrays)
        except Exception as error:
            refused = refusal(error, {})
            if refused is None:
                raise
            raise refused from error
        return dict(zip(self._names, results, strict=True))
