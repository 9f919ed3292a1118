"""`make branches`: the suite under coverage, and which part of each room's branches it takes."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
EXAMPLES = """examples:
  python -m tests.branches                                       the whole suite: tens of minutes
  python -m tests.branches tests/localtensor/test_shards.py      what one file reaches
  python -m tests.branches --below 90                            list the files below 90 %, not below 80 %
"""


def main() -> int:
    asked = _asked()
    with tempfile.TemporaryDirectory() as folder:
        data = {**os.environ, "COVERAGE_FILE": f"{folder}/coverage"}
        run = [sys.executable, "-m", "coverage", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2"]
        code = subprocess.run([*run, *asked.what], cwd=ROOT, env=data, check=False).returncode
        for step in (["combine", "-q"], ["json", "-q", "-o", f"{folder}/coverage.json"]):
            ended = subprocess.run([sys.executable, "-m", "coverage", *step], cwd=ROOT, env=data, check=False)
            if ended.returncode:
                print(f"python -m tests.branches: coverage {step[0]} ended with {ended.returncode}", file=sys.stderr)
                return 3
        files = json.loads(Path(folder, "coverage.json").read_text())["files"]
    show(files, asked.below)
    return code


def show(files: dict[str, dict[str, Any]], below: int) -> None:
    """A line for each room that is a folder, then the files that stay below."""
    by_room: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, file in files.items():
        by_room[_room(name)].append(file["summary"])
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table("room", "files", "branches", "taken", "lines", "run", box=None)
    for room, found in sorted(by_room.items()):
        table.add_row(room, str(len(found)), *_shares(found))
    table.add_row("all", str(len(files)), *_shares([f["summary"] for f in files.values()]))
    console.print(table)
    low = sorted((_taken([file["summary"]]), name) for name, file in files.items())
    for share, name in low:
        if share < below:
            console.print(f"{share:5.1f} %  {name}")


def _room(name: str) -> str:
    """Files that share the first word of their name are one room: lockstep_mesh and lockstep_calls, say."""
    path = Path(name)
    return f"{path.parent.as_posix()}/{path.stem.lstrip('_').split('_')[0]}"


def _taken(found: list[dict[str, Any]]) -> float:
    there = sum(s["num_branches"] for s in found)
    return 100.0 * sum(s["covered_branches"] for s in found) / there if there else 100.0


def _shares(found: list[dict[str, Any]]) -> list[str]:
    lines = sum(s["num_statements"] for s in found)
    ran = 100.0 * sum(s["covered_lines"] for s in found) / lines if lines else 100.0
    branches = sum(s["num_branches"] for s in found)
    return [str(branches), f"{_taken(found):.1f} %", str(lines), f"{ran:.1f} %"]


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.branches", epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help="files or folders of tests; the whole suite by default")
    parser.add_argument("--below", type=int, default=80, metavar="PERCENT", help="list files below this (default 80)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
