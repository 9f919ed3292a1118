"""Programs over the shared cache, each with what must hold in every interleaving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localtensor.concurrency.controlled_sync import Scheduled
from localtensor.concurrency.results import Program
from localtensor.concurrency.single_flight import Once
from localtensor.concurrency.single_flight_cells import Circular
from strategies.propagation.races.races_world import World, hold

Kind = type[World]


def asks(sync: Scheduled, kind: Kind = World) -> Program:
    """Three threads, one key: computed once, told to all, kept."""
    world = kind(sync)
    got: list[object] = []

    def check() -> None:
        hold(got == [("k", 0)] * 3, f"got {got}")
        world.check_once_each()
        world.check_kept("k")

    return Program([lambda: got.append(world.get("k"))] * 3, check)


def colliding(sync: Scheduled, kind: Kind = World) -> Program:
    """Different keys of one hash: none is lost, none is mixed up."""
    world = kind(sync)

    def check() -> None:
        world.check_once_each()
        world.check_kept("a", "b")

    return Program([lambda: _get(world, "ab"), lambda: _get(world, "ba"), lambda: world.get("a")], check)


def cleared(sync: Scheduled, kind: Kind = World) -> Program:
    """A rule changes and the cache is cleared: who asks afterwards is told by the new rule, for ever."""
    world = kind(sync)

    def change() -> None:
        world.change()
        world.get("k")

    def check() -> None:
        hold(world.get("k") == ("k", 1), "a stale value came back")

    return Program([lambda: world.get("k"), change, lambda: _get(world, "kk")], check)


def cleared_twice(sync: Scheduled, kind: Kind = World) -> Program:
    """Two changes, each with a clear, while others compute."""
    world = kind(sync)

    def check() -> None:
        hold(world.get("k") == ("k", 2), "a stale value came back")

    return Program([lambda: _get(world, "kk"), world.change, world.change], check)


def failing(sync: Scheduled, kind: Kind = World) -> Program:
    """A computation fails: whoever waited is told, and it is not kept."""
    world = kind(sync)
    told: list[str] = []

    def fail() -> None:
        sync.step("computes in vain")
        raise ValueError("no")

    def ask() -> None:
        try:
            world.cache.get(world.key("k"), fail)
        except ValueError as error:
            told.append(str(error))

    def check() -> None:
        hold(told == ["no"] * 3, f"told {told}")
        hold(world.get("k") == ("k", 0), "a failure was kept")

    return Program([ask] * 3, check)


def failing_once(sync: Scheduled, kind: Kind = World) -> Program:
    """The first computation fails, no later one does: everybody is told something, and at most two are made."""
    world = kind(sync)
    tries: list[int] = []
    told: list[str] = []

    def first_fails() -> str:
        tries.append(1)
        number = len(tries)
        sync.step("computes")
        if number == 1:
            raise ValueError("first")
        return "fine"

    def ask() -> None:
        try:
            told.append(world.cache.get(world.key("k"), first_fails))
        except ValueError as error:
            told.append(str(error))

    def check() -> None:
        hold(len(told) == 3 and set(told) <= {"first", "fine"}, f"told {told}")
        hold(len(tries) <= 2, f"computed {len(tries)} times")

    return Program([ask] * 3, check)


def reentered(sync: Scheduled, kind: Kind = World) -> Program:
    """A computation asks for its own key: refused at once, and so are the others who wait for it."""
    world = kind(sync)
    refused: list[int] = []

    def circular() -> Any:
        return world.cache.get(world.key("k"), circular)

    def ask() -> None:
        try:
            world.cache.get(world.key("k"), circular)
        except Circular:
            refused.append(1)

    def check() -> None:
        hold(len(refused) == 2, f"{len(refused)} of 2 were refused")

    return Program([ask, ask], check)


def ringed(sync: Scheduled, kind: Kind = World) -> Program:
    """Two keys, each of which needs the other, from two threads: both are refused, and nobody hangs."""
    world = kind(sync)
    refused: list[str] = []

    def needs(name: str, other: str) -> Callable[[], Any]:
        return lambda: world.cache.get(world.key(other), needs(other, name))

    def ask(name: str, other: str) -> None:
        try:
            world.cache.get(world.key(name), needs(name, other))
        except Circular:
            refused.append(name)

    def check() -> None:
        hold(len(refused) == 2, f"only {refused} were refused")

    return Program([lambda: ask("a", "b"), lambda: ask("b", "a")], check)


def two_caches(sync: Scheduled, kind: Kind = World) -> Program:
    """The same ring by way of two caches: nobody hangs, for they share who waits for whom."""
    one, two = kind(sync).cache, kind(sync).cache
    ended: list[str] = []

    def ask(first: Once[Any], second: Once[Any]) -> None:
        try:
            first.get("k", lambda: second.get("k", lambda: first.get("k", lambda: "never asked for")))
            ended.append("told")
        except Circular:
            ended.append("refused")

    def check() -> None:
        hold(len(ended) == 2, f"only {ended} ended")

    return Program([lambda: ask(one, two), lambda: ask(two, one)], check)


def crowded(sync: Scheduled, kind: Kind = World) -> Program:
    """Room for one value: what is computed now is never dropped, and never computed twice at once."""
    world = kind(sync, limit=1)

    def check() -> None:
        hold(world.cache.stats().size <= 1, f"{world.cache.stats()}")

    return Program([lambda: _get(world, "ab"), lambda: _get(world, "ba"), lambda: world.get("a")], check)


def interrupted_waiter(sync: Scheduled, kind: Kind = World) -> Program:
    """Ctrl-C ends a wait: nobody else notices."""
    world = kind(sync)
    ended: list[int] = []

    def ask() -> None:
        try:
            world.get("k")
        except KeyboardInterrupt:
            ended.append(sync.me())

    def check() -> None:
        hold(set(ended) <= {1}, f"{ended} were interrupted")
        world.check_once_each()
        world.check_kept("k")

    return Program([ask, ask, lambda: sync.interrupt(1)], check)


def interrupted_owner(sync: Scheduled, kind: Kind = World) -> Program:
    """Ctrl-C ends a computation: one of those who wait computes instead."""
    world, slow = kind(sync), sync.gate("what is computed")
    got: list[str] = []

    def compute() -> str:
        slow.wait(0.1)
        return "k"

    def ask() -> None:
        try:
            got.append(world.cache.get(world.key("k"), compute))
        except KeyboardInterrupt:
            got.append("ended")

    def check() -> None:
        hold(len(got) == 3 and got.count("ended") <= 1 and set(got) <= {"k", "ended"}, f"got {got}")

    return Program([ask, ask, ask, lambda: sync.interrupt(0)], check)


def _get(world: World, names: str) -> None:
    for name in names:
        world.get(name)
