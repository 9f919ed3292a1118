"""Happens-before between the streams of all ranks, by vector clocks.

A stream is an ordered queue: what a rank issues to it happens in program order.  Each rank begins with one, its default
stream.  What the rank itself has waited for (a collective, a key of a store, `synchronize`) happens before all that it
issues later, to any stream.  A clock holds, for each stream, up to which of its times everything is known to have
happened.  A stream's time advances when it publishes its clock: to a barrier, a signal, an event, a collective.
"""

from collections.abc import Container, Mapping
from threading import get_ident

from localtensor.errors.symmetric import DEFAULT_STREAM, IN_FLIGHT

Clock = dict[int, int]  # number of a stream -> time


def join(clock: Clock, other: Mapping[int, int]) -> None:
    """Add to a clock what another one knows.

    >>> clock = {0: 3, 1: 1}
    >>> join(clock, {1: 2, 2: 5})
    >>> clock
    {0: 3, 1: 2, 2: 5}
    """
    for number, time in other.items():
        if clock.get(number, 0) < time:
            clock[number] = time


class Lane:
    """One stream of one rank: its clock, and its name for messages."""

    __slots__ = ("clock", "host", "name", "number", "rank", "seen")

    def __init__(self, number: int, rank: int, name: str, host: "Host") -> None:
        self.number, self.rank, self.name, self.host = number, rank, name, host
        self.clock: Clock = {number: 1}
        self.seen = 0  # the version of the host's clock that this one includes

    @property
    def time(self) -> int:
        return self.clock[self.number]

    def knows(self, number: int, time: int) -> bool:
        """Whether what that stream did at that time happens before what is issued to this one now."""
        return self.clock.get(number, 0) >= time

    def follow_host(self) -> None:
        """What is issued now happens after all that the rank has waited for."""
        if self.seen != self.host.version:
            self.seen = self.host.version
            join(self.clock, self.host.clock)

    def publish(self) -> Clock:
        """All that has happened in this stream so far; what follows is not part of it."""
        self.follow_host()
        published = dict(self.clock)
        self.clock[self.number] += 1
        return published

    def learn(self, clock: Mapping[int, int]) -> None:
        """What follows in this stream happens after what the clock holds."""
        join(self.clock, clock)


class Host:
    """What one rank has waited for, its streams, and the current one of each of its threads."""

    __slots__ = ("_currents", "clock", "default", "in_flight", "lanes", "version")

    def __init__(self) -> None:
        self.clock: Clock = {}
        self.version = 0
        self.lanes: list[Lane] = []
        self.default: Lane
        self._currents: dict[int, Lane] = {}  # by thread; the default stream where it has set none
        self.in_flight: dict[bool, Lane] = {}  # of collectives and messages: by whether it writes

    @property
    def current(self) -> Lane:
        """The current stream of the calling thread."""
        return self._currents.get(get_ident(), self.default)

    @current.setter
    def current(self, lane: Lane) -> None:
        self._currents[get_ident()] = lane

    def end_thread(self) -> None:
        """The calling thread ends."""
        self._currents.pop(get_ident(), None)

    def learn(self, clock: Mapping[int, int]) -> None:
        """What this rank issues from now on, to any stream, happens after what the clock holds."""
        join(self.clock, clock)
        self.version += 1


class Order:
    """The streams of all ranks.

    >>> order = Order(2)
    >>> first, second = (host.current for host in order.hosts)
    >>> before = first.time
    >>> second.learn(first.publish())
    >>> second.knows(first.number, before), second.knows(first.number, first.time)
    (True, False)
    """

    def __init__(self, ranks: int) -> None:
        self.lanes: list[Lane] = []
        self.hosts = [Host() for _ in range(ranks)]
        for rank, host in enumerate(self.hosts):
            host.default = self.new_lane(rank, DEFAULT_STREAM)

    def new_lane(self, rank: int, name: str = "") -> Lane:
        """A new stream of the rank, which knows what the rank has waited for."""
        number = len(self.lanes)
        host = self.hosts[rank]
        lane = Lane(number, rank, name or f"stream {len(host.lanes)}", host)
        self.lanes.append(lane)
        host.lanes.append(lane)
        return lane

    def in_flight(self, rank: int, *, writes: bool) -> Lane:
        """Where a collective or message that is issued now reads, or writes, until it is waited for."""
        host = self.hosts[rank]
        if writes not in host.in_flight:
            lane = host.in_flight[writes] = Lane(len(self.lanes), rank, IN_FLIGHT, host)
            self.lanes.append(lane)
        lane = host.in_flight[writes]
        lane.follow_host()
        host.current.follow_host()
        lane.learn(host.current.publish())
        return lane

    def release(self, rank: int) -> Clock:
        """What a blocking call of the rank publishes: its current stream so far, and what it has waited for."""
        return self.hosts[rank].current.publish()

    def acquire(self, rank: int, clock: Mapping[int, int]) -> None:
        """A blocking call of the rank has returned: what follows on it happens after what the clock holds."""
        self.hosts[rank].learn(clock)

    def known_to_all(self, ranks: Container[int]) -> Clock:
        """The times up to which each stream of these ranks is known to all the streams of these ranks.

        What is in flight follows the stream that issues it: what that one knows, it will know.  A rank that has more
        streams than one may make another, which begins with what the rank itself has waited for.
        """
        lanes = [lane for lane in self.lanes if lane.rank in ranks]
        streams = [lane for lane in lanes if lane.name != IN_FLIGHT]
        for lane in streams:
            lane.follow_host()
        clocks = [lane.clock for lane in streams]
        clocks += [lane.host.clock for lane in streams if lane is lane.host.default and len(lane.host.lanes) > 1]
        return {lane.number: min(clock.get(lane.number, 0) for clock in clocks) for lane in lanes}
