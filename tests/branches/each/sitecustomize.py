"""Python imports this at its start where PYTHONPATH has this folder: `python -m tests.branches` puts it there.

What each process runs of our two packages is noted and, when it ends, written to a file of its own.
"""

import atexit
import json
import os
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[3]
TO = "LOCALTENSOR_BRANCHES"
PACKAGES = ("localtensor", "strategies")


def follow(folder: str) -> None:
    """From now on; a fork writes what it ran itself, and a process that is killed writes nothing."""
    import slipcover

    slipcover.__doc__ = "PYTEST_DONT_REWRITE"  # it is a plugin of pytest, too, which warns that it is imported already
    noted = slipcover.Slipcover(branch=True, exclude_lines=[])
    ours = slipcover.FileMatcher(sources=[ROOT / name for name in PACKAGES])
    slipcover.ImportManager(noted, ours).__enter__()
    leave = os._exit

    def write() -> None:
        os.chdir(ROOT)  # names are relative to where it is, which may be gone
        files = noted.get_coverage()["files"]
        ran = {name: [file["executed_lines"], file["executed_branches"]] for name, file in files.items()}
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(ran, file)
        Path(name).rename(name.replace(".part", ".json"))

    def write_and_leave(status: int) -> None:
        write()
        leave(status)

    def begin_again() -> None:
        noted.lock = threading.RLock()  # another thread may have held it
        noted.signal_child_process()

    atexit.register(write)
    os._exit = write_and_leave
    os.register_at_fork(after_in_child=begin_again)


if TO in os.environ:
    follow(os.environ[TO])
