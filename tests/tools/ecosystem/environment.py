"""The environment of these programs: the libraries on torch for CPUs, made once and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tools.versions.environments import READY, NotAvailable

TORCH = "torch==2.13.0"
LIBRARIES = (
    ("accelerate", "transformers", "lightning", "torchmetrics", "torchao", "megatron-core", "datasets", "wandb"),
    ("peft", "trl", "sentence-transformers", "pytorch-ignite", "hydra-core", "tensorboard", "schedulefree"),
    ("torchtitan", "triton", "torchdata", "fairscale", "pytorch-metric-learning", "deepspeed"),
)
"""What is installed, in this order; the last ones are built from source against what is there already."""
OURS = ("expecttest", "hypothesis", "jinja2", "pytest", "rich", "setuptools<82", "typer", "wheel")
NOT_HERE = "torchvision"
"""The index has it for GPUs alone; with torch for CPUs its import fails, and so does each library that tries it."""


def python_of(folder: Path) -> Path:
    """The Python of the environment in `folder`; makes it where it is not whole.  Raises NotAvailable."""
    python = folder / "bin" / "python"
    if (folder / READY).exists():
        return python
    _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    _run([*pip, TORCH, "numpy", *OURS])
    for names in LIBRARIES:
        _run([*pip, "--no-build-isolation", TORCH, *names])
    _run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", NOT_HERE])
    (folder / READY).write_text(f"{TORCH}\n")
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
        raise NotAvailable(f"{' '.join(command[-4:])}: {lines[0] if lines else 'no reason given'}")
