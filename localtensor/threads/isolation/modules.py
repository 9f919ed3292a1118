"""Each rank has its own `sys.modules`: an import statement, pickle, `importlib.reload` and C code find its own modules.

While ranks run, `sys.modules` is of a subclass of dict that asks which rank the calling thread belongs to.  Python's
import machinery, in Python and in C, takes any mapping there; but C keeps a pointer to the dict from start-up, so the
same object changes its type for the time of the run.  The dict itself holds what all ranks share and what was imported
before; a rank's own modules are in its `World`.  A helper thread belongs to the rank that started it.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from localtensor.errors import TorchChanged
from localtensor.threads.isolation.sharing import SharedRoots

SHARED = SharedRoots()
_MISSING: Any = object()
_GONE: Any = object()  # a rank's own entry for a module that it has removed, and that is there for others


class World:
    """The modules of one rank."""

    __slots__ = ("modules", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.modules: dict[str, Any] = {}


class _Here(threading.local):
    """The world of this thread (None: outside of all ranks), the C extension that it is loading, whether it defines an op."""

    world: World | None = None
    defining: bool = False
    extension: str | None = None


here = _Here()
before: set[str] = set()  # names that every rank sees though they are not shared
worlds: list[World] = []
on_reach: list[Callable[[Any], None]] = []  # called with a module that ranks share, when a rank first looks it up
on_share: list[Callable[[], None]] = []  # called when a package has become shared
_reached: set[str] = set()


def world_of_thread() -> World | None:
    """The world of the rank to which this thread belongs, or None."""
    return here.world


@contextmanager
def in_world(world: World | None) -> Iterator[None]:
    """Inside the block this thread belongs to that rank; None is outside of all ranks."""
    outer, here.world = here.world, world
    try:
        yield
    finally:
        here.world = outer


class RankModules(dict[str, Any]):
    """`sys.modules` as the calling thread's rank sees it."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        world = here.world
        found = dict.get(self, name, _MISSING) if world is None else _find(self, world, name)
        if found is _MISSING:
            raise KeyError(name)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        world = here.world
        found = dict.get(self, name, _MISSING) if world is None else _find(self, world, name)
        return default if found is _MISSING else found

    def __contains__(self, name: object) -> bool:
        return self.get(name, _MISSING) is not _MISSING  # type: ignore[arg-type]

    def __setitem__(self, name: str, module: Any) -> None:
        world = here.world
        if world is None:
            return dict.__setitem__(self, name, module)
        if name not in world.modules and name in SHARED and is_initializing(module):
            return dict.__setitem__(self, name, module)
        if _visible(name) and dict.get(self, name, _MISSING) is module:
            world.modules.pop(name, None)
        else:
            world.modules[name] = module
        return None

    def __delitem__(self, name: str) -> None:
        world = here.world
        if world is None:
            return dict.__delitem__(self, name)
        held = self[name]
        if name in SHARED and name not in world.modules and is_initializing(held):
            return dict.__delitem__(self, name)  # its import has failed
        if _visible(name) and dict.__contains__(self, name):
            world.modules[name] = _GONE
        else:
            del world.modules[name]
        return None

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        found = self.get(name, _MISSING)
        if found is not _MISSING:
            del self[name]
            return found
        if default:
            return default[0]
        raise KeyError(name)

    def popitem(self) -> tuple[str, Any]:
        name = next(reversed(self), None)
        if name is None:
            raise KeyError("popitem(): dictionary is empty")
        return name, self.pop(name)

    def clear(self) -> None:
        for name in list(self):
            del self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, module in dict(*args, **kwargs).items():
            self[name] = module

    def copy(self) -> dict[str, Any]:
        world = here.world
        if world is None:
            return dict(dict.items(self))
        held = {name: module for name, module in list(dict.items(self)) if _visible(name)}
        held.update(world.modules)
        return {name: module for name, module in held.items() if module is not _GONE}

    def keys(self) -> Any:
        return self.copy().keys()

    def values(self) -> Any:
        return self.copy().values()

    def items(self) -> Any:
        return self.copy().items()

    def __iter__(self) -> Iterator[str]:
        return iter(self.copy())

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.copy())

    def __len__(self) -> int:
        return dict.__len__(self) if here.world is None else len(self.copy())

    def __eq__(self, other: object) -> bool:
        return self is other or self.copy() == other

    __hash__ = None

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return {**self.copy(), **other}

    def __ior__(self, other: Any) -> "RankModules":  # type: ignore[override]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(self.copy())


def _visible(name: str) -> bool:
    """Whether ranks see what the dict itself holds under this name."""
    return name in before or name in SHARED


def _find(modules: RankModules, world: World, name: str) -> Any:
    """The module of this name, as the rank sees it, or `_MISSING`."""
    found = world.modules.get(name, _MISSING)
    if found is _MISSING:
        found = dict.get(modules, name, _MISSING) if _visible(name) else _MISSING
        if name not in _reached and found is not _MISSING and on_reach and not is_initializing(found):
            _reached.add(name)
            on_reach[0](found)
        return found
    if found is _GONE:
        return _MISSING
    if here.extension is not None and name != here.extension and type(name) is str:
        root = name.partition(".")[0]
        if root != "__main__":  # the extension keeps what it finds, for all ranks
            share_root(world, root, f"its C extension {here.extension} takes objects of {name} as it loads")
    return found


def begin(names: Iterable[str], new: list[World]) -> None:
    """Begin a run whose ranks see these names."""
    before.clear()
    _reached.clear()
    before.update(names)
    worlds[:] = new


def is_initializing(module: object) -> bool:
    """Whether the import machinery is executing the module."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def share_root(world: World, root: str, reason: str) -> None:
    """Share the modules of this root from now on: the copies of this rank become those of all."""
    roots = set(SHARED.observed(root, reason))
    for name in [name for name in world.modules if name.partition(".")[0] in roots]:
        module = world.modules.pop(name)
        if module is not _GONE:
            dict.__setitem__(sys.modules, name, module)
    for other in worlds:
        for name in [name for name in other.modules if name.partition(".")[0] in roots]:
            del other.modules[name]
    for call in on_share:
        call()


def set_type(modules: dict[str, Any], kind: type) -> None:
    """Give the dict another type of the same layout.  Raises `TorchChanged` where Python keeps it elsewhere."""
    place = ctypes.c_void_p.from_address(id(modules) + object.__basicsize__ - ctypes.sizeof(ctypes.c_void_p))
    if place.value != id(type(modules)) or kind.__basicsize__ != dict.__basicsize__:
        raise TorchChanged("sys.modules", "this Python keeps the type of an object elsewhere")
    if kind is not dict:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kind))
    place.value = id(kind)
