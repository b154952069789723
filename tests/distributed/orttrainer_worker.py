"""ORTTrainer and TrainingSession on several processes: what each rank of :mod:`test_orttrainer_ranks` runs.

    python orttrainer_worker.py FOLDER

writes to ``FOLDER/RANK.pt`` what each scenario has found. Whoever makes the first trainer joins the process group.
"""

from __future__ import annotations

import functools
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "helpers")]

from orttrainer_models import ADAM, LAMB, SGD, batches, cross_entropy, description, make, options  # noqa: E402

from lightning_ort import ORTTrainer, TrainingParameters, TrainingSession, amp, optim  # noqa: E402
from lightning_ort.distributed import adasum  # noqa: E402
from lightning_ort.distributed.processes import Processes  # noqa: E402
from lightning_ort.ort_trainer import IODescription, ModelDescription, load_checkpoint, save_checkpoint  # noqa: E402
from lightning_ort.ort_trainer import ORTTrainer as OlderTrainer  # noqa: E402

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CLIPPED = {"params": [{"params": ["fc1.weight", "fc3.bias"], "max_norm_clip": 0.05}], "max_norm_clip": 0.2}
ZERO = {"deepspeed_zero_optimization": {"stage": 1}}
POST = {"allreduce_post_accumulation": True}
CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    # configuration, options.distributed, whether in float64
    "adam": (lambda: ADAM(lr=0.01, lambda_coef=0.1), {}, True),
    "lamb": (lambda: LAMB(lr=0.01, lambda_coef=0.1), {}, True),
    "sgd": (lambda: SGD(lr=0.1), {}, True),
    "adam32": (lambda: ADAM(lr=0.01), {}, False),
    "lamb32": (lambda: LAMB(lr=0.01), {}, False),
    "sgd32": (lambda: SGD(lr=0.1), {}, False),
    "clipped": (lambda: ADAM(lr=0.01, **CLIPPED), {}, True),
    "each": (lambda: ADAM(lr=0.01, max_norm_clip=0.2), {}, True),
    "post": (lambda: ADAM(lr=0.01, max_norm_clip=0.2), POST, True),
    "zero adam": (lambda: ADAM(lr=0.01, **CLIPPED), ZERO, True),
    "zero lamb": (lambda: LAMB(lr=0.01, **CLIPPED), ZERO, True),
    "zero sgd": (lambda: SGD(lr=0.1), ZERO, True),
    "zero post": (lambda: ADAM(lr=0.01, **CLIPPED), {**ZERO, **POST}, True),
}


def trainer(config: Any, distributed: dict[str, Any] | None = None, seed: int = 1234, **sections: Any) -> ORTTrainer:
    """Of this rank; of one process alone without ``distributed``."""
    model = make(seed=seed)
    if sections.pop("double", False):
        model.double()
    if distributed is not None:
        sections["distributed"] = {"world_rank": RANK, "world_size": WORLD, "local_rank": RANK, **distributed}
    return ORTTrainer(model, description(), config, loss_fn=cross_entropy, options=options(**sections))


def mine(x: Tensor) -> Tensor:
    return x.chunk(WORLD)[RANK]


def run(found: ORTTrainer, steps: list[tuple[Tensor, Tensor]], *, whole: bool, double: bool = True) -> ORTTrainer:
    for x, label in steps:
        x = x.double() if double else x
        found.train_step(*((x, label) if whole else (mine(x), mine(label))))
    return found


def weights(found: ORTTrainer) -> dict[str, Tensor]:
    return found.state_dict(pytorch_format=True)


def kept(found: ORTTrainer) -> int:
    """Elements of the moments that this process has."""
    return sum(t.numel() for states in found._optimizer.updater.moments.values() for t in states.values())


def equals_one_process(name: str) -> dict[str, Any]:
    config, distributed, double = CASES[name]
    accumulation = {"batch": {"gradient_accumulation_steps": 4}} if name.endswith(("each", "post")) else {}
    ours = run(trainer(config(), distributed, double=double, **accumulation), batches(), whole=False, double=double)
    one = run(trainer(config(), double=double, **accumulation), batches(), whole=True, double=double)
    return {"ours": weights(ours), "one": weights(one), "kept": kept(ours), "kept by one": kept(one)}


