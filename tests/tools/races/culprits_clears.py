"""Caches that are cleared while others compute: deadlocks, and values that come back from before the clear."""

from __future__ import annotations

from typing import Any

from localtensor.concurrency.explorer import Program
from localtensor.concurrency.sync import ScheduledSync
from tests.tools.races.culprits_values import Culprit, Tiny


def a_clear_meets_a_computation(sync: ScheduledSync, kind: type[Any]) -> Program:
    cache, world = kind(sync), {"rule": "old"}

    def compute() -> str:
        rule = world["rule"]
        sync.step("computes by the rule")
        return rule

    def ask() -> None:
        cache.get("k", compute)

    def change() -> None:
        world["rule"] = "new"
        cache.clear()
        got = cache.get("k", compute)
        assert got == "new", f"after the clear: {got}"

    def check() -> None:
        got = cache.get("k", compute)
        assert got == "new", f"a stale value came back: {got}"

    return Program([ask, change], check)


class Resurrects(Tiny):
    """Writes its result into the table, cleared or not."""

    def finish(self, key: Any, flight: Any, value: Any) -> None:
        with self.lock:
            self.table[key] = flight
        super().finish(key, flight, value)


class KeepsFlights(Tiny):
    """The clear drops what is computed, and leaves what is being computed from the old rule."""

    def clear(self) -> None:
        with self.lock:
            self.table = {key: flight for key, flight in self.table.items() if not flight.done}


class ClearWaits:
    """The clear takes the lock and waits for the computation, which needs the lock to end."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.lock, self.sync = sync.lock("lock"), sync
        self.value: str | None = None
        self.idle = sync.gate("idle")
        self.idle.open()

    def get(self, key: str, compute: Any) -> str:
        with self.lock:
            if self.value is not None:
                return self.value
            idle = self.idle = self.sync.gate("idle")
        value = compute()
        with self.lock:
            self.value = value
        idle.open()
        return value

    def clear(self) -> None:
        with self.lock:
            self.idle.wait()
            self.value = None


class Numbered:
    """Each clear makes a new number; a result is kept if the number is still the one it began with."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.lock, self.number = sync.lock("lock"), 0
        self.value: str | None = None

    def bump(self) -> int:
        return self.number + 1

    def get(self, key: str, compute: Any) -> str:
        with self.lock:
            if self.value is not None:
                return self.value
            number = self.number
        value: str = compute()
        with self.lock:
            if number == self.number:
                self.value = value
        return value

    def clear(self) -> None:
        with self.lock:
            self.number, self.value = self.bump(), None


class Wraps(Numbered):
    """The number is a flag: after two clears it is what it was."""

    def bump(self) -> int:
        return 1 - self.number


def two_clears_in_one_computation(sync: ScheduledSync, kind: type[Any]) -> Program:
    cache, world = kind(sync), {"rule": "old"}

    def compute() -> str:
        rule = world["rule"]
        sync.step("computes by the rule")
        return rule

    def change() -> None:
        world["rule"] = "new"
        cache.clear()
        cache.clear()

    def check() -> None:
        got = cache.get("k", compute)
        assert got == "new", f"a stale value came back: {got}"

    return Program([lambda: cache.get("k", compute), change], check)


def a_clear_of_all(sync: ScheduledSync, kind: type[Any]) -> Program:
    every = kind(sync)
    for name in ("a", "b"):
        every.register(name)
    return Program([every.clear_all, lambda: every.register("c")])


class Registry:
    """All caches, for one `clear_all`."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.lock = sync, sync.lock("lock")
        self.caches: dict[str, int] = {}

    def register(self, name: str) -> None:
        with self.lock:
            self.caches[name] = 1

    def clear_all(self) -> None:
        with self.lock:
            names = list(self.caches)
        for name in names:
            self.sync.step(f"clears {name}")
            self.caches[name] = 0


class WalksWhileItGrows(Registry):
    """Goes over the table itself, and another thread adds to it."""

    def clear_all(self) -> None:
        for name in self.caches:
            self.sync.step(f"clears {name}")
            self.caches[name] = 0


CLEARS = (
    Culprit("clear-versus-compute deadlock", "waits for lock", a_clear_meets_a_computation, ClearWaits, Tiny),
    Culprit("clear resurrects a stale value", "stale value", a_clear_meets_a_computation, Resurrects, Tiny),
    Culprit("clear leaves what is computed", "after the clear: old", a_clear_meets_a_computation, KeepsFlights, Tiny),
    Culprit("ABA on a generation number", "stale value", two_clears_in_one_computation, Wraps, Numbered),
    Culprit("table changed while it is walked", "changed size", a_clear_of_all, WalksWhileItGrows, Registry),
)
