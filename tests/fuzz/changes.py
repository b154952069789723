"""Random changes of a module, its settings and its data between the calls of its compiled form.

``python -m tests.fuzz.changes --seconds 600`` makes sequences of changes until the time is over and prints those after
which results, gradients, buffers or the random state are other than in eager.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import random
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

__all__ = ["CHANGES", "check", "search"]


class Network(nn.Module):
    """A step with a bit of everything that may be changed from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.rows = nn.Linear(4, 8), nn.Linear(8, 3), nn.Embedding(5, 4)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.3)
        nn.init.normal_(self.norm.bias)
        self.scale = nn.Parameter(torch.ones(3))
        self.factor: Any = 1.5
        self.activation: Callable[..., torch.Tensor] = F.relu
        self.options = {"temperature": 2.0}
        self.divides = True
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.last(hidden) * self.scale * self.factor

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        hidden = self.activation(self.norm(self.first(x + self.rows(rows))))
        self.count += 1
        with torch.no_grad():
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        result = self.head(self.dropout(hidden) + self.mean)
        return result / self.options["temperature"] if self.divides else result.tanh()


class Breaking(Network):
    """With graph breaks, a number of Python, and what is a view of the data."""

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> Any:
        seen = x.view(-1, 2, 2).transpose(1, 2)
        hidden = self.norm(self.first(seen.reshape(-1, 4)))
        torch._dynamo.graph_break()
        hidden = self.dropout(self.activation(hidden))
        large = hidden.mean().item() > 1e9
        return self.head(hidden) * (0.5 if large else 1.0), seen


@dataclasses.dataclass
class Call:
    """How the next call is made.

    Attributes:
        layout: of the data in memory: ``rows``, ``columns``, a ``part`` that begins elsewhere at each call, or
            one row that is ``repeated``.
    """

    batch: int = 5
    layout: str = "rows"
    gradients: bool = True
    of_data: bool = False
    inference: bool = False
    autocast: bool = False
    dtype: torch.dtype = torch.float64

    def data(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        table = torch.randn(self.batch + 4, 4, generator=generator, dtype=torch.float64).to(self.dtype)
        x = {
            "rows": lambda: table[: self.batch].clone(),
            "columns": lambda: table[: self.batch].t().contiguous().t(),
            "part": lambda: table[number % 4 : number % 4 + self.batch],
            "repeated": lambda: table[:1].clone().expand(self.batch, 4),
        }[self.layout]()
        return x.requires_grad_(self.of_data), torch.randint(0, 5, (self.batch,), generator=generator)


def _with(**attributes: Any) -> Callable[[Network, Call], None]:
    return lambda network, call: network.__dict__.update(attributes)


def _calling(**settings: Any) -> Callable[[Network, Call], None]:
    return lambda network, call: call.__dict__.update(settings)


def _loaded(network: Network, assign: bool) -> None:
    state = {k: v * 0.9 if v.is_floating_point() else v.clone() for k, v in network.state_dict().items()}
    network.load_state_dict(state, assign=assign)


def _head(network: Network) -> None:
    network.head = lambda hidden: network.last(hidden) - 1.0  # type: ignore[method-assign]


def _in_place(network: Network) -> None:
    for parameter in network.parameters():
        parameter.data.mul_(0.95)


def _only_last(network: Network) -> None:
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith("last."))


def _pruned(network: Network) -> None:
    if not prune.is_pruned(network.first):
        prune.l1_unstructured(network.first, "weight", 0.3)


def _parametrized(network: Network) -> None:
    if not parametrize.is_parametrized(network.last):
        parametrizations.weight_norm(network.last)


