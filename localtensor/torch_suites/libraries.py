"""Operators that a test defines itself, on rank threads: each rank defines them, as a process would, and finds its own.

torch has one registry for a process, and refuses an operator that is defined twice.  Here the first rank's definition
is for all; each rank's kernels are called on that rank; and all of them are gone when the run is over, as with the end
of a process.
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

from localtensor._util.ambient import of_rank, running
from localtensor._util.patching import replaced, wrapped
from localtensor.threads.state.shared_propagation import importing

# Stores that a test makes itself, on rank threads: who waits for a key lets the other ranks run.
#
# A FileStore, a TCPStore or a HashStore waits in C++, where no other rank can run, so each would wait for ever.  Here
# they are asked again and again instead, and each time the others have a turn.  The store of a simulation itself is
# no such: threads/store.py.

MOMENT = timedelta(milliseconds=10)  # in which torch says in its own words that nothing came
_WAITING = ("get", "wait", "multi_get", "queue_pop")


@contextmanager
def polled() -> Iterator[None]:
    """While inside, no store of torch's blocks a rank thread; afterwards all is as before."""
    with ExitStack() as stack:
        for name in _WAITING:
            if hasattr(dist.Store, name):
                stack.enter_context(wrapped(dist.Store, name, _polling(name)))
        stack.enter_context(replaced(dist.TCPStore, "__init__", _served(dist.TCPStore.__init__)))
        yield


def is_rank() -> bool:
    """Whether this is called in a rank thread."""
    return of_rank() is not None


def step_aside() -> bool:
    """Every other rank that can run has had a turn; False if this is no rank."""
    simulation = of_rank()
    if simulation is None:
        return False
    simulation.baton.step_aside(simulation.rank())
    return True


def _polling(name: str) -> Callable[..., Any]:
    def poll(original: Callable[..., Any], self: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        limit = _limit(self, rest, options) if name == "wait" else self.timeout
        end = time.monotonic() + limit.total_seconds()
        while not _there(self, name, keys) and time.monotonic() < end:
            if not step_aside():
                return original(self, keys, *rest, **options)
        if _there(self, name, keys):
            return original(self, keys, *rest, **options)
        return _refused(original, self, name, keys)

    return poll


def _limit(store: Any, rest: tuple[Any, ...], options: dict[str, Any]) -> timedelta:
    return next((value for value in (*rest, *options.values()) if isinstance(value, timedelta)), store.timeout)


def _there(store: Any, name: str, keys: Any) -> bool:
    if name == "queue_pop":
        return bool(store.queue_len(keys))
    return bool(store.check([keys] if isinstance(keys, str) else list(keys)))


def _refused(original: Callable[..., Any], store: Any, name: str, keys: Any) -> Any:
    """What torch says of a key that did not come, at once: the time is over."""
    if name == "wait":
        return original(store, keys, MOMENT)
    before = store.timeout
    store.set_timeout(MOMENT)
    try:
        return original(store, keys)
    finally:
        store.set_timeout(before)


def _served(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        """A server does not wait for its clients: they may be ranks that have yet to run."""
        if is_rank():
            if len(args) > 5:
                args = (*args[:5], False, *args[6:])
            else:
                kwargs["wait_for_workers"] = False
        original(self, *args, **kwargs)

    return make


# Private part of torch: why it is needed.  Tried on torch 2.13.0; read in the sources of 2.11 to 2.15.
PRIVATE = {
    "torch.library.Library._register_fake": "how a kernel for fake tensors is registered",
    "torch.library.Library._destroy": "a definition ends with the run, and not with the first rank that leaves it",
}

_TORCHS = ("aten", "prims", "prim", "c10d", "_c10d_functional", "_dtensor", "inductor", "quantized", "higher_order")


class _Run:
    """What the ranks of one run have defined."""

    def __init__(self) -> None:
        self.namespaces: set[str] = set()
        self.defined: dict[tuple[str, str], set[int]] = {}  # ranks that have it now
        self.kernels: dict[tuple[str, ...], dict[int, Callable[..., Any]]] = {}
        self.libraries: dict[int, Any] = {}

    def begin(self, original: Callable[..., None], lib: Any, ns: str, kind: str, *args: Any, **kwargs: Any) -> None:
        if kind == "DEF" and _a_tests(ns):
            kind = "FRAGMENT" if ns in self.namespaces else kind
            self.namespaces.add(ns)
        original(lib, ns, kind, *args, **kwargs)

    def define(self, original: Callable[..., Any], lib: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        if not _a_tests(lib.ns):
            return original(lib, schema, *args, **kwargs)
        known = self.defined.get((lib.ns, schema))
        if known is None or _rank() in known:  # a second time by one rank: torch refuses it
            answer = original(lib, schema, *args, **kwargs)
        else:
            answer = schema.partition("(")[0].strip()
        self.defined.setdefault((lib.ns, schema), set()).add(_rank())
        self.libraries[id(lib)] = lib
        return answer

    def impl(self, original: Callable[..., Any], lib: Any, op: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        where = (lib.ns, "impl", str(op), *map(str, args), *map(str, kwargs.items()))
        return self._kernel(original, lib, where, op, fn, *args, **kwargs)

    def fake(self, original: Callable[..., Any], lib: Any, op: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        return self._kernel(original, lib, (lib.ns, "fake", str(op)), op, fn, *args, **kwargs)

    def _kernel(
        self, original: Any, lib: Any, where: tuple[str, ...], op: Any, fn: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not _a_tests(lib.ns) or not isinstance(fn, types.FunctionType | types.MethodType):
            return original(lib, op, fn, *args, **kwargs)
        self.libraries[id(lib)] = lib
        by_rank = self.kernels.setdefault(where, {})
        first = not by_rank
        by_rank[_rank()] = fn
        return original(lib, op, _of_rank(fn, by_rank), *args, **kwargs) if first else None

    def leave(self, original: Callable[..., None], lib: Any) -> None:
        """The rank has left its definitions; the operators stay until the run is over."""
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
def one_registry() -> Iterator[None]:
    """While inside, ranks may define the same operators; afterwards none of them is there."""
    run, library = _Run(), torch.library.Library
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


def _a_tests(ns: str) -> bool:
    """Whether a test defines this now, on a rank: no module that is being imported, and nothing of torch's own."""
    return is_rank() and not importing() and ns not in _TORCHS


def _rank() -> int:
    simulation: Any = running()
    return int(simulation.rank())


def _of_rank(fn: Callable[..., Any], by_rank: dict[int, Callable[..., Any]]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return by_rank.get(_rank() if is_rank() else -1, fn)(*args, **kwargs)

    return kernel
