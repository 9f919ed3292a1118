"""`make branches`: which part of each room's branches the suite takes, its child processes and their forks included.

On Python 3.10 and 3.11 slipcover changes the bytecode, and tests that compare stacks or time may fail under it; from
3.12 on the interpreter tells it what runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.tools.branches.each import sitecustomize
from tests.tools.command_line import parser_of

PLUGIN = Path(sitecustomize.__file__).stem
EXAMPLES = """examples:
  python -m tests.tools.branches                                       the whole suite: tens of minutes
  python -m tests.tools.branches tests/localtensor/layout/test_shards.py      what one file reaches
  python -m tests.tools.branches --below 90                            list the files below 90 %, not below 80 %
"""


@dataclass(frozen=True)
class File:
    """Lines and branches (from a line to a line, 0 for the end of a function) of a file; and those that ran."""

    name: str
    lines: frozenset[int]
    branches: frozenset[tuple[int, int]]
    lines_run: frozenset[int]
    branches_taken: frozenset[tuple[int, int]]

    @property
    def room(self) -> str:
        """Files that share the first word of their name are one room: lockstep_mesh and lockstep_calls, say."""
        path = Path(self.name)
        return f"{path.parent.as_posix()}/{path.stem.lstrip('_').split('_')[0]}"


def main() -> int:
    asked = _asked()
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join(
            [str(Path(sitecustomize.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", PLUGIN, "-n", "2", *asked.what]
        # pytest loads what it rewrites by itself, and to it all of ours is a plugin's
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --assert=plain".strip()
        followed = {**os.environ, sitecustomize.TO: folder, "PYTHONPATH": path, "PYTEST_ADDOPTS": options}
        code = subprocess.run(run, cwd=sitecustomize.ROOT, env=followed, check=False).returncode
        written = [*Path(folder).glob("*.json")]
        if not written:
            print("python -m tests.tools.branches: no process wrote what it ran", file=sys.stderr)
            return 3
        show(files(written), asked.below)
    return code


def files(written: Iterable[Path]) -> list[File]:
    """All files of ours, with what the processes ran together."""
    import slipcover

    os.chdir(sitecustomize.ROOT)  # the names of the files are relative to where it is
    every = slipcover.Slipcover(branch=True, exclude_lines=[], source=list(sitecustomize.PACKAGES))
    lines, branches = defaultdict[str, set[int]](set), defaultdict[str, set[tuple[int, int]]](set)
    for one in written:
        for name, (ran, taken) in json.loads(one.read_text()).items():
            lines[name].update(ran)
            branches[name].update(tuple(branch) for branch in taken)
    return [
        File(
            name, frozenset(file["missing_lines"]), frozenset(file["missing_branches"]),
            frozenset(lines[name]), frozenset(branches[name]),
        )
        for name, file in every.get_coverage()["files"].items()
    ]  # fmt: skip


def show(found: list[File], below: int) -> None:
    """A line for each room, then the files that stay below, with what of them no test ran."""
    rooms: dict[str, list[File]] = defaultdict(list)
    for file in found:
        rooms[file.room].append(file)
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table("room", "files", "branches", "taken", "lines", "run", box=None)
    for room, inside in sorted(rooms.items()):
        table.add_row(room, str(len(inside)), *_shares(inside))
    table.add_row("all", str(len(found)), *_shares(found))
    console.print(table)
    for file in sorted(found, key=lambda file: (_taken([file]), file.name)):
        if _taken([file]) < below:
            missed = runs_of(file.lines - file.lines_run)
            console.print(
                f"{_taken([file]):5.1f} %  {file.name}" + (f"  without lines {missed}" if missed else ""),
                soft_wrap=True,
            )


def runs_of(lines: Iterable[int]) -> str:
    """Lines in words: `3-5, 7`."""
    every = {*lines}
    starts = sorted(line for line in every if line - 1 not in every)
    ends = sorted(line for line in every if line + 1 not in every)
    return ", ".join(f"{start}-{end}" if end > start else f"{start}" for start, end in zip(starts, ends, strict=True))


def _taken(found: list[File]) -> float:
    there = sum(len(file.branches) for file in found)
    return 100.0 * sum(len(file.branches & file.branches_taken) for file in found) / there if there else 100.0


def _shares(found: list[File]) -> list[str]:
    lines = sum(len(file.lines) for file in found)
    ran = 100.0 * sum(len(file.lines & file.lines_run) for file in found) / lines if lines else 100.0
    return [str(sum(len(f.branches) for f in found)), f"{_taken(found):.1f} %", str(lines), f"{ran:.1f} %"]


def _asked() -> argparse.Namespace:
    parser = parser_of("branches", EXAMPLES)
    parser.add_argument("what", nargs="*", help="files or folders of tests; the whole suite by default")
    parser.add_argument("--below", type=int, default=80, metavar="PERCENT", help="list files below this (default 80)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
