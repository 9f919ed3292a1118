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

GRACE = 5.0
"""Seconds that the other ranks have once one has ended with an error; torchrun, too, ends them then."""
POLL = 0.01


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
    """`codes`: exit code of each rank, None if it was ended here; `raised`: the first exception; `said`: rank 0's last line."""
    with tempfile.TemporaryDirectory() as folder:
        port = _free_port()
        running = {_fork(script, rank, ranks, port, Path(folder)): rank for rank in range(ranks)}
        codes = _wait(running)
        raised = [json.loads(path.read_text()) for path in Path(folder).glob("raised.*")]
        said = Path(folder, "output.0").read_text(errors="replace").split("\n")
    first = min(raised, key=lambda one: one["at"], default=None)
    last = next((line for line in reversed(said) if line.strip()), "")
    return {"codes": [codes[rank] for rank in range(ranks)], "raised": first, "said": last}


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def _fork(script: str, rank: int, ranks: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
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
        code = _run_here(script, folder / f"raised.{rank}")
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _run_here(script: str, raised: Path) -> int:
    """Runs the script as the main program.  Returns its exit code, and writes down the exception that it ends with."""
    sys.argv, sys.path[0] = [script], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # why: any of them is the result
        traceback.print_exc()
        message = (str(error).strip() or "-").splitlines()[0]
        about = {"at": time.monotonic(), "kind": type(error).__name__, "message": message}
        raised.write_text(json.dumps(about | {"missing": _is_missing(error, script)}))
        return 1
    return 0


def _is_missing(error: BaseException, script: str) -> bool:
    """Whether the script itself names what this torch does not have; such an error from within torch is torch's own."""
    if not isinstance(error, (ImportError, AttributeError)):
        return False
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "__getattr__"]
    return bool(frames) and frames[-1].filename == script


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