CHANGES: dict[str, Callable[[Network, Call], Any]] = {
    "nothing": lambda n, c: None,
    "eval": lambda n, c: n.eval(),
    "train": lambda n, c: n.train(),
    "norm in eval": lambda n, c: n.norm.eval(),
    "no dropout": lambda n, c: setattr(n.dropout, "p", 0.0),
    "more dropout": lambda n, c: setattr(n.dropout, "p", 0.5),
    "momentum": lambda n, c: setattr(n.norm, "momentum", 0.3),
    "averages": lambda n, c: setattr(n.norm, "momentum", None),
    "epsilon": lambda n, c: setattr(n.norm, "eps", 1e-2),
    "padding": lambda n, c: setattr(n.rows, "padding_idx", 2),
    "factor": _with(factor=2.5),
    "tensor as factor": lambda n, c: setattr(n, "factor", torch.tensor(0.7, dtype=c.dtype)),
    "gelu": _with(activation=F.gelu),
    "tanh": _with(activation=torch.tanh),
    "tanh instead": _with(divides=False),
    "divided again": _with(divides=True),
    "temperature": lambda n, c: n.options.update(temperature=3.0),
    "another head": lambda n, c: _head(n),
    "its own head": lambda n, c: n.__dict__.pop("head", None),
    "new data": lambda n, c: setattr(n.first.weight, "data", n.first.weight.data * 1.1),
    "new layout": lambda n, c: setattr(n.first.weight, "data", n.first.weight.data.t().contiguous().t()),
    "new parameter": lambda n, c: setattr(n.first, "weight", nn.Parameter(n.first.weight.detach() * 1.2)),
    "new layer": lambda n, c: setattr(n, "last", copy.deepcopy(n.last)),
    "no bias": lambda n, c: setattr(n.last, "bias", None),
    "in place": lambda n, c: _in_place(n),
    "loaded": lambda n, c: _loaded(n, assign=False),
    "assigned": lambda n, c: _loaded(n, assign=True),
    "frozen": lambda n, c: n.first.requires_grad_(False),
    "trained": lambda n, c: n.requires_grad_(True),
    "only the last": lambda n, c: _only_last(n),
    "new buffer": lambda n, c: setattr(n, "mean", torch.ones_like(n.mean)),
    "buffer in a table": lambda n, c: setattr(n, "mean", torch.zeros(3, 8, dtype=n.mean.dtype)[1]),
    "buffer in place": lambda n, c: n.mean.fill_(0.3),
    "count": lambda n, c: n.count.fill_(7),
    "pruned": lambda n, c: _pruned(n),
    "parametrized": lambda n, c: _parametrized(n),
    "hook": lambda n, c: n.first.register_forward_hook(lambda m, i, o: o * 1.01),
    "hook before": lambda n, c: n.last.register_forward_pre_hook(lambda m, i: (i[0] * 0.99,)),
    "hook behind": lambda n, c: n.first.register_full_backward_hook(lambda m, i, o: (i[0] * 2,) if c.of_data else None),
    "hook of a weight": lambda n, c: n.last.weight.register_hook(lambda g: g * 3) if n.last.weight.requires_grad else 0,
    "one row": _calling(batch=1),
    "three rows": _calling(batch=3),
    "six rows": _calling(batch=6),
    "columns": _calling(layout="columns"),
    "part": _calling(layout="part"),
    "repeated": _calling(layout="repeated"),
    "rows": _calling(layout="rows"),
    "no gradients": _calling(gradients=False),
    "gradients": _calling(gradients=True),
    "gradients of data": _calling(of_data=True),
    "none of data": _calling(of_data=False),
    "inference": _calling(inference=True),
    "no inference": _calling(inference=False),
    "autocast": _calling(autocast=True),
    "no autocast": _calling(autocast=False),
    "float": lambda n, c: (n.float(), _calling(dtype=torch.float32)(n, c)),
    "double": lambda n, c: (n.double(), _calling(dtype=torch.float64)(n, c)),
}
"""What is done to a module, and to the calls that follow."""


