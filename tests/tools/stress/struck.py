"""A command that is stopped at its k-th event, or after so many seconds, and what that leaves behind.

Events are Python's own audit events (each import, file, process, socket, compiled text), in the command's own process:
the k-th is the same in every run, as far as the command is.  A command starts cold, as a new process does; or warm, as
a copy of this one, which has imported all: then every event is one of its work, and a second is many events.
"""

import atexit
import contextlib
import importlib
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
MARK = "LOCALTENSOR_STRESS"
LIMIT = 120.0
"""Seconds in which a command has to end, whatever happens: else it hangs."""
BRIEF = 10.0
"""Seconds that its processes have to end after it."""

_HOOK = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
k, number, whom, times, ours = map(int, os.environ.pop("LOCALTENSOR_STRIKE").split())
here, seen = os.getpid(), 0
def hook(event, args):
    global seen
    if os.getpid() != here or signal.getsignal(signal.SIGINT) is signal.default_int_handler and ours or event in ("os.kill", "os.killpg", "signal.pthread_kill"):
        return
    seen += 1
    if k <= seen < k + times:
        os.killpg(0, number) if whom else os.kill(here, number)
sys.addaudithook(hook)
import atexit
atexit.register(lambda: os.environ.get("LOCALTENSOR_COUNT") and open(os.environ["LOCALTENSOR_COUNT"], "w").write(str(seen)))
"""
COMMAND = "from strategies.__main__ import main; main()"
"""What the console script does."""


@dataclass(frozen=True)
class Strike:
    """When and how it is stopped: at the k-th event (or after `seconds`), the group as a terminal does or the process alone."""

    event: int = 0
    seconds: float = 0.0
    number: int = signal.SIGINT
    group: bool = True
    times: int = 1

    def __str__(self) -> str:
        when = f"at event {self.event}" if self.event else f"after {self.seconds:.2f} s"
        whom = "the group" if self.group else "the process"
        return f"{signal.Signals(self.number).name} to {whom} {when}{' twice' * (self.times > 1)}"


@dataclass
class Left:
    """What a command left: its exit code (None: it hung, and was killed), what it said, what is still there."""

    code: int | None
    out: str
    err: str
    processes: list[str] = field(default_factory=list)
    litter: list[str] = field(default_factory=list)
    events: int = 0


WARM = (
    "torch.testing._internal.common_methods_invocations", "torch.distributed.tensor", "strategies.cli.app", "strategies.cli.commands.validate",
    "strategies.cli.commands.gate", "strategies.gate.options", "strategies.cli.commands.report", "strategies.cli.commands.coverage", "strategies.cli.commands.report",
    "strategies.cli.commands.discover", "strategies.cli.commands.plans_audit", "strategies.cli.commands.plan", "strategies.cli.commands.races",
    "strategies.cli.commands.plan", "strategies.cli.options", "localtensor.runner.torchrun", "strategies.sweep.session",
)  # fmt: skip


def warm() -> None:
    """This process has imported what commands import."""
    for name in WARM:
        importlib.import_module(name)


def struck(
    words: Sequence[str], folder: Path, strike: Strike | None = None, *, python: str = COMMAND,
    environment: Mapping[str, str] = {}, tty: int = 0, cold: bool = True, setup: Callable[[], object] = lambda: None,
) -> Left:  # fmt: skip
    """Run the command in the folder, stop it so, and see what is left.  `tty`: on a terminal of so many columns.

    `setup` is called in a warm one before it begins: limits, closed streams.
    """
    mark = uuid.uuid4().hex
    temporary = folder / ".tmp"
    temporary.mkdir(exist_ok=True)
    count = folder / ".tmp.count"
    own = {
        **os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), MARK: mark, "OMP_NUM_THREADS": "1",
        "LOCALTENSOR_COUNT": str(count), **environment,
    }  # fmt: skip
    text = python
    if strike is None or strike.event:
        k = strike or Strike()
        own["LOCALTENSOR_STRIKE"] = (
            f"{k.event or 1 << 60} {int(k.number)} {int(k.group)} {k.times} {int(python == COMMAND)}"
        )
        text = f"exec({_HOOK!r}); {python}"
    else:
        text = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {python}"
    command = [sys.executable, "-c", text, *words]
    if cold or tty:
        code, out, err, pid = (_on_terminal if tty else _piped)(command, folder, own, strike, tty)
    else:
        code, out, err, pid = _forked(command, folder, own, strike, setup)
    events = int(count.read_text()) if count.exists() else 0
    count.unlink(missing_ok=True)
    processes = _still_there(mark, pid)
    litter = [name for name in os.listdir(temporary) if not name.startswith(THEIRS)]
    return Left(code, out, err, processes, litter, events)


def _piped(
    command: Sequence[str], folder: Path, own: Mapping[str, str], strike: Strike | None, _: int
) -> tuple[int | None, str, str, int]:
    process = subprocess.Popen(
        command, cwd=folder, env=own, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + LIMIT
    if strike is not None and not strike.event:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(strike.seconds)
        _send(process.pid, strike)
    try:
        out, err = process.communicate(timeout=max(1.0, end - time.monotonic()))
        return process.returncode, out.decode(errors="replace"), err.decode(errors="replace"), process.pid
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out.decode(errors="replace"), err.decode(errors="replace"), process.pid


def _forked(
    command: Sequence[str], folder: Path, own: Mapping[str, str], strike: Strike | None, setup: Callable[[], object]
) -> tuple[int | None, str, str, int]:
    outs = [folder / ".tmp.out", folder / ".tmp.err"]
    pid = os.fork()
    if pid == 0:
        _become(command, folder, own, outs, setup)
    end = time.monotonic() + LIMIT
    when = time.monotonic() + strike.seconds if strike is not None and not strike.event else None
    status, late = 0, False
    while not (gone := os.waitpid(pid, os.WNOHANG))[0]:
        if when is not None and time.monotonic() > when:
            _send(pid, strike or Strike())
            when = None
        if not late and time.monotonic() > end:
            late = True
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.005)
    status = gone[1]
    texts = [file.read_text(errors="replace") if file.exists() else "" for file in outs]
    for file in outs:
        file.unlink(missing_ok=True)
    return None if late else os.waitstatus_to_exitcode(status), *texts, pid


def _become(
    command: Sequence[str], folder: Path, own: Mapping[str, str], outs: Sequence[Path], setup: Callable[[], object]
) -> None:
    """This copy of the process is the command, from its first line to the end of Python."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(own)
        tempfile.tempdir = None
        for at, path in enumerate([os.devnull, *outs]):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(handle, at)
            os.close(handle)
        sys.stdin, sys.stdout, sys.stderr = (
            open(0, closefd=False),  # noqa: SIM115  # all three as long as the process lives
            open(1, "w", closefd=False),  # noqa: SIM115
            open(2, "w", closefd=False),  # noqa: SIM115
        )
        sys.argv = ["-c", *command[3:]]
        sys.path.insert(0, str(folder))
        setup()
        try:
            exec(command[2], {"__name__": "__main__"})
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:
            traceback.print_exc()
        threading._shutdown()
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


