"""Free-running stress of `SingleFlightCache`: 16 threads, a switch interval of a microsecond, keys that do their worst.

Keys of one hash, or of few; equality that gives way to other threads, asks the cache itself, or raises; threads that are
ended anywhere.  What is checked: every answer is the right one; with room for all, no key is computed twice and none is
lost; with little room and with clearings, the limit holds at every moment; calls and counters agree; and everybody comes
to an end.
"""

from __future__ import annotations

import _thread
import ctypes
import gc
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from localtensor.concurrency.single_flight import SingleFlightCache
from tests.tools.command_line import parser_of

EXAMPLES = """examples:
  python -m tests.tools.races.stress                       ten million operations, many minutes
  python -m tests.tools.races.stress --operations 20000    a second of it

Exit code 1 if anything is wrong; 130 after Ctrl-C.
"""
THREADS = 16
LIMIT = 600.0  # seconds without any progress, after which a thread is said to hang


class Unequal(Exception):
    """Raised by a key's equality."""


class Key:
    """A number whose hash is one of few, and whose equality does what the class says."""

    __slots__ = ("number",)
    hashes = 8

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        return self.number % self.hashes

    def __eq__(self, other: object) -> bool:
        self.misbehave()
        return isinstance(other, Key) and self.number == other.number

    def misbehave(self) -> None:
        """What happens in the midst of a comparison."""


class Yields(Key):
    __slots__ = ()

    def misbehave(self) -> None:
        if random.random() < 0.05:
            time.sleep(0)


class Raises(Key):
    __slots__ = ()

    def misbehave(self) -> None:
        if random.random() < 0.002:
            raise Unequal


class Asks(Key):
    """Its equality asks the cache itself for a plain key."""

    __slots__ = ("cache",)

    def __init__(self, number: int, cache: SingleFlightCache[Any] | None = None) -> None:
        super().__init__(number)
        self.cache = cache

    def misbehave(self) -> None:
        if self.cache is not None and random.random() < 0.02:
            assert self.cache.get(-1, lambda: "plain") == "plain"


class OneHash(Yields):
    __slots__ = ()
    hashes = 1


