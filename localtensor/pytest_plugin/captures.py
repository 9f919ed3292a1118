"""`capsys` and `caplog` in ranks: each rank thread reads what it has printed and logged itself.

In a rank `sys.stdout` and `sys.stderr` are the rank's own, so a capture that starts there sees no other rank; what the rank
does not read goes on to the capture of the test when the rank ends.  `caplog` is a handler that takes the records of one
thread.  `capfd` is one for all ranks: they share the file descriptors.

pytest's private parts (for: tried on 9.0, 9.2):
    CaptureFixture: captureclass, _config, _start, _suspend, _resume     a second capture like that of the test
    _pytest.capture.SysCaptureBase                                       which captures are of sys.stdout
    LogCaptureFixture: _item, _finalize                                  a second one, with a handler of its own
    _pytest.logging: LogCaptureHandler, caplog_handler_key, caplog_records_key
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.capture import SysCaptureBase
from _pytest.logging import LogCaptureHandler, caplog_handler_key, caplog_records_key


class RankCapture(pytest.CaptureFixture[Any]):
    """The `capsys` of one rank."""

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Inside the block the rank's output goes where pytest's own does."""
        self._suspend()
        try:
            with super().disabled():
                yield
        finally:
            self._resume()


def own_capture(value: object, at_end: Callable[[Callable[[], Any]], None]) -> Any:
    """The calling rank's `capsys` or `caplog` for that of the test; None for any other value.

    It begins at once; `at_end` takes what ends it.
    """
    if isinstance(value, pytest.CaptureFixture) and issubclass(value.captureclass, SysCaptureBase):
        capture = RankCapture(value.captureclass, value.request, config=value._config, _ispytest=True)
        capture._start()
        at_end(capture.close)
        return capture
    if isinstance(value, pytest.LogCaptureFixture):
        return _own_log(value, at_end)
    return None


def _own_log(whole: pytest.LogCaptureFixture, at_end: Callable[[Callable[[], Any]], None]) -> pytest.LogCaptureFixture:
    """A `caplog` of the records of this thread."""
    thread, handler = threading.get_ident(), LogCaptureHandler()
    handler.setFormatter(whole.handler.formatter)
    handler.setLevel(whole.handler.level)
    handler.addFilter(lambda record: record.thread in (None, thread))
    stash: Any = pytest.Stash()
    stash[caplog_handler_key] = handler
    of_phases = whole._item.stash[caplog_records_key]
    stash[caplog_records_key] = {**of_phases, "call": handler.records}
    own = pytest.LogCaptureFixture(SimpleNamespace(stash=stash), _ispytest=True)  # type: ignore[arg-type]
    root = logging.getLogger()
    root.addHandler(handler)

    def end() -> None:
        own._finalize()
        root.removeHandler(handler)

    at_end(end)
    return own
