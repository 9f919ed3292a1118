"""Runs scripts on ranks, each forked from this process, which has imported torch: a script then takes a second less for each rank.

Run by the Python of an environment that holds torch and nothing of ours: `python ranks.py [MODULE ...]` imports the modules, prints a line, then
reads a line of JSON, `[script, ranks]`, from its standard input and answers with one, until the input ends.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

GRACE = 2.0
"""Seconds that the other ranks have once one has ended with an error; torchrun, too, ends them then."""
POLL = 0.01
UNCAUGHT = 70
"""The exit code of a rank whose script ended with an exception; of 1, the script itself says what it means."""
OUTPUT = 20_000
"""Characters that are kept of an output: its end."""


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer
    for module in sys.argv[1:]:
        importlib.import_module(module)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        script, ranks = json.loads(line)
        print(json.dumps(run(script, ranks)), file=answers, flush=True)


def run(script: str, ranks: int) -> dict[str, Any]:
    """`codes`: exit code of each rank, None if it was ended here; `output`: of the rank that failed first, else of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        running = {_fork(script, rank, ranks, port, Path(folder)): rank for rank in range(ranks)}
        codes = _wait(running)
        files = {rank: Path(folder, f"output.{rank}") for rank in range(ranks)}
        failed = [rank for rank in range(ranks) if codes[rank]]  # the end of its output is when it failed
        first = min(failed, key=lambda rank: files[rank].stat().st_mtime_ns, default=0)
        output = files[first].read_text(errors="replace")
    return {"codes": [codes[rank] for rank in range(ranks)], "output": output[-OUTPUT:]}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _fork(script: str, rank: int, ranks: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = UNCAUGHT
    try:
        out = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        of_rank = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_PORT": port,
        }
        os.environ |= {name: str(value) for name, value in of_rank.items()} | {"MASTER_ADDR": "127.0.0.1"}
        code = _run_here(script)
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_here(script: str) -> int:
    """Runs the script as the main program.  Returns its exit code, or `UNCAUGHT`, after the traceback."""
    sys.argv, sys.path[0] = [script], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # why: any of them is the result
        traceback.print_exc()
        return UNCAUGHT
    return 0


def _wait(running: dict[int, int]) -> dict[int, int | None]:
    codes: dict[int, int | None] = {}
    until = None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            rank = running.pop(pid)
            codes[rank] = os.waitstatus_to_exitcode(status)
            if codes[rank] and until is None:
                until = time.monotonic() + GRACE
        elif until is not None and time.monotonic() > until:
            for left in running:
                os.kill(left, signal.SIGKILL)
                os.waitpid(left, 0)
            return codes | dict.fromkeys(running.values())
        else:
            time.sleep(POLL)
    return codes


if __name__ == "__main__":
    main()
