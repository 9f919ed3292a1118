"""How a rank thread ends that thinks it is a process: its exit code, and calls that would end all of us."""

import os
import signal
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

from localtensor._util.ambient import of_rank
from localtensor._util.patching import wrapped
from localtensor.errors import ProgramFault, RankRaised
from localtensor.errors.failure_report import told
from localtensor.torch_suites.libraries import is_rank, step_aside

PIDS = 2**22  # no process has a number as high


class Killed(BaseException):
    """A rank has ended itself as only a process can: `os._exit`, or a signal to itself.  No program catches this."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def exit_code(end: BaseException) -> int:
    """The exit code that a process would have that ends by this SystemExit or `Killed`.

    >>> exit_code(SystemExit()), exit_code(SystemExit(86)), exit_code(SystemExit("a sentence"))
    (0, 86, 1)
    """
    code = getattr(end, "code", None)
    return code if isinstance(code, int) else int(code is not None)


@dataclass(slots=True)
class RankProcess:
    """What a test finds in `self.processes` for a rank: it looks like a process that has ended."""

    rank: int
    exitcode: int | None = None
    text: str = ""  # of the exception that ended it, if one did
    name: str = field(init=False)
    pid: str = field(init=False)  # no number: a signal to it must not reach anybody

    def __post_init__(self) -> None:
        self.name, self.pid = f"process {self.rank}", f"rank {self.rank}"

    def start(self) -> None:
        """Ranks start all together, where their test joins them."""

    def terminate(self) -> None:
        """It has ended, or will never begin."""

    kill = close = terminate

    def join(self, timeout: float | None = None) -> None:
        """It has ended."""

    def is_alive(self) -> bool:
        return False

    # -- as the end of a pipe to the process: torch sends and reads the text of an exception there

    def send(self, text: Any) -> None:
        self.text = str(text)

    def recv(self) -> str:
        return self.text

    def poll(self, timeout: float | None = None) -> bool:
        return bool(self.text)

    closed = False


@contextmanager
def as_processes() -> Iterator[None]:
    """While inside, a rank that ends its process ends itself only, and one that sleeps lets the others run."""
    with ExitStack() as stack:
        for owner, name, around in (
            (os, "_exit", _exits),
            (os, "abort", _aborts),
            (os, "kill", _kills),
            (os, "getpid", _own_pid),
            (signal, "raise_signal", _signals),
            (time, "sleep", _sleeps),
        ):
            stack.enter_context(wrapped(owner, name, around))
        yield


def _own_pid(original: Callable[..., int]) -> int:
    """A number of the rank's own, above all that the system gives to processes."""
    simulation = of_rank()
    own = original()
    return own if simulation is None else own * PIDS + simulation.rank() + PIDS


def _exits(original: Callable[..., Any], code: int) -> Any:
    if is_rank():
        raise Killed(code)
    return original(code)


def _aborts(original: Callable[..., Any]) -> Any:
    if is_rank():
        raise Killed(-signal.SIGABRT)
    return original()


def _kills(original: Callable[..., Any], pid: int, number: int) -> Any:
    if pid == os.getpid() and number and is_rank():
        raise Killed(-int(number))
    return original(pid, number)


def _signals(original: Callable[..., Any], number: int) -> Any:
    if is_rank():
        raise Killed(-int(number))
    return original(number)


def _sleeps(original: Callable[..., Any], seconds: float) -> Any:
    original(seconds)
    step_aside()


# How a test that failed on ranks fails where its author looks: by the first exception, as if no rank were a thread.

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_BETWEEN = (f"torch{os.sep}testing{os.sep}_internal{os.sep}", f"{os.sep}unittest{os.sep}")


def fail(fault: ProgramFault, ranks: int) -> NoReturn:
    """Raises the exception of the rank that was the first cause, and else the fault itself; how the other ranks
    fared is its note.

    An error of the simulator's own is raised as the failure that it is: one that no program may catch.
    """
    __tracebackhide__ = True
    cause = fault.errors.get(fault.raised[0].rank) if isinstance(fault, RankRaised) else None
    text = told(fault, ranks, fault.replay or "") if isinstance(fault, RankRaised) else told(fault, ranks, "")
    if isinstance(cause, Exception):
        shown: Exception = cause.with_traceback(users_part(cause.__traceback__))
        note(shown, text)
        raise shown
    note(fault, text)
    raise fault.with_traceback(None)


def note(error: BaseException, text: str) -> None:
    """The text stands under the error; Python 3.10 has no such notes, and shows the error alone."""
    if text and hasattr(error, "add_note") and text not in getattr(error, "__notes__", ()):
        error.add_note(text)


def users_part(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from its first frame on that is neither ours nor of torch's test bases; all of it if none is."""
    here = trace
    while here is not None and _between(here.tb_frame.f_code.co_filename):
        here = here.tb_next
    return here or trace


def _between(file: str) -> bool:
    return file.startswith(_OURS) or any(part in file for part in _BETWEEN)


def skip(why: object) -> NoReturn:
    __tracebackhide__ = True
    raise unittest.SkipTest(str(why))
