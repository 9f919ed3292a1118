"""Races without a cache: torn and lost updates, lost wake-ups, locks in the wrong order."""

from __future__ import annotations

from localtensor.concurrency.explorer import Program
from localtensor.concurrency.sync import ScheduledSync
from tests.tools.races.culprits_values import Culprit


class Pair:
    """Two numbers that are equal whenever somebody may look."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.lock = sync, sync.lock("lock")
        self.one = self.two = 0

    def write(self, value: int) -> None:
        with self.lock:
            self.one = value
            self.sync.step("writes the second")
            self.two = value

    def read(self) -> tuple[int, int]:
        with self.lock:
            return self.one, self.two


class Torn(Pair):
    def write(self, value: int) -> None:
        self.one = value
        self.sync.step("writes the second")
        self.two = value


def a_reader_beside_a_writer(sync: ScheduledSync, kind: type[Pair]) -> Program:
    pair = kind(sync)

    def read() -> None:
        one, two = pair.read()
        assert one == two, f"torn: {one} and {two}"

    return Program([lambda: pair.write(1), read])


class Counter:
    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.lock, self.hits = sync, sync.lock("lock"), 0

    def add(self) -> None:
        with self.lock:
            self.bump()

    def bump(self) -> None:
        seen = self.hits
        self.sync.step("writes the sum")
        self.hits = seen + 1


class Loses(Counter):
    def add(self) -> None:
        self.bump()


def three_count(sync: ScheduledSync, kind: type[Counter]) -> Program:
    counter = kind(sync)

    def check() -> None:
        assert counter.hits == 3, f"{counter.hits} of 3 are counted"

    return Program([counter.add] * 3, check)


class Post:
    """One who waits for news, and one who has them."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.lock, self.news = sync, sync.lock("lock"), False
        self.gate = sync.gate("news")

    def wait(self) -> None:
        self.gate.wait()

    def tell(self) -> None:
        self.news = True
        self.gate.open()


class LosesWakeUp(Post):
    """Looks, finds nothing, and lies down after the call came."""

    asleep = False

    def wait(self) -> None:
        if not self.news:
            self.sync.step("falls asleep")
            self.asleep = True
            self.gate.wait()

    def tell(self) -> None:
        self.news = True
        if self.asleep:
            self.gate.open()


def one_waits_one_tells(sync: ScheduledSync, kind: type[Post]) -> Program:
    post = kind(sync)
    return Program([post.wait, post.tell])


class Accounts:
    def __init__(self, sync: ScheduledSync) -> None:
        self.locks = [sync.lock("first lock"), sync.lock("second lock")]
        self.sums = [5, 5]

    def ordered(self, source: int, target: int) -> list[int]:
        return sorted([source, target])

    def move(self, source: int, target: int) -> None:
        one, two = self.ordered(source, target)
        with self.locks[one], self.locks[two]:
            self.sums[source] -= 1
            self.sums[target] += 1


class WrongOrder(Accounts):
    def ordered(self, source: int, target: int) -> list[int]:
        return [source, target]


def there_and_back(sync: ScheduledSync, kind: type[Accounts]) -> Program:
    accounts = kind(sync)

    def check() -> None:
        assert accounts.sums == [5, 5], f"{accounts.sums}"

    return Program([lambda: accounts.move(0, 1), lambda: accounts.move(1, 0)], check)


class Lazy:
    """Made by the first who asks; the look before the lock is for speed."""

    def __init__(self, sync: ScheduledSync) -> None:
        self.sync, self.lock = sync, sync.lock("lock")
        self.made: dict[str, int] | None = None

    def get(self) -> dict[str, int]:
        if self.made is None:
            with self.lock:
                if self.made is None:
                    self.make()
        assert self.made is not None
        return self.made

    def make(self) -> None:
        made: dict[str, int] = {}
        self.sync.step("fills it")
        made["n"] = 1
        self.made = made


class PublishesHalf(Lazy):
    """Others see it before it is filled."""

    def make(self) -> None:
        self.made = {}
        self.sync.step("fills it")
        self.made["n"] = 1


def two_want_it(sync: ScheduledSync, kind: type[Lazy]) -> Program:
    lazy = kind(sync)

    def want() -> None:
        assert lazy.get().get("n") == 1, "half made"

    return Program([want, want])


LOCKS = (
    Culprit("torn two-step update", "torn: 1 and 0", a_reader_beside_a_writer, Torn, Pair),
    Culprit("counter that loses updates", "of 3 are counted", three_count, Loses, Counter),
    Culprit("lost wake-up", "waits for news, which is shut", one_waits_one_tells, LosesWakeUp, Post),
    Culprit("wrong order of two locks", "waits for second lock", there_and_back, WrongOrder, Accounts),
    Culprit("published before it is filled", "half made", two_want_it, PublishesHalf, Lazy),
)