def starts_from_rank_0() -> dict[str, Any]:
    """Every rank has other weights, and rank 0 has loaded a state."""
    before = run(trainer(ADAM(lr=0.01), double=True), batches(count=3), whole=True)
    ours = trainer(ADAM(lr=0.01), {}, seed=RANK, double=True)
    if RANK == 0:
        ours.load_state_dict(before.state_dict())
    run(ours, batches(count=5)[3:], whole=False)
    one = run(before, batches(count=5)[3:], whole=True)
    return {"ours": weights(ours), "one": weights(one), "counts": ours.state_dict()["train_step_info"]}


def interrupted() -> dict[str, Any]:
    """Steps of rank 1 fail among those that make one update; it goes on with the next batch."""
    accumulation = {"batch": {"gradient_accumulation_steps": 4}}
    ours = trainer(CASES["each"][0](), {}, double=True, **accumulation)
    errors = []
    for k, (x, label) in enumerate(batches()):
        if RANK == 1 and k in (0, 6, 11):
            wrong = torch.full_like(mine(label), 99)
            errors.append(error_of(functools.partial(ours.train_step, mine(x).double(), wrong)))
        ours.train_step(mine(x).double(), mine(label))
    return {"ours": weights(ours), "errors": errors}


def half(distributed: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 alone meets a batch whose gradients are not finite."""
    scaler = amp.DynamicLossScaler(loss_scale=2.0**10)
    mixed = {"enabled": True, "loss_scaler": scaler}
    found = trainer(ADAM(lr=0.01, max_norm_clip=0.5), distributed, mixed_precision=mixed)
    seen = []
    for k, (x, label) in enumerate(batches(count=8)):
        if k == 3 and RANK == 1:
            x = x * 1e6
        found.train_step(mine(x), mine(label))
        seen.append((scaler.loss_scale, found._train_step_info.optimization_step))
    return {"ours": weights(found), "seen": seen, "state": found.state_dict()["loss_scaler"]["skipped_steps"]}


def combined_by_adasum(steps: int = 1, *, post: bool = False) -> dict[str, Any]:
    """Updates of ``steps`` gradients, combined one by one or, with ``post``, their sums."""
    distributed = {"enable_adasum": True, "allreduce_post_accumulation": post}
    accumulation = {"batch": {"gradient_accumulation_steps": steps}}
    ours = run(trainer(SGD(lr=0.1), distributed, double=True, **accumulation), batches(), whole=False)
    model = make().double()
    parameters = list(model.parameters())
    of_ranks: list[list[Tensor]] = []  # of each parameter those of all ranks, one step after the other
    for x, label in batches():
        gradients = [
            torch.autograd.grad(F.cross_entropy(model(a.double()), b), parameters)
            for a, b in zip(x.chunk(WORLD), label.chunk(WORLD), strict=True)
        ]
        of_ranks.append([torch.stack(each) for each in zip(*gradients, strict=True)])
        if len(of_ranks) < steps:
            continue
        with torch.no_grad():
            for p, each in zip(parameters, zip(*of_ranks, strict=True), strict=True):
                combined = adasum(list(sum(each))) if post else sum(adasum(list(one)) for one in each)
                p -= 0.1 * combined / steps
        of_ranks = []
    return {"ours": weights(ours), "one": dict(model.state_dict())}


def resumed(folder: Path, stage: int) -> dict[str, Any]:
    """Ten steps; five, then a checkpoint, then five; and the last five in one process."""
    distributed = {"deepspeed_zero_optimization": {"stage": stage}}

    def made(*arguments: Any) -> ORTTrainer:
        return trainer(ADAM(lr=0.01, max_norm_clip=0.2), *arguments, double=True)

    through = run(made(distributed), batches(count=10), whole=False)
    first = run(made(distributed), batches(count=5), whole=False)
    files = [folder / f"stage{stage}.{rank}.h5" for rank in range(WORLD)][: WORLD if stage else 1]
    if len(files) > RANK:
        first.save_checkpoint(files[RANK], {"epoch": 3})
    dist.barrier()
    second = made(distributed)
    told = second.load_checkpoint(*files)
    run(second, batches(count=10)[5:], whole=False)
    alone = made()
    alone.load_checkpoint(*reversed(files))
    run(alone, batches(count=10)[5:], whole=True)
    # one process's checkpoint on several, and what each has given itself
    back = made(distributed)
    back.load_state_dict(alone.state_dict())
    own = made(distributed)
    own.load_state_dict(first.state_dict())
    run(own, batches(count=10)[5:], whole=False)
    found = {
        "ours": weights(second), "through": weights(through), "one": weights(alone), "own": weights(own), "told": told,
        "optimizer": first.state_dict()["optimizer"], "options": first.state_dict()["trainer_options"],
        "back": back.state_dict()["optimizer"], "alone": alone.state_dict()["optimizer"],
    }  # fmt: skip
    if stage:
        others: list[Any] = [None] * WORLD
        dist.all_gather_object(others, first.state_dict())
        found["missing"] = error_of(lambda: made(distributed).load_state_dict(others[1 - RANK]))
        found["too few"] = error_of(lambda: made(distributed).load_checkpoint(files[0]))
        loaded = made(distributed)
        if RANK == 0:
            loaded.load_checkpoint(*files)
        found["one loads"] = error_of(lambda: run(loaded, batches(count=1), whole=False))
    return found


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class OwnSchedule(optim.lr_scheduler._LRScheduler):
    """One that keeps what differs among the ranks and is no setting."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.function = RANK, lambda: RANK

    def get_lr(self, train_step_info: Any) -> list[float]:
        return [0.1]


def refused() -> dict[str, str]:
    def step(config: Any = None, **sections: Any) -> Any:
        made = config or SGD(lr=0.1)
        return lambda: run(trainer(made, {}, **sections), batches(count=1), whole=False, double=False)

    def scaler(**settings: Any) -> dict[str, Any]:
        return {"enabled": True, "loss_scaler": amp.DynamicLossScaler(**settings)}

    group = {"params": ["fc2.bias"], "lambda_coef": 0.1 * RANK}
    linear, constant = optim.lr_scheduler.LinearWarmupLRScheduler, optim.lr_scheduler.ConstantWarmupLRScheduler
    return {
        "rank": error_of(lambda: trainer(SGD(lr=0.1), {"world_rank": 1 - RANK})),
        "size": error_of(lambda: trainer(SGD(lr=0.1), {"world_size": 3})),
        "session": error_of(lambda: session({"world_size": 4})),
        "steps": error_of(step(batch={"gradient_accumulation_steps": 1 + RANK})),
        "frozen": error_of(step(utils={"frozen_weights": ["fc1.bias"] if RANK else []})),
        "lr": error_of(step(SGD(lr=0.1 + RANK))),
        "alpha": error_of(step(ADAM(alpha=0.5 + 0.25 * RANK))),
        "group": error_of(step(LAMB([group]))),
        "mode": error_of(step(ADAM(weight_decay_mode=ADAM.DecayMode(RANK)))),
        "no schedule": error_of(step(lr_scheduler=linear(10) if RANK else None)),
        "schedule": error_of(step(lr_scheduler=(linear if RANK else constant)(10))),
        "steps of it": error_of(step(lr_scheduler=linear(10 + RANK))),
        "scaler": error_of(step(mixed_precision=scaler(up_scale_window=10 + RANK))),
        "attributes": error_of(
            lambda: trained(
                session({}, optimizer_attributes_map={"net.fc1.bias": {"alpha": 0.5 + RANK / 4}}), whole=False
            )
        ),
        "of their own": error_of(step(lr_scheduler=OwnSchedule(), mixed_precision=scaler(loss_scale=2.0 + RANK))),
    }


def parts() -> dict[str, Any]:
    """Gradients that not all have, in two element types."""
    like = {
        n: torch.zeros(2, 3, dtype=d) for n, d in (("a", torch.float32), ("b", torch.float64), ("c", torch.float32))
    }
    held = {"b": torch.full((2, 3), 1.0 + RANK, dtype=torch.float64)}
    if RANK == 1:
        held["a"] = torch.full((3, 2), 4.0).t()  # of other strides
    found = Processes(RANK, WORLD, torch.device("cpu")).combine(held, like)
    return {"found": found, "in place": all(found[n] is t for n, t in held.items())}


DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.uint16, torch.int64, torch.float16, torch.bfloat16, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip


def of_rank_1() -> dict[str, Any]:
    """Tensors of all element types, of other strides, and without elements, as rank 1 has them."""
    found = [torch.full((2, 3), RANK).to(dtype).t() for dtype in DTYPES]
    empty = torch.zeros(0, 3, dtype=torch.int16)
    Processes(RANK, WORLD, torch.device("cpu")).broadcast([*found, empty], 1)
    return {str(t.dtype): t.to(torch.complex64) for t in found}


class Shifted(nn.Module):
    """A model, or a loss, with buffers of this rank's own: in its states, in none, and one of elements in two places.

    Args:
        module: the rest of it.
        value: of the buffers.
        width: of the one that all ranks must have in the same size.
    """

    def __init__(self, module: Any, value: float, width: int = 1) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("kept", torch.full((1,), value))
        self.register_buffer("own", torch.full((width,), value), persistent=False)
        self.register_buffer("same", self.own, persistent=False)
        self.register_buffer("wide", torch.full((1, 1), value).expand(4, 1), persistent=False)

    def shift(self) -> Tensor:
        return (self.kept * self.own.sum() + self.wide.sum()) / 10


class ShiftedModel(Shifted):
    def forward(self, x: Tensor) -> Tensor:
        return self.module(x) + self.shift()


class ShiftedLoss(Shifted):
    def forward(self, prediction: Tensor, label: Tensor) -> Tensor:
        return self.module(prediction, label) * self.shift()


def shifted(value: float, distributed: dict[str, Any] | None, width: int = 1) -> ORTTrainer:
    if distributed is not None:
        distributed = {"world_rank": RANK, "world_size": WORLD}
    model, loss = ShiftedModel(make(), value, width), ShiftedLoss(cross_entropy, value + 1)
    settings = options(distributed=distributed or {})
    return ORTTrainer(model, description(), SGD(lr=0.1), loss_fn=loss, options=settings)


def buffers() -> dict[str, Any]:
    """All buffers of model and loss as they are on each rank, and the weights that they lead to."""
    ours = run(shifted(1.0 + RANK, {}), batches(count=3), whole=False, double=False)
    one = run(shifted(1.0, None), batches(count=3), whole=True, double=False)
    held = {name: t.clone() for name, t in ours._combined.named_buffers()}
    other = error_of(lambda: run(shifted(1.0, {}, 1 + RANK), batches(count=1), whole=False, double=False))
    return {"held": held, "ours": weights(ours), "one": weights(one), "other": other}


class Emptied(nn.Module):
    """One weight, and a parameter without elements, which is the share of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.none = nn.Linear(20, 10, bias=False), nn.Parameter(torch.zeros(0, 3))
        nn.init.constant_(self.linear.weight, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.none.sum()


def empty_share() -> dict[str, Any]:
    def made(distributed: dict[str, Any]) -> ORTTrainer:
        settings = options(distributed=distributed)
        return ORTTrainer(Emptied(), description(), SGD(lr=0.1), loss_fn=cross_entropy, options=settings)

    ours = made({"world_rank": RANK, "world_size": WORLD, **ZERO})
    run(ours, batches(count=3), whole=False, double=False)
    one = run(made({}), batches(count=3), whole=True, double=False)
    return {"ours": weights(ours), "one": weights(one), "share": list(ours._optimizer.updater.counts)}


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make()

    def forward(self, x: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.net(x)
        return F.cross_entropy(scores, label), scores


@functools.cache
def exported() -> bytes:
    buffer = io.BytesIO()
    torch.onnx.export(
        WithLoss(), batches(count=1)[0], buffer, dynamo=False, input_names=["x", "label"],
        output_names=["loss", "scores"], opset_version=17, training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False, dynamic_axes={n: {0: "batch"} for n in ("x", "label", "scores")},
    )  # fmt: skip
    return buffer.getvalue()


def session(distributed: dict[str, Any] | None, optimizer: str = "AdamOptimizer", **values: Any) -> TrainingSession:
    """Of this rank; of one process alone without ``distributed``."""
    parameters = TrainingParameters()
    parameters.loss_output_name, parameters.training_optimizer_name = "loss", optimizer
    if distributed is not None:
        values |= {"world_rank": RANK, "world_size": WORLD, **distributed}
    for name, value in values.items():
        setattr(parameters, name, value)
    return TrainingSession(exported(), parameters)


def trained(found: TrainingSession, *, whole: bool, first: int = 0, last: int = 12) -> TrainingSession:
    """After some of the batches."""
    for x, label in batches()[first:last]:
        feed = (x, label) if whole else (mine(x), mine(label))
        found.run(["loss"], {"x": feed[0], "label": feed[1], "Learning_Rate": np.array([0.01], np.float32)})
    return found


def of_sessions() -> dict[str, Any]:
    cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "adam": ("AdamOptimizer", {}, {}),
        "lamb": ("LambOptimizer", {"deepspeed_zero_stage": 1}, {}),
        "each": ("AdamOptimizer", {}, {"gradient_accumulation_steps": 3}),
        "post": ("AdamOptimizer", {"allreduce_post_accumulation": True}, {"gradient_accumulation_steps": 3}),
        "zero": ("AdamOptimizer", {"deepspeed_zero_stage": 1, "data_parallel_size": WORLD}, {}),
    }
    found: dict[str, Any] = {}
    for name, (optimizer, distributed, both) in cases.items():
        ours = trained(session(distributed, optimizer, **both), whole=False)
        alone = trained(session(None, optimizer, **both), whole=True)
        found[name] = {"ours": ours.get_state(), "one": alone.get_state()}
    zero = trained(session({"deepspeed_zero_stage": 1}), whole=False, last=6)
    states: list[Any] = [None] * WORLD
    dist.all_gather_object(states, zero.get_state())
    again = session({"deepspeed_zero_stage": 1})
    again.load_state(states[0] | states[1], strict=True)
    alone = session(None)
    alone.load_state(states[0] | states[1], strict=True)
    found["resumed"] = {
        "ours": trained(again, whole=False, first=6).get_state(),
        "one": trained(alone, whole=True, first=6).get_state(),
        "through": trained(zero, whole=False, first=6).get_state(),
    }
    return found


def of_the_older_class(folder: Path) -> dict[str, Any]:
    described = ModelDescription(
        [IODescription("x", ["b", 20], torch.float32), IODescription("label", ["b"], torch.int64)],
        [IODescription("loss", []), IODescription("logits", ["b", 10])],
    )

    def made(**settings: Any) -> OlderTrainer:
        rate = IODescription("Learning_Rate", [1])
        return OlderTrainer(
            make(), cross_entropy, described, "AdamOptimizer", None, rate, "cpu",
            get_lr_this_step=lambda step: 0.01, **settings,
        )  # fmt: skip

    shared = {"world_rank": RANK, "world_size": WORLD, "deepspeed_zero_stage": 1, "allreduce_post_accumulation": True}
    ours, one = made(**shared), made()
    for x, label in batches(count=6):
        ours.train_step(mine(x), mine(label))
        one.train_step(x, label)
    save_checkpoint(ours, folder, checkpoint_state_dict={"epoch": 2})
    dist.barrier()
    alone, again = made(), made(**shared)
    told = [load_checkpoint(found, folder, strict=True) for found in (alone, again)]
    dist.barrier()
    if RANK == 1:
        (folder / "ORT_checkpoint.ZeRO.1.1.ort.pt").unlink()
    dist.barrier()
    return {
        "ours": ours.state_dict(include_optimizer_state=False),
        "one": one.state_dict(include_optimizer_state=False),
        "again": again.state_dict(),
        "states": ours.state_dict(),
        "loaded": alone.state_dict(),
        "told": told,
        "missing": error_of(lambda: load_checkpoint(alone, folder)),
    }


def dies(folder: Path, found: dict[str, Any]) -> None:
    """Rank 1 ends between two steps."""
    ours = run(trainer(SGD(lr=0.1), {}, double=True), batches(count=2), whole=False)
    if RANK == 1:
        torch.save(found, folder / "1.pt")
        os._exit(0)
    before = weights(ours)
    found["death"] = error_of(lambda: run(ours, batches(count=3)[2:], whole=False))
    found["unchanged"] = all(torch.equal(x, before[name]) for name, x in weights(ours).items())
    torch.save(found, folder / f"{RANK}.pt")


def main() -> None:
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, Any] = {name: equals_one_process(name) for name in CASES}
    found |= {
        "starts": starts_from_rank_0(),
        "interrupted": interrupted(),
        "half": half({}),
        "zero half": half(ZERO),
        "adasum": combined_by_adasum(),
        "adasum each": combined_by_adasum(4),
        "adasum post": combined_by_adasum(4, post=True),
    }
    found |= {f"stage {stage}": resumed(folder, stage) for stage in (0, 1)}
    found |= {
        "refused": refused(),
        "parts": parts(),
        "types": of_rank_1(),
        "buffers": buffers(),
        "empty": empty_share(),
    }
    found |= {"sessions": of_sessions(), "older": of_the_older_class(folder)}
    dies(folder, found)


if __name__ == "__main__":
    main()
