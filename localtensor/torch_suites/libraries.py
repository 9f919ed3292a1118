"""Operators and stores that a test makes itself, on rank threads.

Operators: torch has one registry for a process, and refuses an operator that is defined twice.  Here the first rank's
definition serves all ranks; each rank's kernels are called on that rank; and all are removed at the end of the run, as
at the end of a process.

Stores: a FileStore, a TCPStore or a HashStore waits in C++, where no other rank thread can run, so that each rank would
wait for ever.  Here the store is polled instead, and other ranks run between two polls.  The store of a simulation
itself is another: threads/store.py.
"""

import functools
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from localtensor._util.ambient import running, simulation_of_this_rank
from localtensor._util.call_sites import Fn
from localtensor._util.patching import wrapped
from localtensor.threads import dist_patches
from localtensor.threads.state.shared_propagation import is_importing_module

SHORT_TIMEOUT = timedelta(milliseconds=10)  # after which torch raises its own timeout error
_WAITING = ("get", "wait", "multi_get", "queue_pop")


@contextmanager
def polling_stores() -> Iterator[None]:
    """While inside, no store of torch blocks a rank thread."""
    with ExitStack() as stack:
        for name in _WAITING:
            if hasattr(dist.Store, name):
                stack.enter_context(wrapped(dist.Store, name, _polling(name)))
        stack.enter_context(wrapped(dist_patches, "new_store", _without_clients))
        yield


def is_rank() -> bool:
    """Whether this is called in a rank thread."""
    return simulation_of_this_rank() is not None


def step_aside() -> bool:
    """Lets every other rank that can run have a turn; False if this is no rank thread."""
    simulation = simulation_of_this_rank()
    if simulation is None:
        return False
    simulation.run_token.step_aside(simulation.run_token.here())
    return True


def _polling(name: str) -> Fn:
    def wait_in_turns(original: Fn, self: Any, keys: str | list[str], *rest: object, **options: object) -> object:
        limits = [value for value in (*rest, *options.values()) if isinstance(value, timedelta)]
        limit = limits[0] if limits and name == "wait" else self.timeout
        end = time.monotonic() + limit.total_seconds()
        while not _has_keys(self, name, keys) and time.monotonic() < end:
            if not step_aside():
                return original(self, keys, *rest, **options)
        if _has_keys(self, name, keys):
            return original(self, keys, *rest, **options)
        return _time_out(original, self, name, keys)

    return wait_in_turns


def _has_keys(store: dist.Store, name: str, keys: Any) -> bool:
    if name == "queue_pop":
        return bool(store.queue_len(keys))
    return bool(store.check([keys] if isinstance(keys, str) else list(keys)))


def _time_out(original: Fn, store: Any, name: str, keys: str | list[str]) -> object:
    """Raises torch's own timeout error for a missing key, without waiting again."""
    if name == "wait":
        return original(store, keys, SHORT_TIMEOUT)
    before = store.timeout
    store.set_timeout(SHORT_TIMEOUT)
    try:
        return original(store, keys)
    finally:
        store.set_timeout(before)


def _without_clients(original: Fn, make: Fn, kind: type, *args: object, **kwargs: object) -> object:
    """Makes a rank's store; a server does not wait for its clients, which may be ranks that have yet to run."""
    if kind is dist.TCPStore and len(args) > 5:
        args = (*args[:5], False, *args[6:])
    elif kind is dist.TCPStore:
        kwargs["wait_for_workers"] = False
    return original(make, kind, *args, **kwargs)


# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.library.Library._register_fake": "how a kernel for fake tensors is registered",
    "torch.library.Library._destroy": "a definition ends with the run, and not with the first rank that leaves it",
}

_TORCH_NAMESPACES = (
    "aten", "prims", "prim", "c10d", "_c10d_functional", "_dtensor", "inductor", "quantized", "higher_order",
)  # fmt: skip


