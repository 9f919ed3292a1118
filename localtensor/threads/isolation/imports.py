"""How the import machinery works in a rank, whose modules are in `RankModules`.

A shared module is executed as outside of all ranks, so that what it imports is not one rank's.  Code is compiled once:
ranks share code objects, which cannot be changed.  A C extension is loaded once, and each rank has it under its name.
"""

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import _bootstrap, _bootstrap_external
from types import ModuleType
from typing import Any, cast

import torch
from torch._library import custom_ops

from localtensor._util.patching import replaced, wrapped
from localtensor.threads.isolation import modules
from localtensor.threads.isolation.modules import RankModules, World, here, set_type, share_root

_TWICE = re.compile(r"already|duplicate|twice|more than once|multiple times|only once", re.IGNORECASE)
_IMPORTLIB = "<frozen importlib._bootstrap_external>"  # Python leaves frames of this file out of tracebacks


class _RankLocks(dict[Any, Any]):
    """importlib's locks by module name; of a rank's own modules, each rank has its own lock.

    A rank may wait for another while it imports a module, and the other may import its own copy meanwhile.
    """

    @staticmethod
    def _key(name: str) -> object:
        world = here.world
        return name if world is None or name in modules.SHARED else (world.rank, name)

    def __getitem__(self, name: str) -> Any:
        return dict.__getitem__(self, self._key(name))

    def __setitem__(self, name: str, lock: Any) -> None:
        dict.__setitem__(self, self._key(name), lock)

    def __delitem__(self, name: str) -> None:
        dict.pop(self, self._key(name), None)

    def get(self, name: str, default: Any = None) -> Any:
        return dict.get(self, self._key(name), default)


class _Imports:
    """What the import machinery does differently in a rank; one for each run."""

    def __init__(self) -> None:
        self.codes: dict[tuple[Any, ...], Any] = {}
        self.extensions: dict[tuple[str, Any], ModuleType] = {}
        self.executed: set[int] = set()

    def get_code(self, original: Callable[..., Any], loader: Any, name: str) -> Any:
        """The module's code; ranks share it while its file stays the same."""
        if here.world is None:
            return original(loader, name)
        path = loader.get_filename(name)
        try:
            stats = loader.path_stats(path)
        except OSError:
            return original(loader, name)
        key = (path, stats["mtime"], stats.get("size"))
        if key not in self.codes:
            self.codes[key] = original(loader, name)
        return self.codes[key]

    def create_extension(self, original: Callable[..., Any], loader: Any, spec: Any) -> Any:
        """A C extension is loaded once in a process: by the first rank that imports it, or before, outside of all ranks."""
        world, key = here.world, (spec.name, spec.origin)
        if world is not None and spec.name in modules.SHARED:
            return original(loader, spec)
        loaded = dict.get(sys.modules, spec.name) if world is not None else None
        if key not in self.extensions and getattr(getattr(loaded, "__spec__", None), "origin", None) == spec.origin:
            self.extensions[key] = cast("ModuleType", loaded)
            self.executed.add(id(loaded))
        if key not in self.extensions:
            self.extensions[key] = self._loading(spec.name, original, loader, spec)
        return self.extensions[key]

    def exec_extension(self, original: Callable[..., Any], loader: Any, module: ModuleType) -> Any:
        if id(module) not in map(id, self.extensions.values()):
            return original(loader, module)
        if id(module) not in self.executed:
            self.executed.add(id(module))
            self._loading(module.__name__, original, loader, module)
        _give_parts(module.__name__)
        return None

    def _loading(self, name: str, function: Callable[..., Any], *args: object) -> Any:
        before, here.extension = here.extension, name
        try:
            return function(*args)
        finally:
            here.extension = before

    def exec_module(self, original: Callable[..., Any], loader: Any, module: ModuleType) -> Any:
        """Execute a shared module outside of all ranks, any other in the rank."""
        world = here.world
        if world is None:
            return original(loader, module)
        name = module.__spec__.name if module.__spec__ is not None else module.__name__
        extension, here.extension = here.extension, None
        try:
            if name in modules.SHARED and dict.get(sys.modules, name) is module:
                here.world = None
            return original(loader, module)
        except Exception as error:  # why: whatever a registration raises the second time
            here.world = world
            if not _registered_before(world, name, error):
                raise
            return None
        finally:
            here.world, here.extension = world, extension


def _give_parts(extension: str) -> None:
    """The modules that a C extension has put into `sys.modules` below its own name are there for this rank, too."""
    if here.world is not None:
        held = [dict.items(sys.modules), *(world.modules.items() for world in modules.worlds)]
        for name, module in [item for items in held for item in list(items) if item[0].startswith(f"{extension}.")]:
            here.world.modules.setdefault(name, module)


