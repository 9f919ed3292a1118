"""The end of a rank thread that is written as a process: exit codes, os._exit and signals, and the failure of its test."""

import os
import signal
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.patching import wrapped
from localtensor.errors import ProgramFault, RankRaised
from localtensor.errors.failure_report import failure_text
from localtensor.torch_suites.libraries import is_rank, step_aside

PIDS = 2**22  # above all process ids of the system


class RankKilled(BaseException):
    """A rank ended itself as only a process can: by `os._exit`, or a signal to itself.  No program catches this."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exit_code(end: BaseException) -> int:
    """The exit code of a process that ends by this SystemExit or `RankKilled`.

    >>> exit_code(SystemExit()), exit_code(SystemExit(86)), exit_code(SystemExit("a sentence"))
    (0, 86, 1)
    """
    code = getattr(end, "code", None)
    return code if isinstance(code, int) else int(code is not None)


@dataclass(slots=True)
class RankProcess:
    """The entry of a rank in `self.processes` of a test: it has the interface of a process that has ended."""

    rank: int
    exitcode: int | None = None
    text: str = ""  # of the exception that ended it, if one did
    name: str = field(init=False)
    pid: str = field(init=False)  # no number: a signal to it must reach no process

    def __post_init__(self) -> None:
        self.name, self.pid = f"process {self.rank}", f"rank {self.rank}"

    def start(self) -> None:
        """Does nothing: all ranks start where their test joins them."""

    def terminate(self) -> None:
        """Does nothing: it has ended, or will never begin."""

    kill = close = terminate

    def join(self, timeout: float | None = None) -> None:
        """Does nothing: it has ended."""

    def is_alive(self) -> bool:
        return False

    def send(self, text: object) -> None:
        """Stores the text of an exception: the object is also the pipe to the process, which torch writes and reads."""
        self.text = str(text)

    def recv(self) -> str:
        return self.text

    def poll(self, timeout: float | None = None) -> bool:
        return bool(self.text)

    closed = False


@contextmanager
def as_processes() -> Iterator[None]:
    """While inside, a rank that ends its process ends only itself, and a rank that sleeps lets the others run."""
    with ExitStack() as stack:
        for owner, name, around in (
            (os, "_exit", _ending(lambda code: code)),
            (os, "abort", _ending(lambda: -signal.SIGABRT)),
            (os, "kill", _kill_rank),
            (os, "getpid", _own_pid),
            (signal, "raise_signal", _ending(lambda number: -int(number))),
            (time, "sleep", _sleep_rank),
        ):
            stack.enter_context(wrapped(owner, name, around))
        yield


def _own_pid(original: Callable[..., int]) -> int:
    """A process id for each rank, above all ids of the system."""
    simulation = simulation_of_this_rank()
    own = original()
    return own if simulation is None else own * PIDS + simulation.rank() + PIDS


def _ending(code_of: Callable[..., int]) -> Callable[..., Any]:
    """A wrapper of a call that ends the process: a rank ends with the exit code of its arguments instead."""

    def end(original: Callable[..., Any], *args: object, **kwargs: object) -> object:
        if is_rank():
            raise RankKilled(code_of(*args, **kwargs))
        return original(*args, **kwargs)

    return end


def _kill_rank(original: Callable[..., Any], pid: int, number: int) -> object:
    if pid == os.getpid() and number and is_rank():
        raise RankKilled(-int(number))
    return original(pid, number)


def _sleep_rank(original: Callable[..., Any], seconds: float) -> None:
    original(seconds)
    step_aside()


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH_TEST_DIRS = (f"torch{os.sep}testing{os.sep}_internal{os.sep}", f"{os.sep}unittest{os.sep}")


def raise_fault(fault: ProgramFault, ranks: int) -> NoReturn:
    """Raises the `Exception` of the rank that was the first cause, else the fault; a note describes the other ranks."""
    __tracebackhide__ = True
    cause = fault.errors.get(fault.raised[0].rank) if isinstance(fault, RankRaised) else None
    text = failure_text(fault, ranks, (fault.replay or "") if isinstance(fault, RankRaised) else "")
    if isinstance(cause, Exception):
        shown: Exception = cause.with_traceback(user_traceback(cause.__traceback__))
        attach_note(shown, text)
        raise shown
    attach_note(fault, text)
    raise fault.with_traceback(None)


def attach_note(error: BaseException, text: str) -> None:
    """Adds the text as a note of the error; Python 3.10 has no notes, and shows the error alone."""
    if text and hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from its first frame outside of this project, torch's test bases and unittest; else all of it."""
    here = trace
    while here is not None:
        file = here.tb_frame.f_code.co_filename
        if not (file.startswith(_OURS) or any(part in file for part in _TORCH_TEST_DIRS)):
            return here
        here = here.tb_next
    return trace


def skip_test(why: object) -> NoReturn:
    __tracebackhide__ = True
    raise unittest.SkipTest(str(why))
