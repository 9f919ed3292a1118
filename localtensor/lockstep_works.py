"""What an asynchronous collective hands back in lockstep: it is done at once, and still has to be waited for."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from localtensor.events import Call
from localtensor.families import Family
from localtensor.frames import origin
from localtensor.kernels import Brought
from localtensor.offers import flat
from localtensor.placement import shape_text
from localtensor.reductions import name_of


@functools.cache
def over() -> Any:
    """A Work that is over, as the dispatcher carries it."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    cpp: Any = torch._C._distributed_c10d
    return cpp._create_work_from_future(future).boxed()


class LockstepWork(Work):
    """The Work of all ranks' parts in one collective; until it is waited for, its tensors are not to be written."""

    def __init__(self, mode: Any, kind: str, brought: Brought, whole: Family) -> None:
        super().__init__()
        self._mode = mode
        self.tensors = [x for x in (*flat(brought.reads), *brought.writes)]
        self.outputs = list(brought.writes)
        self.call = _call(kind, brought, whole)
        mode.in_flight.append(self)

    def wait(self, timeout: object = None) -> bool:
        if self in self._mode.in_flight:
            self._mode.in_flight.remove(self)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.wait()

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.result())
        return future


def _call(kind: str, brought: Brought, whole: Family) -> Call:
    tensors = tuple(_texts(brought))
    rank = whole.groups[0][0]
    place = origin(sys._getframe(3)).place
    op = None if brought.op is None else name_of(brought.op)
    return Call(rank, kind, "lockstep", whole.groups[0], 0, tensors, op=op, place=place)


def _texts(brought: Brought) -> Iterator[str]:
    for x in flat(brought.reads):
        yield shape_text(x.dtype, [int(size) if isinstance(size, int) else 0 for size in x.shape])
