"""Two runs of one program: by torchrun, and by `localtensor run`; what each rank saved is compared."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LIMIT = 300  # seconds for one run
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "WANDB_MODE": "offline", "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Program:
    """A script of this folder or, if `name` has no slash, a module that is installed; with its arguments."""

    name: str
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.name.removesuffix(".py"), *self.arguments))

    def command(self) -> list[str]:
        name = [str(HERE / self.name)] if "/" in self.name else ["-m", self.name]
        return [*name, *self.arguments]


@dataclass(frozen=True, slots=True)
class Done:
    """One run: exit code (None: stopped at the limit), seconds, what each rank saved, and the end of its output."""

    code: int | None
    seconds: float
    saved: dict[int, Any]
    output: str


@dataclass(slots=True)
class Differences:
    """What differs between two values: how many leaves were compared, how many differ, the largest difference, where."""

    values: int = 0
    differ: int = 0
    largest: float = 0.0
    where: list[str] = field(default_factory=list)

    def note(self, where: str, by: float) -> None:
        self.differ += 1
        self.largest = max(self.largest, by)
        self.where.append(where)


def run(python: Path, program: Program, ranks: int, *, threads: bool) -> Done:
    """Run the program on so many ranks: on rank threads, or by torchrun."""
    way = ["-m", "localtensor", "run", "-n", str(ranks)] if threads else [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        work, kept = Path(folder) / "work", Path(folder) / "kept"
        work.mkdir()
        kept.mkdir()
        env = {
            **os.environ, **OFFLINE, "ECOSYSTEM_KEEP": str(kept), "HF_HOME": str(work / "home"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)]),
        }  # fmt: skip
        start = time.perf_counter()
        started = subprocess.Popen(
            [str(python), *way, *program.command()], cwd=work, env=env, text=True, errors="replace",
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            output = started.communicate(timeout=LIMIT)[0]
            code = started.returncode
        except subprocess.TimeoutExpired:
            started.terminate()  # torchrun ends its workers, which are in sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
            output = started.communicate()[0]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # what the launcher left behind
        seconds = time.perf_counter() - start
        saved = {int(file.stem[4:]): torch.load(file, weights_only=True) for file in kept.glob("rank*.pt")}
    return Done(code, seconds, saved, output)


def differences(one: Any, other: Any) -> Differences:
    """Compares two values of dicts, lists, tensors, numbers and texts, to the last bit."""
    found = Differences()
    _compare(one, other, "", found)
    return found


def _compare(one: Any, other: Any, where: str, found: Differences) -> None:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            _compare(one[key], other[key], f"{where}.{key}", found)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (mine, real) in enumerate(zip(one, other, strict=True)):
            _compare(mine, real, f"{where}[{index}]", found)
    elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        found.values += 1
        if one.shape != other.shape or one.dtype != other.dtype:
            found.note(where, float("inf"))
        elif not _same_bits(one, other):
            found.note(where, float((one.double() - other.double()).abs().max()))
    else:
        found.values += 1
        if type(one) is not type(other) or (one != other and not (one != one and other != other)):
            numbers = isinstance(one, int | float) and isinstance(other, int | float)
            found.note(where, abs(one - other) if numbers else float("inf"))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, real = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(mine, real)
