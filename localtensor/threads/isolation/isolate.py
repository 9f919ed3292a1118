"""What keeps the ranks of one run apart in Python: their modules, and the namespaces of modules that they share.

Last the text of `localtensor run --explain-isolation`: what is a rank's own, what all ranks share, and writes that all see.
"""

import builtins
import copyreg
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch

from localtensor._util.patching import wrapped
from localtensor.threads.isolation import modules
from localtensor.threads.isolation.imports import modules_of_ranks
from localtensor.threads.isolation.modules import World
from localtensor.threads.isolation.namespaces import ELSEWHERE, FOR_ALL, OWN, Namespace, RankNamespaces
from localtensor.threads.isolation.reach import PatchedNamespaces, Reach
from localtensor.threads.isolation.sharing import IMPORTED
from localtensor.threads.state import patched_attributes
from localtensor.threads.state.swap import is_swapped, swapped_spaces

_PACKAGES = tuple(str(Path(__file__).parents[3] / name) + "/" for name in ("localtensor", "strategies"))


def write_rule(owner: Any, name: str, value: Any) -> int:
    """What becomes of a write to a name of a module or class."""
    if is_swapped(owner, name):
        return ELSEWHERE
    if isinstance(value, ModuleType) and value.__name__ in modules.SHARED:
        return FOR_ALL  # a part of a package, imported by one rank, is there for all
    root = str(getattr(getattr(value, "__func__", value), "__module__", "")).partition(".")[0]
    if root in IMPORTED or modules.SHARED.is_observed(root):
        return FOR_ALL  # what such a package registers as it is imported
    code = getattr(getattr(value, "func", value), "__code__", None)
    return FOR_ALL if isinstance(code, CodeType) and code.co_filename.startswith(_PACKAGES) else OWN


_patched, _of_torch = PatchedNamespaces(write_rule), PatchedNamespaces(write_rule, ("torch",))


