"""`SingleFlightCache`: a shared cache in which the first caller of a key computes its value, and the others wait for it.

Guarantees, under any interleaving of threads:

* A hit takes no lock.  Keys are compared, hashed and computed outside of locks, so a key may do anything in `__eq__`.
* One thread computes a key.  Its value goes to all waiting threads, and is kept.  Its exception goes to all waiting
  threads, and is not kept: a later call computes anew.  Each waiting thread gets a copy of the exception, because
  raising one object in two threads mixes their tracebacks; one that cannot be copied is shared.
* If the thread that computes is ended (Ctrl-C, `SystemExit`, any `BaseException`), one of the waiting threads computes.
* A thread that requests a key that it is itself computing, also by way of keys that other threads compute, gets
  `Circular` at once, and no thread hangs.  This holds across all caches with the same `sync`.
* A wait can be interrupted, by Ctrl-C and by an exception sent from another thread.
* `clear` never waits.  A value that is being computed then goes to the earlier callers, and is not kept.
* At most `limit` values are kept.  The oldest is evicted first, unless it was hit since it was last examined.
* A child forked while other threads compute starts with the kept values.

A compute function must not wait for another thread that uses the same cache, other than through the cache.

`value_key` and `uncommon_value_key` turn arguments into parts of keys, such that equal keys mean equal results.  1, 1.0
and True are equal in Python and mean different things, and so do 0.0 and -0.0; NaN is equal to itself here.  Each cache
passes a `leaf` for the values that only it knows, such as tensors.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any, Generic, TypeVar

import torch

from localtensor._util import ambient
from localtensor.concurrency.single_flight_cells import (
    COMPUTING,
    FAILED,
    GONE,
    KEPT,
    AtomicCounter,
    BucketTable,
    CacheCell,
    Circular,
    OwnedLock,
    ReentrantUse,
    key_parts,
    miss_explanation,
    wait_graph_of,
)
from localtensor.concurrency.sync import THREAD_SYNC, Sync
from localtensor.errors.base import Refusal

LIMIT = 16384
SLICE = 0.05  # seconds; an exception sent to a waiting thread arrives between two slices
_NONE: tuple[CacheCell, ...] = ()
V = TypeVar("V")


class BadCache(Refusal, values="{value!r}"):
    """A cache that could keep nothing, or has no compute function."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of calls: `misses` computed, `waits` got the value that another thread computed.

    `failures` are computations that raised; `size` is the number of values kept now.
    """

    hits: int
    misses: int
    waits: int
    failures: int
    evictions: int
    size: int


class SingleFlightCache(Generic[V]):
    """Values by key, each computed once.  `name` is for messages; `parts` returns the named parts of a key, for `explain`.

    >>> lengths = SingleFlightCache(len, name="lengths")
    >>> lengths.get("abc"), lengths.get("abc"), lengths.get("abcd", lambda: -1)
    (3, 3, -1)
    >>> lengths.stats()
    Stats(hits=1, misses=2, waits=0, failures=0, evictions=0, size=2)
    """

    def __init__(
        self,
        compute: Callable[[Any], V] | None = None,
        *,
        name: str,
        limit: int = LIMIT,
        sync: Sync = THREAD_SYNC,
        parts: Callable[[Any], Mapping[str, Any]] = key_parts,
    ) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            problem = "a cache keeps one value or more"
            raise BadCache("SingleFlightCache", "limit", limit, problem, "Pass a whole number from 1 on.")
        self.name = name
        self._compute = compute
        self._limit = limit
        self._parts = parts
        self._sync = sync
        self._counters = {what: AtomicCounter() for what in ("hits", "misses", "waits", "failures", "evictions")}
        self._hit = self._counters["hits"].add
        self._own = OwnedLock(sync)
        self._wait_graph = wait_graph_of(sync)
        self._table = BucketTable()
        ambient.add_cache(self)

    def get(self, key: Hashable, compute: Callable[..., V] | None = None, *args: object) -> V:
        """The value of the key; if it is not kept, `compute(*args)`, or the cache's own compute function of the key.

        Raises what computing raises; `Circular`; `BadCache` if there is no compute function.
        """
        for cell in self._table.get(hash(key), _NONE):
            known = cell.key
            if known is key or known == key:
                if cell.state is KEPT:
                    cell.used = True
                    self._hit()
                    return cell.value  # type: ignore[no-any-return]
                break
        return self._missed(key, compute, args)

    def clear(self) -> None:
        """Drops all values.  A value that is being computed goes to its earlier callers, and is not kept."""
        self._sync.step("clear")
        self._table = BucketTable()

    def stats(self) -> Stats:
        """Exact if no thread uses the cache now; else each number was right at some moment of this call."""
        counts = {what: counter.read() for what, counter in self._counters.items()}
        return Stats(**counts, size=len(self._kept()))

    def explain(self, key: Hashable) -> str:
        """Whether a key is kept, and if not, how the nearest kept key differs.

        >>> sums = SingleFlightCache(sum, name="sums")
        >>> sums.get((1, 2)), sums.explain((1, 2)), sums.explain((1, 3))
        (3, 'kept', 'same [0]; differs in: [1]=3 vs 2')
        """
        table = self._table
        for cell in table.get(hash(key), _NONE):
            if cell.key is key or cell.key == key:
                return "kept" if cell.state is KEPT else "being computed"
        return miss_explanation(key, [cell.key for cell in self._kept()], self._parts)

    def after_fork(self) -> None:
        """Drops the keys that other threads of the parent were computing: those threads do not exist in this process."""
        me = self._sync.me()
        self._wait_graph.reset(self._sync)
        self._own = OwnedLock(self._sync)
        for cell in [cell for cells in self._table.values() for cell in cells]:
            if cell.state is not KEPT and cell.owner != me:
                self._table.remove(cell)

    def __repr__(self) -> str:
        return f"SingleFlightCache({self.name!r}, {len(self._kept())} of {self._limit})"

    def _kept(self) -> list[CacheCell]:
        return [cell for cell in self._table.ring.copy() if cell.state is KEPT]

    def _missed(self, key: Hashable, compute: Callable[..., V] | None, args: tuple[Any, ...]) -> V:
        if compute is None:
            if self._compute is None:
                raise BadCache(f"{self.name}.get", "compute", None, "nothing says how to compute", "Pass a function.")
            compute, args = self._compute, (key,)
        number, me = hash(key), self._sync.me()
        while True:
            table = self._table
            mine = CacheCell(key, number, me, self._sync.gate())
            try:
                try:
                    cell = self._claim(table, mine)
                    if cell is mine:
                        del cell  # it holds a failure, whose traceback will hold this frame
                        return self._work(table, mine, compute, args)
                finally:
                    self._settle(table, mine)
            finally:
                self._settle(table, mine)  # an exception sent by another thread may have ended the first call
                del mine
            try:
                if cell is not None and self._answered(cell, me):
                    return cell.value  # type: ignore[no-any-return]
            except ReentrantUse:
                cell = None
            if cell is None:  # this thread holds the lock already: the value cannot be kept
                self._counters["misses"].add()
                return compute(*args)

    def _claim(self, table: BucketTable, mine: CacheCell) -> CacheCell | None:
        """The one cell of the key: `mine`, if there was none; None if this thread holds the lock already."""
        key, number, seen = mine.key, mine.number, _NONE
        while True:
            cells = table.get(number, _NONE)
            compared = set(map(id, seen))
            for cell in cells:
                if id(cell) not in compared and (cell.key is key or cell.key == key):
                    return cell
            self._sync.step("looked")
            if self._own.by == mine.owner:
                return None
            if self._own.run(mine.owner, table.try_add, mine, cells):
                return mine
            seen = cells

    def _work(self, table: BucketTable, cell: CacheCell, compute: Callable[..., V], args: tuple[Any, ...]) -> V:
        self._counters["misses"].add()
        self._sync.step("claimed")
        try:
            value = compute(*args)
        except Exception as error:  # why: any error of the compute function goes to all waiting threads, and is raised
            self._counters["failures"].add()
            self._sync.step("failed")
            self._forget(table, cell)  # first: a thread that gets the failure and calls again computes anew
            cell.error, cell.trace = error, error.__traceback__
            cell.state = FAILED
            del cell  # the traceback has this frame
            raise
        self._sync.step("computed")
        cell.value = value
        self._keep(table, cell)
        return value

    def _keep(self, table: BucketTable, cell: CacheCell) -> None:
        for _ in self._own.run(cell.owner, table.keep, cell, self._limit):
            self._counters["evictions"].add()

    def _forget(self, table: BucketTable, cell: CacheCell) -> None:
        self._own.run(cell.owner, table.remove, cell)

    def _settle(self, table: BucketTable, cell: CacheCell) -> None:
        """Releases the threads that wait for the cell; if it has no value, one of them computes.  Idempotent."""
        gate = cell.gate
        if gate is None or not cell.claimed:
            return
        if cell.state is COMPUTING:
            self._sync.step("abandons")
            self._forget(table, cell)
            cell.state = GONE
        gate.open()
        cell.gate = None

    def _answered(self, cell: CacheCell, me: int) -> bool:
        """Waits for the cell of another thread; False if that thread was ended before there was a value.

        Raises what computing raised; `Circular`; `ReentrantUse`.
        """
        if cell.state is KEPT:
            cell.used = True
            self._hit()
            return True
        before = self._wait_graph.awaited_by(me)
        try:
            try:
                self._wait(cell, me)
            finally:
                self._wait_graph.restore(me, before)
        finally:
            self._wait_graph.restore(me, before)  # as above
        if cell.state is GONE:
            return False
        self._counters["waits"].add()
        if cell.error is not None:
            raise _own_copy(cell.error).with_traceback(cell.trace)
        return True

    def _wait(self, cell: CacheCell, me: int) -> None:
        cycle = self._wait_graph.add(me, cell)
        if cycle:
            raise Circular(self.name, [one.key for one in cycle])
        self._sync.step("waits")
        gate = cell.gate
        while gate is not None and cell.state is COMPUTING and not gate.wait(SLICE):
            pass


def clear_all() -> None:
    """Clears every live cache of this process."""
    for cache in ambient.caches():
        cache.clear()


def _own_copy(error: Exception) -> Exception:
    try:
        copied = copy.copy(error)
    except Exception:  # why: an exception of the user may fail to copy in any way; the original is raised then
        return error
    if type(copied) is not type(error):
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied


SELF_KEYED_TYPES = frozenset({
    int, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.qscheme,
})  # fmt: skip
"""Types whose values are their own key: none equals a value of another of these types.  All others become a tuple."""
_COMMON = frozenset({bool, float, list, tuple, dict})
_TRUE, _FALSE = (bool, True), (bool, False)


class IdentityKey:
    """A key part that equals only itself.  It keeps its object alive, so that no other object gets the same id."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and self.thing is other.thing

    def __hash__(self) -> int:
        return id(self.thing)

    def __repr__(self) -> str:
        return f"<this {type(self.thing).__name__}>"


