"""Fabrics of several processes, and the end of the script: ``python fabric_exit.py COUNT``."""

import atexit
import sys
import threading


def watching() -> int:
    return sum(thread.name == "lightning_ort ranks" for thread in threading.enumerate())


# before all that is imported: it comes last
atexit.register(lambda: print("threads at the end:", watching(), flush=True))

from lightning.fabric import Fabric  # noqa: E402

import lightning_ort  # noqa: E402, F401 - registers the strategy

if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ort")
        fabric.launch()
        fabric.barrier()
    print("threads of all Fabrics:", watching(), flush=True)
