"""Try an installed wheel as a user would.

Runs with the Python of the environment that the wheel is in, from any folder: ``.venv-wheel/bin/python .ci/smoke.py``.
The environment needs the extra ``template`` and one ONNX Runtime.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = Path(sys.executable).with_name("lightning-ort")
COMPILED = """
import torch
step = torch.compile(lambda x: (x.sin() * 2).sum(), backend="lightning_ort")
x = torch.linspace(0, 1, 5, requires_grad=True)
step(x).backward()
torch.testing.assert_close(x.grad, 2 * x.detach().cos())
"""
INSTALLED = """
import lightning_ort, pathlib
from lightning.pytorch.strategies import StrategyRegistry
assert "ort" in StrategyRegistry
folder = pathlib.Path(lightning_ort.__file__).parent
assert (folder / "py.typed").is_file() and (folder / "_template" / "README.md").is_file()
print(folder)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What the command prints; ends this process where it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", *(str(word) if "\n" not in str(word) else "..." for word in command), flush=True)
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"status {done.returncode}")
    return done.stdout


def main() -> None:
    version = importlib.metadata.version("lightning-ort")
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        folder = run(sys.executable, "-c", INSTALLED, cwd=here)
        if not folder.startswith(sys.prefix):
            sys.exit(f"expected the package below {sys.prefix}")
        if run(COMMAND, "--version", cwd=here) != f"{version}\n":
            sys.exit(f"expected {version}")
        run(COMMAND, "doctor", cwd=here)
        run(sys.executable, "-c", COMPILED, cwd=here)
        run(COMMAND, "new", "project", cwd=here)
        run(sys.executable, "-m", "pytest", "-q", cwd=here / "project")
    print(f"lightning-ort {version} works as installed.")


if __name__ == "__main__":
    main()
