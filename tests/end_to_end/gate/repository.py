"""Somebody's repository: a package with two ops and their rules, in commits; and the gate, run as its author would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.strategies.edits import commit, git
from tests.tools import warm

COMMAND = Path(sys.executable).with_name("localtensor")
BASELINE = "localtensor-baseline.json"
FILES = {
    "my_ops/__init__.py": "",
    "my_ops/ops.py": '''"""Two ops."""

import torch


@torch.library.custom_op("my_ops::running", mutates_args=())
def running(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(0)


@torch.library.custom_op("my_ops::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


running.register_fake(torch.empty_like)
twice.register_fake(torch.empty_like)
''',
    "my_ops/rules.py": '''"""How the two ops are sharded."""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor.experimental import register_sharding

from my_ops import ops


@register_sharding(torch.ops.my_ops.running.default)
def running_rule(x):
    whole = ([Replicate()], [Replicate()])
    columns = [([Shard(dim)], [Shard(dim)]) for dim in range(1, x.ndim)]
    return [whole, *columns]


@register_single_dim_strategy(torch.ops.my_ops.twice.default)
def twice_rule(op, args, kwargs):
    return [[Shard(dim), Shard(dim)] for dim in range(len(args[0].shape))]
''',
}
RIGHT, WRONG = "range(1, x.ndim)", "range(x.ndim)"
"""A rank does not know the rows above its own, so that rows are wrong for a running sum."""


@dataclass(frozen=True)
class Ran:
    """One run of the gate: the exit code, what it printed, what it wrote as JSON, the baseline after it, its seconds."""

    code: int
    out: str
    err: str
    seconds: float
    told: dict[str, Any] = field(default_factory=dict)
    baseline: dict[str, Any] = field(default_factory=dict)


def made(folder: Path) -> Path:
    """The repository, with one commit."""
    git(folder, "init", "-q")
    for path, text in FILES.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    commit(folder)
    return folder


def edit(folder: Path, path: str, old: str, new: str) -> str:
    """A commit with this edit; its name."""
    file = folder / path
    text = file.read_text()
    assert old in text, f"{old!r} is not in {path}"
    file.write_text(text.replace(old, new))
    return commit(folder)


def gate(folder: Path, *options: str) -> Ran:
    """`localtensor gate --rules my_ops.rules` with these options."""
    told = folder.parent / "told.json"
    told.unlink(missing_ok=True)
    found = run(folder, str(COMMAND), "gate", "--rules", "my_ops.rules", "--json", str(told), *options)
    baseline = folder / BASELINE
    return Ran(
        *found, json.loads(told.read_text()) if told.exists() else {},
        json.loads(baseline.read_text()) if baseline.exists() and found[0] != 2 else {},
    )  # fmt: skip


def run(folder: Path, *command: str, **variables: str) -> tuple[int, str, str, float]:
    """The exit code, standard output and error, and the seconds of a command in that folder."""
    start = time.perf_counter()
    names = {"COLUMNS": "300", "PATH": f"{COMMAND.parent}{os.pathsep}{os.environ['PATH']}", **variables}
    environ = {**os.environ, **names}
    if command[0] == str(COMMAND):
        done = warm.run(command, cwd=folder, env=environ)
    else:
        done = subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
    return done.returncode, done.stdout, done.stderr, time.perf_counter() - start
