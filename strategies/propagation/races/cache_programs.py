"""Programs over the shared cache, each with what must hold in every interleaving.

Their keys yield to other threads, and their rule may change; `CacheUnderTest` records what was computed by which rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localtensor.concurrency import Circular, Program, ScheduledSync, SingleFlightCache

Answer = tuple[str, int]
"""The name of a key, and the number of the rule that computed it."""


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


class YieldingKey:
    """A key whose comparison yields to other threads, and whose hash is that of all keys, so that each is compared."""

    def __init__(self, sync: ScheduledSync, name: str) -> None:
        self.sync, self.name = sync, name

    def __hash__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        self.sync.step(f"compares {self.name}")
        return isinstance(other, YieldingKey) and self.name == other.name

    def __repr__(self) -> str:
        return self.name


class CacheUnderTest:
    """A cache under test, a rule that may change, and a record of what was computed by which rule.

    `settled` is the last rule whose change is complete, its clear included.
    """

    def __init__(self, sync: ScheduledSync, limit: int = 8) -> None:
        self.sync, self.rule, self.settled = sync, 0, 0
        self.cache = self.make(sync, limit)
        self.made: list[Answer] = []
        self.busy: set[Answer] = set()

    def make(self, sync: ScheduledSync, limit: int) -> SingleFlightCache[Any]:
        """The cache under test."""
        return SingleFlightCache[Any](name="explored", limit=limit, sync=sync)

    def key(self, name: str) -> YieldingKey:
        return YieldingKey(self.sync, name)

    def compute(self, name: str) -> Answer:
        made = name, self.rule
        require(made not in self.busy or self.rule > 0, f"{name} is computed twice at once")  # after a clear it may be
        self.busy.add(made)
        self.made.append(made)
        self.sync.step(f"computes {name}")
        self.busy.discard(made)
        return made

    def get(self, name: str) -> Answer:
        settled = self.settled
        got: Answer = self.cache.get(self.key(name), lambda: self.compute(name))
        require(got[0] == name, f"asked for {name}, got {got[0]}")
        require(got[1] >= settled, f"asked after the clear for rule {settled}, answered by rule {got[1]}")
        return got

    def change(self) -> None:
        """Change the rule, and clear the cache."""
        self.rule += 1
        rule = self.rule
        self.cache.clear()
        self.settled = max(self.settled, rule)

    def check_once_each(self) -> None:
        require(len(self.made) == len(set(self.made)), f"computed twice: {self.made}")

    def check_kept(self, *names: str) -> None:
        made = len(self.made)
        for name in names:
            require(self.get(name) == (name, self.rule), f"{name} has a stale value")
        require(len(self.made) == made, "what was computed is not kept")


CacheClass = type[CacheUnderTest]


def asks(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """Three threads, one key: computed once, returned to all, kept."""
    world = kind(sync)
    got: list[object] = []

    def check() -> None:
        require(got == [("k", 0)] * 3, f"got {got}")
        world.check_once_each()
        world.check_kept("k")

    return Program([lambda: got.append(world.get("k"))] * 3, check)


def colliding(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """Different keys of one hash: none is lost, none is mixed up."""
    world = kind(sync)

    def check() -> None:
        world.check_once_each()
        world.check_kept("a", "b")

    return Program([lambda: _get(world, "ab"), lambda: _get(world, "ba"), lambda: world.get("a")], check)


def cleared(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """A rule changes and the cache is cleared: every later call gets the new rule's value."""
    world = kind(sync)

    def change() -> None:
        world.change()
        world.get("k")

    threads = [lambda: world.get("k"), change, lambda: _get(world, "kk")]
    return Program(threads, lambda: require(world.get("k") == ("k", 1), "a stale value came back"))


