"""Stand-ins for torch.cuda's streams and events in a rank where there is no GPU.

An op runs when it is issued; a stream counts for the order of accesses only.  So the values are those of a run in which
each op ends before the next one begins, and a race between streams is found all the same.
"""

from typing import Any

import torch

from localtensor._util.ambient import simulation_of_this_rank
from localtensor.errors import NotServed
from localtensor.threads.symmetric.memory import memory_of
from localtensor.threads.symmetric.order import Clock, Host, Lane


def _host() -> Host:
    simulation = simulation_of_this_rank()
    if simulation is None:
        raise NotServed("torch.cuda.Stream", "this thread is no rank, and this machine has no GPU", gloo_has_it=False)
    host: Host = memory_of(simulation).order.hosts[simulation.rank()]
    return host


class RankStream:
    """A stream of one rank, as torch.cuda.Stream."""

    device, device_index, device_type, priority = torch.device("cuda", 0), 0, 1, 0

    def __init__(self, device: object = None, priority: int = 0, lane: Lane | None = None, **kwargs: object) -> None:
        if lane is None:
            _host()
            simulation = simulation_of_this_rank()
            lane = memory_of(simulation).order.new_lane(simulation.rank())  # type: ignore[arg-type, union-attr]
        self.lane, self.priority = lane, priority
        self._before: list[Lane] = []

    @property
    def stream_id(self) -> int:
        return self.lane.number

    cuda_stream = stream_id

    def wait_stream(self, other: "RankStream") -> None:
        """What is issued to this stream from now on happens after what was issued to the other so far."""
        self.lane.follow_host()
        self.lane.learn(other.lane.publish())

    def wait_event(self, event: "RankEvent") -> None:
        self.lane.follow_host()
        self.lane.learn(event.clock)

    def record_event(self, event: "RankEvent | None" = None) -> "RankEvent":
        event = event or RankEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _host().learn(self.lane.publish())

    def query(self) -> bool:
        """True, as its ops have run: the rank goes on knowing that, as after `synchronize`."""
        self.synchronize()
        return True

    def __enter__(self) -> "RankStream":
        host = _host()
        self._before.append(host.current)
        host.current = self.lane
        return self

    def __exit__(self, *error: object) -> None:
        _host().current = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankStream) and self.lane is other.lane

    def __hash__(self) -> int:
        return hash((RankStream, self.lane.number))


class RankEvent:
    """An event of one rank, as torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **kwargs: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: RankStream | None = None) -> None:
        self.clock = (_host().current if stream is None else stream.lane).publish()

    def wait(self, stream: RankStream | None = None) -> None:
        lane = _host().current if stream is None else stream.lane
        lane.follow_host()
        lane.learn(self.clock)

    def synchronize(self) -> None:
        _host().learn(self.clock)

    def query(self) -> bool:
        """True, as what is before it has run: the rank goes on knowing that, as after `synchronize`."""
        self.synchronize()
        return True

    def elapsed_time(self, end: "RankEvent") -> float:
        raise NotServed("torch.cuda.Event.elapsed_time", "ops take no time of a GPU here", gloo_has_it=False)


class StreamContext:
    """`with torch.cuda.stream(stream)`; with None it does nothing."""

    def __init__(self, stream: RankStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream is not None:
            self.stream.__exit__(*error)


def current_stream(device: object = None) -> RankStream:
    return RankStream(lane=_host().current)


def default_stream(device: object = None) -> RankStream:
    return RankStream(lane=_host().default)


def set_stream(stream: RankStream) -> None:
    _host().current = stream.lane


def synchronize(device: object = None) -> None:
    """Wait for all streams of the rank."""
    host = _host()
    simulation: Any = simulation_of_this_rank()
    for lane in memory_of(simulation).order.lanes:
        if lane.host is host:
            host.learn(lane.publish())


def sleep(cycles: int) -> None:
    """torch.cuda._sleep: orders nothing."""
    _host()


def set_device(device: object) -> None:
    """torch.cuda.set_device: a rank has the device that it names."""
    _host()


def record_stream(tensor: torch.Tensor, stream: object) -> None:
    """Tensor.record_stream: no memory is given back while a stream may use it; it orders nothing."""
    if not isinstance(stream, RankStream):
        torch._C.TensorBase.record_stream(tensor, stream)  # type: ignore[arg-type]
