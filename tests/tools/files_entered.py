"""How many of our modules a command enters: in the parent, in a worker, for one collective.

    python -m tests.tools.files_entered

A module counts if one of its functions is called (`sys.setprofile`).  Bodies of modules and classes do not count, nor does
what they call while they are imported (decorators, tables that fill themselves): nobody reads that to follow the command.
`--imports` counts those as well.  `--list` prints the files.

A worker does tasks of several kinds, one after another: it gathers samples, validates overloads, makes findings small.  Its
count is of all files that it enters; below it is a count for each kind of task, since one follows one of them at a time.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
HOOK = """
import atexit, json, os, sys
sys.path.insert(0, {root!r})
from tests.tools.files_entered import Entered
entered = Entered()
entered.start()
os.register_at_fork(after_in_child=entered.in_child)
atexit.register(entered.write)
"""


class Entered:
    """The files of ours whose functions were called in this process."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.tasks: dict[str, set[str]] = {}
        self._task = self.files
        self._known: dict[int, bool] = {}
        self.role = "parent"
        self.imports = "FILES_ENTERED_IMPORTS" in os.environ

    def start(self) -> None:
        """From here on, in this thread and in those that are started."""
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def stop(self) -> None:
        """No longer, in this thread."""
        sys.setprofile(None)
        threading.setprofile(None)

    def in_child(self) -> None:
        """A forked process counts its own files, and writes them as it goes: it may be killed."""
        self.role, self.files, self._known = "worker", set(), {}
        self._task = self.files

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if self.role == "worker" and event == "call" and _is_task(frame):
            task = self.tasks.setdefault(frame.f_code.co_name, set())
            if task is not self._task:
                self._task, self._known = task, {}
        if event != "call" or id(frame.f_code) in self._known or (not self.imports and _while_importing(frame)):
            return
        self._known[id(frame.f_code)] = True
        file = frame.f_code.co_filename
        if (
            file.startswith((f"{ROOT}/localtensor/", f"{ROOT}/strategies/"))
            and frame.f_code.co_flags & inspect.CO_OPTIMIZED
        ):
            new = file not in self._task
            self._task.add(file)
            self.files.add(file)
            if new and self.role == "worker":
                self.write()

    def write(self) -> None:
        """What was entered so far, to a file of this process in the folder that the environment names."""
        folder = os.environ.get("FILES_ENTERED")
        if folder:
            tasks = {name: len(files) for name, files in self.tasks.items()}
            text = json.dumps({"role": self.role, "files": sorted(self.files), "tasks": tasks})
            (Path(folder) / f"{os.getpid()}.json").write_text(text)


def _is_task(frame: FrameType) -> bool:
    """Whether a worker's loop calls the function of its task."""
    caller = frame.f_back.f_code if frame.f_back is not None else None
    if caller is None or caller.co_name != "_worker_loop" or caller.co_filename == frame.f_code.co_filename:
        return False
    return frame.f_code.co_filename.startswith(f"{ROOT}/strategies/")


def _while_importing(frame: FrameType | None) -> bool:
    """Whether the body of a module of ours is running."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "<module>" and code.co_filename.startswith((f"{ROOT}/localtensor/", f"{ROOT}/strategies/")):
            return True
        frame = frame.f_back
    return False


def of_command(*words: str) -> tuple[dict[str, list[str]], dict[str, int]]:
    """The files that `localtensor WORDS` enters in the parent, and in the worker that enters most of them.

    Beside them the number of files of that worker's tasks, by the function that does them.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = (
            HOOK.format(root=str(ROOT))
            + f"sys.argv = {['localtensor', *words]!r}\nfrom strategies.__main__ import main\nmain()\n"
        )
        environment = os.environ | {"FILES_ENTERED": folder, "PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, check=False)
        found = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    most: dict[str, dict[str, Any]] = {}
    for one in found:
        if one["role"] not in most or len(one["files"]) > len(most[one["role"]]["files"]):
            most[one["role"]] = one
    return {role: one["files"] for role, one in most.items()}, most.get("worker", {}).get("tasks", {})


def of_call(call: Callable[[], object]) -> list[str]:
    """The files that a second call enters: the first has filled tables and imported."""
    call()
    entered = Entered()
    entered.start()
    try:
        call()
    finally:
        entered.stop()
    return sorted(entered.files)


def main() -> None:
    if "--imports" in sys.argv:
        os.environ["FILES_ENTERED_IMPORTS"] = "1"
    import torch
    import torch.distributed as dist

    import localtensor as lt

    with lt.LocalTensorMode(4):
        x = lt.rank_map(lambda rank: torch.full((4,), float(rank)))
        lockstep = of_call(lambda: lt.all_reduce(x, "sum"))

    seen: list[list[str]] = []

    def program() -> None:
        x = torch.ones(2)
        if dist.get_rank() == 0:
            seen.append(of_call(lambda: dist.all_reduce(x)))
        else:
            dist.all_reduce(x)
            dist.all_reduce(x)

    lt.run(program, ranks=2)
    command, tasks = of_command("validate", "cumprod")
    for name, files in (
        ("all_reduce in lockstep", lockstep),
        ("all_reduce on a rank thread", seen[0]),
        ("validate cumprod, the parent", command.get("parent", [])),
        ("validate cumprod, a worker", command.get("worker", [])),
    ):
        print(f"{name}: {len(files)}")
        if "--list" in sys.argv:
            print(*(f"    {Path(file).relative_to(ROOT)}" for file in files), sep="\n")
    for task, count in tasks.items():
        print(f"  {task}: {count}")


if __name__ == "__main__":
    main()
