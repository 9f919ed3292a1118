"""Threads for the tests of `SingleFlightCache`: they end, or the test says which did not; and where a thread is can be waited for."""

import ctypes
import threading
from collections import Counter

from localtensor.concurrency.sync import ThreadSync

LONG = 20.0  # seconds; nothing here waits that long unless it hangs


class Watched(ThreadSync):
    """Real threads, and a count of the steps they took: `until(step, times)` waits for one without a clock."""

    def __init__(self):
        self.taken = Counter()
        self._changed = threading.Condition()

    def step(self, what):
        with self._changed:
            self.taken[what] += 1
            self._changed.notify_all()

    def until(self, what, times=1):
        with self._changed:
            assert self._changed.wait_for(lambda: self.taken[what] >= times, LONG), (what, times, self.taken)


class Running:
    """Threads that are at work; `ends()` gives what each returned, or the error that it raised."""

    def __init__(self, *functions):
        self._outcomes = [None] * len(functions)
        self.threads = [
            threading.Thread(target=self._live, args=(i, function), daemon=True) for i, function in enumerate(functions)
        ]
        for thread in self.threads:
            thread.start()

    def _live(self, i, function):
        try:
            self._outcomes[i] = function()
        except BaseException as error:
            self._outcomes[i] = error

    def ends(self):
        for thread in self.threads:
            thread.join(LONG)
        assert [thread.name for thread in self.threads if thread.is_alive()] == []
        return self._outcomes


def send(thread, kind):
    """The exception is raised in that thread as soon as it runs Python code."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))


class Ended(BaseException):
    """As the rank engine ends a rank."""


class Held:
    """A computation that stands still until it is let go."""

    def __init__(self, value=None):
        self.value = value
        self.begun = threading.Event()
        self.go = threading.Event()
        self.times = 0

    def __call__(self):
        self.times += 1
        self.begun.set()
        assert self.go.wait(LONG)
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value
