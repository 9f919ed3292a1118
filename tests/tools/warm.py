"""Commands in processes that need not import torch: each is forked from one that has.

    done = warm.run([sys.executable, "-c", text], cwd=folder, env=environ)

Importing torch takes two seconds of processor time, and the suite starts hundreds of commands.  Arguments, folder, environment,
streams and exit code are those of a process of its own; what differs is that `PRELOADED` has been imported.  Not for what is
about starting up: what is imported when, what an interpreter's own options, its hash seed or Ctrl-C do.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path

PRELOADED = ("numpy", "pytest", "rich.console", "torch", "torch.distributed.tensor", "torch._dynamo", "typer")
"""Whole libraries of others, and what DTensor imports when it is first used.  None of ours: what they do when they are imported
belongs to what is tested."""
ROOT = str(Path(__file__).parents[2])
HEADER = 8
"""Bytes of a number that goes over the socket."""


def run(
    command: Sequence[str | Path], *, cwd: str | Path = ".", env: Mapping[str, str] = os.environ, timeout: float = 300,
    start_new_session: bool = False, check: bool = False,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """`subprocess.run(command, capture_output=True, text=True, stdin=DEVNULL, ...)` of `python ...` or of a script in Python."""
    words = [str(word) for word in command]
    python = words[0] in ("python", sys.executable)
    rest = words[1:] if python else [shutil.which(words[0], path=env["PATH"]) or words[0], *words[1:]]
    request = json.dumps([rest, str(Path(cwd).absolute()), dict(env), start_new_session]).encode()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull) as nothing:
        connection = _server(os.getpid())
        streams = [nothing.fileno(), out.fileno(), err.fileno()]
        socket.send_fds(connection, [len(request).to_bytes(HEADER, "big")], streams)
        connection.sendall(request)
        pid = _number(connection)
        connection.settimeout(timeout)
        try:
            code = _number(connection)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            connection.settimeout(None)
            _number(connection)
            raise subprocess.TimeoutExpired(words, timeout) from None
        connection.settimeout(None)
        texts = [file.seek(0) or file.read().decode() for file in (out, err)]
    done = subprocess.CompletedProcess(words, code, *texts)
    if check:
        done.check_returncode()
    return done


@functools.lru_cache(maxsize=1)
def _server(pid: int) -> socket.socket:
    """The socket to the process that forks: one for each process of tests, as a fork of it would talk on the same socket."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "tests.tools.warm", str(theirs.fileno())]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], **quiet)

    @atexit.register
    def close() -> None:
        if os.getpid() == pid:
            ours.shutdown(socket.SHUT_RDWR)
            ours.close()
            process.wait()

    theirs.close()
    return ours


def _number(connection: socket.socket) -> int:
    read = connection.recv(HEADER, socket.MSG_WAITALL)
    if len(read) < HEADER:
        raise ConnectionError("the process that forks the commands of tests has ended")
    return int.from_bytes(read, "big", signed=True)


def _serve(connection: socket.socket) -> bytes | None:
    """Fork a process for each request.  Returns the request in the new process, and None here when the client has ended."""
    while True:
        header, streams, _, _ = socket.recv_fds(connection, HEADER, 3)
        if not header:
            return None
        request = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
        pid = os.fork()
        for number, stream in enumerate(streams):
            if not pid:
                os.dup2(stream, number)
            os.close(stream)
        if not pid:
            connection.close()
            return request
        connection.sendall(pid.to_bytes(HEADER, "big", signed=True))
        _, status = os.waitpid(pid, 0)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(HEADER, "big", signed=True))


def _execute(words: list[str], cwd: str, environment: dict[str, str], new_session: bool) -> None:
    """What `python WORDS` does in that folder, with that environment."""
    if new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    match words:
        case ["-m", name, *rest]:
            sys.argv, sys.path[:0] = [name, *rest], [cwd]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", text, *rest]:
            sys.argv, sys.path[:0] = ["-c", *rest], [""]
            exec(compile(text, "<string>", "exec"), vars(main))
        case [name, *_]:
            file = Path(name).absolute()
            sys.argv, sys.path[:0] = words, [str(file.resolve().parent)]
            main.__file__ = str(file)
            exec(compile(file.read_bytes(), str(file), "exec"), vars(main))


def main() -> None:
    """Serve on the socket whose number is the argument."""
    ours = {"", ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [folder for folder in sys.path if folder not in ours]
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # what is here now is never collected, nor looked at and so copied by each process
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _execute(*json.loads(request))


if __name__ == "__main__":
    main()
