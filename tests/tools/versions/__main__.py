"""Which version of torch has which fault: runs the script of each fault on gloo, in an environment for each version."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from strategies.base import atomic_files
from tests.tools.command_line import parser_of
from tests.tools.versions import outcomes, ranks
from tests.tools.versions.environments import VERSIONS, NotAvailable, place_of, python_of
from tests.tools.versions.outcomes import HANGS, PRESENT, Column, Outcome, Script

USAGE, INFRASTRUCTURE, STOPPED = 2, 3, 130
PRELOADED = ("numpy", "torch", "torch.distributed.tensor")
EXAMPLES = """examples:
  localtensor causes sweep.jsonl --repro scripts                    a script for each cause; validate --repro: for each finding
  python -m tests.tools.versions scripts                            a column for each version, a row for each script
  python -m tests.tools.versions scripts --torch 2.13.0 2.15.0      these two only
  python -m tests.tools.versions scripts --by-op -o versions.md     a row for each op

A script is plain torch: its docstring names the ranks (`torchrun --nproc-per-node N`), and its exit code is 1 if the fault
shows, 0 if not.  Cells: present, also if it hangs; fixed; not applicable, if this torch lacks what the script names, or
DTensor has no rule for the op; error, any other exception, which stands below the table; not available, if pip cannot
install this version.

The first time pip installs each torch: minutes, and up to 6 GB each, because PyPI has builds for GPUs.  With
PIP_EXTRA_INDEX_URL naming torch's index of builds for CPUs it takes those, 1 GB each.

Exit code 0 if every script ran on every version, 2 for a wrong option, 3 if a version is not available or a file could not
be read or written.
"""
MakeEnvironment = Callable[[Path, str], Path]
"""Takes the folder of all environments and a version; returns a Python that has it.  Raises NotAvailable."""


class Runner:
    """Runs scripts one after the other in one environment.  A context manager: at its end no process of it is left."""

    def __init__(self, python: Path, limit: float, preloaded: Sequence[str] = PRELOADED) -> None:
        self.command = [str(python), ranks.__file__, *preloaded]
        self.limit = limit
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None

    def run(self, script: Script) -> Outcome:
        """Raises NotAvailable if the environment does not run at all."""
        answer = self._answer([str(script.path.absolute()), script.ranks], self.limit)
        if answer is None:
            self.__exit__()  # with all ranks: the next script has a process of its own
            return Outcome(PRESENT, HANGS)
        return outcomes.outcome_of(script, answer["codes"], answer["output"])

    def _answer(self, request: list[Any], seconds: float) -> dict[str, Any] | None:
        """None where no answer came in time."""
        process = self.process or self._started()
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            if not ready.select(seconds):
                return None
        line = process.stdout.readline()
        if not line:
            raise NotAvailable(f"{self.command[0]} ended with exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _started(self) -> subprocess.Popen[str]:
        """A process that has imported everything: an import is not on the time of a script."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCH"))}
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **kept}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        assert self.process.stdout
        if not self.process.stdout.readline():
            raise NotAvailable(f"{' '.join(self.command)} ended with exit code {self.process.wait()}")
        return self.process


def main(arguments: Sequence[str] | None = None, make: MakeEnvironment = python_of) -> int:
    asked = _asked(arguments)
    try:
        scripts = [outcomes.script_of(path) for path in sorted(asked.scripts.glob("*.py"))]
    except (OSError, ValueError) as error:
        return _failed(f"{asked.scripts}: {error}")
    if not scripts:
        return _failed(
            f"{asked.scripts} holds no script: `localtensor validate OP --repro {asked.scripts}` writes some"
        )
    columns: list[Column] = []
    stopped = False
    try:
        for version in asked.torch:
            columns.append(_column(version, scripts, asked, make))  # noqa: PERF401 (what is done stays, on Ctrl-C)
    except KeyboardInterrupt:
        stopped = True
        _say("stopped; the versions that were done until then:")
    try:
        _write(scripts, columns, asked)
    except OSError as error:
        return _failed(f"{error.filename}: {error.strerror}")
    for script in outcomes.gone(scripts, columns):
        _say(f"{script.path.name} does not show its fault on torch {script.found_on}, which it names")
    return STOPPED if stopped else INFRASTRUCTURE * any(column.missing for column in columns)


def _column(version: str, scripts: Sequence[Script], asked: argparse.Namespace, make: MakeEnvironment) -> Column:
    started = time.monotonic()
    _say(f"torch {version}: environment {place_of(asked.envs, version)}")
    found: dict[str, Outcome] = {}
    try:
        with Runner(make(asked.envs, version), asked.limit, asked.preload) as runner:
            for done, script in enumerate(scripts):
                if done and not done % 20:
                    _say(f"torch {version}: {done} of {len(scripts)} scripts, {time.monotonic() - started:.0f} s")
                found[script.path.name] = runner.run(script)
    except NotAvailable as reason:
        _say(f"torch {version} is not available: {reason}")
        return Column(version, missing=str(reason))
    finally:
        if asked.clean:
            shutil.rmtree(place_of(asked.envs, version), ignore_errors=True)
    present = sum(outcome.kind == PRESENT for outcome in found.values())
    _say(f"torch {version}: {present} of {len(scripts)} faults present, {time.monotonic() - started:.0f} s")
    return Column(version, found)


def _write(scripts: Sequence[Script], columns: Sequence[Column], asked: argparse.Namespace) -> None:
    if asked.out:
        atomic_files.write_whole(asked.out, outcomes.page(scripts, columns, asked.by_op))
    else:
        print(outcomes.markdown(scripts, columns, asked.by_op), end="")
    if asked.json:
        atomic_files.write_whole(asked.json, json.dumps(outcomes.as_json(scripts, columns), indent=1))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _failed(text: str) -> int:
    _say(f"python -m tests.tools.versions: {text}")
    return INFRASTRUCTURE


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("versions", EXAMPLES, __doc__)
    envs = Path(tempfile.gettempdir(), "localtensor-versions")
    parser.add_argument(
        "scripts", type=Path, nargs="?", default=Path("scripts"), help="their folder (default: scripts)"
    )
    parser.add_argument("--torch", nargs="+", default=[*VERSIONS], metavar="VERSION", help="these versions only")
    parser.add_argument(
        "--envs", type=Path, default=envs, metavar="DIR", help=f"keeps the environments (default {envs})"
    )
    parser.add_argument("--clean", action="store_true", help="remove each environment when its scripts have run")
    parser.add_argument(
        "--limit", type=float, default=60.0, metavar="SECONDS", help="a script hangs after (default 60)"
    )
    parser.add_argument("--by-op", action="store_true", help="a row for each op, not for each script")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="a page of the table (default: the table to standard output)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the same as data, with the reasons")
    parser.add_argument("--preload", nargs="*", default=PRELOADED, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if unknown := [version for version in asked.torch if version not in VERSIONS]:
        parser.error(f"--torch: unknown version {', '.join(unknown)}; known are {', '.join(VERSIONS)}")
    asked.torch = [version for version in VERSIONS if version in asked.torch]
    asked.envs = asked.envs.absolute()
    return asked


if __name__ == "__main__":
    sys.exit(main())
