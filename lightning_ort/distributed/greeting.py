"""Two processes that add two numbers: ``python -m lightning_ort.distributed.greeting RANK PORT SECONDS``."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ort.distributed.rendezvous import init_process_group


def _greet(rank: int, port: int, seconds: float) -> int:
    """Be one of two processes of this machine; print what is wrong in a line.

    Returns:
        0, or 1 if they have not met in time, or not computed the sum.
    """
    try:
        init_process_group("gloo", "127.0.0.1", port, rank, 2, timedelta(seconds=seconds))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
    except Exception as error:  # whatever it is, it is the answer
        print(str(error).splitlines()[0])
        return 1
    if total.item() != 3:
        print(f"1 + 2 is {total.item():g}")
    return int(total.item() != 3)


if __name__ == "__main__":
    sys.exit(_greet(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