def _importing(owner: Any, name: str, around: Callable[..., Any]) -> AbstractContextManager[None]:
    """Inside the block importlib calls `around(original, ...)`, which is left out of tracebacks as importlib itself is."""
    original = getattr(owner, name)

    def ours(*args: object) -> Any:
        return around(original, *args)

    for function in (ours, around.__func__):  # type: ignore[attr-defined]
        function.__code__ = function.__code__.replace(co_filename=_IMPORTLIB)
    return replaced(owner, name, ours)


def _registered_before(world: World, name: str, error: Exception) -> bool:
    """Whether the import failed because another rank's has registered something once per process; then it is shared."""
    held = [(other, other.modules.get(name)) for other in modules.worlds if other is not world]
    held.append((World(-1), dict.get(sys.modules, name)))  # what a shared module has imported is outside of all ranks
    whole = [other for other, module in held if isinstance(module, ModuleType) and not modules.is_initializing(module)]
    if name == "__main__" or not whole or not _TWICE.search(str(error)):
        return False
    share_root(whole[0], name.partition(".")[0], f"importing {name} twice raises {type(error).__name__}")
    return True


def _note_registration(original: Callable[..., Any], library: Any, namespace: str, *args: Any, **kwargs: Any) -> Any:
    """`torch.library.Library`: the package that makes one as it is imported is shared."""
    world = here.world
    if world is not None and not here.defining:
        frame: Any = sys._getframe(1)
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if frame.f_code.co_name == "<module>":  # none above it: who imports a package that registers is not shared
                if name != "__main__" and name not in modules.SHARED and name in world.modules:
                    share_root(world, name.partition(".")[0], f"{name} registers operators of {namespace!r} in torch")
                break
            frame = frame.f_back
    return original(library, namespace, *args, **kwargs)


def _define_once(
    original: Callable[..., Any], made: Any, space: str, name: str, schema: str, function: Any, *args: Any
) -> Any:
    """`torch.library.custom_op` in a rank: the op that another rank has defined by the same code is this one, too."""
    found = custom_ops.OPDEFS.get(f"{space}::{name}") if here.world is not None else None
    code = getattr(function, "__code__", None)
    if found is not None and code is not None and getattr(found._init_fn, "__code__", None) is code:
        made.__dict__ = found.__dict__
        return None
    before, here.defining = here.defining, True
    try:
        return original(made, space, name, schema, function, *args)
    finally:
        here.defining = before


def _start_thread(original: Callable[..., Any], thread: Any) -> Any:
    """`Thread.start`: the thread belongs to the rank that starts it."""
    world = here.world
    if world is not None:
        thread._bootstrap = functools.partial(_run_in_world, world, thread._bootstrap)
    return original(thread)


def _run_in_world(world: World, run: Callable[[], Any]) -> Any:
    here.world = world
    return run()


@contextmanager
def modules_of_ranks(ranks: int, *, fresh: bool) -> Iterator[list[World]]:
    """Inside the block each rank has its own modules; afterwards `sys.modules` is as before, but for shared modules.

    `fresh`: ranks do not see what was imported before, unless it is shared.
    """
    table = sys.modules
    modules.begin({"__main__"} if fresh else table, [World(rank) for rank in range(ranks)])
    imports, locks = _Imports(), _bootstrap._module_locks  # type: ignore[attr-defined]
    basics = _bootstrap_external._LoaderBasics  # type: ignore[attr-defined]
    source, extension = _bootstrap_external.SourceLoader, _bootstrap_external.ExtensionFileLoader
    with ExitStack() as stack:
        for owner, name, around in (
            (source, "get_code", imports.get_code),
            (basics, "exec_module", imports.exec_module),
            (extension, "create_module", imports.create_extension),
            (extension, "exec_module", imports.exec_extension),
        ):
            stack.enter_context(_importing(owner, name, around))
        stack.enter_context(wrapped(torch.library.Library, "__init__", _note_registration))
        stack.enter_context(wrapped(custom_ops.CustomOpDef, "__init__", _define_once))
        stack.enter_context(wrapped(threading.Thread, "start", _start_thread))
        _bootstrap._module_locks = _RankLocks(locks)  # type: ignore[attr-defined]
        stack.callback(setattr, _bootstrap, "_module_locks", locks)
        set_type(table, RankModules)
        stack.callback(set_type, table, dict)
        yield list(modules.worlds)
