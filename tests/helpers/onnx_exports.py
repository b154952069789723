"""Small modules that torch.onnx.export writes, for the tests of everything that reads ONNX files."""

from __future__ import annotations

import dataclasses
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch writes its traces to this logger when a handler listens, as pytest's does
logging.getLogger("torch.__trace").propagate = False


class ConvNet(nn.Module):
    """Convolutions with BatchNorm, pooling and Dropout, and a classifier of 5."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(4 * 4, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return F.cross_entropy(self.head(self.drop(x.flatten(1))), y)


class Encoder(nn.Module):
    """A causal transformer encoder over 11 tokens with LayerNorm and GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits = self.head(self.layer(self.embed(x), src_mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class UNet(nn.Module):
    """GroupNorm, SiLU, a skip connection, and Resize on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.mid, self.up = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(7, 3, 3, 1, 1)
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.silu(self.norm(self.mid(F.silu(self.down(x)))))
        h = F.interpolate(h, scale_factor=2.0, mode="bilinear", align_corners=False)
        return F.mse_loss(self.up(torch.cat([x, h], 1)), y)


class Recurrent(nn.Module):
    """A bidirectional LSTM, then a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(3, 4, bidirectional=True), nn.GRU(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.gru(self.lstm(x)[0])[0], y)


class Heads(nn.Module):
    """Losses and operators that the training wheel cannot differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(6, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.linear(x) * self.scale
        spread = h.amax(1) - h.amin(1) + torch.atan(h).sum(1) + torch.einsum("bi,bj->bij", h, h).tril().sum((1, 2))
        return F.nll_loss(F.log_softmax(h, 1), y) + torch.erf(spread).mean() + h.std(1).mean()


@dataclasses.dataclass
class Export:
    module: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    """batch size to inputs"""
    dynamo: bool = False

    def make(self) -> nn.Module:
        """The module with random parameters: exporters merge tensors that are equal."""
        torch.manual_seed(0)
        module = self.module()
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn_like(p) * 0.2)
        return module

    def write(self, module: nn.Module, path: Path | None = None, batch: int = 4) -> bytes:
        """The ONNX file of ``module`` in its present mode; also written to ``path``."""
        buffer = io.BytesIO()
        names = ["x", "y"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self.dynamo:
                batches = ({0: torch.export.Dim("batch")}, {0: torch.export.Dim("batch")})
                program = torch.onnx.export(
                    module, self.inputs(batch), dynamo=True, input_names=names, output_names=["loss"],
                    dynamic_shapes=batches, verbose=False,
                )  # fmt: skip
                assert program is not None
                buffer.write(program.model_proto.SerializeToString())
            else:
                mode = torch.onnx.TrainingMode
                torch.onnx.export(
                    module, self.inputs(batch), buffer, dynamo=False, input_names=names, output_names=["loss"],
                    opset_version=17, training=mode.TRAINING if module.training else mode.EVAL,
                    do_constant_folding=not module.training, dynamic_axes={n: {0: "batch"} for n in names},
                )  # fmt: skip
        if path is not None:
            path.write_bytes(buffer.getvalue())
        return buffer.getvalue()


def _image(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 3, 4, 4), torch.randint(0, 5, (n,))


def _tokens(n: int) -> tuple[Tensor, ...]:
    return torch.randint(0, 11, (n, 6)), torch.randint(0, 11, (n, 6))


def _images(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 3, 4, 4), torch.randn(n, 3, 4, 4)


def _steps(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 2, 3), torch.randn(n, 2, 3)


def _rows(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 6), torch.randint(0, 4, (n,))


EXPORTS = {
    "conv": Export(ConvNet, _image),
    "encoder": Export(Encoder, _tokens),
    "unet": Export(UNet, _images),
    "recurrent": Export(Recurrent, _steps),
    "heads": Export(Heads, _rows),
    "encoder dynamo": Export(Encoder, _tokens, dynamo=True),
    "unet dynamo": Export(UNet, _images, dynamo=True),
    "heads dynamo": Export(Heads, _rows, dynamo=True),
}
