"""What was communicated, to assert on: the fixture `comms`."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from localtensor._util.events import Call

SHOWN = 12  # calls in a repr


class Comms(Sequence["Call"]):
    """The parts that a rank took in collectives and messages so far, in order; each is a `localtensor._util.events.Call`.

    Live: what is called later is in it later.  `rank` None is all ranks, in the order in which it happened.

    >>> from localtensor._util.events import Call
    >>> log = [Call(0, "all_reduce", "0", (0, 1), 0, ("f32[4]",), 16), Call(1, "all_reduce", "0", (0, 1), 0, ("f32[4]",), 16)]
    >>> comms = Comms(lambda: log, rank=0)
    >>> comms
    Comms(rank 0: all_reduce #0 of f32[4])
    >>> len(comms), comms.kinds, comms.count("all_reduce"), comms.bytes, len(comms.of_all_ranks)
    (1, ['all_reduce'], 1, 16, 2)
    """

    def __init__(self, log: "Callable[[], Sequence[Call]]", rank: int | None, kind: str | None = None) -> None:
        self._log, self.rank, self._kind = log, rank, kind

    @property
    def calls(self) -> "list[Call]":
        """As they are now."""
        wanted = [call for call in self._log() if self.rank is None or call.rank == self.rank]
        return [call for call in wanted if self._kind is None or call.kind == self._kind]

    @property
    def of_all_ranks(self) -> "Comms":
        """The same log, with the calls of every rank."""
        return Comms(self._log, None, self._kind)

    def of(self, kind: str) -> "Comms":
        """The calls of one kind: "all_reduce", "broadcast", "send"."""
        return Comms(self._log, self.rank, kind)

    @property
    def kinds(self) -> list[str]:
        """The kind of each call, in order."""
        return [call.kind for call in self.calls]

    @property
    def bytes(self) -> int:
        """Of what the rank brought to all its calls."""
        return sum(call.bytes for call in self.calls)

    def count(self, value: Any) -> int:
        """How many calls there are of a kind; or how often a Call is in here."""
        return self.kinds.count(value) if isinstance(value, str) else self.calls.count(value)

    @overload
    def __getitem__(self, index: int) -> "Call": ...
    @overload
    def __getitem__(self, index: slice) -> "list[Call]": ...
    def __getitem__(self, index: Any) -> Any:
        return self.calls[index]

    def __len__(self) -> int:
        return len(self.calls)

    def __repr__(self) -> str:
        calls = self.calls
        told = [_told(call, with_rank=self.rank is None) for call in calls[:SHOWN]]
        told += [f"and {len(calls) - SHOWN} more"] if len(calls) > SHOWN else []
        return f"Comms({'all ranks' if self.rank is None else f'rank {self.rank}'}: {', '.join(told) or 'nothing yet'})"


def _told(call: "Call", *, with_rank: bool) -> str:
    who = f"rank {call.rank} " if with_rank else ""
    return f"{who}{call.kind} #{call.number}" + (f" of {', '.join(call.tensors)}" if call.tensors else "")
