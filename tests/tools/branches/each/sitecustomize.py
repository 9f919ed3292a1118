"""Python imports this at its start where PYTHONPATH has this folder, and pytest as a plugin: `python -m tests.tools.branches`.

What each process runs of our two packages is noted and, when it ends, written to a file of its own.
"""

import atexit
import json
import os
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).parents[4]
TO = "LOCALTENSOR_BRANCHES"
PACKAGES = ("localtensor", "strategies")


class Followed:
    """What this process ran, from now on; a fork of it writes what it ran itself, and who is killed writes nothing."""

    def __init__(self, folder: str) -> None:
        import slipcover

        slipcover.__doc__ = (
            "PYTEST_DONT_REWRITE"  # it is a plugin of pytest, too, which warns that it is imported already
        )
        self._folder = folder
        self._noted = slipcover.Slipcover(branch=True, exclude_lines=[])
        ours = slipcover.FileMatcher(sources=[ROOT / name for name in PACKAGES])
        slipcover.ImportManager(self._noted, ours).__enter__()
        self._leave = os._exit
        os._exit = self._write_and_leave
        atexit.register(self.write)
        os.register_at_fork(after_in_child=self._begin_again)

    def write(self) -> None:
        os.chdir(ROOT)  # names are relative to where it is, which may be gone
        files = self._noted.get_coverage()["files"]
        ran = {name: [file["executed_lines"], file["executed_branches"]] for name, file in files.items()}
        handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(ran, file)
        Path(name).rename(name.replace(".part", ".json"))

    def _write_and_leave(self, status: int) -> None:
        self.write()
        self._leave(status)

    def _begin_again(self) -> None:
        self._noted.lock = threading.RLock()  # another thread may have held it
        self._noted.signal_child_process()


# Once in a process: a second one would take the lines from the first, and tests import this under another name.
followed = Followed(os.environ[TO]) if __name__ == "sitecustomize" and TO in os.environ else None


def pytest_sessionfinish() -> None:
    """Write now: a worker of pytest-xdist that takes more than ten seconds to leave is killed."""
    if followed:
        followed.write()
