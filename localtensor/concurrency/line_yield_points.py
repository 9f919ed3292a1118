"""Every line, or every bytecode, of some modules is a yield point: races at unmarked places are explored, too.

>>> class Count:
...     def __init__(self):
...         self.hits = 0
...     def add(self):
...         self.hits = self.hits + 1
>>> from localtensor.concurrency.explorer import Program, explore
>>> def program(sync):
...     count = Count()
...     def check():
...         assert count.hits == 2, f"two additions made {count.hits}"
...     return Program([count.add, count.add], check)
>>> print(explore(by_lines(program, Count, opcodes=True), policy="bounded").failure.detail)
two additions made 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType, ModuleType
from typing import Any

from localtensor.concurrency.results import Program
from localtensor.concurrency.sync import ScheduledSync


def by_lines(
    program: Callable[[ScheduledSync], Program], *where: ModuleType | type | Callable[..., Any], opcodes: bool = False
) -> Callable[[ScheduledSync], Program]:
    """The program with a yield point at each line of `where` (modules, classes or functions).

    With `opcodes` each bytecode is one: a schedule may switch threads between the read and the write of one `+=`.
    """
    files = {one.__file__ for one in where if hasattr(one, "__file__")}
    codes = {code for one in where if not hasattr(one, "__file__") for code in _codes(one)}

    def wanted(code: CodeType) -> bool:
        return code.co_filename in files or code in codes

    def made(sync: ScheduledSync) -> Program:
        plain = program(sync)
        tracer = _Tracer(sync, wanted, opcodes)
        return Program([partial(tracer.run, thread) for thread in plain.threads], plain.check)

    return made


class _Tracer:
    def __init__(self, sync: ScheduledSync, wanted: Callable[[CodeType], bool], opcodes: bool) -> None:
        self._sync, self._wanted, self._opcodes = sync, wanted, opcodes

    def run(self, thread: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            thread()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        if not self._wanted(frame.f_code):
            return None
        frame.f_trace_opcodes = self._opcodes
        return self._within

    def _within(self, frame: FrameType, event: str, arg: object) -> Callable[..., Any]:
        if event == "line":
            self._sync.step(f"{frame.f_code.co_name} line {frame.f_lineno}")
        elif event == "opcode":
            self._sync.step(f"{frame.f_code.co_name} line {frame.f_lineno} at {frame.f_lasti}")
        return self._within


def _codes(one: object) -> list[CodeType]:
    """The code objects of a function, or of all functions of a class."""
    if isinstance(one, type):
        return [code for member in vars(one).values() for code in _codes(member)]
    code = getattr(one, "__code__", None)
    return [code] if isinstance(code, CodeType) else []
