"""Rules modules as a user would write them, each with tiny ops of its own, and what they leave behind undone."""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

from strategies.torch_api import dtensor

HEAD = """
import faulthandler
import os
import signal
import time

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# A test may import this twice, and an op is defined but once: the library outlives the module.
LIB = torch.lib_{space} = getattr(torch, "lib_{space}", None) or torch.library.Library("{space}", "FRAGMENT")


def die():
    faulthandler.disable()  # pytest's would print all that it knows
    os.kill(os.getpid(), signal.SIGSEGV)


R, S0, S1 = [Replicate()], [Shard(0)], [Shard(1)]


def op(name, function, *rows):
    if not hasattr(torch.ops.{space}, name):
        LIB.define(f"{{name}}(Tensor x) -> Tensor")
        LIB.impl(name, function, "CPU")
        LIB.impl(name, torch.empty_like, "Meta")
    if rows:
        register_sharding(getattr(torch.ops.{space}, name).default)(lambda x: list(rows))
"""
RIGHT_AND_WRONG = """
op("running", lambda x: x.cumsum(0), (R, R), (S1, S1), (S0, S0))
op("twice", lambda x: x * 2, (R, R), (S0, S0), (S1, S1))
"""


def write(folder: Path, name: str, body: str) -> str:
    """The name of a module that is now there; its ops live in a namespace of the same name."""
    (folder / f"{name}.py").write_text(HEAD.format(space=name) + body)
    return name


@contextlib.contextmanager
def undone() -> Iterator[None]:
    """DTensor's registries, the modules, the path and the silence of a run are put back."""
    path, modules, silence = list(sys.path), set(sys.modules), logging.root.manager.disable
    with warnings.catch_warnings(), dtensor.registrations_restored():
        try:
            yield
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if not name.startswith(("torch", "numpy", "strategies", "localtensor", "multiprocessing")):
                    del sys.modules[name]
            logging.disable(silence)