@dataclass
class Found:
    """What the threads of one round saw."""

    calls: int = 0
    raised: int = 0
    wrong: list[str] = field(default_factory=list)
    computed: Counter[int] = field(default_factory=Counter)


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Threads change places that often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def no_collections() -> Iterator[None]:
    """The garbage collector is off: an exception that reaches a thread inside a callback of it is reported and dropped."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def together(body: Callable[[int], None], threads: int = THREADS) -> list[str]:
    """Runs `body(thread)` in so many threads at a time; errors, and who did not come to an end."""
    wrong: list[str] = []

    def live(number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            wrong.append(f"thread {number} died of {error!r}")

    running = [threading.Thread(target=live, args=(i,), daemon=True) for i in range(threads)]
    for thread in running:
        thread.start()
    end = time.monotonic() + LIMIT
    for i, thread in enumerate(running):
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            wrong.append(f"thread {i} hangs")
    return wrong


def one_round(
    cache: SingleFlightCache[Any],
    make: Callable[[int], Any],
    keys: int,
    operations: int,
    seed: int,
    clears: float = 0.0,
) -> Found:
    """So many operations of all threads together on keys made of 0 to `keys` - 1."""
    found = Found()
    tallies: list[tuple[int, int]] = []
    computed = [itertools.count() for _ in range(keys)]
    known = [make(i) for i in range(keys)]

    def compute(number: int) -> int:
        next(computed[number])
        return number * number

    def body(thread: int) -> None:
        draw = random.Random(seed * THREADS + thread)
        calls = raised = 0
        for i in range(operations // THREADS):
            if clears and draw.random() < clears:
                cache.clear()
                continue
            number = int(draw.random() * keys)
            if i % 2:  # all threads come to new keys at about the same time
                number = min(i * THREADS * keys // operations + number % 4, keys - 1)
            key = known[number] if draw.random() < 0.5 else make(number)
            calls += 1
            try:
                answer = cache.get(key, compute, number)
            except Unequal:
                raised += 1
                continue
            if answer != number * number:
                found.wrong.append(f"{number} was answered with {answer}")
        tallies.append((calls, raised))

    found.wrong += together(body)
    found.calls, found.raised = (sum(column) for column in zip(*tallies, strict=True))
    found.computed = Counter({i: int(repr(count)[6:-1]) for i, count in enumerate(computed)})
    return found


def with_room_for_all(make: type[Any], operations: int, seed: int) -> list[str]:
    """Nothing is lost, and nothing is computed twice."""
    keys = 50 * make.hashes if issubclass(make, Key) else max(100, operations // 50)
    cache: SingleFlightCache[Any] = SingleFlightCache(name="stress", limit=keys + 1)
    built = (lambda number: Asks(number, cache)) if make is Asks else make
    found = one_round(cache, built, keys, operations, seed)
    wrong = found.wrong + [f"{key} was computed {times} times" for key, times in found.computed.items() if times > 1]
    stats = cache.stats()
    if make is not Asks:
        if stats.hits + stats.misses + stats.waits != found.calls - found.raised:
            wrong.append(f"{found.calls} calls, of which {found.raised} raised, were counted as {stats}")
        if stats.misses != sum(found.computed.values()):
            wrong.append(f"{sum(found.computed.values())} computations were counted as {stats.misses}")
    lost = [number for number, times in found.computed.items() if times and not _kept(cache, built(number))]
    return wrong + [f"{number} was lost" for number in lost]


def with_little_room(make: type[Any], operations: int, seed: int) -> list[str]:
    """The limit holds, and answers are right, while values are evicted and all is cleared now and then."""
    cache: SingleFlightCache[Any] = SingleFlightCache(name="stress", limit=20)
    over: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.001):
            size = cache.stats().size
            if size > 20:
                over.append(f"{size} values were kept")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found = one_round(cache, make, 60, operations, seed, clears=0.001)
    stop.set()
    watcher.join()
    stats = cache.stats()
    if stats.size > 20:  # also where the watcher was never let run
        over.append(f"{stats.size} values were kept")
    wrong = found.wrong + over
    if stats.misses != sum(found.computed.values()):
        wrong.append(f"{sum(found.computed.values())} computations were counted as {stats.misses}")
    if cache._wait_graph._waits:
        wrong.append("somebody is said to wait after all have ended")
    return wrong


class Ended(SystemExit):
    """Sent to a thread from outside; threads started by hand end with it and say nothing."""


def with_threads_that_are_ended(make: type[Any], operations: int, seed: int) -> list[str]:
    """Each thread is sent an exception twice, wherever it is: the others come to an end, and find what they ask."""
    cache: SingleFlightCache[Any] = SingleFlightCache(name="stress", limit=50)
    draw, wrong = random.Random(seed), []

    def victim(first: int) -> None:
        for i in range(40):
            number = first + i // 2
            answer = cache.get(make(number), lambda: number * number)  # noqa: B023  # it is called at once
            if answer != number * number:
                wrong.append(f"{number} was answered with {answer}")

    with no_collections():
        for batch in range(operations // (THREADS * 40) + 1):
            wrong += _ended(victim, batch, draw)
            if cache._wait_graph._waits:
                wrong.append("somebody is said to wait after all have ended")
            if wrong:
                return wrong
        hanging = together(lambda i: victim(20 * draw.randrange(operations // (THREADS * 40) + 1)))
    return wrong + hanging


def _ended(victim: Callable[[int], None], batch: int, draw: random.Random) -> list[str]:
    """One batch of threads, each of which is sent `Ended` twice; who still runs at the end of the time."""
    others = _thread._count()
    started = {_thread.start_new_thread(victim, (20 * batch,)): None for _ in range(THREADS)}
    idents = list(started)  # one that ended already may have left its number to another
    for ident in (*draw.sample(idents, len(idents)), *draw.sample(idents, len(idents))):
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Ended))
    end = time.monotonic() + LIMIT
    while _thread._count() > others:
        if time.monotonic() > end:
            return ["somebody waits for a thread that was ended"]
        time.sleep(0)
    return []


def _kept(cache: SingleFlightCache[Any], key: Any) -> bool:
    while True:
        try:
            return cache.explain(key) == "kept"
        except Unequal:
            continue


ROUNDS: dict[str, tuple[Callable[[Any, int, int], list[str]], Any, float]] = {
    "plain numbers, room for all": (with_room_for_all, int, 0.4),
    "few hashes, room for all": (with_room_for_all, Key, 0.1),
    "equality that yields, room for all": (with_room_for_all, Yields, 0.1),
    "equality that raises, room for all": (with_room_for_all, Raises, 0.1),
    "equality that asks the cache, room for all": (with_room_for_all, Asks, 0.05),
    "one hash and equality that yields, room for all": (with_room_for_all, OneHash, 0.02),
    "plain numbers, little room, clearings": (with_little_room, int, 0.15),
    "equality that yields, little room, clearings": (with_little_room, Yields, 0.05),
    "equality that raises, little room, clearings": (with_little_room, Raises, 0.02),
    "plain numbers, threads that are ended": (with_threads_that_are_ended, int, 0.01),
}
"""What is done, with which keys, and which share of all operations it has."""


def stress(operations: int, seed: int = 0, tell: Callable[[str], None] = lambda line: None) -> list[str]:
    """What went wrong in so many operations, shared out over all `ROUNDS`."""
    wrong = []
    with switching(1e-6):
        for name, (check, make, share) in ROUNDS.items():
            begun, some = time.perf_counter(), max(int(operations * share), 20 * THREADS)
            found = check(make, some, seed)
            seconds = time.perf_counter() - begun
            said = f", {len(found)} WRONG" if found else ""
            tell(f"{name}: {some:,} operations, {seconds:.1f} s, {seconds / some * 1e6:.2f} us each{said}")
            wrong += [f"{name}: {what}" for what in found]
    return wrong


def main(words: list[str] | None = None) -> int:
    parser = parser_of("races.stress", EXAMPLES, "Free-running stress of the shared cache.")
    parser.add_argument(
        "--operations", type=int, default=10_000_000, metavar="N", help="how many (default ten million)"
    )
    parser.add_argument("--seed", type=int, default=0, help="other keys and threads (default 0)")
    asked = parser.parse_args(words)
    if asked.operations < 1:
        parser.error(f"--operations {asked.operations}: pass 1 or more")
    try:
        wrong = stress(asked.operations, asked.seed, tell=lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C: what was done is told above.", flush=True)
        return 130
    for line in wrong[:20]:
        print(f"WRONG {line}")
    print(f"{asked.operations:,} operations, {THREADS} threads: {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
