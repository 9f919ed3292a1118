"""Units of work on anybody's `concurrent.futures` executor, so that a sweep may leave one machine.

An executor is made by a factory, a function without arguments that the user names as `MODULE:FUNCTION`.  What it is
given are batches of tasks; in its worker each batch runs in a child process of its own (`sealed`), so that a native
crash or a hang costs one task there too.  A batch whose worker is gone is tried again, with a new executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import TimeoutError as Late
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from localtensor._util import pickling
from localtensor.processes import deaf
from strategies.base.signals import gently
from strategies.base.worker_pool import Answer, Lost, Work, serve
from strategies.model.settings import BadSetting
from strategies.torch_api.user_modules import imported, words_of

BATCH = 16
"""Tasks that an executor is given at a time: enough that the start of a child does not count."""
TRIES = 3
"""Times that a batch is given to an executor whose worker is lost each time."""
PATIENCE = 120.0
"""Seconds that a batch may take beside the limits of its tasks: to be sent, and to start a child."""


class Borrowed:
    """Work on an executor that `factory` makes.  `path` is where its workers find modules, beside their own."""

    def __init__(self, factory: Callable[[], Executor], path: Sequence[str] = ()) -> None:
        self._factory, self._path = factory, tuple(path)
        self._executor: Executor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Borrowed:
        self._stack.enter_context(gently())  # what is somebody's has to be shut down
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            self._leave(wait=kind is None)

    def _leave(self, *, wait: bool) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=True)

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Callable[[int], None] | None = None
    ) -> Iterator[Answer]:
        """The answer to every task, in order.  `work` is a function that can be imported by name, wherever it runs."""
        batches = [tasks[i : i + BATCH] for i in range(0, len(tasks), BATCH)]
        sent = [pickling.dumps((work, list(batch), limit, self._path)) for batch in batches]
        futures = [self._give(body) for body in sent]
        for at, batch in enumerate(batches):
            answers = self._taken(futures, at, sent, len(batch), limit)
            if tick:
                tick(len(batch))
            yield from answers

    def _give(self, body: bytes) -> Future[bytes]:
        with deaf():  # for it may start processes, which would say so when they hear Ctrl-C
            if self._executor is None:
                self._executor = self._factory()
            try:
                return self._executor.submit(serve, body)
            except RuntimeError as error:  # it broke while it was given other work: as if this were lost, too
                lost: Future[bytes] = Future()
                lost.set_exception(error)
                return lost

    def _taken(
        self, futures: list[Future[bytes]], at: int, sent: Sequence[bytes], many: int, limit: float
    ) -> list[Answer]:
        """The answers to one batch.  If its worker is lost, all that is left is given to a new executor."""
        why = ""
        for _ in range(TRIES):
            try:
                return pickling.loads(futures[at].result(limit * many + PATIENCE))  # type: ignore[no-any-return]
            except (Exception, CancelledError) as error:  # why: each engine has errors of its own for a lost worker
                why = "no answer in time" if isinstance(error, Late) else f"{type(error).__name__}: {error}"
            self._leave(wait=False)
            futures[at:] = [
                f if _done(f) else self._give(body) for f, body in zip(futures[at:], sent[at:], strict=True)
            ]
        return [Lost(f"its worker was lost {TRIES} times: {why}", -1)] * many


def _done(future: Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def factory(name: str, folder: str) -> Callable[[], Executor]:
    """The factory of that name: `dask`, `dask:ADDRESS`, or the user's own `MODULE:FUNCTION`.  Raises `BadSetting`."""
    module, _, function = name.partition(":")
    if module == "dask":
        return made(function)
    if not (module and function):
        raise BadSetting("--executor", name, "this names no function", "Write MODULE:FUNCTION, or dask.")
    found = getattr(imported(module, folder, partial(BadSetting, "--executor")), function, None)
    if not callable(found):
        problem = "this is no function" if found is not None else f"{module} has no {function}"
        raise BadSetting("--executor", name, problem, "Name a function that returns an executor.")
    return partial(_made, name, found)


def _made(name: str, function: Callable[[], Any]) -> Executor:
    try:
        executor = function()
    except Exception as error:  # why: whatever the user's function raises is to be said in a sentence, and it is his
        said = f"calling it raises {type(error).__name__}: {words_of(error)}"
        raise BadSetting("--executor", name, said, "Mend that first.") from error
    if not callable(getattr(executor, "submit", None)) or not callable(getattr(executor, "shutdown", None)):
        problem = f"it returns {type(executor).__name__}, which is no executor"
        raise BadSetting("--executor", name, problem, "Return a concurrent.futures.Executor.")
    return executor  # type: ignore[no-any-return]  # or what does as one does


# A sweep on dask.distributed, an engine that many have: its client gives a `concurrent.futures` executor.
#
# It is an optional extra (`pip install localtensor[dask]`), since nothing else here needs it.


class _Client(Executor):
    """The client's executor; the client, and the cluster that it may have started, end with it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._inner = client.get_executor(retries=0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        made: Future[Any] = self._inner.submit(fn, *args, **kwargs)
        return made

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not wait:
            self._client.cancel(list(self._client.futures), force=True)
        self._inner.shutdown(wait=wait)
        self._client.close()


def made(address: str) -> Callable[[], Executor]:
    """A factory: with an address that scheduler's workers, without one a worker for each core of this machine.

    Raises `BadSetting` if dask is not installed.
    """
    try:
        from distributed import Client  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        remedy = "Install it: pip install 'localtensor[dask]'."
        raise BadSetting("--executor", "dask", "dask.distributed is not installed", remedy) from error

    def start() -> Executor:
        if address:
            return _Client(Client(address))
        return _Client(Client(processes=True, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"))

    return start
