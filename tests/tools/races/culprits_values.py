"""What a culprit is; and `Tiny`, a right single-flight cache of thirty lines, of which most culprits are wrong twins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from localtensor.concurrency.explorer import Program
from localtensor.concurrency.sync import ScheduledSync


@dataclass(frozen=True, slots=True)
class Culprit:
    """A program of a class: `program(sync, wrong)` must fail in some interleaving, `program(sync, right)` in none.

    says: words that the failure holds.
    """

    name: str
    says: str
    program: Callable[[ScheduledSync, Any], Program]
    wrong: Any
    right: Any

    def of(self, kind: Any) -> Callable[[ScheduledSync], Program]:
        return lambda sync: self.program(sync, kind)


class Reentered(Exception):
    pass


class Flight:
    def __init__(self, sync: ScheduledSync, key: object) -> None:
        self.gate = sync.gate(f"gate of {key}")
        self.owner = sync.me()
        self.value: Any = None
        self.error: BaseException | None = None
        self.done = False

    def result(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Tiny:
    """One thread computes a key, the others wait; a failure goes to all of them and is not kept; re-entry raises."""

    def __init__(self, sync: ScheduledSync, limit: int = 99) -> None:
        self.sync, self.limit = sync, limit
        self.lock = sync.lock("lock")
        self.table: dict[Any, Flight] = {}
        self.waiters = 0

    def get(self, key: Any, compute: Callable[[], Any]) -> Any:
        flight, mine = self.claim(key)
        if not mine:
            return self.join(flight)
        try:
            value = compute()
        except BaseException as error:
            self.fail(key, flight, error)
            raise
        self.finish(key, flight, value)
        return value

    def claim(self, key: Any) -> tuple[Flight, bool]:
        with self.lock:
            flight = self.table.get(key)
            if flight is not None:
                self.refuse_reentry(flight)
                return flight, False
            self.evict()
            self.table[key] = flight = Flight(self.sync, key)
            return flight, True

    def refuse_reentry(self, flight: Flight) -> None:
        if flight.owner == self.sync.me() and not flight.done:
            raise Reentered

    def evict(self) -> None:
        for key in [key for key, flight in self.table.items() if flight.done]:
            if len(self.table) >= self.limit:
                del self.table[key]

    def join(self, flight: Flight) -> Any:
        self.count(1)
        try:
            flight.gate.wait()
        finally:
            self.count(-1)
        return flight.result()

    def count(self, more: int) -> None:
        with self.lock:
            self.waiters += more

    def finish(self, key: Any, flight: Flight, value: Any) -> None:
        flight.value, flight.done = value, True
        flight.gate.open()

    def fail(self, key: Any, flight: Flight, error: BaseException) -> None:
        flight.error, flight.done = error, True
        with self.lock:
            if self.table.get(key) is flight:
                del self.table[key]
        flight.gate.open()

    def clear(self) -> None:
        with self.lock:
            self.table = {}


class Counted:
    """A computation that counts how often it ran, and may be interrupted by others in the middle."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.made = sync, []

    def __call__(self, key: Any = "k") -> Callable[[], Any]:
        def compute() -> Any:
            self.made.append(key)
            self.sync.step(f"computes {key}")
            return key

        return compute

    def check_once_each(self) -> None:
        assert sorted(self.made) == sorted(set(self.made)), f"computed twice: {sorted(self.made)}"
