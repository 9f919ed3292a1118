"""`localtensor run`: a torchrun script on rank threads or on real processes.

Each rank has the script as its own `__main__`, its own sys.argv, and torchrun's environment.  Its output appears line
by line, with its rank in front.
"""

import functools
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from localtensor import errors
from localtensor._util.ambient import simulation_of_this_rank
from localtensor._util.events import Call
from localtensor.concurrency.schedule import replay, round_robin
from localtensor.errors.base import Refusal
from localtensor.errors.runs import DAY, MOST_RANKS
from localtensor.runner import torchrun_processes
from localtensor.runner.torchrun_processes import PrefixedWriter, RankLines, Script, user_traceback

if TYPE_CHECKING:
    from localtensor.collectives.trace.recorder import Recorder
    from localtensor.layout.links import Links
    from localtensor.runner.trace.files import TraceOptions
    from localtensor.threads.faults import Faults

OK, FAILED, USAGE = 0, 1, 2
RUN_MODES = ("threads", "gloo")


@dataclass(frozen=True, slots=True)
class TorchrunOptions:
    """The options of `localtensor run`."""

    name: str
    arguments: tuple[str, ...] = ()
    ranks: int = 1
    on: str = "threads"
    module: bool = False
    schedule: str | None = None
    seed: int = 0
    timeout: float = 0.0  # seconds; 0 is no limit
    prefix: bool = True
    explain_isolation: bool = False
    faults: str | None = None  # the arguments of `localtensor.Faults`, as a text
    note: str = ""  # printed before the script begins
    trace: Path | None = None
    html: Path | None = None
    summary: bool = False
    topology: "Links | None" = None  # of the modelled clock
    planned: Callable[[str], str] | None = None  # what the planner says of a redistribution, for the page


@dataclass(frozen=True, slots=True)
class Observer:
    """What a caller sees of a script on rank threads: `around(rank)` is entered while that rank runs the script.

    It compares what the ranks hold, so that replicas that differ do not end the run.  `calls` gets the calls of all ranks, if the run ends.
    """

    around: Callable[[int], AbstractContextManager[object]]
    calls: list[Call] = field(default_factory=list)


class InvalidNumber(Refusal, call="run", values="{argument}={value}"):
    """A number that `localtensor run` does not accept."""


def run_script(options: TorchrunOptions, observer: Observer | None = None) -> int:
    """Run the script; returns the exit code of the first rank that failed, 0 if none did, 2 for invalid options.

    `observer` sees the ranks, if they are threads.
    KeyboardInterrupt is raised again after all threads and processes of the run have ended.
    """
    try:
        script = checked_script(options)
    except errors.LocalTensorError as refused:
        _print_error(f"localtensor {refused}")
        return USAGE
    except SyntaxError as error:
        _print_error("".join(traceback.format_exception_only(error)))
        return FAILED
    prefix = options.prefix and options.ranks > 1
    if options.note:
        _print_error(options.note)
    try:
        if options.on == "threads":
            return _on_threads(options, script, observer, prefix=prefix)
        _report_isolation(["ranks are processes, which share nothing"], [], explain=options.explain_isolation)
        return torchrun_processes.run_processes(
            options.name,
            options.arguments,
            options.ranks,
            module=options.module,
            seed=options.seed,
            timeout=options.timeout or None,
            prefix=prefix,
        )
    except errors.RankRaised as fault:
        if isinstance(fault.__cause__, BrokenPipeError) and torchrun_processes.stdout_is_closed():
            return torchrun_processes.OUTPUT_CLOSED
        first = fault.raised[0].rank
        if (cause := fault.__cause__) is not None:
            shown = traceback.format_exception(type(cause), cause, user_traceback(cause.__traceback__))
            with RankLines(sys.stderr, prefix=prefix).of(first) as lines:
                lines.write("".join(shown))
        _print_error(_fault_text(fault))
    except errors.LocalTensorError as fault:
        _print_error(_fault_text(fault))
    return FAILED


