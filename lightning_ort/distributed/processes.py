"""Processes that train copies of one model, each on its own batches: gradients, states, and what they agree on."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ort.distributed.adasum import adasum as combined
from lightning_ort.distributed.ranks import is_of_transport
from lightning_ort.distributed.rendezvous import init_process_group
from lightning_ort.errors import RankError

__all__ = ["Processes", "join"]


def join(
    rank: int, world_size: int, data_parallel_size: int, device: torch.device, *, adasum: bool, option: str
) -> Processes | None:
    """Join the processes that the options of a trainer ask for.

    Args:
        rank: of this process.
        world_size: how many there are.
        data_parallel_size: the same; another number below it is not heeded, as in ONNX Runtime 1.16.
        device: see :class:`Processes`, as all that follow.
        adasum: of more than one process.
        option: what the user calls ``"world_size"``.

    Returns:
        ``None`` for one process alone.

    Raises:
        ValueError: numbers that contradict each other, or the process group.

    Warns:
        UserWarning: ``data_parallel_size`` is not heeded.
    """
    size = option.format("world_size")
    if rank >= world_size:
        raise ValueError(
            f"{option.format('world_rank')} = {rank}, but {size} = {world_size}: ranks are 0 to {world_size - 1}."
        )
    if data_parallel_size > world_size:
        raise ValueError(
            f"{option.format('data_parallel_size')} = {data_parallel_size}, but {size} = {world_size}. Leave "
            "it out, or give the same number to both."
        )
    if world_size == 1:
        return None
    if data_parallel_size not in (1, world_size):
        warnings.warn(
            f"{option.format('data_parallel_size')} = {data_parallel_size} is taken for {world_size}, as large as "
            f"{size}: all processes train copies of the model.",
            UserWarning,
            stacklevel=4,
        )
    return Processes(rank, world_size, device, adasum=adasum, option=option)


class Processes:
    """torch's default process group, as one of its processes sees it.

    There must be one, or the variables ``MASTER_ADDR`` and ``MASTER_PORT``, by which it is made: of gloo, and of nccl
    on CUDA devices.

    Args:
        rank: of this process.
        world_size: how many there are.
        device: of the tensors that are exchanged.
        adasum: combine gradients by :func:`~lightning_ort.distributed.adasum`, and not to their mean.
        option: what the user calls ``"world_rank"`` or ``"world_size"``, for messages; ``{}`` stands for it.

    Raises:
        ValueError: there is no process group, or it is another one than ``rank`` and ``world_size`` say.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, *, adasum: bool = False, option: str = "{}"
    ) -> None:
        self.rank, self.world_size, self._device, self._adasum = rank, world_size, device, adasum
        given = {"world_rank": rank, "world_size": world_size}
        if not dist.is_available():
            raise ValueError(f"{option.format('world_size')} = {world_size}, but this torch has no torch.distributed.")
        if not dist.is_initialized():
            self._join(given, option)
        _compare(given, dist.get_rank(), dist.get_world_size(), option, "the process group of torch.distributed")

    def _join(self, given: Mapping[str, int], option: str) -> None:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ValueError(
                f"{option.format('world_size')} = {self.world_size}, but torch.distributed has no process group, and "
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set in the environment. Start all "
                "processes by torchrun, or call torch.distributed.init_process_group() in each before."
            )
        rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        if rank.isdigit() and size.isdigit():  # before waiting for processes that never come
            _compare(given, int(rank), int(size), option, "the environment (RANK, WORLD_SIZE)")
        backend = "gloo" if self._device.type == "cpu" else f"cpu:gloo,{self._device.type}:nccl"
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        init_process_group(backend, host, port, self.rank, self.world_size)

    # -- exchanges ------------------------------------------------------------------------------------------------

    def combine(self, gradients: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Combine gradients with those of the other processes, in one exchange per element type.

        Args:
            gradients: name to gradient, in any order; they are overwritten.
            like: name to parameter, the same and in the same order in all processes.

        Returns:
            The mean over all processes, or what :func:`~lightning_ort.distributed.adasum` makes of them, of each
            parameter that has a gradient in at least one; where a process has none, its gradient is zero.

        Raises:
            RankError: another process has failed or ended.
        """
        present: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(p.dtype for p in like.values()):
            names = [n for n, p in like.items() if p.dtype == dtype]
            held = {n: gradients[n] if n in gradients else torch.zeros_like(like[n]) for n in names}
            marks = torch.tensor([n in gradients for n in names], dtype=dtype, device=self._device)
            flat = torch.cat([*(g.flatten() for g in held.values()), marks])
            with self._exchange("gradients"):
                flat = self._combined(flat, [g.numel() for g in held.values()])
            *parts, marks = flat.split([*(g.numel() for g in held.values()), len(names)])
            for (name, gradient), part, mark in zip(held.items(), parts, marks.tolist(), strict=True):
                if mark:
                    present[name] = gradient.copy_(part.view(gradient.shape))
        return {name: present[name] for name in like if name in present}

    def _combined(self, flat: Tensor, sizes: Sequence[int]) -> Tensor:
        if not self._adasum:
            dist.all_reduce(flat)
            return flat.div_(self.world_size)
        everyones = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(everyones, flat)
        *parts, marks = zip(*(x.split([*sizes, len(sizes)]) for x in everyones), strict=True)
        return torch.cat([*map(combined, parts), torch.stack(marks).sum(0)])

    def broadcast(self, tensors: Sequence[Tensor], source: int = 0) -> None:
        """Overwrite tensors by those of rank ``source``, in one exchange per element type.

        Raises:
            RankError: another process has failed or ended.
        """
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            chosen = [t.detach() for t in tensors if t.dtype == dtype]
            flat = torch.cat([t.to(self._device).flatten() for t in chosen])
            with self._exchange("states"):
                dist.broadcast(flat.view(torch.uint8), source)  # gloo and nccl do not know all types
            if self.rank != source:
                for tensor, part in zip(chosen, flat.split([t.numel() for t in chosen]), strict=True):
                    # of an expanded tensor an element that stands in several places is written once
                    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
                    tensor[once].copy_(part.view(tensor.shape)[once])

    def of_first(self, value: Any) -> Any:
        """The ``value`` of rank 0, which is pickled.

        Raises:
            RankError: another process has failed or ended.
        """
        told = [value]
        with self._exchange("states"):
            dist.broadcast_object_list(told, 0)
        return told[0]

    def agree(self, facts: Mapping[str, Any], weights: Mapping[str, Tensor], trained: Collection[str]) -> None:
        """Raise in all processes if one has other settings or weights than rank 0, with which they would go apart.

        Args:
            facts: settings, by the words of a message.
            weights: and buffers, of whom names, shapes, types and order are compared, not values.
            trained: names of those that are trained.

        Raises:
            ValueError: names the rank, and both values.
            RankError: another process has failed or ended.
        """
        facts = {**facts, "number of weights": len(weights)}
        for i, (name, t) in enumerate(weights.items()):
            facts[f"weight {i}"] = (name, tuple(t.shape), str(t.dtype), "trained" if name in trained else "not trained")
        everyones: list[Any] = [None] * self.world_size
        with self._exchange("settings"):
            dist.all_gather_object(everyones, facts)
        for rank, theirs in enumerate(everyones):
            for fact, value in everyones[0].items():
                if theirs.get(fact) != value:
                    raise ValueError(
                        f"The processes must have the same {fact}, but rank 0 has {value!r}, and rank {rank} "
                        f"{theirs.get(fact)!r}."
                    )

    @contextlib.contextmanager
    def _exchange(self, what: str) -> Iterator[None]:
        # nccl sends objects by the current device
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        try:
            with on_device:
                yield
        except RuntimeError as error:
            if not is_of_transport(error):
                raise
            raise RankError(
                f"rank {self.rank} of {self.world_size} could not exchange {what}: another rank has failed or ended, "
                f"and its own output may say why ({error}). Go on from the last checkpoint."
            ) from error


def _compare(given: Mapping[str, int], rank: int, size: int, option: str, where: str) -> None:
    actual = {"world_rank": rank, "world_size": size}
    different = [f"{option.format(name)} = {value}" for name, value in given.items() if actual[name] != value]
    if different:
        raise ValueError(
            f"{' and '.join(different)}, but this process is rank {rank} of {size} in {where}. Give the same to both."
        )
