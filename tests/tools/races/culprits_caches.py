"""Single-flight caches that compute twice, keep or lose a failure, or strand those who wait."""

from __future__ import annotations

from typing import Any

from localtensor.concurrency.explorer import Program
from localtensor.concurrency.sync import ScheduledSync
from tests.tools.races.culprits_values import Counted, Culprit, Flight, Reentered, Tiny


def two_ask(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache, counted, got = kind(sync), Counted(sync), []

    def ask() -> None:
        got.append(cache.get("k", counted()))

    def check() -> None:
        assert got == ["k", "k"], f"got {got}"
        counted.check_once_each()

    return Program([ask, ask], check)


class Unlocked(Tiny):
    """The twin of SingleFlightCache without its lock."""

    def claim(self, key: Any) -> tuple[Flight, bool]:
        flight = self.table.get(key)
        if flight is not None:
            return flight, False
        self.sync.step("has not found it")
        self.table[key] = flight = Flight(self.sync, key)
        return flight, True


class LooksThenActs(Tiny):
    """A lock for the look and a lock for the act, and a moment between them."""

    def claim(self, key: Any) -> tuple[Flight, bool]:
        with self.lock:
            flight = self.table.get(key)
        if flight is not None:
            return flight, False
        with self.lock:
            self.table[key] = flight = Flight(self.sync, key)
        return flight, True


class OpensTooEarly(Tiny):
    """Who waits goes on before the value is there."""

    def finish(self, key: Any, flight: Flight, value: Any) -> None:
        flight.gate.open()
        self.sync.step("writes the value")
        flight.value, flight.done = value, True


def a_failure_and_a_second_try(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache, told, tries = kind(sync), [], []

    def fails() -> Any:
        tries.append(1)
        sync.step("computes")
        raise ValueError("no")

    def ask() -> None:
        try:
            cache.get("k", fails)
        except ValueError:
            told.append("failed")

    def check() -> None:
        assert told == ["failed", "failed"], f"told {told}"
        assert cache.get("k", lambda: "fine") == "fine"

    return Program([ask, ask], check)


class KeepsFailure(Tiny):
    """The next who asks is told of a failure that would not happen again."""

    def fail(self, key: Any, flight: Flight, error: BaseException) -> None:
        flight.error, flight.done = error, True
        flight.gate.open()


class ForgetsWaiters(Tiny):
    """A failure is raised to the one who computed; who waits for it waits for ever."""

    def fail(self, key: Any, flight: Flight, error: BaseException) -> None:
        with self.lock:
            del self.table[key]


class SwallowsFailure(Tiny):
    """Who waits is let through after a failure, and gets None."""

    def fail(self, key: Any, flight: Flight, error: BaseException) -> None:
        with self.lock:
            del self.table[key]
        flight.gate.open()


def asks_for_itself(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache, told = kind(sync), []

    def again() -> Any:
        return cache.get("k", lambda: "inner")

    def ask() -> None:
        try:
            cache.get("k", again)
        except Reentered:
            told.append("refused")

    def other() -> None:
        cache.get("other", lambda: "other")

    def check() -> None:
        assert told == ["refused"], f"told {told}"

    return Program([ask, other], check)


class WaitsForItself(Tiny):
    """A computation that asks for its own key waits for itself."""

    def refuse_reentry(self, flight: Flight) -> None:
        pass


def more_keys_than_room(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache, busy = kind(sync, limit=1), set()

    def ask(key: str) -> None:
        def compute() -> str:
            assert key not in busy, f"computed twice at once: {key}"
            busy.add(key)
            sync.step(f"computes {key}")
            busy.discard(key)
            return key

        assert cache.get(key, compute) == key

    return Program([lambda: ask("a"), lambda: ask("b"), lambda: ask("a")])


class EvictsFlights(Tiny):
    """Makes room by dropping what is still computed; the next who asks computes it again, at the same time."""

    def evict(self) -> None:
        while len(self.table) >= self.limit:
            del self.table[next(iter(self.table))]


def a_waiter_is_interrupted(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache, counted = kind(sync), Counted(sync)

    def ask() -> None:
        try:
            cache.get("k", counted())
        except KeyboardInterrupt:
            sync.step("was interrupted")

    def check() -> None:
        assert cache.waiters == 0, f"{cache.waiters} still wait, and nobody is there"

    return Program([ask, ask, lambda: sync.interrupt(1)], check)


class LeaksWaiters(Tiny):
    """Counts those who wait, but not those who leave by an interrupt."""

    def join(self, flight: Flight) -> Any:
        self.count(1)
        flight.gate.wait()
        self.count(-1)
        return flight.result()


def the_owner_is_interrupted(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache, slow = kind(sync), sync.gate("slow")

    def compute() -> str:
        slow.wait(5.0)
        return "k"

    def ask() -> None:
        try:
            cache.get("k", compute)
        except KeyboardInterrupt:
            sync.step("was interrupted")

    return Program([ask, ask, lambda: sync.interrupt(0)])


class CatchesExceptionsOnly(Tiny):
    """A Ctrl-C in the computation is no `Exception`: the gate stays shut."""

    def fail(self, key: Any, flight: Flight, error: BaseException) -> None:
        if isinstance(error, Exception):
            super().fail(key, flight, error)


def two_need_each_other(sync: ScheduledSync, kind: type[Tiny]) -> Program:
    cache = kind(sync)

    def ask(key: str, other: str) -> None:
        try:
            cache.get(key, lambda: cache.get(other, lambda: cache.get(key, lambda: "never")))
        except Reentered:
            sync.step("was refused")

    return Program([lambda: ask("a", "b"), lambda: ask("b", "a")])


class SeesCycles(Tiny):
    """Refuses a wait that would close a ring of threads, each of which waits for the next."""

    def __init__(self, sync: ScheduledSync, limit: int = 99) -> None:
        super().__init__(sync, limit)
        self.waits: dict[int, Flight] = {}

    def claim(self, key: Any) -> tuple[Flight, bool]:
        flight, mine = super().claim(key)
        if not mine:
            with self.lock:
                self.refuse_ring(flight)
                self.waits[self.sync.me()] = flight
        return flight, mine

    def refuse_ring(self, flight: Flight | None) -> None:
        while flight is not None and not flight.done:
            if flight.owner == self.sync.me():
                raise Reentered
            flight = self.waits.get(flight.owner)

    def join(self, flight: Flight) -> Any:
        try:
            return super().join(flight)
        finally:
            with self.lock:
                self.waits.pop(self.sync.me(), None)


CACHES = (
    Culprit("unlocked twin of SingleFlightCache", "computed twice", two_ask, Unlocked, Tiny),
    Culprit("look, then act", "computed twice", two_ask, LooksThenActs, Tiny),
    Culprit("gate opened before the value is written", "got [None, 'k']", two_ask, OpensTooEarly, Tiny),
    Culprit("failure kept", "ValueError: no", a_failure_and_a_second_try, KeepsFailure, Tiny),
    Culprit("failure not delivered, waiter stranded", "waits for gate of k", a_failure_and_a_second_try, ForgetsWaiters, Tiny),
    Culprit("failure not delivered, waiter gets None", "told ['failed']", a_failure_and_a_second_try, SwallowsFailure, Tiny),
    Culprit("re-entry deadlock", "thread 0 waits for gate of k", asks_for_itself, WaitsForItself, Tiny),
    Culprit("double compute after eviction", "computed twice at once", more_keys_than_room, EvictsFlights, Tiny),
    Culprit("waiter count leak", "still wait", a_waiter_is_interrupted, LeaksWaiters, Tiny),
    Culprit("interrupted owner leaves the gate shut", "waits for gate of k", the_owner_is_interrupted,
            CatchesExceptionsOnly, Tiny),
    Culprit("ring of threads that wait for each other", "waits for gate of", two_need_each_other, Tiny, SeesCycles),
)  # fmt: skip
