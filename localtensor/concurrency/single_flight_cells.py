"""The parts of a shared cache: a cell for each key, a bucket table, the wait graph, a counter, and explained misses."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from localtensor.concurrency.sync import Gate, Sync
from localtensor.errors.base import Refusal

T = TypeVar("T")
COMPUTING, KEPT, FAILED, GONE = "computing", "kept", "failed", "gone"


class Circular(Refusal):
    """A computation that waits for itself: by way of the same key, or of keys that other threads compute."""

    def __init__(self, name: str, keys: Sequence[object]) -> None:
        first, *others = [short_repr(key) for key in keys]
        problem = "this thread is computing it now, and asks for it again"
        if others:
            problem = f"it waits for {', which waits for '.join(others)}, which this thread is computing"
        remedy = "Let a computation ask for smaller things only, never for one that may ask for it."
        super().__init__(f"{name}.get", "key", first, problem, remedy)


class ReentrantUse(Exception):
    """A finaliser or signal handler uses the cache while its own thread holds the lock: it must not wait for itself."""


def short_repr(thing: object, most: int = 200) -> str:
    """The repr of a thing, cut to `most` characters; the name of its class if the repr fails."""
    try:
        text = repr(thing)
    except Exception:  # why: the repr of a user's key may raise anything, and the message needs a text
        return f"<{type(thing).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


class CacheCell:
    """One key: the thread that computes it, then its value.  `state` is written last, after the values it stands for."""

    __slots__ = ("claimed", "error", "gate", "key", "number", "owner", "state", "trace", "used", "value")

    def __init__(self, key: Hashable, number: int, owner: int, gate: Gate) -> None:
        self.key = key
        self.number = number  # the hash of the key
        self.owner = owner
        self.gate: Gate | None = gate  # None: all waiting threads were released
        self.state = COMPUTING
        self.claimed = False
        self.used = False  # since `make_space` examined it last
        self.value: Any = None
        self.error: Exception | None = None
        self.trace: Any = None


class BucketTable(dict[int, "tuple[CacheCell, ...]"]):
    """Cells by the hash of their keys.  The tuples are replaced, never changed, so that readers need no lock.

    `ring` holds the kept cells, the next to be evicted first.
    """

    __slots__ = ("ring",)

    def __init__(self) -> None:
        super().__init__()
        self.ring: deque[CacheCell] = deque()

    def try_add(self, cell: CacheCell, beside: tuple[CacheCell, ...]) -> bool:
        """Adds the cell; False if the cells of its hash are no longer those of `beside`."""
        if self.get(cell.number, ()) is not beside:
            return False
        cell.claimed = True
        self[cell.number] = (*beside, cell)
        return True

    def keep(self, cell: CacheCell, limit: int) -> list[CacheCell]:
        """Marks the cell as kept, and returns the cells that were evicted for it."""
        gone = self.make_space(limit)
        self.ring.append(cell)
        cell.state = KEPT
        return gone

    def remove(self, cell: CacheCell) -> None:
        """Removes the cell from its bucket."""
        rest = tuple([other for other in self.get(cell.number, ()) if other is not cell])
        if rest:
            self[cell.number] = rest
        else:
            self.pop(cell.number, None)

    def make_space(self, limit: int) -> list[CacheCell]:
        """Evicts until fewer than `limit` cells are kept: the oldest unused since last examined.  Returns the evicted."""
        gone = []
        looks = len(self.ring)
        while len(self.ring) >= limit:
            first = self.ring[0]
            if first.used and looks > 0:
                first.used = False
                self.ring.rotate(-1)
                looks -= 1
                continue
            self.remove(first)
            gone.append(self.ring.popleft())
        return gone


class OwnedLock:
    """A lock that knows which thread holds it: a finaliser or signal handler of that thread must not take it again."""

    __slots__ = ("by", "lock")

    def __init__(self, sync: Sync) -> None:
        self.lock = sync.lock()
        self.by: int | None = None

    def run(self, me: int, work: Callable[..., T], *args: object) -> T:
        """The result of `work(*args)`, which runs while this thread holds the lock."""
        with self.lock:
            try:
                try:
                    self.by = me
                    return work(*args)
                finally:
                    self.by = None
            finally:
                self.by = None  # an exception sent by another thread may have ended the first


class WaitGraph:
    """The cell that each thread waits for, across all caches with the same services.  No wait may close a cycle."""

    def __init__(self, sync: Sync) -> None:
        self.reset(sync)

    def reset(self, sync: Sync) -> None:
        """Forgets all waits."""
        self.own = OwnedLock(sync)
        self._waits: dict[int, CacheCell] = {}

    def add(self, me: int, cell: CacheCell) -> list[CacheCell]:
        """Registers that the thread waits for the cell; returns the cycle instead if that would close one.

        Raises `ReentrantUse`.
        """
        if self.own.by == me:
            raise ReentrantUse
        return self.own.run(me, self._cycle_of, me, cell)

    def _cycle_of(self, me: int, cell: CacheCell) -> list[CacheCell]:
        cycle: list[CacheCell] = []
        awaited: CacheCell | None = cell
        while awaited is not None and awaited.state is COMPUTING and len(cycle) <= len(self._waits):
            cycle.append(awaited)
            if awaited.owner == me:
                return cycle
            awaited = self._waits.get(awaited.owner)
        self._waits[me] = cell
        return []

    def awaited_by(self, me: int) -> CacheCell | None:
        """The cell that the thread waits for now; a signal handler may call this during a wait."""
        cell = self._waits.get(me)
        return cell if cell is not None and cell.state is COMPUTING else None

    def restore(self, me: int, cell: CacheCell | None) -> None:
        """Restores what the thread waits for; None is nothing."""
        if cell is None:
            self._waits.pop(me, None)
        else:
            self._waits[me] = cell


def wait_graph_of(sync: Sync) -> WaitGraph:
    """The one wait graph of these services, kept on the object that their threads share."""
    graph: WaitGraph = vars(sync).get("wait_graph") or vars(sync).setdefault("wait_graph", WaitGraph(sync))
    return graph


class AtomicCounter:
    """An exact counter without a lock, for any number of threads: adding is one step of the interpreter."""

    __slots__ = ("_count", "add")

    def __init__(self) -> None:
        self._count = itertools.count()
        self.add = self._count.__next__

    def read(self) -> int:
        """The number of calls of `add`."""
        return int(repr(self._count)[len("count(") : -1])  # next() would change it


PartsOf = Callable[[Any], Mapping[str, Any]]
ABSENT = "(not given)"


@dataclasses.dataclass(frozen=True, slots=True)
class KeyPart:
    """A value and its text.  A quiet part is not listed among the equal ones."""

    value: Any
    text: str
    quiet: bool = False

    def __repr__(self) -> str:
        return self.text


def key_parts(key: Hashable) -> Mapping[str, Any]:
    """The named parts of a key: the fields of a dataclass or named tuple, the places of a tuple, or itself.

    >>> key_parts(("add", 1))
    {'[0]': 'add', '[1]': 1}
    """
    if dataclasses.is_dataclass(key):
        return {field.name: getattr(key, field.name) for field in dataclasses.fields(key)}
    if isinstance(key, tuple):
        names = getattr(type(key), "_fields", None) or [f"[{i}]" for i in range(len(key))]
        return dict(zip(names, key, strict=True))
    return {"key": key}


def miss_explanation(key: Hashable, kept: Iterable[Hashable], parts: PartsOf = key_parts) -> str:
    """One line about the nearest kept key: the equal parts, and the parts that differ.

    >>> miss_explanation(("sum", "S(0)", -1), [("mul", "R", 1), ("sum", "S(0)", 1)])
    'same [0] and [1]; differs in: [2]=-1 vs 1'
    """
    mine = parts(key)
    nearest: tuple[list[str], Mapping[str, Any]] | None = None
    for other in kept:
        theirs = parts(other)
        differ = [name for name in {**mine, **theirs} if not _same(mine, theirs, name)]
        if nearest is None or len(differ) < len(nearest[0]):
            nearest = differ, theirs
    if nearest is None:
        return "nothing is kept"
    differ, theirs = nearest
    same = [name for name, part in mine.items() if name not in differ and not getattr(part, "quiet", False)]
    shared = " and ".join(filter(None, (", ".join(same[:-1]), *same[-1:])))
    shared = f"same {shared}; " if same else ""
    return f"{shared}differs in: {', '.join(f'{n}={_part_text(mine, n)} vs {_part_text(theirs, n)}' for n in differ)}"


def _same(mine: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> bool:
    if name not in mine or name not in theirs:
        return False
    one, other = mine[name], theirs[name]
    return one is other or (type(one) is type(other) and bool(one == other))


def _part_text(parts: Mapping[str, Any], name: str) -> str:
    return short_repr(parts[name]) if name in parts else ABSENT
