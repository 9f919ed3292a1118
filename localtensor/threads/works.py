"""The Work that a rank's call returns, its future, and how long it is waited for."""

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from localtensor.collectives.rendezvous import Contribution, Ticket
from localtensor.threads.simulation import Simulation


class RankWork(Work):
    """The Work of one rank's call; torch's C++ calls `wait` and `get_future`, Python the rest.

    It is named as gloo's: programs print and compare the name of its type.
    """

    def __init__(self, simulation: Simulation, ticket: Ticket, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._simulation = simulation
        self._ticket = ticket
        self.outputs = list(outputs)
        self.on_wait: Callable[[], None] | None = None  # called once, at the first wait
        self.waits_left = 1  # a functional collective waits once for each of its outputs
        self.release: Callable[[], None] | None = None  # called once, after the last wait
        self.abandoned = False  # the rank has ended, and torch waits once more
        self.lists = 1  # of outputs, in `outputs` one after the other

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the outputs hold the result.

        Raises `CollectiveTimeout` if `timeout`, or the group's own, passes on the simulated clock: it moves when no rank
        can run.
        """
        simulation, ticket = self._simulation, self._ticket
        self.waits_left -= 1
        if self.waits_left == 0 and self.release is not None:
            release, self.release = self.release, None  # it refers to this work: a reference cycle
            release()
        if self.abandoned or (ticket.waited and ticket.done and ticket.deliver is None):
            return True
        simulation.enter()
        self.complete(timeout)
        if ticket.part.kind == "barrier":
            simulation.kernels.complete_before(ticket)
        return True

    def complete(self, timeout: timedelta | None = None) -> None:
        on_wait, self.on_wait = self.on_wait, None
        if on_wait is not None:
            on_wait()
        self._simulation.wait(self._ticket, self._ticket.part.time_limit(timeout))

    def abandon(self) -> None:
        """The rank has ended: the outputs get the result as soon as it is there."""
        self.abandoned = True
        if self._ticket.done:
            self._ticket.hand_out()
        self._ticket.left = True

    def is_before(self, part: Contribution) -> bool:
        """Whether this is the Work of an earlier collective of the same group, which has not been waited for."""
        mine = self._ticket.part
        return (
            mine.group is part.group
            and mine.kind not in ("send", "recv")
            and mine.number < part.number
            and not self._ticket.waited
        )

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether the outputs hold the result: torch's documentation demands no wait() after True."""
        done = self._simulation.poll(self._ticket)
        if done:
            self.wait()
        return done

    def is_success(self) -> bool:
        return self._ticket.done

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        self.wait()
        return self.outputs

    def source_rank(self) -> int:
        """The group rank of the sender that a receive was matched with."""
        self.wait()
        part = self._ticket.part
        return part.group.ranks.index(part.rank if part.peer is None else part.peer)

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the outputs: for Python one that waits when it is used, for C++, which cannot, a completed one."""
        caller = sys._getframe(1).f_code
        future = _WaitingFuture(self)
        if "get_future" not in caller.co_names:
            future.wait()
        return future


# Programs and logs name the type of a Work: as on gloo, where it is torch's own.
RankWork.__name__, RankWork.__qualname__, RankWork.__module__ = Work.__name__, Work.__qualname__, Work.__module__


class _WaitingFuture(torch.futures.Future):
    """A future that is completed by waiting for its Work; every method waits."""

    def __init__(self, work: RankWork) -> None:
        super().__init__()
        self._work: RankWork | None = work

    def settle(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self.set_result(_value_of_future(work.result(), work.lists))

    def wait(self) -> Any:
        self.settle()
        return super().wait()

    def value(self) -> Any:
        self.settle()
        return super().value()

    def done(self) -> bool:
        if self._work is not None and self._work.is_completed():
            self.settle()
        return super().done()

    def then(self, callback: Callable[..., Any]) -> torch.futures.Future[Any]:
        self.settle()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[..., Any]) -> None:
        self.settle()
        super().add_done_callback(callback)


def _value_of_future(outputs: list[Tensor], lists: int) -> list[Any]:
    """The outputs as gloo's future has them: of several lists, as lists."""
    size = len(outputs) // lists
    return outputs if lists == 1 else [outputs[i * size : (i + 1) * size] for i in range(lists)]