def cleared_twice(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """Two changes, each with a clear, while others compute."""
    world = kind(sync)
    threads = [lambda: _get(world, "kk"), world.change, world.change]
    return Program(threads, lambda: require(world.get("k") == ("k", 2), "a stale value came back"))


def failing(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """A computation fails: all who wait get the error, and it is not kept."""
    world = kind(sync)
    errors: list[str] = []

    def fail() -> None:
        sync.step("computes in vain")
        raise ValueError("no")

    def ask() -> None:
        try:
            world.cache.get(world.key("k"), fail)
        except ValueError as error:
            errors.append(str(error))

    def check() -> None:
        require(errors == ["no"] * 3, f"got {errors}")
        require(world.get("k") == ("k", 0), "a failure was kept")

    return Program([ask] * 3, check)


def failing_once(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """The first computation fails, no later one does: all threads get a result or the error, and at most two are made."""
    world = kind(sync)
    tries: list[int] = []
    got: list[str] = []

    def first_fails() -> str:
        tries.append(1)
        number = len(tries)
        sync.step("computes")
        if number == 1:
            raise ValueError("first")
        return "fine"

    def ask() -> None:
        try:
            got.append(world.cache.get(world.key("k"), first_fails))
        except ValueError as error:
            got.append(str(error))

    def check() -> None:
        require(len(got) == 3 and set(got) <= {"first", "fine"}, f"got {got}")
        require(len(tries) <= 2, f"computed {len(tries)} times")

    return Program([ask] * 3, check)


def reentered(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """A computation asks for its own key: refused at once, as are the threads that wait for it."""
    world = kind(sync)
    refused: list[int] = []

    def circular() -> object:
        return world.cache.get(world.key("k"), circular)

    def ask() -> None:
        try:
            world.cache.get(world.key("k"), circular)
        except Circular:
            refused.append(1)

    return Program([ask, ask], lambda: require(len(refused) == 2, f"{len(refused)} of 2 were refused"))


def ringed(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """Two keys, each of which needs the other, from two threads: both are refused, and no thread hangs."""
    world = kind(sync)
    refused: list[str] = []

    def needs(name: str, other: str) -> Callable[[], Any]:
        return lambda: world.cache.get(world.key(other), needs(other, name))

    def ask(name: str, other: str) -> None:
        try:
            world.cache.get(world.key(name), needs(name, other))
        except Circular:
            refused.append(name)

    threads = [lambda: ask("a", "b"), lambda: ask("b", "a")]
    return Program(threads, lambda: require(len(refused) == 2, f"only {refused} were refused"))


def two_caches(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """The same ring through two caches: no thread hangs, because the caches share one wait graph."""
    one, two = kind(sync).cache, kind(sync).cache
    ended: list[str] = []

    def ask(first: SingleFlightCache[Any], second: SingleFlightCache[Any]) -> None:
        try:
            first.get("k", lambda: second.get("k", lambda: first.get("k", lambda: "never computed")))
            ended.append("answered")
        except Circular:
            ended.append("refused")

    threads = [lambda: ask(one, two), lambda: ask(two, one)]
    return Program(threads, lambda: require(len(ended) == 2, f"only {ended} ended"))


def crowded(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """A limit of one value: a value being computed is never dropped, and never computed twice at once."""
    world = kind(sync, limit=1)
    threads = [lambda: _get(world, "ab"), lambda: _get(world, "ba"), lambda: world.get("a")]
    return Program(threads, lambda: require(world.cache.stats().size <= 1, f"{world.cache.stats()}"))


def interrupted_waiter(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """Ctrl-C ends a wait: the other threads are not affected."""
    world = kind(sync)
    ended: list[int] = []

    def ask() -> None:
        try:
            world.get("k")
        except KeyboardInterrupt:
            ended.append(sync.me())

    def check() -> None:
        require(set(ended) <= {1}, f"{ended} were interrupted")
        world.check_once_each()
        world.check_kept("k")

    return Program([ask, ask, lambda: sync.interrupt(1)], check)


def interrupted_owner(sync: ScheduledSync, kind: CacheClass = CacheUnderTest) -> Program:
    """Ctrl-C ends a computation: a waiting thread computes instead."""
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
        require(len(got) == 3 and got.count("ended") <= 1 and set(got) <= {"k", "ended"}, f"got {got}")

    return Program([ask, ask, ask, lambda: sync.interrupt(0)], check)


def _get(world: CacheUnderTest, names: str) -> None:
    for name in names:
        world.get(name)
