"""`localtensor run`: a torchrun script on rank threads, or on real processes, in one command.

Each rank has the script as its own `__main__`, its own sys.argv, and torchrun's environment.  What it prints goes
out line by line, with its rank in front.
"""

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import torch.distributed as dist

from localtensor import errors
from localtensor.concurrency.schedule import replay, round_robin
from localtensor.errors.base import Refusal
from localtensor.runner.torchrun_processes import (
    UNREAD,
    RankLines,
    Script,
    Tagged,
    execute,
    nobody_reads,
    read,
    run_processes,
    search_path,
    users_part,
)
from localtensor.threads.run import DAY, run_in_threads

FINE, FAILED, USAGE = 0, 1, 2
WAYS = ("threads", "gloo")
MOST = 1 << 16  # ranks
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class TorchrunOptions:
    """What `localtensor run` was asked for."""

    name: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    on: str = "threads"
    module: bool = False
    schedule: str | None = None
    seed: int = 0
    timeout: float = 0.0  # seconds; 0 is no limit
    prefix: bool = True


class Unfit(Refusal, call="run", values="{argument}={value}"):
    """A number that `localtensor run` cannot take."""


def run_script(asked: TorchrunOptions) -> int:
    """The exit code: that of the first rank that failed, 0 if none did, 2 if the question was wrong.

    KeyboardInterrupt passes through; no thread or process of ours is left then.
    """
    try:
        script = _checked(asked)
    except errors.LocalTensorError as refused:
        _say(str(refused))
        return USAGE
    except SyntaxError as error:
        _say("".join(traceback.format_exception_only(error)))
        return FAILED
    prefix = asked.prefix and asked.ranks > 1
    try:
        if asked.on == "threads":
            return _on_threads(asked, script, prefix=prefix)
        return run_processes(
            asked.name, asked.arguments, asked.ranks, module=asked.module, seed=asked.seed,
            timeout=asked.timeout or None, prefix=prefix,
        )  # fmt: skip
    except errors.RankRaised as fault:
        if isinstance(fault.__cause__, BrokenPipeError) and nobody_reads():
            return UNREAD
        first = fault.raised[0].rank
        with RankLines(sys.stderr, prefix=prefix).of(first) as lines:
            lines.write(_users_traceback(fault.__cause__))
        _say(_told(fault))
    except errors.LocalTensorError as fault:
        _say(_told(fault))
    return FAILED


def _checked(asked: TorchrunOptions) -> Script:
    if asked.ranks < 1:
        raise errors.NoRanks("run", asked.ranks)
    if asked.ranks > MOST:
        raise Unfit("ranks", asked.ranks, f"one machine has no room for more than {MOST}", "Ask for fewer.")
    if not -(2**63) <= asked.seed < 2**63:
        raise Unfit("seed", asked.seed, "torch's generators do not take it", "Pass 0 to 2**63 - 1.")
    if asked.on not in WAYS:
        raise errors.UnknownWay(asked.on, WAYS)
    if not 0 <= asked.timeout <= DAY:
        raise errors.NoTime("run", "timeout", asked.timeout)
    if asked.schedule is not None:
        if asked.on != "threads":
            raise errors.ThreadsOnly("schedule", asked.schedule, asked.on)
        replay(asked.schedule)
    with _first_on_path(asked):
        script = read(asked.name, module=asked.module)
    if script is None:
        raise errors.NoSuchScript(asked.name, "module" if asked.module else "file")
    return script


@contextmanager
def _first_on_path(asked: TorchrunOptions) -> Iterator[None]:
    """Modules beside the script are found."""
    before = list(sys.path)
    sys.path.insert(0, search_path(asked.name, module=asked.module))
    try:
        yield
    finally:
        sys.path[:] = before


def _on_threads(asked: TorchrunOptions, script: Script, *, prefix: bool) -> int:
    codes: dict[int, int] = {}  # by rank, in the order in which they ended
    argv = [script.file if asked.module else asked.name, *asked.arguments]
    streams = _Streams(prefix=prefix) if asked.ranks > 1 else None

    def body(rank: int) -> None:
        dist.destroy_process_group()  # a script makes its own, as under torchrun
        sys.argv = list(argv)
        with ExitStack() as stack:
            if streams is not None:
                stack.enter_context(streams.of(rank))
            try:
                execute(script)
            except SystemExit as leaving:
                codes[rank] = _exit_code(leaving.code)

    schedule = replay(asked.schedule) if asked.schedule else round_robin()
    with ExitStack() as stack:
        stack.enter_context(_first_on_path(asked))
        if streams is not None:
            stack.enter_context(streams)
        try:
            run_in_threads(body, asked.ranks, schedule, asked.seed, asked.timeout or None)
        except errors.ProgramFault as fault:
            if not any(codes.values()) or isinstance(fault, errors.RankRaised):
                raise
            stack.callback(_say, _told(fault))  # one left with an error, and others waited for it
    if any(codes.values()):
        _say(str(errors.ScriptFailed(codes)))
    return next((code for code in codes.values() if code), FINE)


def _exit_code(code: object) -> int:
    """What python makes of sys.exit's argument: anything but a number is printed, and is a failure."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return FAILED


def _users_traceback(error: BaseException | None) -> str:
    if error is None:
        return ""
    return "".join(traceback.format_exception(type(error), error, users_part(error.__traceback__, _OURS)))


def _told(fault: errors.LocalTensorError) -> str:
    """A fault of the program by its name, for which one can search; a refusal of the command line without."""
    return f"{type(fault).__name__}: {fault}" if isinstance(fault, errors.ProgramFault) else str(fault)


def _say(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


class _Streams:
    """sys.stdout and sys.stderr, which know what rank writes."""

    def __init__(self, *, prefix: bool) -> None:
        self.prefix = prefix
        self.mine = threading.local()
        self.real: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> None:
        self.real = (sys.stdout, sys.stderr)
        self.lines = [RankLines(stream, prefix=self.prefix) for stream in self.real]
        sys.stdout, sys.stderr = (_Shared(self.mine, at, stream) for at, stream in enumerate(self.real))

    def __exit__(self, *error: object) -> None:
        if self.real is not None:
            sys.stdout, sys.stderr = self.real

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        with ExitStack() as stack:
            self.mine.streams = [stack.enter_context(lines.of(rank)) for lines in self.lines]
            yield


class _Shared:
    """One of the two: a rank's thread writes to its own lines, any other to the stream itself."""

    def __init__(self, mine: threading.local, at: int, real: TextIO) -> None:
        self._mine, self._at, self._real = mine, at, real

    def _stream(self) -> "TextIO | Tagged":
        streams: list[Tagged] | None = getattr(self._mine, "streams", None)
        return self._real if streams is None else streams[self._at]

    def write(self, text: str) -> int:
        self._stream().write(text)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self._real.flush()

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)
