"""A script on real processes, one per rank, as torchrun starts them: on this machine, by loopback only.

The ranks connect to a store in this process, which listens on the loopback interface only.  When one rank fails, or
this process ends, all are killed.

A rank's script is compiled once, and run as `__main__` in a namespace of its own: by `main` in a real process, by
`execute` on a rank thread.
"""

import importlib.util
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import IO, Any, TextIO

from localtensor._util.events import Waiting
from localtensor.errors import NeverEnded, ScriptFailed
from localtensor.processes.worker import ignore_interrupt, worker_environment
from localtensor.processes.worker_group import sigint_blocked

OUTPUT_CLOSED = 141  # exit code of a process ended by SIGPIPE
POLL_INTERVAL = 0.02  # seconds between two checks for ended ranks
_SOURCE_ROOT = str(Path(__file__).parents[2])
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_RANK_PROGRAM = f"import sys; sys.path.append({_SOURCE_ROOT!r}); from localtensor.runner.torchrun_processes import main; main(sys.argv[1:])"
DRAIN_LIMIT = 2.0  # seconds for the ranks' last output; a grandchild may keep the pipe open for ever


class RankLines:
    """A stream that ranks share: whole lines only, each prefixed with its rank."""

    def __init__(self, stream: TextIO, *, prefix: bool) -> None:
        self.stream, self.prefix = stream, prefix
        self.lock = threading.Lock()

    @contextmanager
    def of(self, rank: int) -> Iterator["PrefixedWriter"]:
        """The writer of a rank; an unfinished line is written at the end of the block."""
        writer = PrefixedWriter(self, f"[rank {rank}] " if self.prefix else "")
        try:
            yield writer
        finally:
            writer.end()


class PrefixedWriter:
    r"""Writes one rank's lines to the shared stream.

    >>> import sys
    >>> with RankLines(sys.stdout, prefix=True).of(3) as lines:
    ...     lines.write("one ")
    ...     lines.write("line\ntwo")
    [rank 3] one line
    [rank 3] two
    """

    def __init__(self, shared: RankLines, tag: str) -> None:
        self._shared, self._tag, self._begun = shared, tag, ""

    def write(self, text: str) -> None:
        *whole, self._begun = (self._begun + text).split("\n")
        if whole:
            with self._shared.lock:
                self._shared.stream.write("".join(f"{self._tag}{line}\n" for line in whole))
                self._shared.stream.flush()

    def end(self) -> None:
        if self._begun:
            self.write("\n")


def run_processes(
    name: str, arguments: Sequence[str], ranks: int, *, module: bool, seed: int, timeout: float | None, prefix: bool
) -> int:
    """Run the script; returns the exit code of the first rank that failed, 0 if none did.  Raises `NeverEnded`."""
    command = [str(seed), "-m" if module else "-f", name, *arguments]
    lost: list[OSError] = []  # why the ranks' output cannot be written
    shared = worker_environment(ranks)  # raises before there is a store if the ranks could not connect
    with _store() as port, _ranks(command, ranks, shared, port, lost, prefix=prefix) as (processes, failures):
        codes = _first_failure_first(_exit_codes(processes, timeout, lost), processes, failures)
    if lost:
        if stdout_is_closed():
            return OUTPUT_CLOSED
        sys.stderr.write(f"run: the ranks' output: cannot be written ({lost[0].strerror}). Make room for it.\n")
        return next((code for code in codes.values() if code > 0), 1)
    if any(codes.values()):
        sys.stderr.write(f"{ScriptFailed(codes)}\n")
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def stdout_is_closed() -> bool:
    """Whether standard output is a pipe without a reader, as after `| head`; if so, redirect it to the null device."""
    if not hasattr(select, "poll"):
        return False
    pipe = select.poll()
    pipe.register(1, 0)
    if not any(what & select.POLLERR for _, what in pipe.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _exit_codes(
    processes: Sequence[subprocess.Popen[str]], timeout: float | None, lost: Sequence[OSError]
) -> dict[int, int]:
    """The exit codes by rank, in the order in which the ranks ended, up to the first failure."""
    codes: dict[int, int] = {}
    end = None if timeout is None else time.monotonic() + timeout
    while len(codes) < len(processes):
        for rank, process in enumerate(processes):
            code = process.poll()
            if rank not in codes and code is not None:
                codes[rank] = code
        if any(codes.values()) or lost:
            return codes
        if timeout is not None and end is not None and time.monotonic() > end:
            late = [Waiting(rank, "unknown") for rank in range(len(processes)) if rank not in codes]
            raise NeverEnded(timeout, None, None, busy=late)
        time.sleep(POLL_INTERVAL)
    return codes


def _first_failure_first(
    codes: dict[int, int], processes: Sequence[subprocess.Popen[str]], failures: int
) -> dict[int, int]:
    """The exit codes, those of failed ranks in the order in which the ranks failed.

    A rank that raised takes a while to end, and the ranks that wait for it may end before it: `failures` is a pipe
    to which every rank writes its number as its script fails.  A rank that was killed writes nothing, and no other
    rank's failure ends it so: it is first.
    """
    if not any(codes.values()):
        return codes
    os.set_blocking(failures, False)
    try:
        order = [int(rank) for rank in os.read(failures, select.PIPE_BUF).split()]
    except BlockingIOError:
        order = []
    end = time.monotonic() + DRAIN_LIMIT
    for rank in order:
        try:
            codes[rank] = processes[rank].wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            codes[rank] = 1
    return {rank: codes[rank] for rank in [*(rank for rank in codes if rank not in order), *order]}


@contextmanager
def _store() -> Iterator[int]:
    """The port of a store on the loopback interface, as torchrun's agent provides."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        from torch.distributed import TCPStore  # lazy, as all of torch here: invalid options are refused without it

        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    try:
        yield port
    finally:
        del store


@contextmanager
def _ranks(
    command: Sequence[str], ranks: int, shared: dict[str, str], port: int, lost: list[OSError], *, prefix: bool
) -> Iterator[tuple[list[subprocess.Popen[str]], int]]:
    """The ranks' processes, and a pipe that tells which failed; afterwards none is left, and all output is written."""
    from localtensor.threads.state.special_slots import launcher_environment, torchrun_environment

    settings = {**launcher_environment(), "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}  # for output by a pipe
    way_out = subprocess.PIPE if ranks > 1 else None  # to keep the ranks' lines whole
    pipe, ours = os.pipe()  # closes when this process ends
    failures, told = os.pipe()
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    outs = [RankLines(stream, prefix=prefix) for stream in (sys.stdout, sys.stderr)]
    try:
        for rank in range(ranks):
            own = {**shared, **torchrun_environment(rank, ranks), **settings}
            with sigint_blocked():
                process = subprocess.Popen(
                    [sys.executable, "-c", _RANK_PROGRAM, str(pipe), str(told), *command],
                    env=own,
                    pass_fds=[pipe, told],
                    text=True,
                    errors="replace",
                    stdout=way_out,
                    stderr=way_out,
                )
                processes.append(process)
            for stream, out in zip((process.stdout, process.stderr), outs):
                if stream is not None:
                    readers.append(threading.Thread(target=_forward, args=(stream, out, rank, lost), daemon=True))
                    readers[-1].start()
        yield processes, failures
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        for end_of_pipe in (pipe, ours, failures, told):
            os.close(end_of_pipe)
        end = time.monotonic() + DRAIN_LIMIT
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()))


