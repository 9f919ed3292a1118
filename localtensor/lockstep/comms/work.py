"""The Work of an asynchronous collective in lockstep: complete at once, but its buffers stay in use until wait()."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from localtensor._util.call_sites import origin
from localtensor._util.events import Call, Place
from localtensor.collectives.argument_checks import flat_tensors
from localtensor.collectives.c10d_table import CallArguments
from localtensor.layout.reductions import reduction_name
from localtensor.layout.spec import shape_text
from localtensor.lockstep.comms.stacked_collectives import GroupFamily
from localtensor.lockstep.values.local_tensor import LocalTensor, Mode


class LockstepWork(Work):
    """The Work of all ranks in one collective.

    Until it is waited for, the tensors that it reads must not be written, and its outputs neither read nor written.
    """

    def __init__(self, mode: Mode, kind: str, brought: CallArguments, family: GroupFamily) -> None:
        super().__init__()
        self._mode = mode
        self.reads = list(flat_tensors(brought.reads))
        self.outputs = list(brought.writes)
        self._described: Any = (kind, brought, family, origin(sys._getframe(4)).place)
        mode.in_flight.append(self)

    def calls(self) -> list[Call]:
        """The call of each rank, for errors."""
        kind, brought, family, place = self._described
        return calls_of_ranks(kind, brought, family, place, [rank for group in family.groups for rank in group])

    def wait(self, timeout: object = None) -> bool:
        if self in self._mode.in_flight:
            self._mode.in_flight.remove(self)
            self.reads, self._described = [], None
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """True, and the outputs can be used: torch's documentation asks for no wait() after that."""
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


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are one object, or views of one memory."""
    if x is y:
        return True
    mine, theirs = _outside_address(x), _outside_address(y)
    if mine is not None or theirs is not None:
        return mine is not None and mine == theirs
    memory = getattr(x, "_memory", None)
    return memory is not None and memory is getattr(y, "_memory", None)


def _outside_address(x: Tensor) -> int | None:
    """The address of the memory of a tensor made outside of the mode; None if it was made inside."""
    if isinstance(x, LocalTensor):
        if x._memory is None or not x._memory.outside:
            return None
        x = x._cells[0]
    return x.untyped_storage().data_ptr()


def calls_of_ranks(
    kind: str, brought: CallArguments, family: GroupFamily, place: Place | None, ranks: Sequence[int]
) -> list[Call]:
    """The calls of these ranks in a collective, for errors."""
    op = None if brought.op is None else reduction_name(brought.op)
    found = []
    for rank in ranks:
        group = family.group_of(rank)
        root = None if brought.root is None else group[brought.root]
        mine = [x.__localtensor_on__(rank) if isinstance(x, LocalTensor) else x for x in flat_tensors(brought.reads)]
        texts = tuple(shape_text(x.shape, x.dtype) for x in mine)
        found.append(Call(rank, kind, "lockstep", group, 0, texts, op=op, root=root, place=place))
    return found
