"""Programs on symmetric memory with labels: right ones, and faulty ones with the kind of fault and the lines to name.

A line to name ends in the comment `# here`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from tests.device import MESH


@dataclass(frozen=True)
class Labelled:
    """A program, the number of its ranks, and for a faulty one the class of fault and the names of errors that fit."""

    body: Callable[[], object]
    ranks: int
    kind: str = ""
    errors: tuple[str, ...] = ()
    lines: frozenset[int] = field(default=frozenset())
    schedules: bool = False  # the fault shows only in some orders of the ranks

    @property
    def name(self) -> str:
        return self.body.__name__


RIGHT: list[Labelled] = []
FAULTY: list[Labelled] = []


def right(ranks=4):
    """Registers a program without a fault."""

    def add(body):
        RIGHT.append(Labelled(body, ranks))
        return body

    return add


def faulty(kind, errors, ranks=2, schedules=False):
    """Registers a program with one fault."""

    def add(body):
        source = inspect.getsource(body).splitlines()
        first = body.__code__.co_firstlineno
        lines = frozenset(first + at for at, line in enumerate(source) if line.rstrip().endswith("# here"))
        assert lines, body
        FAULTY.append(Labelled(body, ranks, kind, tuple(errors.split()), lines, schedules))
        return body

    return add


def group():
    return dist.group.WORLD


def name():
    return dist.group.WORLD.group_name


def buffer(*size, dtype=torch.float32, fill=None):
    """A symmetric tensor of this rank, filled or not, and its handle."""
    mine = symm_mem.empty(*size, dtype=dtype, device=MESH)
    if fill is not None:
        mine.fill_(fill)
    return mine, symm_mem.rendezvous(mine, group())


def of(handle, peer, *size, dtype=torch.float32, at=0):
    return handle.get_buffer(peer % handle.world_size, size, dtype, at)


def flag(handle, owner, word=0):
    """A word of a rank's signal pad, beyond those of its channels."""
    return handle.get_signal_pad(owner % handle.world_size, (1,), torch.int32, 2000 + word)


def until(word, value):
    """Poll a flag until it has reached a value."""
    while word.item() < value:
        pass