class _Registrations:
    """The definitions by the ranks of one run."""

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        self.defined: dict[tuple[str, str], set[int]] = {}  # ranks that hold it now
        self.kernels: dict[tuple[str, ...], dict[int, Fn]] = {}
        self.libraries: dict[int, torch.library.Library] = {}

    def begin(
        self, original: Fn, lib: torch.library.Library, ns: str, kind: str, *args: object, **kwargs: object
    ) -> None:
        if kind == "DEF" and _is_tests_own(ns):
            kind = "FRAGMENT" if ns in self.namespaces else kind
            self.namespaces.add(ns)
        original(lib, ns, kind, *args, **kwargs)

    def define(self, original: Fn, lib: torch.library.Library, schema: str, *args: object, **kwargs: object) -> object:
        if not _is_tests_own(lib.ns):
            return original(lib, schema, *args, **kwargs)
        known = self.defined.get((lib.ns, schema))
        if known is None or _rank() in known:  # a second time by one rank: torch refuses it
            answer = original(lib, schema, *args, **kwargs)
        else:
            answer = schema.partition("(")[0].strip()
        self.defined.setdefault((lib.ns, schema), set()).add(_rank())
        self.libraries[id(lib)] = lib
        return answer

    def impl(
        self, original: Fn, lib: torch.library.Library, op: object, fn: Fn, *args: object, **kwargs: object
    ) -> object:
        place = (lib.ns, "impl", str(op), *map(str, args), *map(str, kwargs.items()))
        return self._kernel(original, lib, place, op, fn, *args, **kwargs)

    def fake(
        self, original: Fn, lib: torch.library.Library, op: object, fn: Fn, *args: object, **kwargs: object
    ) -> object:
        return self._kernel(original, lib, (lib.ns, "fake", str(op)), op, fn, *args, **kwargs)

    def _kernel(
        self,
        original: Fn,
        lib: torch.library.Library,
        place: tuple[str, ...],
        op: object,
        fn: Fn,
        *args: object,
        **kwargs: object,
    ) -> object:
        if not _is_tests_own(lib.ns) or not isinstance(fn, types.FunctionType | types.MethodType):
            return original(lib, op, fn, *args, **kwargs)
        self.libraries[id(lib)] = lib
        by_rank = self.kernels.setdefault(place, {})
        first = not by_rank
        by_rank[_rank()] = fn
        return original(lib, op, _of_rank(fn, by_rank), *args, **kwargs) if first else None

    def leave(self, original: Callable[..., None], lib: torch.library.Library) -> None:
        """Drops the rank's definitions; the operators stay until the end of the run."""
        if id(lib) not in self.libraries or not is_rank():
            original(lib)
            return
        for (ns, _), ranks in self.defined.items():
            if ns == lib.ns:
                ranks.discard(_rank())

    def end(self) -> None:
        for lib in reversed(self.libraries.values()):
            lib._destroy()
        self.libraries.clear()


@contextmanager
def shared_registry() -> Iterator[None]:
    """While inside, ranks may define the same operators; all are removed afterwards."""
    run, library = _Registrations(), torch.library.Library
    with ExitStack() as stack:
        for name, around in (
            ("__init__", run.begin),
            ("define", run.define),
            ("impl", run.impl),
            ("_register_fake", run.fake),
            ("_destroy", run.leave),
        ):
            stack.enter_context(wrapped(library, name, around))
        stack.callback(run.end)
        yield


def _is_tests_own(ns: str) -> bool:
    """Whether a test defines this now, on a rank: not an import in progress, and not a namespace of torch."""
    return is_rank() and not is_importing_module() and ns not in _TORCH_NAMESPACES


def _rank() -> int:
    simulation: Any = running()
    return int(simulation.rank())


def _of_rank(fn: Fn, by_rank: dict[int, Fn]) -> Fn:
    @functools.wraps(fn)
    def kernel(*args: object, **kwargs: object) -> object:
        return by_rank.get(_rank() if is_rank() else -1, fn)(*args, **kwargs)

    return kernel
