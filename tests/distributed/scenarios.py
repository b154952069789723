"""What a script of scenarios does that each of several processes runs: ``python SCRIPT FOLDER SCENARIO...``."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ACCELERATOR = os.environ.get("LIGHTNING_ORT_TEST_ACCELERATOR", "cpu")


def devices() -> dict[str, Any]:
    """Flags of a Trainer whose ranks are all processes that there are; on a GPU, each has a machine of its own."""
    world = dist.get_world_size()
    return {
        "accelerator": ACCELERATOR,
        **({"devices": world} if ACCELERATOR == "cpu" else {"devices": 1, "num_nodes": world}),
    }


def run(scenarios_in: Callable[[Path], Mapping[str, Callable[[], Any]]], file: str) -> None:
    """Run those that are asked for, in one process group, and write what each has found.

    Args:
        scenarios_in: the folder to all scenarios by name.
        file: its name there, with ``{rank}`` and ``{world}``.
    """
    folder, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_utilities.core.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    scenarios = scenarios_in(Path(folder))
    if not dist.is_initialized():
        dist.init_process_group("gloo" if ACCELERATOR == "cpu" else f"cpu:gloo,{ACCELERATOR}:nccl")
    found = {name: scenarios[name]() for name in names}
    torch.save(found, Path(folder) / file.format(rank=dist.get_rank(), world=dist.get_world_size()))