def _called(network: Network, function: Callable[..., Any], call: Call, number: int) -> dict[str, torch.Tensor]:
    x, rows = call.data(number)
    torch.manual_seed(number)
    network.zero_grad(set_to_none=True)
    mode: Any = torch.inference_mode() if call.inference else torch.set_grad_enabled(call.gradients)
    with mode, torch.autocast("cpu", dtype=torch.bfloat16, enabled=call.autocast):
        outputs = function(x, rows)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum(o.to(call.dtype).square().sum() for o in outputs)
    found = {f"output {i}": o.detach().clone() for i, o in enumerate(outputs)}
    if loss.requires_grad:
        loss.backward()
    gradients = {n: p.grad for n, p in [("x", x), *network.named_parameters()] if p.grad is not None}
    # rounding to 16 bits, and a mean that is taken off: what is left of gradients is noise
    found |= {f"gradient of {n}": torch.zeros(()) if call.autocast else g.clone() for n, g in gradients.items()}
    found |= {name: buffer.clone() for name, buffer in network.named_buffers()}
    return found | {"random state": torch.get_rng_state()}


def _difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], call: Call) -> str | None:
    if ours.keys() != theirs.keys():
        return f"only in one: {sorted(ours.keys() ^ theirs.keys())}"
    share = 5e-2 if call.autocast else 1e-9 if call.dtype == torch.float64 else 1e-3
    for name, wanted in theirs.items():
        got = ours[name]
        if got.dtype != wanted.dtype or got.shape != wanted.shape:
            return f"{name}: {tuple(got.shape)} {got.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}"
        size = max(1.0, float(wanted.double().abs().max())) if wanted.numel() else 1.0
        exact = not wanted.is_floating_point()
        if not torch.allclose(got.double(), wanted.double(), rtol=0, atol=0 if exact else share * size, equal_nan=True):
            return f"{name}: off by {float((got.double() - wanted.double()).abs().max()):.3g}, largest {size:.3g}"
    return None


def check(seed: int, length: int = 6) -> str | None:
    """Change a module ``length`` times, calling it in between; how it went other than in eager."""
    rng = random.Random(seed)
    kind = rng.choice([Network, Breaking])
    names = ["nothing", *rng.choices(list(CHANGES), k=length)]
    torch._dynamo.reset()
    networks, calls = [], [Call(), Call()]
    for _ in calls:
        torch.manual_seed(0)
        networks.append(kind().double())
    options = {"verify": seed % 2 == 0, "placement": rng.choice(["fastest", "torch", "torch-channels-last"])}
    functions = [networks[0], torch.compile(networks[1], backend="lightning_ort", options=options)]
    # of plain torch.compile, Dynamo takes no notice of hooks that come later
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        for number, name in enumerate(names):
            found: list[Any] = []
            for network, function, call in zip(networks, functions, calls, strict=True):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        CHANGES[name](network, call)
                        found.append(_called(network, function, call, number))
                except Exception as error:
                    found.append(error)
            theirs, ours = found
            where = f"seed {seed}, {kind.__name__}, {options}: {', '.join(names[: number + 1])}"
            if isinstance(theirs, Exception):
                return None if isinstance(ours, Exception) else f"{where}: eager raises {theirs}"
            if isinstance(ours, Exception):
                return f"{where}: {''.join(traceback.format_exception(ours)[-4:])}"
            problem = _difference(ours, theirs, calls[0])
            if problem is not None:
                return f"{where}: {problem}"
    return None


def search(check: Callable[[int], str | None], things: str, description: str | None) -> None:
    """Check what follows from one seed after another for a time, and exit with 1 if anything failed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--first", type=int, default=1_000, help="first seed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    until = time.monotonic() + options.seconds
    seed, failed = options.first, 0
    while time.monotonic() < until:
        failure = check(seed)
        if failure is not None:
            failed += 1
            print(failure, flush=True)
        seed += 1
    print(f"{seed - options.first} {things}, {failed} failed")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    search(check, "sequences", __doc__)
