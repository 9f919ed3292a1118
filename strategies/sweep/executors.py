"""Tasks on a user's `concurrent.futures` executor, so that a sweep may run on several machines.

An executor is made by a factory, a function without arguments that the user names as `MODULE:FUNCTION`.  It is given
batches of tasks; in its worker each batch runs in a child process of its own (`worker_pool.serve`), so that a native
crash or a hang costs one task there too.  A batch whose worker is lost is tried again with a new executor.

dask.distributed is an optional extra (`pip install 'localtensor[dask]'`): its client gives such an executor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from concurrent.futures import TimeoutError as Late
from contextlib import ExitStack
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from localtensor._util import pickling
from localtensor.processes import sigint_blocked
from strategies.base.signals import interruptible
from strategies.base.worker_pool import Again, Arrived, TaskAnswer, TaskLost, Tick, Work, run_in_subprocess
from strategies.model.settings import BadSetting
from strategies.torch_api.user_modules import exception_message, import_user_module

P = ParamSpec("P")
T = TypeVar("T")
BATCH = 16
"""Tasks that an executor is given at a time: enough that the start of a child process does not count."""
TRIES = 3
"""Attempts of a batch whose worker is lost each time."""
_ANY_ERROR = (Exception, CancelledError, SystemExit)
PATIENCE = 120.0
"""Seconds that a batch may take beside the limits of its tasks: to be sent, and to start a child process."""


class ExecutorPool:
    """A pool of workers on an executor that `executor_factory` makes.  `path` is added to their `sys.path`."""

    def __init__(self, factory: Callable[[], Executor], path: Sequence[str] = ()) -> None:
        self._factory, self._path = factory, tuple(path)
        self._executor: Executor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> ExecutorPool:
        self._stack.enter_context(interruptible())  # a user's executor has to be shut down
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._stack:
            self._shut_down(wait=kind is None)

    def _shut_down(self, *, wait: bool) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=wait, cancel_futures=True)

    def run(
        self, work: Work, tasks: Sequence[Any], *, limit: float, tick: Tick | None = None, again: Again | None = None,
        arrived: Arrived | None = None,
    ) -> Iterator[TaskAnswer]:  # fmt: skip
        """The answer to every task, in order.  `work` is a function that can be imported by name on every worker.

        What `again` makes of a lost task is run in its place, by itself.
        """
        batches = [tasks[i : i + BATCH] for i in range(0, len(tasks), BATCH)]
        sent = [pickling.dumps((work, list(batch), limit, self._path)) for batch in batches]
        futures = [self._submit(body) for body in sent]
        for at, batch in enumerate(batches):
            answers = self._collect(futures, at, sent, len(batch), limit)
            if tick:
                tick(len(batch))
            for number, first in enumerate(answers, at * BATCH):
                answer = self._tried_again(first, work, limit, partial(again, number)) if again else first
                if arrived:
                    arrived(number, answer)
                yield answer

    def _tried_again(
        self, answer: TaskAnswer, work: Work, limit: float, again: Callable[[TaskLost], Any]
    ) -> TaskAnswer:
        """The answer, or that to what `again` makes of a lost task."""
        while isinstance(answer, TaskLost) and (task := again(answer)) is not None:
            sent = [pickling.dumps((work, [task], limit, self._path))]
            (answer,) = self._collect([self._submit(sent[0])], 0, sent, 1, limit)
        return answer

    def _submit(self, body: bytes) -> Future[bytes]:
        with sigint_blocked():  # the executor may start processes, which would print a traceback on Ctrl-C
            if self._executor is None:
                self._executor = self._factory()
            try:
                return self._executor.submit(run_in_subprocess, body)
            except (RuntimeError, SystemExit) as error:  # it broke on other work, or exits: this batch is lost as well
                lost: Future[bytes] = Future()
                lost.set_exception(error)
                return lost

    def _collect(
        self, futures: list[Future[bytes]], at: int, sent: Sequence[bytes], many: int, limit: float
    ) -> list[TaskAnswer]:
        """The answers to one batch.  If its worker is lost, all that is left is submitted to a new executor."""
        why = ""
        for _ in range(TRIES):
            try:
                return _checked(pickling.loads(futures[at].result(limit * many + PATIENCE)), many)
            except _ANY_ERROR as error:  # why: engines have errors of their own for a lost worker;
                # a crash of ours in the worker comes back as data, and `TaskLost` reports the text of anything else
                why = "no answer in time" if isinstance(error, Late) else f"{type(error).__name__}: {error}"
            self._shut_down(wait=False)
            left = zip(futures[at:], sent[at:], strict=True)
            futures[at:] = [future if _done(future) else self._submit(body) for future, body in left]
        return [TaskLost(f"its worker was lost {TRIES} times: {why}", -1)] * many


def _checked(answers: Any, many: int) -> list[TaskAnswer]:
    """The answers, which came through a user's executor.  Raises ValueError if they are not one for each task."""
    if not isinstance(answers, list) or len(answers) != many or not all(isinstance(a, TaskAnswer) for a in answers):
        raise ValueError(f"it gave no answers to {many} tasks")
    return answers


def _done(future: Future[bytes]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def executor_factory(name: str, folder: str) -> Callable[[], Executor]:
    """The factory of that name: `dask`, `dask:ADDRESS`, or the user's own `MODULE:FUNCTION`.  Raises `BadSetting`."""
    module, _, function = name.partition(":")
    if module == "dask":
        return dask_factory(function)
    if not (module and function):
        raise BadSetting("--executor", name, "this names no function", "Write MODULE:FUNCTION, or dask.")
    found = getattr(import_user_module(module, folder, partial(BadSetting, "--executor")), function, None)
    if not callable(found):
        problem = "this is no function" if found is not None else f"{module} has no {function}"
        raise BadSetting("--executor", name, problem, "Name a function that returns an executor.")
    return partial(_make_executor, name, found)


def _make_executor(name: str, function: Callable[[], object]) -> Executor:
    try:
        executor = function()
    except (Exception, SystemExit) as error:  # why: the user's function may raise anything; none of our code is in it
        problem = f"calling it raises {type(error).__name__}: {exception_message(error)}"
        raise BadSetting("--executor", name, problem, "Fix that first.") from error
    if not callable(getattr(executor, "submit", None)) or not callable(getattr(executor, "shutdown", None)):
        problem = f"it returns {type(executor).__name__}, which is no executor"
        raise BadSetting("--executor", name, problem, "Return a concurrent.futures.Executor.")
    return cast(Executor, executor)  # it may be no subclass


class _DaskExecutor(Executor):
    """A dask client's executor.  Its shutdown closes the client, and the cluster that the client may have started."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._inner = client.get_executor(retries=0)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        made: Future[T] = self._inner.submit(fn, *args, **kwargs)
        return made

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if not wait:
            self._client.cancel(list(self._client.futures), force=True)
        self._inner.shutdown(wait=wait)
        self._client.close()


def dask_factory(address: str) -> Callable[[], Executor]:
    """A factory of dask executors: on the scheduler at `address`, or a worker for each core of this machine if it is "".

    Raises `BadSetting` if dask is not installed.
    """
    try:
        from distributed import Client  # type: ignore[import-not-found, unused-ignore]
    except ImportError as error:
        remedy = "Install it: pip install 'localtensor[dask]'."
        raise BadSetting("--executor", "dask", "dask.distributed is not installed", remedy) from error

    def start() -> Executor:
        if address:
            return _DaskExecutor(Client(address))
        return _DaskExecutor(Client(processes=True, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"))

    return start
