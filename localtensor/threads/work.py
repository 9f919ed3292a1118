"""What an asynchronous collective hands back."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from localtensor.collectives.rendezvous import Ticket
from localtensor.threads.simulation import Simulation


class RankWork(Work):
    """The Work of one rank's part; torch's C++ calls `wait` and `get_future`, Python the rest."""

    def __init__(self, simulation: Simulation, ticket: Ticket, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._simulation = simulation
        self._ticket = ticket
        self.outputs = list(outputs)
        self.settled: Callable[[], None] | None = None  # called once, when it is waited for
        self.waits_left = 1  # a functional collective waits once for each of its outputs
        self.forget: Callable[[], None] | None = None  # called once, when nobody will wait for it again
        self.abandoned = False  # the rank has ended, and torch asks for it once more

    def wait(self, timeout: object = None) -> bool:
        """The collective is over and its outputs hold its result.  A deadlock is found at once: no time limit."""
        simulation, ticket = self._simulation, self._ticket
        self.waits_left -= 1
        if self.waits_left == 0 and self.forget is not None:
            forget, self.forget = self.forget, None  # it knows this work: a circle, else, that only the collector finds
            forget()
        if self.abandoned or (ticket.waited and ticket.deliver is None):
            return True
        simulation.rank()
        settled, self.settled = self.settled, None
        if settled is not None:
            settled()
        simulation.wait(ticket)
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        """Once it says so, the outputs can be used: torch's documentation asks for no wait() after that."""
        done = self._simulation.peek(self._ticket)
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
        """The group rank of the sender that a receive has met."""
        self.wait()
        part = self._ticket.part
        return part.group.ranks.index(part.rank if part.peer is None else part.peer)

    _source_rank = source_rank

    def get_future(self) -> "torch.futures.Future[Any]":
        """A future of the outputs.  Python's waits when it is asked; C++, which cannot, gets one that is over."""
        asker = sys._getframe(1).f_code
        future = _LateFuture(self)
        if "get_future" not in asker.co_names:
            future.wait()
        return future


class _LateFuture(torch.futures.Future):
    """Done when its work has been waited for; every question waits."""

    def __init__(self, work: RankWork) -> None:
        super().__init__()
        self._work: RankWork | None = work

    def settle(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self.set_result(work.result())

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

    def then(self, callback: Any) -> Any:
        self.settle()
        return super().then(callback)

    def add_done_callback(self, callback: Any) -> None:
        self.settle()
        super().add_done_callback(callback)