class _Places:
    """The working directory and the umask of each rank that has changed them; what the others have is in `first`."""

    def __init__(self) -> None:
        self.own: dict[int, dict[str, Any]] = {}  # rank -> name of the function -> what to call it with
        self.first: dict[str, Any] = {}

    def note(self, name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A call of `os.chdir`, `os.fchdir` or `os.umask`."""
        world, before = modules.world_of_thread(), os.getcwd() if name == "chdir" else None
        answer = original(*args, **kwargs)
        if world is not None:
            self.first.setdefault(name, answer if before is None else before)
            own = args[0] if before is None else os.getcwd()
            self.own.setdefault(world.rank, {})[name] = own
        return answer

    def turn(self, old: int | None, new: int | None) -> None:
        here, there = self.own.get(-1 if old is None else old, {}), self.own.get(-1 if new is None else new, {})
        for name, first in self.first.items():
            want = there.get(name, first)
            if want != here.get(name, first):
                {"chdir": _chdir, "umask": _umask}[name](want)


_chdir, _fchdir, _umask = os.chdir, os.fchdir, os.umask


class Isolation:
    """The isolation of one run: `turn` at each hand-over, before the slots of `threads/state`, and `settle` after them."""

    def __init__(self, worlds: list[World], places: "_Places") -> None:
        self.worlds = worlds
        self.namespaces = RankNamespaces(len(worlds))
        self.reach = Reach(write_rule, {_chdir: os.chdir, _fchdir: os.fchdir, _umask: os.umask})
        self.places = places
        self.overlooked: Overlooked | None = None
        self._lock = threading.RLock()  # a helper thread may import while ranks take turns

    def add(self, roots: Iterable[object]) -> None:
        with self._lock:
            self.namespaces.add(self.reach.cells(roots))

    def give_to_all(self) -> None:
        """What ranks have written is looked at anew: a package has become shared."""
        with self._lock:
            self.namespaces.give_to_all()

    def report(self) -> tuple[list[str], list[str]]:
        """What stays shared, and the writes to it that were seen."""
        return explanation(self.worlds), [] if self.overlooked is None else self.overlooked.writes()

    def turn(self, new: int | None) -> None:
        old = self.namespaces.holder
        with self._lock:
            self.namespaces.turn(new)
        if self.places.own:
            self.places.turn(old, new)

    def settle(self) -> None:
        with self._lock:
            self.namespaces.settle(swapped_spaces)


def _registries() -> list[Any]:
    """What the standard library and torch keep in dicts and lists, by names that programs register."""
    safe = getattr(sys.modules.get("torch._weights_only_unpickler"), "_marked_safe_globals_set", None)
    context: Any = getattr(sys.modules.get("multiprocessing.context"), "_default_context", None)
    names: Any = (logging._levelToName, logging._nameToLevel, logging._handlerList)  # type: ignore[attr-defined]
    return [*names, copyreg.dispatch_table, safe, vars(context) if context is not None else None]


def _home(function: Any) -> ModuleType | None:
    """The module of a function, of what it wraps, or of an object that can be called.

    What a function refers to by closure ranks share: so a test collects their results.
    """
    if isinstance(function, ModuleType):
        return function
    while not isinstance(getattr(function, "__code__", None), CodeType):
        inner = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
        if inner is None:
            break
        function = inner
    return sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)


@contextmanager
def ranks_isolated(ranks: int, roots: Iterable[object], *, fresh: bool) -> Iterator[Isolation]:
    """Inside the block the ranks are kept apart; afterwards the process is as before.

    `roots`: functions that the ranks will call, or modules.  `fresh`: each rank imports its modules itself.
    """
    with modules_of_ranks(ranks, fresh=fresh) as worlds, ExitStack() as stack:
        places = _Places()
        for name, function in (("chdir", "chdir"), ("chdir", "fchdir"), ("umask", "umask")):
            stack.enter_context(wrapped(os, function, functools.partial(places.note, name)))
        isolation = Isolation(worlds, places)
        isolation.namespaces.add(_patched.now())
        isolation.reach.know(_patched.cells)
        isolation.add([builtins, logging, logging.root, *_registries(), *map(_home, roots)])

        def found(original: Any, manager: Any, name: str) -> Any:
            logger = original(manager, name)
            if modules.world_of_thread() is not None:
                isolation.add([logger])
            return logger

        if fresh:
            isolation.overlooked = Overlooked(isolation.namespaces.tracks, _of_torch)
        modules.on_share[:] = [isolation.give_to_all]
        modules.on_reach[:] = [lambda module: isolation.add([module])]
        patched_attributes.kept_elsewhere[:] = [isolation.namespaces.tracks]
        try:
            with wrapped(logging.Manager, "getLogger", found):
                yield isolation
        finally:
            modules.on_reach.clear()
            modules.on_share.clear()
            patched_attributes.kept_elsewhere.clear()
            isolation.turn(None)
            isolation.reach.close()


_TORCH = str(Path(torch.__file__).parent) + "/"
_STILL_SHARED = (
    "the state of C extensions and of objects that C keeps (queues, locks, open files)",
    "locale.setlocale, atexit.register, codecs.register, resource limits",
    "signal handlers: a rank is not the main thread, so Python refuses signal.signal",
    "what torch registers by name: operators, pytrees, backends",
)


class Overlooked:
    """The functions of torch that no cell tracks, as they were when the run began."""

    def __init__(self, tracks: Callable[[object], bool], of_torch: PatchedNamespaces) -> None:
        self._tracks, self._of_torch = tracks, of_torch
        of_torch.now()

    def writes(self) -> list[str]:
        """The functions that code outside of torch has replaced since, each with the line of the new one."""
        cells = [cell for cell in self._of_torch.changed() if not self._tracks(cell.owner)]
        return [text for cell in cells for text in _replaced(cell)]


def _replaced(cell: Namespace) -> Iterable[str]:
    owner = cell.owner
    where = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    for name, value in cell.changes().items():
        code: Any = getattr(getattr(value, "__func__", value), "__code__", None)
        if isinstance(code, CodeType) and not code.co_filename.startswith((_TORCH, "<")):
            yield f"{where}.{name} is now {value.__qualname__} ({code.co_filename}:{code.co_firstlineno}), on all ranks"


def explanation(worlds: Iterable[World]) -> list[str]:
    """What each rank has for itself, and what stays shared and why, a line each."""
    own: dict[str, int] = {}
    for world in worlds:
        for name in world.modules:
            if name != "__main__" and isinstance(world.modules[name], type(sys)):
                own.setdefault(name.partition(".")[0], 0)
                own[name.partition(".")[0]] += 1
    roots = sorted({name.partition(".")[0] for name in dict.keys(sys.modules)})
    seen, by_reason = modules.SHARED.seen(), dict[str, list[str]]()
    for root in roots:
        reason = modules.SHARED.reason(root)
        if reason and root not in seen:
            by_reason.setdefault(reason, []).append(root)
    lines = [f"each rank's own: {', '.join(sorted(own)) or 'no modules but the script'}"]
    for reason, names in sorted(by_reason.items()):
        lines.append(f"shared ({reason}): {', '.join(names) if len(names) < 20 else f'{len(names)} modules'}")
    lines += [f"shared: {root}: {why}" for root, why in sorted(seen.items())]
    return [*lines, *(f"shared: {what}" for what in _STILL_SHARED)]
