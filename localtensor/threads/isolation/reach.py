"""From a function to the cells that a run of it may change: its module's globals, and what they lead to.

The walk follows modules, classes, functions (their closures, defaults and attributes), containers and objects.  It does
not enter what all ranks share (torch, the standard library), except the attributes of loggers.  Of modules it enters
those that a value names; those that a rank imports later are added when it does so.  So the state of a debugger, a
notebook's kernel or a test runner is left alone.
"""

import argparse
import functools
import gc
import logging
import sys
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from localtensor.threads.isolation.modules import SHARED, world_of_thread
from localtensor.threads.isolation.namespaces import Cell, Contents, Namespace, Rule
from localtensor.threads.isolation.sharing import STANDARD
from localtensor.threads.isolation.watch import ON_SIGHT, Watch

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_FROZEN = (tuple, frozenset)
_LEAVES = (str, bytes, int, float, complex, type(None), BuiltinFunctionType)
_ENTERED: tuple[type, ...] = (
    logging.Logger,
    logging.RootLogger,
    logging.Manager,
    logging.PlaceHolder,
    SimpleNamespace,
    argparse.Namespace,
)
_ENTERED += (logging.StreamHandler, logging.FileHandler, logging.NullHandler, UserDict, UserList)
_CACHE: Any = type(functools.lru_cache(int))
MOST_CELLS = 200_000
_UNTOUCHED = ("sys", "_frozen_importlib", "_frozen_importlib_external")  # slots, and imports.py
_OF_THREADS = ("threading", "_weakrefset", "weakref", "concurrent.futures.thread")  # what they keep is of all threads
PATCHED = ("torch.distributed", "torch.nn", "torch.optim")  # shared modules whose functions programs replace


class Reach:
    """The cells found so far, and the functions that were replaced."""

    def __init__(self, rule: Rule, substitutes: dict[Any, Any]) -> None:
        """`substitutes`: functions in whose place a program that has imported them by name gets others."""
        self._rule = rule
        self._seen: dict[int, Any] = {}  # keeps what was seen alive, so that no other object has its address
        self._in_place_of = dict(substitutes)
        self._replaced: list[tuple[Any, str, Any]] = []
        kept = (value for name in _OF_THREADS if name in sys.modules for value in vars(sys.modules[name]).values())
        self._seen.update((id(value), value) for value in kept if type(value) in (*_DICTS, list, set, deque))

    def know(self, cells: Iterable[Namespace]) -> None:
        """These are tracked already."""
        self._seen.update((id(cell.owner), cell.owner) for cell in cells)

    def cells(self, roots: Iterable[object]) -> list[Cell]:
        """The cells that these values lead to and that were not found before."""
        found: list[Cell] = []
        pending = list(roots)
        while pending and len(self._seen) < MOST_CELLS:
            value = pending.pop()
            if issubclass(type(value), _LEAVES) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            pending += self._enter(value, found)
        return found

    def _enter(self, value: Any, found: list[Cell]) -> list[Any]:
        """Add the cells of one value; returns what it leads to."""
        kind = type(value)  # not isinstance: an object may make something of a look at its __class__
        if issubclass(kind, ModuleType | type):
            return self._names(value, found)
        if kind is FunctionType:
            return self._function(value)
        if kind in _DICTS or kind in (list, set, deque):
            found.append(Contents(value))
            return list(value.values()) if isinstance(value, dict) else list(value)
        if kind in _FROZEN:
            return list(value)
        if kind is MethodType:
            return [value.__self__, value.__func__]
        if kind in (classmethod, staticmethod):
            return [value.__func__]
        if kind is property:
            return [value.fget, value.fset]
        if kind is functools.partial:
            return [value.func, value.args, value.keywords]
        return self._object(value, found)

    def _names(self, owner: Any, found: list[Cell]) -> list[Any]:
        """A module, or a class with its bases."""
        name = _module_of(owner)
        if not name or (isinstance(owner, ModuleType) and sys.modules.get(name) is not owner):
            return []
        if isinstance(owner, type) and not owner.__flags__ & 1 << 9:  # made in C
            return []
        space = _class_dict(owner) if isinstance(owner, type) else vars(owner)
        if name in SHARED:  # programs patch such things, too
            if name not in _UNTOUCHED:
                found.append(Namespace(owner, space, self._rule))
            return _registries(name, owner, space) if SHARED.reason(name.partition(".")[0]) == STANDARD else []
        self._substitute(owner, space)
        found.append(Namespace(owner, space, self._rule))
        around = [owner.__mro__, sys.modules.get(name)] if isinstance(owner, type) else []
        return [*(value for key, value in space.items() if key != "__builtins__"), *around]

    def _function(self, function: FunctionType) -> list[Any]:
        """Its module, and what it keeps; of a function that ranks share, the one that it wraps."""
        name = function.__module__ or ""
        if name in SHARED:
            return [getattr(function, "__wrapped__", None)]
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        ahead = [sys.modules.get(name), *cells]
        ahead += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return [*ahead, function.__dict__] if function.__dict__ else ahead

    def _object(self, value: Any, found: list[Cell]) -> list[Any]:
        """An object whose class is the program's, or of a kind that programs keep state in: its attributes."""
        kind = type(value)
        if _module_of(kind) in SHARED and kind not in _ENTERED:
            return []
        held = _own_dict(value)
        if type(held) is not dict or id(held) in self._seen:
            return [kind]
        self._seen[id(held)] = held
        found.append(Contents(held))
        return [kind, *held.values()]

    def _substitute(self, owner: Any, space: dict[str, Any]) -> None:
        """Functions with state in C get a stand-in until `close`; a cache gets one that has a cache for each rank."""
        for name, value in list(space.items()):
            function = value.__func__ if type(value) in (classmethod, staticmethod) else value
            if type(function) is _CACHE and function not in self._in_place_of:
                self._in_place_of[function] = _cache_of_each_rank(function)
            if type(function) in (_CACHE, BuiltinFunctionType) and function in self._in_place_of:
                own = self._in_place_of[function]
                self._replaced.append((owner, name, value))
                _set(owner, name, own if function is value else type(value)(own))

    def close(self) -> None:
        """Put the functions back."""
        for owner, name, value in self._replaced:
            _set(owner, name, value)
        self._replaced.clear()


