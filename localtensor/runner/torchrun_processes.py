"""A script on real processes, one a rank, as torchrun starts them: on this machine, by loopback only.

The ranks meet at a store in this process, which listens on the loopback interface only.  When one rank fails, or
this process ends, all are killed.
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

import torch.distributed as dist

from localtensor._util.events import Waiting
from localtensor.errors import NeverEnded, ScriptFailed
from localtensor.processes.worker import heed_no_interrupt
from localtensor.processes.worker_group import deaf, environ
from localtensor.threads.state.special_slots import torchrun_environment

UNREAD = 141  # exit code, as of a process that SIGPIPE ends
LOOK = 0.02  # seconds between two looks at who has ended
_HOME = str(Path(__file__).parents[2])
_RANK = f"import sys; sys.path.append({_HOME!r}); from localtensor.runner.torchrun_processes import main; main(sys.argv[1:])"
DRAIN = 2.0  # seconds for what the ranks have printed; a grandchild may hold the pipe for ever


class RankLines:
    """A stream that ranks share: whole lines only, each with its rank in front."""

    def __init__(self, stream: TextIO, *, prefix: bool) -> None:
        self.stream, self.prefix = stream, prefix
        self.turn = threading.Lock()

    @contextmanager
    def of(self, rank: int) -> Iterator["Tagged"]:
        """Where this rank writes; a line that it has not ended is out when the block ends."""
        tagged = Tagged(self, f"[rank {rank}] " if self.prefix else "")
        try:
            yield tagged
        finally:
            tagged.end()


class Tagged:
    r"""What one rank writes.

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
            with self._shared.turn:
                self._shared.stream.write("".join(f"{self._tag}{line}\n" for line in whole))
                self._shared.stream.flush()

    def end(self) -> None:
        if self._begun:
            self.write("\n")


@dataclass
class _Who:
    rank: int
    ranks: int
    seed: int


def run_processes(
    name: str,
    arguments: Sequence[str],
    ranks: int,
    *,
    module: bool,
    seed: int,
    timeout: float | None,
    prefix: bool,
) -> int:
    """The exit code of the first rank that failed, 0 if none did.  Raises `NeverEnded`."""
    command = [str(seed), "-m" if module else "-f", name, *arguments]
    lost: list[OSError] = []  # why what they print cannot be shown
    shared = environ(ranks)  # refuses a machine on which the ranks could not meet, before there is a store
    with _store() as port, _ranks(command, ranks, seed, shared, port, lost, prefix=prefix) as processes:
        codes = _codes(processes, timeout, lost)
    if lost:
        if nobody_reads():
            return UNREAD
        sys.stderr.write(f"run: the ranks' output: cannot be written ({lost[0].strerror}). Make room for it.\n")
        return next((code for code in codes.values() if code > 0), 1)
    if any(codes.values()):
        sys.stderr.write(f"{ScriptFailed(codes)}\n")
    return next((code if code > 0 else 128 - code for code in codes.values() if code), 0)