def _forward(stream: IO[str], out: RankLines, rank: int, lost: list[OSError]) -> None:
    try:
        with stream, out.of(rank) as lines:
            for line in stream:
                lines.write(line)
    except OSError as error:
        lost.append(error)


@dataclass(frozen=True, slots=True)
class Script:
    """A rank's script: a file, or a module that is found on sys.path."""

    code: CodeType
    file: str
    spec: Any = None  # of a module, as with `python -m`


def read(name: str, *, module: bool) -> Script | None:
    """The script of this path or module name, compiled; None if it does not exist."""
    if module:
        return _module(name)
    file = Path(name)
    if not os.path.isfile(file):  # Path's own raises where a name is too long
        return None
    return Script(compile(file.read_bytes(), str(file.absolute()), "exec", dont_inherit=True), str(file.absolute()))


def _module(name: str) -> Script | None:
    for full in (name, f"{name}.__main__"):
        try:
            spec = importlib.util.find_spec(full)
        except (ImportError, ValueError):  # a parent package is missing, or the name is invalid
            return None
        if spec is not None and spec.submodule_search_locations is None and spec.origin:
            code = getattr(spec.loader, "get_code", lambda _: None)(full)
            return Script(code, spec.origin, spec) if isinstance(code, CodeType) else None
    return None


def execute(script: Script) -> None:
    """Run the script in this thread as the module `__main__`, which stays in sys.modules."""
    main = ModuleType("__main__")
    spec = script.spec
    vars(main).update(
        __file__=script.file,
        __builtins__=__builtins__,
        __spec__=spec,
        __package__=spec.parent if spec else None,
        __loader__=spec.loader if spec else None,
    )
    sys.modules["__main__"] = main
    exec(script.code, vars(main))  # noqa: S102  # the purpose of the command


def search_path(script: str, *, module: bool) -> str:
    """The first entry of sys.path under python."""
    return os.getcwd() if module else str(Path(script).absolute().parent)


def user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from its first frame outside this package on."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def _end_with_parent(pipe: int) -> None:
    os.read(pipe, 1)  # returns when the parent ends, for whatever reason
    os._exit(1)


def main(words: list[str]) -> None:
    """Run a rank in its own process; `words` are `pipe failures seed -m|-f script arguments...`."""
    ignore_interrupt()
    pipe, failures, seed, how, name, *arguments = words
    rank = os.environ["RANK"]
    for inherited in (pipe, failures):
        os.set_inheritable(int(inherited), False)
    threading.Thread(target=_end_with_parent, args=(int(pipe),), daemon=True).start()
    module = how == "-m"
    sys.path[0] = search_path(name, module=module)
    script = read(name, module=module)
    if script is None:  # the parent found it before
        sys.exit(f"{name} has gone")
    sys.argv = [script.file if module else name, *arguments]
    import torch

    torch.manual_seed(int(seed))  # the generators are seeded as on rank threads
    random.seed(int(seed))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(int(seed) % 2**32)
    try:
        execute(script)
    except SystemExit as leaving:
        if leaving.code:
            os.write(int(failures), f"{rank} ".encode())
        raise
    except Exception as error:  # why: whatever the script raises is shown as python shows it
        os.write(int(failures), f"{rank} ".encode())
        error.__traceback__ = user_traceback(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
