"""A sweep on dask.distributed, an engine that many have: its client gives a `concurrent.futures` executor.

It is an optional extra (`pip install localtensor[dask]`), since nothing else here needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from strategies.model.settings import BadSetting


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