def checked_script(options: TorchrunOptions) -> Script:
    """The script, read.  Raises `Refusal` and the like for options that are not accepted, SyntaxError for the script."""
    if not 0 < options.ranks <= MOST_RANKS:
        raise errors.NoRanks("run", options.ranks)
    if not -(2**63) <= options.seed < 2**63:
        raise InvalidNumber("seed", options.seed, "torch's generators do not take it", "Pass 0 to 2**63 - 1.")
    if options.on not in RUN_MODES:
        raise errors.UnknownWay(options.on, RUN_MODES)
    if not 0 <= options.timeout <= DAY:
        raise errors.NoTime("run", "timeout", options.timeout)
    if options.schedule is not None:
        if options.on != "threads":
            raise errors.ThreadsOnly("schedule", options.schedule, options.on)
        replay(options.schedule)
    _faults(options)
    if options.trace is not None or options.html is not None or options.summary:
        _tracing(options).check("run", options.on)
    with _first_on_path(options):
        script = torchrun_processes.read(options.name, module=options.module)
    if script is None:
        raise errors.NoSuchScript(options.name, "module" if options.module else "file")
    return script


def _faults(options: TorchrunOptions) -> "Faults | None":
    """The faults of the run.  Raises `ThreadsOnly`, `BadFaults`."""
    if options.faults is None:
        return None
    if options.on != "threads":
        raise errors.ThreadsOnly("faults", options.faults, options.on)
    from localtensor.threads.faults import faults_from_text  # lazy: it needs torch

    faults = faults_from_text(options.faults)
    faults.check(options.ranks)
    return faults


def _tracing(options: TorchrunOptions) -> "TraceOptions":
    from localtensor.runner.trace.files import DEFAULT_LINKS, TraceOptions  # lazy: they need torch

    links = options.topology or DEFAULT_LINKS
    return TraceOptions(options.trace, options.html, options.summary, links, options.planned)


@contextmanager
def _recorded(options: TorchrunOptions, codes: dict[int, int]) -> "Iterator[Recorder | None]":
    """Records the run inside the block, if anything is to be made of it; prints its summary at the end if requested.

    `codes` are the exit codes of the ranks when the block ends.
    """
    tracing = _tracing(options)
    if not tracing.wanted:
        yield None
        return
    from localtensor.runner.trace.files import recorded
    from localtensor.runner.trace.summary import axes_texts, summary_lines

    def summarize(recording: Any, clock: Any) -> None:
        for what, path in (("trace", options.trace), ("page", options.html)):
            if path is not None:
                _print_error(f"localtensor run: the {what} is in {path}.")
        for text in axes_texts(clock):
            _print_error(f"localtensor run: topology: {text}.")
        if options.summary:
            _print_error("\n".join(summary_lines(recording, clock)))

    with recorded(tracing, options.ranks, done=summarize) as recorder:
        yield recorder
        if any(codes.values()):
            recorder.recording.problem = str(errors.ScriptFailed(codes))


@contextmanager
def _first_on_path(options: TorchrunOptions) -> Iterator[None]:
    """Inside the block modules beside the script can be imported."""
    before = list(sys.path)
    sys.path.insert(0, torchrun_processes.search_path(options.name, module=options.module))
    try:
        yield
    finally:
        sys.path[:] = before


def _on_threads(options: TorchrunOptions, script: Script, observer: Observer | None, *, prefix: bool) -> int:
    import torch.distributed as dist  # lazy: invalid options are refused without torch

    from localtensor.threads.run import run_in_threads
    from localtensor.threads.state.special_slots import launcher_environment

    codes: dict[int, int] = {}  # by rank, in the order in which they ended
    threads: set[int] = set()  # of the ranks
    argv = [script.file if options.module else options.name, *options.arguments]
    streams = _RankStreams(prefix=prefix) if options.ranks > 1 else None

    def body(rank: int) -> None:
        threads.add(threading.get_ident())
        dist.destroy_process_group()  # a script makes its own, as under torchrun
        os.environ.update(launcher_environment(start))
        sys.argv = list(argv)
        with ExitStack() as stack:
            if streams is not None:
                stack.enter_context(streams.of(rank))
            if observer is not None:
                stack.enter_context(observer.around(rank))
            try:
                torchrun_processes.execute(script)
            except SystemExit as leaving:
                codes[rank] = _exit_code(leaving.code)
                _note_exit(recorder, rank, leaving, codes[rank])

    schedule = replay(options.schedule) if options.schedule else round_robin()
    faults, start = _faults(options), 0
    recorder: Recorder | None = None
    with ExitStack() as stack:
        stack.enter_context(_first_on_path(options))
        stack.enter_context(_own_processes(threads))
        if streams is not None:
            stack.enter_context(streams)
        try:
            limit = options.timeout or None
            report = functools.partial(_report_isolation, explain=options.explain_isolation)
            given = (body, options.ranks, schedule, options.seed, limit)
            with _recorded(options, codes) as recorder:
                replicas = None if observer is None else "ignore"
                settings: dict[str, Any] = {
                    "fresh": True, "report": report, "faults": faults, "observer": recorder, "replicas": replicas,
                }  # fmt: skip
                done = run_in_threads(*given, **settings)
                while not done.values:  # a rank has died, and the program starts again
                    start += 1
                    codes.clear()
                    _print_error(f"localtensor run: a rank has died on purpose; start {start + 1}")
                    done = run_in_threads(*given, **settings, start=start)
            if observer is not None:
                observer.calls.extend(done.calls)
        except errors.ProgramFault as fault:
            if not any(codes.values()) or isinstance(fault, errors.RankRaised):
                raise
            stack.callback(_print_error, _fault_text(fault))  # a rank exited with an error, and others waited for it
    if any(codes.values()):
        _print_error(str(errors.ScriptFailed(codes)))
    return next((code for code in codes.values() if code), OK)


