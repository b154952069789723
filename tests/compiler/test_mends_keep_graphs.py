"""What is mended in TorchDynamo breaks no graph that it has without: each program plainly, and as steps have it.

A mend that refuses too much leaves whole steps to Python, with the right results: no comparison of weights sees that.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from lightning_ort.compiler.dynamo import DYNAMO_SETTINGS
from lightning_ort.compiler.plain_values import SETTINGS, left_to_python

pytestmark = pytest.mark.stock_only

# of ours, but none that is there to leave something to Python
_PLAIN = {name: value for name, value in DYNAMO_SETTINGS.items() if name not in SETTINGS}


class Kind(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Sizes:
    width: int
    depth: int = 2
    names: list = dataclasses.field(default_factory=list)

    @property
    def area(self) -> int:
        return self.width * self.depth


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.factor = 2
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return ctx.factor * gradient * torch.ones_like(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.calls, self.sizes, self.seen = nn.GRUCell(8, 8), 0, [4, 8], {}

    def forward(self, x):
        self.calls += 1
        state = x.new_zeros(len(x), 8)
        for i in range(3):
            state = self.cell(x, state)
            self.seen[f"step {i}"] = state.detach()
        return state


class Counting(nn.Module):
    """One of whose numbers changes with each call."""

    def __init__(self, step) -> None:
        super().__init__()
        self.step, self.count, self.rate = step, 1, 0.5

    def forward(self, x):
        self.count += 1
        return self.step(self, x)


class Experts(nn.ModuleList):
    def forward(self, x):
        parts = {name: layer(x) for name, layer in self.named_children()}
        return torch.stack([part for _, part in sorted(parts.items())]).mean(0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.heads = nn.Linear(8, 24), 2

    def forward(self, x):
        b, (n, d) = len(x), x.shape[1:]
        q, k, v = self.inner(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(b, n, d)


LAYERS = {
    "linear": (nn.Linear(8, 8), (4, 8)),
    "convolution": (nn.Sequential(nn.Conv1d(6, 8, 3, padding="same"), nn.BatchNorm1d(8), nn.ReLU(True)), (4, 6, 8)),
    "circular": (nn.Conv1d(6, 8, 3, padding=1, padding_mode="circular"), (4, 6, 8)),
    "transposed": (nn.ConvTranspose1d(6, 8, 3, stride=2, output_padding=1), (4, 6, 8)),
    "norms": (nn.Sequential(nn.GroupNorm(2, 6), nn.InstanceNorm1d(6, affine=True), nn.LayerNorm(8)), (4, 6, 8)),
    "pools": (nn.Sequential(nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(2), nn.Flatten(1)), (4, 6, 8)),
    "unpooled": (nn.Upsample(scale_factor=2, mode="linear"), (4, 6, 8)),
    "lstm": (nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True, dropout=0.1), (4, 6, 8)),
    "gru": (nn.GRU(8, 8), (6, 4, 8)),
    "cells": (Recurrent(), (4, 8)),
    "attention": (Attention(), (4, 6, 8)),
    "encoder": (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2), (4, 6, 8)),
    "spectral": (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), (4, 8)),
    "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), (4, 8)),
    "experts": (Experts([nn.Linear(8, 8) for _ in range(3)]), (4, 8)),
    "dropout": (nn.Sequential(nn.Dropout(), nn.AlphaDropout(), nn.GELU(), nn.Softmax(-1)), (4, 8)),
    "shuffled": (nn.PixelShuffle(2), (4, 8, 3, 3)),
}

w = nn.Parameter(torch.randn(8, 8))

NUMBERS = {
    "multiplied": lambda module, x: x * module.count + module.count // 2 + module.count % 3 - module.count**2,
    "compared": lambda module, x: 2 * x if module.count > 1 and module.count != 0 and 0 < module.count <= 100 else x,
    "at an interval": lambda module, x: 2 * x if module.count % 100 != 0 else x,
    "warm-up": lambda module, x: x * min(1.0, module.count / 10) * max(module.count, 1),
    "annealed": lambda module, x: x * module.rate**module.count * math.exp(-module.rate),
    "as an index": lambda module, x: x[:, module.count % 8] + x.unbind(1)[0],
    "as a size": lambda module, x: x[:, : module.count].sum(1) + x.new_full((), module.count),
    "converted": lambda module, x: x * int(module.count) * float(module.count) * bool(module.count),
    "in a tensor": lambda module, x: x + torch.tensor(module.rate) * torch.full((8,), module.rate),
}


def _sizes(x):
    sizes = Sizes(x.shape[-1], names=["a"])
    sizes.names.append("b")
    return x.reshape(-1, sizes.area // 2) * len(sizes.names)


def _caught(x):
    try:
        {}["missing"]
    except KeyError:
        x = x + 1
    finally:
        x = 2 * x
    return x


def _matched(x, *, kind=Kind.MEAN):
    match kind:
        case Kind.SUM:
            return x.sum()
        case Kind.MEAN if x.ndim > 1:
            return x.mean()
        case _:
            return x


def _asserted(x):
    assert x.ndim == 2, f"{x.ndim} dimensions"
    if x.shape[-1] != 8:
        raise ValueError(f"{x.shape}")
    return x + 1


def _generated(x):
    def halves():
        yield x
        yield x / 2

    return sum(halves())


def _written(x):
    out = torch.zeros_like(x)
    out[:, ::2] = x[:, ::2]
    out[0] += 1
    return out @ w


@contextlib.contextmanager
def _doubled():
    yield 2


def _managed(x):
    with _doubled() as factor, torch.no_grad():
        y = factor * x
    return x @ w + y


def _counted(x):
    counts = collections.Counter(["a", "b", "a"])
    seen = collections.defaultdict(list)
    for name, count in counts.items():
        seen[name].append(count * x)
    order = collections.OrderedDict(first=seen["a"][0], second=seen["b"][0])
    order["third"] = x
    return sum(order.values())


def _masked(x):
    mask = torch.arange(x.shape[1]) < x.shape[1] // 2
    return x.masked_fill(~mask, float("-inf")).softmax(-1)


STATEMENTS = {
    "sizes": lambda x: x.reshape(x.shape[0], -1)[:, : x.size(1) // 2],
    "sizes compared": lambda x: x * 2 if x.shape == (4, 8) and x.shape[1:] != (4,) and x.size(0) in (4, 5) else x + 1,
    "sizes in order": lambda x: x + 1 if x.shape > (1, 1) and tuple(x.shape) >= (2, 2) and x.shape[-1] % 2 == 0 else -x,
    "sizes as numbers": lambda x: x * math.sqrt(x.shape[-1]) / max(1, min(x.shape)) + math.prod(x.shape),
    "sizes unpacked": lambda x: (lambda b, *rest: x.view(b, *rest).sum(tuple(range(1, 1 + len(rest)))))(*x.shape),
    "sizes kept": lambda x: torch.cat([x.new_zeros(1, *x.shape[1:]), x])[1:].expand(2, *x.shape),
    "size objects": lambda x: x.view(torch.Size([x.shape.numel() // 8, 8])),
    "dataclass": _sizes,
    "namedtuple": lambda x: (lambda pair: pair.first + pair._replace(second=x).second)(Pair(x, 2 * x)),
    "caught": _caught,
    "match": _matched,
    "generator": _generated,
    "written": _written,
    "managed": _managed,
    "counted": _counted,
    "masked": _masked,
    "comprehensions": lambda x: sum(
        [i * x for i in range(3) if i % 2] + [y for _, y in zip("ab", (x, x), strict=True)]
    ),
    "sorted": lambda x: sum(y * i for i, y in sorted({2: x, 1: x + 1}.items(), key=operator.itemgetter(0))),
    "itertools": lambda x: sum(a * b for a, b in itertools.product(x.unbind(1)[:2], repeat=2)),
    "chained": lambda x: torch.stack(list(itertools.chain(x.unbind(0), itertools.islice(x.unbind(0), 2)))),
    "pairs": lambda x: sum(a * b for a, b in itertools.pairwise(x.unbind(0))),
    "accumulated": lambda x: torch.stack(list(itertools.accumulate(x.unbind(0), operator.add))),
    "reduced": lambda x: functools.reduce(torch.maximum, x.unbind(0)),
    "partial": lambda x: functools.partial(F.leaky_relu, negative_slope=0.2)(x),
    "map and filter": lambda x: sum(filter(lambda y: y is not None, map(torch.relu, (x, -x)))),
    "enumerated": lambda x: sum(i * row for i, row in enumerate(x, start=1)),
    "reversed": lambda x: torch.stack([*reversed(list(x))]),
    "strings": lambda x: 2 * {f"{'layer'}.{0}": x}["layer.0"] if "lay" in "layer".upper().lower() else x,
    "dictionaries": lambda x: sum(({"a": x} | {"b": 2 * x}).values()) + {"a": x, "c": x}.pop("a"),
    "unpacking": lambda x: (lambda first, *rest, last: first + last + len(rest))(*x.unbind(0)[:3], last=x[0]),
    "walrus": lambda x: y * y if (y := x + 1).ndim == 2 else x,
    "isinstance": lambda x: 2 * x if isinstance(x, torch.Tensor) and callable(x.sum) and hasattr(x, "shape") else None,
    "getattr": lambda x: getattr(x, "sum")() + getattr(x, "missing", 1),  # noqa: B009
    "any and all": lambda x: 2 * x if all(n > 0 for n in x.shape) and any([x.ndim == 2, False]) else -x,
    "types": lambda x: x.to(torch.float64).type_as(x) if x.dtype in (torch.float32, torch.float16) else x,
    "numbers": lambda x: x * round(2.5) * int(3.7) * divmod(7, 2)[0] * pow(2, 3) * abs(-2) * float("1.5"),
    "limits": lambda x: x.clamp(torch.finfo(x.dtype).min, 1e3) + torch.iinfo(torch.int32).max * 0,
    "constants": lambda x: x + torch.tensor([1.0] * 8) + torch.arange(8).to(x) + torch.full((8,), 2.0),
    "indices": lambda x: x[torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)] + x[:, [0, 1]].sum(),
    "gathered": lambda x: x.gather(1, x.argsort(1)).scatter_add(1, x.argmax(1, keepdim=True), x),
    "one-hot": lambda x: F.one_hot(x.argmax(-1), 8) * x,
    "losses": lambda x: F.cross_entropy(x @ w, x.argmax(-1)) + F.mse_loss(x, x.detach()) + F.huber_loss(x, x * 2),
    "einsum": lambda x: torch.einsum("bi,ij->bj", x, w),
    "einops": lambda x: x.unflatten(1, (2, 4)).movedim(1, 2).flatten(1),
    "cast": torch.autocast("cpu", torch.bfloat16)(lambda x: x @ w),
    "gradient": lambda x: torch.autograd.grad((x @ w).sum(), w)[0],
    "function": lambda x: Doubled.apply(x @ w),
    "checkpoint": lambda x: checkpoint(torch.tanh, x @ w, use_reentrant=False),
    "vmap": lambda x: torch.vmap(lambda row: (row @ w).sum())(x),
    "random": lambda x: x + torch.randn_like(x) + torch.rand(8) + torch.bernoulli(torch.full((8,), 0.5)),
    "hook": lambda x: (lambda y: (y.register_hook(lambda g: 2 * g), y.sum())[1])(x @ w),
    "asserted": _asserted,
    "while": lambda x: [x := x / 2 for _ in range(3)][-1],
    "detached": lambda x: x - x.detach() + (x > 0).float() + x.data,
    "complex": lambda x: torch.fft.irfft(torch.fft.rfft(x), n=8),
}


def _graphs(program, x, *, mended: bool) -> tuple[int, int]:
    """How many graphs there are, and operations in them."""
    counter = CompileCounter()
    torch._dynamo.reset()
    settings = torch._dynamo.config.patch(**(DYNAMO_SETTINGS if mended else _PLAIN))
    with settings, left_to_python() if mended else contextlib.nullcontext():
        compiled = torch.compile(program, backend=counter)
        for rows in (0, 1, 2):  # the second size is open
            compiled(torch.cat([x, x[:rows]]))
    return counter.frame_count, counter.op_count


@pytest.mark.parametrize("name", [*LAYERS, *STATEMENTS, *NUMBERS])
def test_no_graph_more_than_without_mends(name):
    make, shape = (lambda: STATEMENTS[name]), (4, 8)
    if name in NUMBERS:
        make = functools.partial(Counting, NUMBERS[name])
    elif name in LAYERS:
        layer, shape = LAYERS[name]
        make = functools.partial(copy.deepcopy, layer)
    x = torch.randn(shape)
    with torch.random.fork_rng():
        plain, mended = [_graphs(make(), x, mended=m) for m in (False, True)]
    assert plain[0] > 0, "Dynamo makes no graph of it, so that nothing is compared"
    assert mended[0] <= plain[0], f"graphs, and operations in them: {plain}, {mended}"
