"""Temporary replacements of attributes, and a per-object version of torch.distributed's process-wide world."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Inside the block `owner.name` is `value`; afterwards it is restored, or deleted if the owner had none of its own.

    >>> from types import SimpleNamespace
    >>> box = SimpleNamespace(x=1)
    >>> with replaced(box, "x", 2), replaced(box, "y", 3):
    ...     box
    namespace(x=2, y=3)
    >>> box
    namespace(x=1)
    """
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def wrapped(owner: object, name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside the block `owner.name(...)` calls `around(original, ...)`, for functions and methods alike."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def ours(*args: object, **kwargs: object) -> Any:
        return around(original, *args, **kwargs)

    return replaced(owner, name, ours)


class IndependentWorld(c10d._World):
    """The world of torch.distributed (its process groups) with values of its own: torch's class keeps them in its module."""

    def __init__(self) -> None:
        super().__init__()
        self.group_count = 0


def _own(name: str) -> property:
    def read(self: IndependentWorld) -> object:
        return self.__dict__.setdefault(f"_own_{name}", {})

    def write(self: IndependentWorld, value: object) -> None:
        self.__dict__[f"_own_{name}"] = value

    return property(read, write)


for _name, _value in vars(c10d._World).items():
    if isinstance(_value, property) and _name not in ("default_pg", "pg_coalesce_state", "comms", "pg_config_info"):
        setattr(IndependentWorld, _name, _own(_name))


def left_alone_by_the_compiler(function: Any) -> None:
    """Mark a function so that torch's compiler runs it, and what it calls, as it is written.

    `torch._disable_dynamo` does the same, and imports the compiler, which takes seconds.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
