"""One event loop for each rank, for tests and fixtures that are async."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Loop:
    """Begins with the first coroutine; all that a rank awaits runs on it, so a fixture and its test share it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Tasks that are left are cancelled, as asyncio.run does."""
        if self._loop is None:
            return
        try:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