@contextmanager
def _own_processes(threads: set[int]) -> Iterator[None]:
    """Inside, what a script does to its own process, or starts as one, is that of a rank: one of these threads."""
    import torch.multiprocessing

    from localtensor._util.patching import wrapped  # it imports torch

    leave = functools.partial(_end_of_rank, threads)
    with wrapped(torch.multiprocessing, "spawn", _spawned), wrapped(os, "_exit", leave):
        yield


def _end_of_rank(threads: set[int], original: Callable[[int], NoReturn], status: int) -> NoReturn:
    """`os._exit` of a rank, whose thread is among these, ends that rank: it would end all of them, with its exit code."""
    simulation = simulation_of_this_rank()
    if simulation is None or simulation.forked or threading.get_ident() not in threads:
        original(status)
    raise SystemExit(status)


def _spawned(original: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Says so first: with torchrun's environment such processes wait for a store that none of them makes, under torchrun as well."""
    _print_error(
        "localtensor run: the script starts processes by torch.multiprocessing.spawn, which are no ranks of this run. "
        "A script that starts its ranks itself is run by python; here it has to read RANK and WORLD_SIZE, as under torchrun."
    )
    return original(*args, **kwargs)


def _note_exit(recorder: "Recorder | None", rank: int, leaving: SystemExit, code: int) -> None:
    """Adds the exit of a rank with an error to a recording."""
    if recorder is not None and code:
        recorder.ended(rank, leaving)


def _report_isolation(shared: list[str], writes: list[str], *, explain: bool) -> None:
    """Print what ranks share if that is requested, and what one of them has replaced for all in any case."""
    for line in shared if explain else ():
        _print_error(f"isolation: {line}")
    for line in writes:
        _print_error(f"isolation: {line}: torch is shared; a real run has it on the ranks that replaced it")


def _exit_code(code: object) -> int:
    """The exit code for an argument of sys.exit, as in python: anything but a number is printed, and is a failure."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return FAILED


def _fault_text(fault: errors.LocalTensorError) -> str:
    """The message of a fault, with its class name, by which it can be searched, if it is a fault of the program."""
    return f"{type(fault).__name__}: {fault}" if isinstance(fault, errors.ProgramFault) else str(fault)


def _print_error(text: str) -> None:
    sys.stderr.write(text.rstrip("\n") + "\n")
    sys.stderr.flush()


class _RankStreams:
    """Replaces sys.stdout and sys.stderr by streams that separate the ranks."""

    def __init__(self, *, prefix: bool) -> None:
        self.prefix = prefix
        self.mine = threading.local()
        self.real: tuple[TextIO, TextIO] | None = None

    def __enter__(self) -> None:
        self.real = (sys.stdout, sys.stderr)
        self.lines = [RankLines(stream, prefix=self.prefix) for stream in self.real]
        sys.stdout, sys.stderr = (_SharedStream(self.mine, at, stream) for at, stream in enumerate(self.real))

    def __exit__(self, *error: object) -> None:
        if self.real is not None:
            sys.stdout, sys.stderr = self.real

    @contextmanager
    def of(self, rank: int) -> Iterator[None]:
        with ExitStack() as stack:
            self.mine.streams = [stack.enter_context(lines.of(rank)) for lines in self.lines]
            yield


class _SharedStream:
    """A stream on which a rank's thread writes its own lines, and any other thread to the real stream."""

    def __init__(self, mine: threading.local, at: int, real: TextIO) -> None:
        self._mine, self._at, self._real = mine, at, real

    def write(self, text: str) -> int:
        streams: list[PrefixedWriter] | None = getattr(self._mine, "streams", None)
        (self._real if streams is None else streams[self._at]).write(text)
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
