"""Damages files of every format that the project reads; each is read, or refused with one error that names it.

    python -m tests.fuzz.files --seconds 600

A case follows from its number. Cases are read in a process of their own, which is replaced when it dies or hangs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from lightning_ort import errors

from .damage import damage
from .file_formats import FORMATS

__all__ = ["Outcome", "explore"]

PATIENCE = 60.0
"""Seconds until a case counts as one that hangs."""

MOST_MEMORY = 500
"""MiB that a case may take at its peak, beyond what the process has."""

MOST_SECONDS = 10.0
"""Processor seconds that a case may take; a sound file of the slowest format takes one."""

LEAK = 32
"""KiB per case that the process may grow on the average: the compiler keeps some of what it is given."""

Outcome = tuple[int, str, str, str]
"""Number of the case, format, what happened ("read", "refused" or a fault), and details."""


def case(number: int, formats: Sequence[str]) -> tuple[random.Random, str]:
    chance = random.Random(number)
    return chance, chance.choices(formats, [FORMATS[name].weight for name in formats])[0]


def fault_of(error: BaseException, folder: Path) -> str:
    """Why an error is not clear, or an empty string."""
    text = str(error)
    own = type(error).__module__ == errors.__name__
    known = (FileNotFoundError, IsADirectoryError, PermissionError, ValueError, RuntimeError, AssertionError, OSError)
    # exactly these, as many libraries derive theirs from them
    if not own and type(error) not in known and type(error).__name__ != "UnpicklingError":
        return f"unclear error: {type(error).__name__}: {text[:500]}"
    if str(folder) not in text:
        return f"no file in the error: {type(error).__name__}: {text[:500]}"
    if not text.strip().rstrip(".:") or text.rstrip(". ").endswith(":"):
        return f"no cause in the error: {type(error).__name__}: {text[:500]}"
    return ""


class Reader:
    """Reads cases in this process."""

    def __init__(self, sound: Path) -> None:
        self._sound = sound
        self._expected: dict[str, Any] = {}
        self._work = Path(tempfile.mkdtemp(dir=sound.parent))

    def __call__(self, number: int, formats: Sequence[str]) -> tuple[str, str]:
        """What happened, and details."""
        chance, name = case(number, formats)
        form = FORMATS[name]
        if name not in self._expected:
            # more than once, for what is made at the first time and kept
            for _ in range(3):
                self._expected[name] = form.read(self._sound / name / "0")
        folder = self._work / name
        shutil.copytree(self._sound / name / "0", folder)
        changed, anew = damage(chance, folder, self._sound / name / "1")
        memory, files, start = _peak(), _open_files(), time.process_time()
        try:
            found, error = form.read(folder), None
        except Exception as raised:
            found, error = None, raised
            fault = fault_of(raised, folder)
            raised.__traceback__ = None
        else:
            # an old save, or a swap that leaves each file whole, is a sound file
            fault = ""
            protected = form.protected and all(n.endswith(form.protected) for n in changed)
            if protected and not anew and not self._sound_again(folder, name):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    if not _equal(found, self._expected[name]):
                        fault = f"other numbers without an error ({', '.join(changed)})"
        seconds, grown = time.process_time() - start, (_peak() - memory) / 1024
        if not fault and seconds > MOST_SECONDS:
            fault = f"takes {seconds:.1f} s of the processor"
        if not fault and grown > MOST_MEMORY:
            fault = f"takes {grown:.0f} MiB"
        if not fault and _open_files() > files:
            # libraries open some of their own when they are first needed
            files = _open_files()
            with contextlib.suppress(Exception):
                form.read(folder)
            if _open_files() > files:
                fault = f"leaves {_open_files() - files} files open"
        details = fault or (str(error) if error is not None else ", ".join(changed))
        shutil.rmtree(folder)
        return (f"fault in {name}" if fault else "refused" if error is not None else "read"), details

    def _sound_again(self, folder: Path, name: str) -> bool:
        """Whether each file is one of another save, whole."""
        whole = {p.read_bytes() for k in "01" for p in (self._sound / name / k).iterdir()}
        return all(p.is_file() and p.read_bytes() in whole for p in folder.iterdir())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        a, b = a.detach().numpy(), b.detach().numpy() if isinstance(b, torch.Tensor) else b
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return a == b


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _open_files() -> int:
    return psutil.Process().num_fds()


def make_sound(folder: Path, formats: Sequence[str]) -> None:
    """Two saves of each format."""
    for name in formats:
        for seed in (0, 1):
            place = folder / name / str(seed)
            place.mkdir(parents=True)
            FORMATS[name].make(place, seed)


def serve(connection: Any, sound: Path, formats: Sequence[str], errors_to: str) -> None:
    """Read the cases whose numbers arrive, until ``None`` does."""
    with open(errors_to, "ab", buffering=0) as log:
        os.dup2(log.fileno(), 2)  # what libraries print about damaged files
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # a file that asks for all memory gets an error, and is reported
    resource.setrlimit(resource.RLIMIT_AS, (24 * 2**30, 24 * 2**30))
    reader = Reader(sound)
    while (number := connection.recv()) is not None:
        connection.send((*reader(number, formats), psutil.Process().memory_info().rss // 1024))


def explore(numbers: Iterator[int], formats: Sequence[str] = tuple(FORMATS), seconds: float = 1e9) -> Iterator[Outcome]:
    """Read the cases of these numbers, one after the other, for a time; what happened to each."""
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="damaged-") as folder, contextlib.ExitStack() as stack:
        sound = Path(folder) / "sound"
        make_sound(sound, formats)
        process: Any = None
        memory: list[int] = []
        for number in numbers:
            if time.monotonic() > end:
                break
            if process is None:
                ours, theirs = context.Pipe()
                arguments = (theirs, sound, formats, os.path.join(folder, "errors"))
                process = context.Process(target=serve, args=arguments, daemon=True)
                process.start()
                theirs.close()
                stack.callback(process.kill)
                memory = []
            ours.send(number)
            fault = "hangs"
            try:
                if ours.poll(PATIENCE if memory else 3 * PATIENCE):
                    what, details, size = ours.recv()
                    memory.append(size)
                    yield number, case(number, formats)[1], what, details
                    continue
            except EOFError:
                process.join()
                fault = f"dies with {process.exitcode}"
            process.kill()
            process = None
            yield number, case(number, formats)[1], "fault", fault
        if len(memory) > 400:
            grown = (memory[-1] - memory[200]) / (len(memory) - 200)
            if grown > LEAK:
                yield -1, "", "fault", f"the process grows by {grown:.0f} KiB with each case"
            print(f"# the process grows by {grown:.1f} KiB with each case", file=sys.stderr)


def main() -> None:
    """Read damaged files for a time, and exit with 1 if any is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--first", type=int, default=10_000, help="number of the first case")
    parser.add_argument("--count", type=int, default=10**9, help="most cases")
    parser.add_argument("--formats", default=",".join(FORMATS), help="some of: %(default)s")
    parser.add_argument("--show", action="store_true", help="print every case")
    options = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    numbers = range(options.first, options.first + options.count)
    start = time.monotonic()
    faults = 0
    for number, name, what, details in explore(iter(numbers), options.formats.split(","), options.seconds):
        counts[f"{name} {what.split()[0]}"] += 1
        fault = what not in ("read", "refused")
        faults += fault
        if fault or options.show:
            print(f"case {number} ({name}): {what}: {details}", flush=True)
    print(dict(sorted(counts.items())))
    print(f"{sum(counts.values())} damaged files, {faults} faults, {time.monotonic() - start:.0f} s")
    raise SystemExit(faults > 0)


if __name__ == "__main__":
    main()