def _send(pid: int, strike: Strike) -> None:
    for _ in range(strike.times):
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if strike.group else os.kill)(pid, strike.number)


def _on_terminal(
    command: Sequence[str], folder: Path, own: Mapping[str, str], strike: Strike | None, columns: int
) -> tuple[int | None, str, str, int]:
    """All that it writes, to either stream, as the first of the two texts."""
    own = {**own, "TERM": own.get("TERM") if own.get("TERM") == "dumb" else "xterm", "COLUMNS": str(columns)}
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(command[0], list(command), dict(own))
    shown, end = b"", time.monotonic() + LIMIT
    when = time.monotonic() + strike.seconds if strike is not None and not strike.event else None
    while time.monotonic() < end:
        if when is not None and time.monotonic() > when:
            _send(pid, strike or Strike())
            when = None
        ready, _, _ = select.select([terminal], [], [], 0.05)
        if ready:
            try:
                part = os.read(terminal, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
    late = time.monotonic() >= end
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return None if late else os.waitstatus_to_exitcode(status), shown.decode(errors="replace"), "", pid


THEIRS = ("torchinductor_", "pytest-of-")
"""Folders that torch and pytest make, and keep."""


def _still_there(mark: str, session: int) -> list[str]:
    """Processes with our mark that do not end by themselves within a while; they are ended then."""
    end = time.monotonic() + BRIEF
    while (left := _marked(mark, session)) and time.monotonic() < end:
        time.sleep(0.05)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return list(left.values())


def _marked(mark: str, session: int) -> dict[int, str]:
    found = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, _, _, of = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            mine = f"{MARK}={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes()
            if (mine or int(of) == session) and state != "Z":
                found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
    return found


Check = Callable[[Left, Path], list[str]]


NOISE = ("Traceback", "Exception ignored", "Error in atexit", "leaked", "Fatal Python")


def faults(left: Left, strike: Strike | None, codes: Sequence[int]) -> list[str]:
    """What is wrong with how it ended: each a sentence.  `codes` are those of a run that nobody stops."""
    found = []
    text = left.err + left.out
    stopped = strike is not None and left.code == 128 + strike.number
    if left.code is None:
        found.append(f"it did not end in {LIMIT:g} s")
    elif strike is not None and left.code == -strike.number and not text:
        pass  # before the first line of ours, or after the last
    elif not stopped and left.code not in codes:
        found.append(f"exit code {left.code}")
    said = text.count("localtensor: stopped by ")
    if stopped and said != 1:
        found.append(f"{said} sentences say that it was stopped")
    found += [f"{noise!r} is shown" for noise in NOISE if noise in text]
    if left.processes:
        found.append(f"processes are left: {left.processes}")
    if left.litter:
        found.append(f"files are left in TMPDIR: {left.litter}")
    if "\x1b[?25l" in left.out and left.out.rfind("\x1b[?25l") > left.out.rfind("\x1b[?25h"):
        found.append("the cursor is hidden")
    return found
