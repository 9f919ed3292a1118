"""Stores that a test makes itself, on rank threads: who waits for a key lets the other ranks run.

A FileStore, a TCPStore or a HashStore waits in C++, where no other rank can run, so each would wait for ever.  Here
they are asked again and again instead, and each time the others have a turn.  The store of a simulation itself is
no such: threads/store.py.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from localtensor._util.ambient import of_rank
from localtensor._util.patching import replaced, wrapped

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