def nobody_reads() -> bool:
    """Standard output was a pipe whose reader has gone, as after `| head`; what is still to be written goes nowhere."""
    if not hasattr(select, "poll"):
        return False
    pipe = select.poll()
    pipe.register(1, 0)
    if not any(what & select.POLLERR for _, what in pipe.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def _codes(
    processes: Sequence[subprocess.Popen[str]], timeout: float | None, lost: Sequence[OSError]
) -> dict[int, int]:
    """Each rank's exit code, in the order in which they ended; the first that fails is the last that counts."""
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
        time.sleep(LOOK)
    return codes


@contextmanager
def _store() -> Iterator[int]:
    """Where the ranks meet, as torchrun's agent keeps it: the port of a store on the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    try:
        yield port
    finally:
        del store


@contextmanager
def _ranks(
    command: Sequence[str],
    ranks: int,
    seed: int,
    shared: dict[str, str],
    port: int,
    lost: list[OSError],
    *,
    prefix: bool,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes; none is left afterwards, and all that they printed is out."""
    way_out = subprocess.PIPE if ranks > 1 else None  # whole lines, whoever is faster
    pipe, ours = os.pipe()  # ends when this process does
    processes: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    outs = [RankLines(stream, prefix=prefix) for stream in (sys.stdout, sys.stderr)]
    try:
        for rank in range(ranks):
            own = {**shared, **torchrun_environment(_Who(rank, ranks, seed)), **_rendezvous(port)}
            with deaf():
                process = subprocess.Popen(
                    [sys.executable, "-c", _RANK, str(pipe), *command],
                    env=own, pass_fds=[pipe], text=True, errors="replace",
                    stdout=way_out, stderr=way_out,
                )  # fmt: skip
                processes.append(process)
            for stream, out in zip((process.stdout, process.stderr), outs):
                if stream is not None:
                    readers.append(threading.Thread(target=_pass_on, args=(stream, out, rank, lost), daemon=True))
                    readers[-1].start()
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        os.close(pipe)
        os.close(ours)
        end = time.monotonic() + DRAIN
        for reader in readers:
            reader.join(max(0.0, end - time.monotonic()))


def _rendezvous(port: int) -> dict[str, str]:
    """What torchrun tells its ranks of the store, and that their output is a pipe's."""
    return {
        "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none", "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }  # fmt: skip


def _pass_on(stream: IO[str], out: RankLines, rank: int, lost: list[OSError]) -> None:
    try:
        with stream, out.of(rank) as lines:
            _copy(stream, lines)
    except OSError as error:
        lost.append(error)


def _copy(stream: IO[str], lines: Tagged) -> None:
    for line in stream:
        lines.write(line)


# One rank of a script: its code, read once, and run as `__main__` in a namespace of its own.
#
# `main` is one real process of `localtensor run --on gloo`; rank threads call `execute` themselves.


@dataclass(frozen=True, slots=True)
class Script:
    """What a rank runs: a file, or a module that is found on sys.path."""

    code: CodeType
    file: str
    spec: Any = None  # a module's, as `python -m` has it


def read(name: str, *, module: bool) -> Script | None:
    """The script of that path or module name, compiled; None if there is no such thing."""
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
        except (ImportError, ValueError):  # a package above it is missing, or the name is none
            return None
        if spec is not None and spec.submodule_search_locations is None and spec.origin:
            code = getattr(spec.loader, "get_code", lambda _: None)(full)
            return Script(code, spec.origin, spec) if isinstance(code, CodeType) else None
    return None


def execute(script: Script) -> None:
    """The script has run in this thread, as the module `__main__`, which stays in sys.modules."""
    main = ModuleType("__main__")
    spec = script.spec
    vars(main).update(
        __file__=script.file, __builtins__=__builtins__, __spec__=spec,
        __package__=spec.parent if spec else None, __loader__=spec.loader if spec else None,
    )  # fmt: skip
    sys.modules["__main__"] = main
    exec(script.code, vars(main))  # noqa: S102  # running what the user names is the purpose


def search_path(script: str, *, module: bool) -> str:
    """What python would put first on sys.path."""
    return os.getcwd() if module else str(Path(script).absolute().parent)


def users_part(trace: TracebackType | None, ours: str) -> TracebackType | None:
    """The traceback from the first line on that is not in our own folder."""
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((ours, "<frozen importlib")):
        trace = trace.tb_next
    return trace


def _stay_with_parent(pipe: int) -> None:
    """The process ends when its parent does, however that ends."""
    os.set_inheritable(pipe, False)

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _seed(seed: int) -> None:
    """As rank threads begin."""
    import torch

    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def main(words: list[str]) -> None:
    """`pipe seed -m|-f script arguments...`"""
    heed_no_interrupt()
    pipe, seed, how, name, *arguments = words
    _stay_with_parent(int(pipe))
    module = how == "-m"
    sys.path[0] = search_path(name, module=module)
    script = read(name, module=module)
    if script is None:  # it was there when the parent looked
        sys.exit(f"{name} has gone")
    sys.argv = [script.file if module else name, *arguments]
    _seed(int(seed))
    try:
        execute(script)
    except Exception as error:  # why: whatever the script raises is shown as python would show it
        error.__traceback__ = users_part(error.__traceback__, os.path.dirname(os.path.dirname(__file__)) + os.sep)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
