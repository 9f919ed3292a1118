"""Faults of programs on symmetric memory: races, reads of what no rank has written, signals and channels that do not fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from localtensor._util.events import Place, Wait
from localtensor.errors import base


@dataclass(frozen=True, slots=True)
class MemoryAccess:
    """One access to symmetric memory: by which rank and stream, whether it writes, by which op, and in which line.

    `after` is the number of calls in the log of the run before it.
    """

    rank: int
    stream: str
    writes: bool
    op: str
    bytes: str
    place: Place | None
    after: int = 0

    def __str__(self) -> str:
        return f"{_who(self)} {_verb(self)} {self.bytes} by {self.op}{base.place_suffix(self.place)}"


DEFAULT_STREAM, IN_FLIGHT = "the default stream", "a call in flight"


class SymmetricRace(base.ProgramFault):
    """Two accesses to one symmetric buffer, of which one writes, and neither happens before the other.

    `first` ran first this time.  `buffer` names the buffer, `common` the bytes that both span, as (first, last + 1).
    `past` is the stream, of the first access's rank, that is in order with the second access, or of the second's rank
    with the first, where the access's own stream is not: (rank, name), or None.
    """

    def __init__(
        self,
        first: MemoryAccess,
        second: MemoryAccess,
        buffer: str,
        common: tuple[int, int],
        past: tuple[int, str] | None = None,
    ) -> None:
        self.first, self.second, self.buffer, self.common, self.past = first, second, buffer, common, past
        sentence = base.refusal_sentence(
            "symmetric memory",
            "order",
            f"bytes {common[0]} to {common[1] - 1} of {buffer}",
            f"{_who(first)} {_verb(first)} them and {_who(second)} {_verb(second)} them, and nothing orders the two",
            _missing_edge(first, second) if past is None else _missing_wait(first, second, *past),
        )
        lines = [f"  {first}", f"  {second}"]
        super().__init__(sentence, lines, [second.place, first.place], [second.rank, first.rank])


def _who(access: MemoryAccess) -> str:
    return f"rank {access.rank}" + ("" if access.stream == DEFAULT_STREAM else f" in {access.stream}")


def _verb(access: MemoryAccess) -> str:
    return "writes" if access.writes else "reads"


def _line(access: MemoryAccess) -> str:
    return f"line {access.place.line}" if access.place else "it"


def _missing_edge(first: MemoryAccess, second: MemoryAccess) -> str:
    """The order that the program lacks, in the direction in which the two ran."""
    if first.rank == second.rank and first.stream == IN_FLIGHT:
        return (
            f"Let rank {first.rank} wait for the call of {_line(first)}, by wait() of its Work, before {_line(second)}."
        )
    if first.rank == second.rank:
        return (
            f"Let {second.stream} of rank {second.rank} wait for {first.stream} (wait_stream, or an event recorded after "
            f"{_line(first)}) before {_line(second)}."
        )
    return (
        f"Let rank {second.rank} wait for a signal of rank {first.rank} before {_line(second)}, which rank {first.rank} puts "
        f"after {_line(first)}, or the other way round, or let both call barrier() in between."
    )


def _missing_wait(first: MemoryAccess, second: MemoryAccess, rank: int, past: str) -> str:
    """The order of streams that the program lacks, where the ranks are in order and a stream of one of them is not."""
    if first.stream == IN_FLIGHT:
        return (
            f"Let the call of {_line(first)} return on rank {rank}, by wait() of its Work, before a barrier or signal that "
            f"lets rank {second.rank} go on."
        )
    if rank == first.rank:
        return (
            f"Let {past} of rank {rank} wait for {first.stream} (wait_stream, or an event recorded after {_line(first)}) "
            f"before the call that lets rank {second.rank} go on."
        )
    return (
        f"Let {second.stream} of rank {rank} wait for {past} (wait_stream, or an event), which has waited for rank "
        f"{first.rank}, before {_line(second)}."
    )


class ReadUnwritten(base.ProgramFault):
    """A read of symmetric memory that no rank has written: it holds anything; here, NaN."""

    def __init__(self, access: MemoryAccess, buffer: str, bytes_unwritten: int, bytes_read: int) -> None:
        self.access, self.buffer = access, buffer
        few = "none of them was" if bytes_unwritten == bytes_read else f"{bytes_unwritten} of them were not"
        sentence = base.refusal_sentence(
            "symmetric memory",
            "read",
            f"{access.bytes} of {buffer}, by {access.op} on rank {access.rank}{base.place_suffix(access.place)}",
            f"{few} written by any rank, and symm_mem.empty leaves them as they are",
            "Write them first, as by zero_(), or read the part that was written.",
        )
        super().__init__(sentence, [f"  {access}"], [access.place], [access.rank])


class OutsideBuffer(base.Refusal, RuntimeError, call="symm_mem.{call}"):
    """A part of a symmetric buffer or signal pad that it does not have; a RuntimeError, as in torch."""

    REMEDY = "Ask for a part of what was allocated, or allocate more on every rank."


class NoSuchPeer(base.Refusal, RuntimeError, call="symm_mem.{call}", argument="{argument}", values="{argument}={peer}"):
    """A rank or channel that the group of a handle does not have; a RuntimeError, as in torch."""


class ForeignHandle(
    base.Refusal, RuntimeError, call="symm_mem.{call}", argument="handle", values="the handle of rank {owner}"
):
    """A handle that another rank than its own uses; in real processes no rank has the handle of another."""

    PROBLEM = "rank {caller} uses it"
    REMEDY = "Let each rank use the handle that its own call of symm_mem.rendezvous returned."


class NotSymmetric(base.Refusal, RuntimeError, call="symm_mem.{call}"):
    """A tensor that is not in symmetric memory, or not known to the group; a RuntimeError, as in torch."""

    PROBLEM = "it is not in symmetric memory that this group has exchanged ({detail})"
    REMEDY = "Make it by symm_mem.empty, and let all ranks of the group call symm_mem.rendezvous on it."


class SignalNotConsumed(base.ProgramFault):
    """Signals that no rank has waited for; a later user of the channel takes them for its own.

    `signals` are (sender, receiver, channel, line) each.
    """

    def __init__(self, signals: Sequence[tuple[int, int, int, Place | None]]) -> None:
        self.signals = tuple(signals)
        sender, receiver, channel, place = signals[0]
        more = f" and {len(signals) - 1} more" if len(signals) > 1 else ""
        sentence = base.refusal_sentence(
            "symm_mem.put_signal",
            "signal",
            f"channel {channel}, from rank {sender} to rank {receiver}{base.place_suffix(place)}{more}",
            "the function returned, and no wait_signal has consumed it",
            f"Let rank {receiver} call wait_signal({sender}, channel={channel}), or leave the signal out.",
        )
        lines = [
            f"  rank {a} put a signal for rank {b} on channel {c}{base.place_suffix(at)}" for a, b, c, at in signals
        ]
        ranks = [rank for a, b, *_ in signals for rank in (a, b)]
        super().__init__(sentence, base.truncate_lines(lines), [at for *_, at in signals], ranks)


class PadReused(base.ProgramFault):
    """One word of a signal pad used for two things at a time: a signal is taken for another, or never becomes free.

    `put` and `taken` are (rank, call, line) each: who filled the word, and who else uses it.
    """

    def __init__(
        self,
        put: tuple[int, str, Place | None],
        taken: tuple[int, str, Place | None],
        channel: int,
        problem: str,
        waits: Sequence[Wait] = (),
    ) -> None:
        self.put, self.taken, self.channel = put, taken, channel
        sentence = base.refusal_sentence(
            f"symm_mem.{taken[1]}",
            "channel",
            f"channel={channel} on rank {taken[0]}{base.place_suffix(taken[2])}",
            problem,
            "Wait for the signal first, or use a channel of its own for each purpose.",
        )
        lines = [f"  rank {rank}: {call}{base.place_suffix(at)}" for rank, call, at in (put, taken)]
        super().__init__(sentence, [*lines, *base.wait_lines(waits)], [taken[2], put[2]], [taken[0], put[0]])


class ChannelsDiffer(base.ProgramFault):
    """Ranks of one group use unlike channels and never meet: barriers, or a signal and the wait for it.

    `channels` are those of the ranks, `places` in the same order the lines of their calls.
    """

    def __init__(
        self, call: str, waits: Sequence[Wait], channels: dict[int, int], places: dict[int, Place | None]
    ) -> None:
        self.waits, self.channels = tuple(waits), dict(channels)
        meets = "a barrier ends when all ranks of the group have called it on the same channel"
        if call != "barrier":
            meets = "a wait ends by a signal of its own channel, and the one that this rank has put is on another"
        remedy = "Pass the same channel on every rank, and call them in one order."
        values = base.facts_by_rank({rank: f"channel={channel}" for rank, channel in channels.items()})
        sentence = base.refusal_sentence(f"symm_mem.{call}", "channel", values, meets, remedy)
        details = [*base.likely_culprit_lines(channels), *base.wait_lines(waits)]
        order = [rank for _, ranks in base.minority_first(channels) for rank in ranks]
        super().__init__(sentence, details, [places.get(rank) for rank in order], order)
