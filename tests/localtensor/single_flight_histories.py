"""Is a history of concurrent calls one that a plain dict, used by one thread, could have answered?

A search in the way of Wing and Gong: some call that was not over before another began comes first; take it if a dict
would have answered so, and go on with the rest.  States seen before with the same calls left are not searched again.
"""

import itertools
import threading
from dataclasses import dataclass
from typing import Any

from tests.localtensor.single_flight_threads import Running


@dataclass(frozen=True)
class Call:
    """`key` is None for a clearing; `answer` is a value, or ("raised", number of the computation)."""

    key: Any
    begun: int
    over: int
    answer: Any = None


def explained(calls):
    """An order of the calls in which a dict gives the same answers, or None.

    A dict keeps the first answer for a key until it is cleared; a failure is not kept, and no computation is kept twice.
    """
    seen = set()

    def search(left, kept, used):
        if not left:
            return []
        state = (frozenset(map(id, left)), frozenset(kept.items()), frozenset(used))
        if state in seen:
            return None
        seen.add(state)
        first_over = min(call.over for call in left)
        for call in left:
            if call.begun > first_over:
                continue
            after = applied(call, kept, used)
            if after is not None:
                order = search([other for other in left if other is not call], *after)
                if order is not None:
                    return [call, *order]
        return None

    return search(list(calls), {}, set())


def applied(call, kept, used):
    """What is kept and which computations were, after the call; None if a dict would not have answered so."""
    if call.key is None:
        return {}, used
    if call.key in kept:
        return (kept, used) if kept[call.key] == call.answer else None
    if isinstance(call.answer, tuple):
        return kept, used
    return None if call.answer in used else ({**kept, call.key: call.answer}, used | {call.answer})


class Recorder:
    """Runs calls on a cache, and notes when each began and ended."""

    def __init__(self, cache):
        self.cache = cache
        self.calls = []
        self.computed = itertools.count()
        self._clock = itertools.count()
        self._start = None

    def run(self, programs):
        """Each program is a list of `(key, fails)`, or None to clear; one thread each."""
        self._start = threading.Barrier(len(programs))
        outcomes = Running(*[lambda program=program: self._thread(program) for program in programs]).ends()
        assert [outcome for outcome in outcomes if isinstance(outcome, BaseException)] == []
        return self.calls

    def _thread(self, program):
        self._start.wait()
        for step in program:
            begun = next(self._clock)
            key, answer = (None, self.cache.clear()) if step is None else (step[0], self._get(*step))
            self.calls.append(Call(key, begun, next(self._clock), answer))

    def _get(self, key, fails):
        number = []

        def compute():
            number.append(next(self.computed))
            if fails:
                raise LookupError(number[0])
            return number[0]

        try:
            return self.cache.get(key, compute)
        except LookupError as error:
            return ("raised", error.args[0])
