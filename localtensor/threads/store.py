"""The key-value store of one simulation; a rank that waits for a key lets the others run."""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

from torch.distributed import Store
from torch.distributed.distributed_c10d import default_pg_timeout

from localtensor._util.call_sites import origin
from localtensor.collectives.rendezvous import Contribution, Group, Ticket, TimeLimit
from localtensor.threads.simulation import Simulation

UNSET = (
    300.0,
    default_pg_timeout.total_seconds(),
)  # seconds: a store's own limit, and the one that init_process_group sets


class RankStore(Store):
    """torch.distributed's Store over one dict of bytes; `host` and `port` are those of a `TCPStore`."""

    host = ""
    port = 0

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[tuple[str, ...], Ticket]] = []
        self._group = Group("store", tuple(range(simulation.ranks)))

    def set(self, key: str, value: str | bytes) -> None:
        self._values[key] = _bytes(value)
        if self._simulation.memory is not None and self._simulation.is_rank():
            self._simulation.memory.wrote_store(self)
        for entry in list(self._waiting):
            keys, ticket = entry
            if all(one in self._values for one in keys):
                self._waiting.remove(entry)
                self._simulation.wake(ticket)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def _note_read(self) -> None:
        if self._simulation.memory is not None and self._simulation.is_rank():
            self._simulation.memory.read_store(self)

    def add(self, key: str, amount: int) -> int:
        if amount == 0:
            self._yield_turn()
        self._note_read()
        total = int(self._values.get(key, b"0")) + amount
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        self._note_read()
        if (key not in self._values and not _bytes(expected)) or self._values.get(key) == _bytes(expected):
            self.set(key, desired)
            return _bytes(desired)
        held = self._values.get(key, _bytes(expected))
        self._yield_turn()
        return held

    def append(self, key: str, value: str | bytes) -> None:
        self.set(key, self._values.get(key, b"") + _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        found = all(key in self._values for key in keys)
        if not found:
            self._yield_turn()
        self._note_read()
        return found

    def _yield_turn(self) -> None:
        """Let the other ranks run: the caller may be polling in a loop."""
        if self._simulation.is_rank():
            self._simulation.enter()
            self._simulation.run_token.step_aside(self._simulation.run_token.here())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    # C++ calls the next three under its own names.

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return self._values.pop(key, None) is not None

    def getNumKeys(self) -> int:  # noqa: N802
        return len([key for key in self._values if key != MASTER])

    def clone(self) -> Store:
        return self

    def has_extended_api(self) -> bool:
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set, while other ranks run.

        A key that no rank can set is a deadlock, or raises `CollectiveTimeout` where the program gave a time limit.
        """
        if all(key in self._values for key in keys):
            self._note_read()
            return
        rank = self._simulation.enter()
        others = tuple(other for other in self._group.ranks if other != rank)
        kind = f"store.wait({', '.join(map(repr, keys))})"
        part = Contribution(rank, kind, self._group, None, (), None, line=origin(sys._getframe(1)).line)
        part.number = 0
        ticket = Ticket(part, lambda: others)
        entry = (tuple(keys), ticket)
        self._waiting.append(entry)
        seconds = (timeout or self.timeout).total_seconds()  # type: ignore[attr-defined]  # of C++, where PrefixStore sets it
        limit = None if seconds in UNSET or _called_by_torch(sys._getframe(1)) else TimeLimit(seconds)
        try:
            self._simulation.wait(ticket, limit)
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
        self._note_read()


MASTER = "\0master"  # the key under which a TCPStore's server has begun
WORKERS = "init/"  # and the one under which torch counts its clients


def file_store(simulation: Simulation, file_name: str, world_size: int = -1) -> RankStore:
    """The store of all ranks that name this file, in place of torch's `FileStore`, whose waits no other rank could end."""
    store: RankStore = simulation.stores.setdefault(("file", os.path.abspath(file_name)), RankStore(simulation))
    return store


def tcp_store(
    simulation: Simulation,
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta | None = None,
    wait_for_workers: bool = True,
    **options: object,
) -> RankStore:
    """The store of all ranks that name this address, in place of torch's `TCPStore`.

    A client waits for its server, and the server for `world_size` clients, itself included; port 0 is a free number.
    """
    port = port or 29_500 + len(simulation.stores)
    store: RankStore = simulation.stores.setdefault(("tcp", host_name, port), RankStore(simulation))
    store.host, store.port = host_name, port
    if timeout is not None and timeout.total_seconds() not in UNSET:
        store.set_timeout(timeout)
    if is_master or _is_of_agent(host_name, port):
        store.set(MASTER, b"1")
    else:
        store.wait([MASTER])
    if world_size is not None and world_size > 0 and store.add(WORKERS, 1) == world_size:
        store.set(f"{WORKERS}all", b"1")
    if is_master and wait_for_workers and world_size is not None and world_size > 1:
        store.wait([f"{WORKERS}all"])
    return store


def _is_of_agent(host_name: str, port: int) -> bool:
    """Whether torchrun's agent, which launches the ranks of a script, serves this address: all ranks are clients there."""
    address = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and address == (host_name, str(port))


def _called_by_torch(frame: FrameType) -> bool:
    """Whether torch itself waits: it repeats such waits by the real clock, which does not move meanwhile."""
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("torch.")


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