def value_key(value: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """A hashable key of a value and its type; `leaf` makes that of a value of no common type.

    >>> value_key([1, (2.0, True)], repr)
    (<class 'list'>, 1, (<class 'tuple'>, (<class 'float'>, 2.0), (<class 'bool'>, True)))
    """
    kind = type(value)
    if kind in SELF_KEYED_TYPES:
        return value  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        parts: list[Any] = [kind]
        for item in value:  # a loop, for speed at each lookup: a comprehension would make `leaf` a closure cell
            kind = type(item)
            parts.append(item if kind in SELF_KEYED_TYPES else value_key(item, leaf) if kind in _COMMON else leaf(item))
        return tuple(parts)
    if kind is bool:
        return _TRUE if value else _FALSE
    if kind is float:
        return (float, value) if value and not isnan(value) else (float, repr(value))
    if kind is dict:
        return (dict, *[(value_key(name, leaf), value_key(item, leaf)) for name, item in value.items()])
    return leaf(value)


def uncommon_value_key(value: Any, leaf: Callable[[Any], Hashable], refused: Callable[[Any], Exception]) -> Hashable:
    """The key of a value of a less common type, as the last resort of a `leaf`.  Raises `refused(value)` for any other."""
    kind = type(value)
    if isinstance(value, Mapping):
        return (kind, value_key(dict(value), leaf))
    if isinstance(value, (list, tuple)):
        return (kind, *[value_key(item, leaf) for item in value])
    if kind is complex:
        return (complex, value_key(value.real, leaf), value_key(value.imag, leaf))
    if kind is bytes or isinstance(value, enum.Enum):
        return (kind, value if kind is bytes else value.name)
    raise refused(value)
