"""The globals and class attributes of modules that ranks share: each rank sees what it wrote, and nothing that another wrote.

A `Cell` is one namespace (of a module or a class) or one container (a dict, a list, a set, the attributes of an object)
as it was when the run began.  At a hand-over the cells that have changed are compared with that, what differs is kept
for the rank, and the next rank's differences are put in place.  So a program that changes nothing pays for the look only.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from localtensor.threads.isolation.watch import ON_SIGHT, Watch

_NOTHING: Any = object()  # the value of a name that is not there
_FIXED = ("__builtins__", "__dict__", "__weakref__", "__abstractmethods__")

OWN, FOR_ALL, ELSEWHERE = range(3)
"""Of a write to a name: the rank's own, seen by all ranks, or kept by a slot of `threads/state`."""

Rule = Callable[[Any, str, Any], int]  # of the owner, the name and the new value


class Namespace:
    """The names of a module or a class.  What a rank keeps of it is a dict of the values that differ."""

    __slots__ = ("container", "first", "originals", "owner", "rule")

    def __init__(self, owner: Any, container: dict[str, Any], rule: Rule) -> None:
        self.owner, self.container, self.rule = owner, container, rule
        self.first = dict(container)
        self.originals: dict[str, Any] = {}  # of names that were written for all ranks

    def changes(self) -> dict[str, Any]:
        now, first = self.container, self.first
        found = {name: value for name, value in now.items() if first.get(name, _NOTHING) is not value}
        if len(now) - len(first) < len(found):
            found.update(dict.fromkeys([name for name in first if name not in now], _NOTHING))
        kept: dict[str, Any] = {}
        for name, value in found.items():
            kind = ELSEWHERE if name in _FIXED else self.rule(self.owner, name, value)
            if kind == FOR_ALL or (name in self.originals and value is self.originals[name]):
                self.originals.setdefault(name, first.get(name, _NOTHING))
                if value is _NOTHING:
                    first.pop(name, None)
                else:
                    first[name] = value
            elif kind == OWN:
                kept[name] = value
        return kept

    def release(self, kept: dict[str, Any]) -> list[str]:
        """Take out of a rank's differences what is for all; the names of that."""
        names = [name for name, value in kept.items() if value is not _NOTHING]
        names = [name for name in names if self.rule(self.owner, name, kept[name]) == FOR_ALL]
        for name in names:
            self.originals.setdefault(name, self.first.get(name, _NOTHING))
            self.first[name] = kept.pop(name)
        return names

    def put(self, old: dict[str, Any] | None, new: dict[str, Any] | None) -> bool:
        """Replace the differences `old`, which are there, by `new`; whether that has changed anything."""
        wanted = {name: self.first.get(name, _NOTHING) for name in old or ()}
        wanted.update(new or {})
        held, kind = self.container, isinstance(self.owner, type)
        differs = [(name, value) for name, value in wanted.items() if held.get(name, _NOTHING) is not value]
        for name, value in differs:
            if kind and value is _NOTHING:
                type.__delattr__(self.owner, name)
            elif kind:
                type.__setattr__(self.owner, name, value)
            elif value is _NOTHING:
                del held[name]
            else:
                held[name] = value
        return bool(differs)


class Contents:
    """What is in a container.  What a rank keeps of it is a copy."""

    __slots__ = ("container", "first")

    def __init__(self, container: Any) -> None:
        self.container = container
        self.first = _copy(container)

    def changes(self) -> Any:
        now = _copy(self.container)
        return None if _same(now, self.first) else (now,)

    def put(self, old: Any, new: Any) -> bool:
        """Put the rank's contents there, or the first ones; always a change."""
        held = self.container
        value = self.first if new is None else new[0]
        if isinstance(held, list):
            list.__setitem__(held, slice(None), value)
        elif isinstance(held, deque):
            deque.clear(held)
            deque.extend(held, value)
        elif isinstance(held, set):
            set.clear(held)
            set.update(held, value)
        else:
            kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
            kind.clear(held)
            for key, one in value.items():
                kind.__setitem__(held, key, one)
        return True


Cell = Namespace | Contents


def _copy(container: Any) -> Any:
    """The contents, in a plain list, set or dict."""
    if isinstance(container, dict):
        return dict(container.items()) if isinstance(container, OrderedDict) else dict(container)
    return list(container) if isinstance(container, list | deque) else set(container)


def _same(one: Any, other: Any) -> bool:
    """Whether both hold the same objects, in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return all(a is b for a, b in zip(one.values(), other.values())) and list(one) == list(other)
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other))
    return {id(value) for value in one} == {id(value) for value in other}


class RankNamespaces:
    """The cells of one run, and what each rank has changed in them."""

    def __init__(self, ranks: int) -> None:
        self.cells: list[Cell] = []
        self.own: list[dict[int, Any]] = [{} for _ in range(ranks)]
        self.holder: int | None = None
        self._watch = Watch()
        self._tracked: set[int] = set()  # ids of owners and containers
        self._settled_cells = -1  # how many cells there were when `_slots` was made
        self._slots: Any = None

    def add(self, cells: Iterable[Cell]) -> None:
        """Track these, too.  They have not been changed by any rank."""
        new = list(cells)
        if new:
            self._keep_changes()
            self.cells += new
            self._tracked.update(id(cell.owner if isinstance(cell, Namespace) else cell.container) for cell in new)
            self._watch.add([cell.container for cell in new])

    def tracks(self, owner: object) -> bool:
        """Whether what is written to this module, class, object or container is a rank's own."""
        return id(owner) in self._tracked or id(getattr(owner, "__dict__", None)) in self._tracked

    def turn(self, new: int | None) -> None:
        """The next rank to run (None: the caller, who sees what was there before)."""
        self._keep_changes()
        here = {} if self.holder is None else self.own[self.holder]
        there = {} if new is None else self.own[new]
        self.holder = new
        if here or there:
            written = [at for at in here.keys() | there.keys() if self.cells[at].put(here.get(at), there.get(at))]
            if written:
                self._watch.read(written)

    def give_to_all(self) -> None:
        """What a rank has written to a module or class is there for all if the rule says so now: a package became shared."""
        self._keep_changes()
        here = {} if self.holder is None else self.own[self.holder]
        for own in self.own:
            for at, kept in list(own.items()):
                cell = self.cells[at]
                if isinstance(cell, Namespace) and (names := cell.release(kept)):
                    if not kept:
                        del own[at]
                    if cell.put(dict.fromkeys(names), here.get(at)):
                        self._watch.read([at])

    def settle(self, spaces: Callable[[], Collection[int]]) -> None:
        """Take what slots have put there as unchanged; `spaces()`: the ids of the namespaces where they do."""
        if self._settled_cells != len(self.cells):
            ids = spaces()
            self._slots = self._watch.places([at for at, cell in enumerate(self.cells) if id(cell.container) in ids])
            self._settled_cells = len(self.cells)
        if ON_SIGHT:
            self._watch.refresh(self._slots)

    def _keep_changes(self) -> None:
        """Keep what the running rank has changed since it was last looked at."""
        changed = self._watch.changed() if ON_SIGHT else range(len(self.cells))
        if self.holder is not None:
            own = self.own[self.holder]
            for at in changed:
                own.pop(at, None)
                found = self.cells[at].changes()
                if found:
                    own[at] = found
        if changed:
            self._watch.read(changed)
