"""Scripts that several processes of one process group run."""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

_PRELOADED = ["torch._dynamo", "lightning.pytorch", "lightning_ort", "lightning_ort.lightning.strategy"]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process has ended, and what it has written."""

    returncode: int | None
    stdout: str


class Forked:
    """A process that runs a script, with the methods of :class:`subprocess.Popen` that are needed here.

    It is a fork of one process that has imported what each would import for five seconds. How processes start and end
    is not what it can tell.

    Args:
        command: a script and its arguments.
        environment: all of its variables.
        output: what it writes goes to this file.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(target=_run, args=(list(command), dict(environment), str(output)))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """The code it has ended with; ``None`` if it has not ended in ``timeout`` seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def torchrun_variables(world: int, *, on_gpu: bool = False) -> list[dict[str, str]]:
    """What torchrun would set for each of ``world`` processes of this machine; nothing is measured, on one thread.

    Args:
        world: how many there are.
        on_gpu: they share a GPU, each as the only process of a machine of its own: NCCL refuses a second one of a
            machine on the same GPU.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "LIGHTNING_ORT_MEASURE": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    if on_gpu:
        alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "LIGHTNING_ORT_TEST_ACCELERATOR": "cuda"}
        network = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        return [{**v, **alone, **network, "GROUP_RANK": v["RANK"], "NCCL_HOSTID": f"test{v['RANK']}"} for v in ranks]
    return ranks


def launch(world: int, script: Path, *arguments: str, timeout: float = 500, on_gpu: bool = False) -> list[Ended]:
    """Run ``script`` on ``world`` processes of this machine, on CPUs or all of them on one GPU.

    Raises:
        TimeoutError: they have not ended in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        written = [Path(folder, str(rank)) for rank in range(world)]
        processes: list[Forked] = []
        try:
            for variables, file in zip(torchrun_variables(world, on_gpu=on_gpu), written, strict=True):
                processes.append(Forked([str(script), *arguments], {**os.environ, **variables}, file))
            end = time.monotonic() + timeout
            for rank, process in enumerate(processes):
                if process.wait(max(0.0, end - time.monotonic())) is None:
                    raise TimeoutError(f"rank {rank} has not ended in {timeout} s: {written[rank].read_text()[-3000:]}")
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [Ended(p.poll(), file.read_text()) for p, file in zip(processes, written, strict=True)]


def _run(command: Sequence[str], environment: Mapping[str, str], file: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with open(file, "wb", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:  # a process of multiprocessing's ends without
        atexit._run_exitfuncs()