def _set(owner: Any, name: str, value: object) -> None:
    if isinstance(owner, type):
        type.__setattr__(owner, name, value)
    else:
        vars(owner)[name] = value


def _module_of(value: object) -> str:
    """The full name of the module that a class or an object belongs to, or of a module; empty if it names none."""
    name = getattr(value, "__name__", "") if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return name if isinstance(name, str) else ""


def _registries(name: str, owner: Any, space: dict[str, Any]) -> list[Any]:
    """Of a module or class of the standard library: its classes, and the tables in which programs register."""
    values = list(space.values()) if name not in _OF_THREADS else []
    found = [value for value in values if type(value) in _DICTS and value and all(map(_is_entry, value.values()))]
    if isinstance(owner, ModuleType):
        classes = [kind for kind in values if issubclass(type(kind), type)]
        found += [kind for kind in classes if _module_of(kind).partition(".")[0] == name.partition(".")[0]]
    return found


def _is_entry(value: object) -> bool:
    """Whether a table of functions, classes and names may hold this."""
    return type(value) in (FunctionType, BuiltinFunctionType, str) or issubclass(type(value), type)


def _contents(cell: Any) -> Any:
    """What is in a cell of a closure; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _class_dict(kind: type) -> dict[str, Any]:
    """The dict behind the read-only view of a class's attributes."""
    (space,) = gc.get_referents(kind.__dict__)
    return space  # type: ignore[no-any-return]


def _cache_of_each_rank(cached: Any) -> Any:
    """A function that calls the running rank's own cache of the function, made at its first call."""
    caches: dict[int, Any] = {}

    def mine() -> Any:
        world = world_of_thread()
        if world is None:
            return cached
        if world.rank not in caches:
            caches[world.rank] = functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)
        return caches[world.rank]

    @functools.wraps(cached)
    def call(*args: Any, **kwargs: Any) -> Any:
        return mine()(*args, **kwargs)

    vars(call)["__wrapped__"] = cached.__wrapped__
    for name in ("cache_info", "cache_clear", "cache_parameters"):
        vars(call)[name] = functools.partial(_call_method, mine, name)
    return call


def _call_method(of: Callable[[], Any], name: str) -> Any:
    return getattr(of(), name)()


def _own_dict(value: object) -> Any:
    """The attributes of an object, or None; not by `getattr`, which runs a `__getattr__` of the program's."""
    try:
        return object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None


class PatchedNamespaces:
    """The namespaces of shared modules that programs patch by a name such as `torch.nn.Linear.forward`, as they are outside of
    runs: kept from run to run, since they are many.

    `rule` is that of the namespaces; `among`: how the names of the modules begin.
    """

    def __init__(self, rule: Rule, among: tuple[str, ...] = PATCHED) -> None:
        self.cells: list[Namespace] = []
        self._rule, self._among = rule, among
        self._names: set[str] = set()
        self._watch = Watch()

    def now(self) -> list[Namespace]:
        """All of them, up to date."""
        for cell in self.changed():
            cell.first = dict(cell.container)
        for cell in self.cells:
            cell.originals.clear()
        new = [name for name in dict.keys(sys.modules) if name not in self._names]
        self._names.update(new)
        cells = _patched_namespaces(new, self._rule, self._among)
        self.cells += cells
        self._watch.add([cell.container for cell in cells])
        self._watch.read(range(len(self.cells)))
        return self.cells

    def changed(self) -> list[Namespace]:
        """Those that may have changed since `now`."""
        return [self.cells[at] for at in (self._watch.changed() if ON_SIGHT else range(len(self.cells)))]


def _patched_namespaces(names: Iterable[str], rule: Rule, among: tuple[str, ...]) -> list[Namespace]:
    found: list[Namespace] = []
    for name in names:
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and name.startswith(among):
            found.append(Namespace(module, vars(module), rule))
            classes = (value for value in list(vars(module).values()) if issubclass(type(value), type))
            own = (kind for kind in classes if kind.__module__ == name and kind.__flags__ & 1 << 9)
            found += [Namespace(kind, _class_dict(kind), rule) for kind in own]
    return found
